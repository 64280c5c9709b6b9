"""The edit of one weight: a ridge least-squares solve in closed form.

Shapes: T tokens, N inputs of W, M outputs of W, K rank.  W_MN maps a key (N,) to an output (M,).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
from torch import Tensor

from grom.config import RidgeConfig
from grom.errors import EmptySet, NonFiniteKeys, NotPositiveDefinite
from grom.moments import KeyMoments
from grom.target import LowRank

POWER_STEPS = 12


@dataclass(frozen=True, slots=True)
class RidgeFactor:
    """The Cholesky factor of A at one site, and what is worth knowing about A."""

    lower_NN: Tensor
    """L with L LT = A, float64."""
    num_forget: int
    """s."""
    num_retain: int
    """r."""
    mus: tuple[float, ...]
    """The ridge that was added, for each site in the system."""
    peak_ratios: tuple[float, ...]
    """Largest over mean diagonal entry of A before the ridge, for each site in the system."""

    def condition(self) -> float:
        """Estimate of the condition number of A; a lower bound, close after a dozen steps."""
        low, high = extremes(self.lower_NN)
        return high / low


def extremes(lower_NN: Tensor) -> tuple[float, float]:
    """Smallest and largest eigenvalue of A = L LT, by power steps with its inverse and with A."""
    high_N1 = lower_NN.new_ones(len(lower_NN), 1) / math.sqrt(len(lower_NN))
    low_N1, high, low = high_N1.clone(), 1.0, 1.0
    for _ in range(POWER_STEPS):
        high_N1 = lower_NN @ (lower_NN.mT @ high_N1)
        low_N1 = torch.cholesky_solve(low_N1, lower_NN)
        high, low = float(high_N1.norm()), float(low_N1.norm())
        high_N1, low_N1 = high_N1 / high, low_N1 / low
    return 1 / low, high


def factorise(
    retain: KeyMoments,
    forget: KeyMoments,
    ridge: RidgeConfig,
    *,
    site: str,
    widths: Sequence[int] | None = None,
) -> RidgeFactor:
    """Cholesky factor of A = w_r/r X_r X_rT + w_f/s X_f X_fT + mu I.

    Without retain tokens their term is left out.  Where the keys of several sites stand side by
    side, `widths` are their inputs, and each site gets the mu of its own block of A: layers differ
    in the size of their keys by orders of magnitude.  With `cache_retain` that block is one of the
    retain term alone.

    Raises:
        EmptySet: there are no forget tokens, or with `cache_retain` no retain tokens.
        NonFiniteKeys: NaN or Inf in the moments.
        NotPositiveDefinite: mu is too small for these keys.
    """
    if forget.num_tokens <= 0:
        raise EmptySet("forget", site)
    if ridge.cache_retain and retain.num_tokens <= 0:
        raise EmptySet("retain", site)
    for name, moments in (("retain", retain), ("forget", forget)):
        if not bool(torch.isfinite(moments.gram_NN.diagonal()).all()):
            raise NonFiniteKeys(site, f"the {name} set")
    A_NN = forget.gram_NN * (ridge.w_forget / forget.num_tokens)
    if retain.num_tokens > 0:
        A_NN.add_(retain.gram_NN, alpha=ridge.w_retain / retain.num_tokens)
    sizes = list(widths or [len(A_NN)])
    peak_ratios = peaks(A_NN.diagonal(), sizes)
    if ridge.cache_retain:
        mus = ridges(retain_diagonal(retain, ridge), sizes, ridge)
    else:
        mus = ridges(A_NN.diagonal(), sizes, ridge)
    add_ridge_(A_NN, mus, sizes)
    lower_NN, info = torch.linalg.cholesky_ex(A_NN)
    if pivot := int(info):
        raise NotPositiveDefinite(site, pivot, len(A_NN), min(mus))
    return RidgeFactor(lower_NN, forget.num_tokens, retain.num_tokens, mus, peak_ratios)


def retain_diagonal(retain: KeyMoments, ridge: RidgeConfig) -> Tensor:
    """Diagonal of w_r/r X_r X_rT, (N,)."""
    return retain.gram_NN.diagonal() * (ridge.w_retain / retain.num_tokens)


def ridges(diagonal_N: Tensor, widths: Sequence[int], ridge: RidgeConfig) -> tuple[float, ...]:
    """mu of each site, from the mean of its part of a diagonal."""
    return tuple(ridge.ridge(float(part.mean())) for part in torch.split(diagonal_N, list(widths)))


def peaks(diagonal_N: Tensor, widths: Sequence[int]) -> tuple[float, ...]:
    """Largest over mean entry of each site's part of a diagonal; NaN where there is nothing."""
    ratios = (part_N.max() / part_N.mean() for part_N in torch.split(diagonal_N, list(widths)))
    return tuple(map(float, ratios))


