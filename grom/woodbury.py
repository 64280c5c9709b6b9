"""The edit for a small forget set, from the Cholesky factor of the retain part.

Shapes: S forget positions, N inputs of W, M outputs of W, K rank of D, V vocabulary.

With B = w_r/r X_r X_rT + mu I = L LT, made once, and c = w_f/s, the P of `grom.solve` is

    P = c D X_fT (B + c X_f X_fT)^-1 = c D (I + c YT Y)^-1 YT L^-1,      Y = L^-1 X_f

by pushing X_f through (Woodbury).  It takes N^2 (S + K) operations at the rate of products; a
factor of the whole system takes N^3/3 at half of it, and N^2 2K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.audit import directions
from grom.changes import Request
from grom.config import RidgeConfig, TargetConfig
from grom.errors import EmptySet, NonFiniteKeys, NotPositiveDefinite
from grom.moments import KeyMoments
from grom.solve import POWER_STEPS, add_ridge_, extremes, peaks, retain_diagonal, ridges
from grom.sums import PairSums, TokenSums
from grom.target import LowRank, random_direction, target_cross

MAX_SHARE = 1 / 6
"""Largest number of forget positions, as a share of N, that is solved this way: up to there it is
at least twice as fast as a factor of the whole system."""


@dataclass(frozen=True, slots=True)
class RetainFactor:
    """L, and what of the retain part is needed besides; float64."""

    lower_NN: Tensor
    """L with L LT = w_r/r X_r X_rT + mu I."""
    diagonal_N: Tensor
    """Of w_r/r X_r X_rT."""
    mus: tuple[float, ...]
    """Ridge of each site."""
    widths: tuple[int, ...]
    """Inputs of each site."""
    counts_V: Tensor
    """How often each gold token occurs in the retain set, int64."""
    num_retain: int
    """r."""
    low: float
    """Smallest eigenvalue of L LT, nearly ..."""
    high: float
    """... and its largest."""

    def to(self, device: torch.device) -> RetainFactor:
        """The same on a device."""
        return replace(
            self,
            lower_NN=self.lower_NN.to(device),
            diagonal_N=self.diagonal_N.to(device),
            counts_V=self.counts_V.to(device),
        )


@dataclass(frozen=True, slots=True)
class SmallSolve:
    """An edit, and what is worth knowing about its system."""

    update: LowRank
    condition: float
    """Upper bound of the condition number of A, nearly: of its two parts' extremes."""
    peak_ratios: tuple[float, ...]
    """Largest over mean diagonal entry of A before the ridge, for each site."""


def factorise_retain(
    retain: KeyMoments, ridge: RidgeConfig, *, site: str, widths: Sequence[int] | None = None
) -> RetainFactor:
    """L and its companions; the work of one full solve, once for all batches.

    Args:
        retain: moments of the retain tokens.
        ridge: w_r, w_f, and rho or mu, with `cache_retain`.
        site: for error messages only.
        widths: inputs of the sites whose keys stand side by side.

    Raises:
        ValueError: mu would depend on the forget set.
        EmptySet: there are no retain tokens.
        NonFiniteKeys: NaN or Inf in the moments.
        NotPositiveDefinite: mu is too small for these keys.
    """
    if not ridge.cache_retain:
        raise ValueError("without `cache_retain` the ridge depends on the forget set")
    if retain.num_tokens <= 0:
        raise EmptySet("retain", site)
    diagonal_N = retain_diagonal(retain, ridge)
    if not bool(torch.isfinite(diagonal_N).all()):
        raise NonFiniteKeys(site, "the retain set")
    sizes = tuple(widths or [len(diagonal_N)])
    mus = ridges(diagonal_N, sizes, ridge)
    B_NN = retain.gram_NN * (ridge.w_retain / retain.num_tokens)
    add_ridge_(B_NN, mus, sizes)
    lower_NN, info = torch.linalg.cholesky_ex(B_NN)
    if pivot := int(info):
        raise NotPositiveDefinite(site, pivot, len(B_NN), min(mus))
    del B_NN
    low, high = extremes(lower_NN)
    return RetainFactor(
        lower_NN, diagonal_N, mus, sizes, retain.counts_V, retain.num_tokens, low, high
    )


