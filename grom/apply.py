"""Adding an edit to a model, with exact undo and a report of what rounding lost.

Shapes: N inputs of W, M outputs of W, K rank or edited rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grom.errors import ErasedByRounding
from grom.sites import Site, config_of, untie_
from grom.target import LowRank

ROW_BLOCK = 512
"""Rows of W that are widened to float64 at once."""


@dataclass(frozen=True, slots=True)
class Edit:
    """The updates of all edited weights."""

    updates: Mapping[Site, LowRank]
    """Site -> P.  A plain tensor (M, N), as `solve_edit` gives it, is taken as well."""

    def __post_init__(self) -> None:
        """Wrap plain tensors."""
        wrapped = {
            site: LowRank(update) if isinstance(update, Tensor) else update
            for site, update in self.updates.items()
        }
        object.__setattr__(self, "updates", wrapped)

    def scaled(self, factor: float) -> Edit:
        """factor times every update."""
        return Edit({site: update.scaled(factor) for site, update in self.updates.items()})


@dataclass(frozen=True, slots=True)
class Rounding:
    """What casting W + P to the checkpoint's dtype did to one site's edit."""

    site: str
    update_norm: float
    """|P|, Frobenius."""
    weight_norm: float
    """|W|, Frobenius."""
    lost: float
    """|cast(W + P) - (W + P)| / |P|."""
    num_changed: int
    """Weights whose stored value changed."""
    num_weights: int


@contextmanager
def edited(model: nn.Module, edit: Edit | Mapping[Site, LowRank]) -> Iterator[list[Rounding]]:
    """The model with the edit inside the context, and exactly as before after it.

    The original tensors are kept, not subtracted: (W + P) - P is not W in floating point.  A tied
    head that is edited is untied inside the context and tied again after it.

    Raises:
        ErasedByRounding: the edit would not change a single weight of a site.
    """
    edit = edit if isinstance(edit, Edit) else Edit(edit)
    saved: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []
    head = next((site.module(model) for site in edit.updates if site.kind == "head"), None)
    tied_weight = None if head is None else head.weight
    was_tied = head is not None and untie_(model)
    try:
        roundings = []
        for site, update in edit.updates.items():
            weight = site.module(model).weight
            assert isinstance(weight, nn.Parameter)
            rows_K = None if update.rows_K is None else update.rows_K.to(weight.device)
            kept = weight.detach() if rows_K is None else weight.detach()[rows_K]
            saved.append((weight, rows_K, kept.clone()))
            roundings.append(add_(site, site.weight_MN(model), update))
        yield roundings
    finally:
        with torch.no_grad():
            for weight, rows_K, original in reversed(saved):
                if rows_K is None:
                    weight.copy_(original)
                else:
                    weight[rows_K] = original
        if was_tied and head is not None:
            head.weight = tied_weight  # type: ignore[assignment]
            config_of(model).tie_word_embeddings = True


def add_(site: Site, weight_MN: Tensor, update: LowRank) -> Rounding:
    """Add P to W in place: W + P in float64, cast once.

    Args:
        site: for its name.
        weight_MN: W as (M, N), changed in place.
        update: P.

    Raises:
        ErasedByRounding: not one stored weight changed.
    """
    lost, num_changed = 0.0, 0
    weight_norm = float(torch.linalg.vector_norm(weight_MN, dtype=torch.float64))
    row_sets: Sequence[slice | Tensor] = (
        _row_blocks(len(weight_MN)) if update.rows_K is None else [update.rows_K]
    )
    with torch.no_grad():
        for rows in row_sets:
            old_KN = weight_MN[rows]
            exact_KN = _rows_of(update, rows).to(weight_MN.device, torch.float64) + old_KN
            new_KN = exact_KN.to(weight_MN.dtype, copy=True)
            num_changed += int(torch.count_nonzero(new_KN != old_KN))
            lost += float(exact_KN.sub_(new_KN).square_().sum())
            weight_MN[rows] = new_KN
    if num_changed == 0:
        raise ErasedByRounding(site.name, str(weight_MN.dtype).removeprefix("torch."))
    norm = update.norm()
    return Rounding(
        site=site.name,
        update_norm=norm,
        weight_norm=weight_norm,
        lost=lost**0.5 / norm,
        num_changed=num_changed,
        num_weights=weight_MN.numel(),
    )


def _row_blocks(num_rows: int) -> list[slice]:
    return [slice(first, first + ROW_BLOCK) for first in range(0, num_rows, ROW_BLOCK)]


def _rows_of(update: LowRank, rows: slice | Tensor) -> Tensor:
    if update.rows_K is not None:
        return update.right_KN
    if update.left_MK is not None:
        return update.left_MK[rows] @ update.right_KN
    return update.right_KN[rows]
