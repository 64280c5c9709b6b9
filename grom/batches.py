"""Examples side by side: padded batches, filled to a token budget.

Shapes: B examples, L positions, T answer tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.examples import Rendered


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded examples, and which positions predict an answer token.

    Shapes: B examples, L positions, T answer tokens of the batch, in row-major order.
    """

    ids_BL: Tensor
    mask_BL: Tensor
    predicts_BL: Tensor
    """True where the next token is part of the answer."""
    gold_T: Tensor
    """That next token."""
    example_T: Tensor
    """Row of each answer token."""
    examples: tuple[Rendered, ...]
    positions: tuple[int, ...]
    """Index of each example in the stream that was batched."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device."""
        return replace(
            self,
            ids_BL=self.ids_BL.to(device),
            mask_BL=self.mask_BL.to(device),
            predicts_BL=self.predicts_BL.to(device),
            gold_T=self.gold_T.to(device),
            example_T=self.example_T.to(device),
        )


def make_batch(examples: Iterable[tuple[int, Rendered]], pad_id: int) -> Batch:
    """Pad numbered examples into one batch, on the right."""
    positions, rendered = zip(*examples, strict=True)
    length = max(len(example.ids) for example in rendered)
    ids_BL = torch.full((len(rendered), length), pad_id)
    mask_BL = torch.zeros_like(ids_BL)
    predicts_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
    for row, example in enumerate(rendered):
        ids_BL[row, : len(example.ids)] = torch.tensor(example.ids)
        mask_BL[row, : len(example.ids)] = 1
        predicts_BL[row, example.start - 1 : len(example.ids) - 1] = True
    gold_T = ids_BL[:, 1:][predicts_BL[:, :-1]]
    example_T = predicts_BL.nonzero()[:, 0]
    return Batch(ids_BL, mask_BL, predicts_BL, gold_T, example_T, tuple(rendered), positions)


def batches(
    examples: Iterable[Rendered], *, batch_tokens: int, window_examples: int, pad_id: int
) -> Iterator[Batch]:
    """Fill batches to a token budget, padding included, sorted by length within a window.

    Constant memory: at most `window_examples` examples are held.
    """
    window: list[tuple[int, Rendered]] = []
    for numbered in enumerate(examples):
        window.append(numbered)
        if len(window) == window_examples:
            yield from _fill(window, batch_tokens, pad_id)
            window = []
    yield from _fill(window, batch_tokens, pad_id)


def _fill(window: list[tuple[int, Rendered]], batch_tokens: int, pad_id: int) -> Iterator[Batch]:
    group: list[tuple[int, Rendered]] = []
    for numbered in sorted(window, key=lambda pair: len(pair[1].ids)):
        if group and (len(group) + 1) * len(numbered[1].ids) > batch_tokens:
            yield make_batch(group, pad_id)
            group = []
        group.append(numbered)
    if group:
        yield make_batch(group, pad_id)