def add_ridge_(A_NN: Tensor, mus: Sequence[float], widths: Sequence[int]) -> None:
    """Add each site's mu to its part of the diagonal."""
    for part_N, mu in zip(torch.split(A_NN.diagonal(), list(widths)), mus, strict=True):
        part_N.add_(mu)


def solve_factored(cross: LowRank, factor: RidgeFactor, ridge: RidgeConfig) -> LowRank:
    """P = w_f/s cross A^-1, in the form in which `cross` is kept.

    The solve has as many right-hand sides as `cross` has rows in `right_KN`: the number of
    suppressed token types, or M if that is smaller.
    """
    scale = ridge.w_forget / factor.num_forget
    right_KN = torch.cholesky_solve(cross.right_KN.mT, factor.lower_NN).mT * scale
    return replace(cross, right_KN=right_KN.contiguous())


def split_columns(update: LowRank, widths: Sequence[int]) -> list[LowRank]:
    """The updates of sites that were solved side by side, each with its own inputs' columns."""
    return [
        replace(update, right_KN=part.contiguous())
        for part in torch.split(update.right_KN, list(widths), dim=1)
    ]


@overload
def solve_edit(
    retain: KeyMoments,
    forget: KeyMoments,
    cross_MN: Tensor,
    ridge: RidgeConfig,
    *,
    site: str,
    return_factor: Literal[False] = False,
) -> Tensor: ...


@overload
def solve_edit(
    retain: KeyMoments,
    forget: KeyMoments,
    cross_MN: Tensor,
    ridge: RidgeConfig,
    *,
    site: str,
    return_factor: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def solve_edit(
    retain: KeyMoments,
    forget: KeyMoments,
    cross_MN: Tensor,
    ridge: RidgeConfig,
    *,
    site: str,
    return_factor: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The update P that leaves retain keys alone and moves forget keys by D.

    Minimises, over P (M, N), with one key per column of X_r (N, r) and X_f (N, s):

        w_r/r |P X_r|^2  +  w_f/s |P X_f - D|^2  +  mu |P|^2

    The minimiser is P = w_f/s D X_fT A^-1, A = w_r/r X_r X_rT + w_f/s X_f X_fT + mu I
    (arXiv 2608.05783).  mu = rho * mean(diag A), A before the ridge, unless it is given.

    Args:
        retain: moments of the r retain tokens; only gram and num_tokens are used.
        forget: moments of the s forget tokens; likewise.
        cross_MN: D X_fT, for instance from `suppression_cross`; scale it for another strength.
        ridge: w_r, w_f and rho or mu.
        site: name of W, for error messages only.
        return_factor: also return the Cholesky factor L_NN of A, which `leave_one_out` needs.

    Returns:
        P_MN, float64, on the device of the moments: add it to W.  With `return_factor` (P, L).

    Raises:
        EmptySet, NonFiniteKeys, NotPositiveDefinite: as `factorise`.
    """
    factor = factorise(retain, forget, ridge, site=site)
    P_MN = solve_factored(LowRank(cross_MN.double()), factor, ridge).right_KN
    return (P_MN, factor.lower_NN) if return_factor else P_MN