def solve_small(
    shifts: LowRank, keys_SN: Tensor, factor: RetainFactor, ridge: RidgeConfig, *, site: str
) -> SmallSolve:
    """P, to 1e-9 that of `solve_factored`, in O(N^2 S).

    Args:
        shifts: D, as `position_shifts` gives it.
        keys_SN: every forget key, one per row, float64.
        factor: of the retain part.
        ridge: as for the factor.
        site: for error messages only.

    Returns:
        P in the form in which `solve_factored` gives it.

    Raises:
        EmptySet: there are no forget keys.
        NonFiniteKeys: NaN or Inf among the keys.
    """
    if len(keys_SN) == 0:
        raise EmptySet("forget", site)
    if not bool(torch.isfinite(keys_SN).all()):
        raise NonFiniteKeys(site, "the forget set")
    c = ridge.w_forget / len(keys_SN)
    Y_NS = torch.linalg.solve_triangular(factor.lower_NN, keys_SN.mT, upper=False)
    core_SS = c * (Y_NS.mT @ Y_NS)
    core_SS.diagonal().add_(1)
    weights_KS = torch.cholesky_solve(shifts.right_KN.mT, torch.linalg.cholesky(core_SS)).mT
    rows_KN = (c * weights_KS) @ Y_NS.mT
    right_KN = torch.linalg.solve_triangular(factor.lower_NN, rows_KN, upper=False, left=False)
    diagonal_N = factor.diagonal_N + c * keys_SN.square().sum(0)
    return SmallSolve(
        replace(shifts, right_KN=right_KN.contiguous()).smallest(),
        (factor.high + c * _largest(keys_SN)) / factor.low,
        peaks(diagonal_N, factor.widths),
    )


def position_shifts(
    request: Request,
    alpha_V: Tensor,
    unembedding_VM: Tensor,
    target: TargetConfig,
    *,
    head: bool,
    redirect_token: int | None = None,
) -> LowRank:
    """D (M, S) at unit strength, one column for each position; see `grom.target`.

    The target is linear in the keys: with the unit vectors of the positions in their place, its
    cross moment D X_fT is D.

    Raises:
        ValueError: replacement without alternatives.
        ConfigError: corruption at the head, where a direction has no meaning.
    """
    if target.kind == "replacement" and request.alt_T is None:
        raise ValueError("these keys were collected without what should be said instead")
    if target.kind == "corruption" and not head:
        direction_M = random_direction(unembedding_VM.shape[1], target.seed)
        ones_1S = torch.ones(1, len(request.gold_T), dtype=torch.float64)
        ones_1S = ones_1S.to(request.gold_T.device)
        return LowRank(ones_1S, direction_M.to(ones_1S).unsqueeze(1))
    units_SS = torch.eye(len(request.gold_T), dtype=torch.float64, device=request.gold_T.device)
    units = sums_of(replace(request, keys_TN=units_SS), len(alpha_V))
    by_token = target_cross(
        units, alpha_V, unembedding_VM, target, head=True, redirect_token=redirect_token
    )
    if head:
        return by_token
    assert by_token.rows_K is not None
    left_MK = directions(by_token.rows_K, unembedding_VM, None).mT
    return replace(by_token, left_MK=left_MK, rows_K=None)


def sums_of(request: Request, vocab_size: int) -> KeyMoments:
    """Moments of keys without their gram, which takes no memory and is NaN."""
    keys_SN, num_inputs = request.keys_TN.double(), request.keys_TN.shape[1]
    sums = TokenSums(num_inputs, vocab_size, keys_SN.device)
    sums.add_(request.gold_T, keys_SN)
    pair_sums = PairSums(num_inputs, vocab_size, keys_SN.device)
    if request.alt_T is not None:
        pair_sums.add_(request.gold_T, request.alt_T, keys_SN)
    return KeyMoments(
        gram_NN=keys_SN.new_full((), math.nan).expand(num_inputs, num_inputs),
        sums=sums,
        counts_V=torch.bincount(request.gold_T, minlength=vocab_size),
        num_tokens=len(keys_SN),
        pair_sums=pair_sums,
    )


def _largest(keys_SN: Tensor) -> float:
    """Largest eigenvalue of X_f X_fT, by power steps from the sum of the keys."""
    vector_N, value = keys_SN.sum(0), 0.0
    for _ in range(POWER_STEPS):
        vector_N = keys_SN.mT @ (keys_SN @ torch.nn.functional.normalize(vector_N, dim=0))
        value = float(vector_N.norm())
    return value
