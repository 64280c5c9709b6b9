"""Relearning as an attack: a few LoRA steps on some forgotten examples; do the others come back?

Shapes: T answer tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from grom.batches import Batch, make_batch
from grom.examples import Rendered
from grom.sites import answer_logits_TV, family_of, trunk, unembedding_VD


@dataclass(frozen=True, slots=True)
class Training:
    """How hard to relearn."""

    steps: int
    """Optimiser steps."""
    learning_rate: float
    """Of AdamW, constant, without weight decay."""
    rank: int
    """Rank of the LoRA adapters; their scale is 2 (alpha = 2 · rank)."""
    batch_tokens: int
    """Tokens of one step, padding included; at least one example."""
    seed: int = 0
    """Of the adapters' start and the order of the examples."""


@contextmanager
def relearnt(
    model: nn.Module, examples: Sequence[Rendered], training: Training, *, pad_id: int
) -> Iterator[list[float]]:
    """The model after it has been trained on some examples, and exactly as before after it.

    LoRA adapters on every linear matrix of the layers (head and embeddings are left out), without
    dropout, minimise the mean over answer tokens of -log p(token), the end of answer included,
    with AdamW in a plain loop.  The weights themselves never change; the adapters are taken out
    again.  The same seed gives the same model on the same machine.

    Args:
        model: gets the adapters while the context is open.
        examples: what is relearnt.
        training: steps, rate, rank, batch and seed.
        pad_id: token to pad with.

    Yields:
        loss of each step, nats per token, before that step's update.

    Raises:
        ImportError: peft is not installed.
    """
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        adapted = _adapted(model, training.rank)
        try:
            yield _train(model, examples, training, pad_id)
        finally:
            adapted.unload()
            for parameter, before in zip(model.parameters(), wanted, strict=True):
                parameter.requires_grad_(before)


def answer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean over answer tokens of -log p(token), nats, with gradients."""
    places_BL = (batch.mask_BL.cumsum(1) - 1).clamp(min=0)
    output = trunk(model)(
        input_ids=batch.ids_BL,
        attention_mask=batch.mask_BL,
        position_ids=places_BL,
        use_cache=False,
    )
    logits_TV = answer_logits_TV(model, output.last_hidden_state[batch.predicts_BL])
    return F.cross_entropy(logits_TV, batch.gold_T)


def _adapted(model: nn.Module, rank: int) -> Any:
    from peft import LoraConfig, LoraModel

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        fan_in_fan_out=family_of(model).inputs_first,
        task_type="CAUSAL_LM",
    )
    # Not `get_peft_model`: its wrapper leaves marks on the model that outlive the adapters.
    adapted = LoraModel(model, config, "relearn")
    for parameter in _trainable(model):
        parameter.data = parameter.data.float()  # steps of 1e-4 vanish in bfloat16
    return adapted


def _train(
    model: nn.Module, examples: Sequence[Rendered], training: Training, pad_id: int
) -> list[float]:
    device, losses = unembedding_VD(model).device, []
    optimiser = torch.optim.AdamW(
        _trainable(model), lr=training.learning_rate, betas=(0.9, 0.999), weight_decay=0.0
    )
    stream = _endless(examples, training, pad_id)
    with torch.enable_grad():
        for batch in islice(stream, training.steps if examples else 0):
            loss = answer_loss(model, batch.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            optimiser.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _endless(examples: Sequence[Rendered], training: Training, pad_id: int) -> Iterator[Batch]:
    """Batches for ever, each pass over the examples in a new order."""
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        group: list[tuple[int, Rendered]] = []
        longest = 0
        for position in torch.randperm(len(examples), generator=generator).tolist():
            longest = max(longest, len(examples[position].ids))
            if group and (len(group) + 1) * longest > training.batch_tokens:
                yield make_batch(group, pad_id)
                group, longest = [], len(examples[position].ids)
            group.append((position, examples[position]))
        yield make_batch(group, pad_id)


def split_slice(examples: Sequence[Rendered], share: float) -> tuple[list[int], list[int]]:
    """Positions of the examples to relearn and of the rest that is measured.

    Whole groups, evenly spaced, so that the rest is about other subjects than the slice; single
    examples where there is one group only.  At least one on either side if there are two.
    """
    groups = list(dict.fromkeys(example.group for example in examples))
    unit = [example.group for example in examples]
    if len(groups) < 2:
        unit = [str(position) for position in range(len(examples))]
        groups = unit
    count = min(max(1, round(share * len(groups))), len(groups) - 1)
    chosen = {groups[number * len(groups) // count] for number in range(max(count, 0))}
    taken = [position for position, name in enumerate(unit) if name in chosen]
    return taken, [position for position, name in enumerate(unit) if name not in chosen]
