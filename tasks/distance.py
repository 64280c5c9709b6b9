"""How far apart two edits are.

Shapes: N inputs of W, M outputs of W, K edited rows.
"""

from __future__ import annotations

import torch

from grom.sites import Site
from grom.target import LowRank
from tasks.updates import StoredUpdates

ROWS = 512
"""Rows of P that are in memory at once."""


def relative_difference(one: StoredUpdates, other: StoredUpdates, site: Site) -> float:
    """|P - P'| / |P| of a site, some rows at a time; Inf if the other has no such site."""
    if site not in other.sites:
        return float("inf")
    square = norm = 0.0
    whole, against = one.whole(site), other.whole(site)
    if whole.rows_K is not None or against.rows_K is not None:
        return _sparse_difference(whole, against)
    num_rows = len(whole.right_KN) if whole.left_MK is None else len(whole.left_MK)
    for first in range(0, num_rows, ROWS):
        last = min(first + ROWS, num_rows)
        P_KN, Q_KN = (updates.rows(site, first, last).dense() for updates in (one, other))
        square += float((P_KN - Q_KN).square().sum())
        norm += float(P_KN.square().sum())
    return (square / norm) ** 0.5 if norm else float(square > 0)


def _sparse_difference(one: LowRank, other: LowRank) -> float:
    """The same for updates of some rows each."""
    if one.rows_K is None or other.rows_K is None:
        return float((one.dense() - other.dense()).norm() / one.dense().norm())
    rows_K = torch.unique(torch.cat([one.rows_K, other.rows_K]))
    P_KN, Q_KN = (
        update.right_KN.new_zeros(len(rows_K), update.right_KN.shape[1]).index_add_(
            0, torch.searchsorted(rows_K, update.rows_K), update.right_KN
        )
        for update in (one, other)
        if update.rows_K is not None
    )
    return float((P_KN - Q_KN).norm() / P_KN.norm())
