"""The edit for a small forget set, from an inverse of the retain part (`grom.inverse`).

Shapes: S forget positions, N inputs of W, M outputs of W, K rank of D, Q probes, V vocabulary.

With B = w_r/r X_r X_rT + mu I and c = w_f/s the P of `grom.solve`, pushed through:

    P = c D X_fT (B + c X_f X_fT)^-1 = c D (I + c H)^-1 X_fT B^-1,      H = X_fT B^-1 X_f

X_fT B^-1 takes 2 N^2 S operations for each product with the inverse, a Cholesky factor of A N^3/3,
which run at half the rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.audit import directions
from grom.config import RidgeConfig, TargetConfig
from grom.errors import NonFiniteKeys, SolveError
from grom.inverse import RetainInverse, Shift
from grom.moments import KeyMoments
from grom.solve import POWER_STEPS
from grom.sums import PairSums, TokenSums
from grom.target import LowRank, random_direction, target_cross

MAX_LOAD = 1 / 6
"""Largest number of rows that are multiplied by C, as a share of N.  N^3/3 operations there, at
twice the rate of a factorisation: below it this is at least twice as fast."""
MAX_RESIDUAL = 1e-7
"""Of P A = c D X_fT on the probes.  Rounding gives 1e-16 times the condition number or less; an
inverse of other keys, some per cent."""


class WrongInverse(SolveError):
    """The inverse is not that of the retain part at hand."""

    def __init__(self, site: str, residual: float) -> None:
        super().__init__(
            f"{site}: the edit misses its system by {residual:.1e}, relative. The stored inverse "
            "of the retain part is wrong: delete its folder, or set `ridge.cache_retain: false`."
        )


@dataclass(frozen=True, slots=True)
class SmallSolve:
    """An edit, and what is worth knowing about its system."""

    update: LowRank
    condition: float
    """Estimate of the condition number of A, a lower bound, nearly."""
    residual: float
    """How far P A is from c D X_fT on random vectors, relative."""


def position_shifts(
    gold_S: Tensor,
    alt_S: Tensor | None,
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
    if target.kind == "replacement" and alt_S is None:
        raise ValueError("these keys were collected without what should be said instead")
    if target.kind == "corruption" and not head:
        direction_M = random_direction(unembedding_VM.shape[1], target.seed)
        ones_1S = torch.ones(1, len(gold_S), dtype=torch.float64, device=gold_S.device)
        return LowRank(ones_1S, direction_M.to(ones_1S).unsqueeze(1))
    units_SS = torch.eye(len(gold_S), dtype=torch.float64, device=gold_S.device)
    units = sums_of(units_SS, gold_S, alt_S, len(alpha_V))
    by_token = target_cross(
        units, alpha_V, unembedding_VM, target, head=True, redirect_token=redirect_token
    )
    if head:
        return by_token
    assert by_token.rows_K is not None
    left_MK = directions(by_token.rows_K, unembedding_VM, None).mT
    return replace(by_token, left_MK=left_MK, rows_K=None)


def sums_of(keys_SN: Tensor, gold_S: Tensor, alt_S: Tensor | None, vocab_size: int) -> KeyMoments:
    """Moments of keys without their gram, which takes no memory and must not be used."""
    num_inputs, device = keys_SN.shape[1], keys_SN.device
    sums = TokenSums(num_inputs, vocab_size, device)
    sums.add_(gold_S, keys_SN)
    pair_sums = PairSums(num_inputs, vocab_size, device)
    if alt_S is not None:
        pair_sums.add_(gold_S, alt_S, keys_SN)
    return KeyMoments(
        gram_NN=keys_SN.new_full((), math.nan).expand(num_inputs, num_inputs),
        sums=sums,
        counts_V=torch.bincount(gold_S, minlength=vocab_size),
        num_tokens=len(gold_S),
        pair_sums=pair_sums,
    )


def solve_small(
    shifts: LowRank,
    keys_SN: Tensor,
    inverse: RetainInverse,
    shift: Shift,
    ridge: RidgeConfig,
    *,
    site: str,
) -> SmallSolve:
    """P, to 1e-9 that of `solve_factored`, in O(N^2 S).

    Args:
        shifts: D, as `position_shifts` gives it.
        keys_SN: every forget key, one per row, float64.
        inverse: of the retain part.
        shift: of `shift_of` for these keys.
        ridge: as for the inverse.
        site: for error messages only.

    Returns:
        P in the form in which `solve_factored` gives it.

    Raises:
        ValueError: `shift` has no polynomial.
        NonFiniteKeys: NaN or Inf among the keys.
        WrongInverse: P does not solve the system.
    """
    if shift.coefficients is None:
        raise ValueError(f"{site}: the ridge is too far from that of the inverse")
    c = ridge.w_forget / len(keys_SN)
    *lower, highest = shift.coefficients
    rows_SN = highest * keys_SN
    for coefficient in reversed(lower):
        rows_SN = coefficient * keys_SN + (rows_SN @ inverse.inverse_NN) * shift.extra_N
    solved_SN = rows_SN @ inverse.inverse_NN  # X_fT B^-1
    H_SS = solved_SN @ keys_SN.mT
    core_SS = (H_SS + H_SS.mT) * (c / 2)
    core_SS.diagonal().add_(1)
    lower_SS, info = torch.linalg.cholesky_ex(core_SS)
    if int(info) or not bool(torch.isfinite(lower_SS).all()):
        raise NonFiniteKeys(site, "the forget set")
    weights_KS = torch.cholesky_solve(shifts.right_KN.mT, lower_SS).mT
    right_KN = c * (weights_KS @ solved_SN)
    residual = _residual(right_KN, shifts.right_KN, keys_SN, inverse, shift, c)
    if not residual <= MAX_RESIDUAL:
        raise WrongInverse(site, residual)
    condition = _condition(keys_SN, solved_SN, lower_SS, inverse, shift, c)
    return SmallSolve(replace(shifts, right_KN=right_KN).smallest(), condition, residual)


def _residual(
    right_KN: Tensor,
    weights_KS: Tensor,
    keys_SN: Tensor,
    inverse: RetainInverse,
    shift: Shift,
    c: float,
) -> float:
    probes_NQ = inverse.probes_NQ
    moved_SQ = keys_SN @ probes_NQ
    A_NQ = inverse.answers_NQ + shift.mu_N.unsqueeze(1) * probes_NQ + c * (keys_SN.mT @ moved_SQ)
    expected_KQ = c * (weights_KS @ moved_SQ)
    norm = float(expected_KQ.norm())
    return float((right_KN @ A_NQ - expected_KQ).norm()) / norm if norm else 0.0


def _condition(
    keys_SN: Tensor,
    solved_SN: Tensor,
    lower_SS: Tensor,
    inverse: RetainInverse,
    shift: Shift,
    c: float,
) -> float:
    """Largest over smallest eigenvalue of A: from what the retain part's extremes become."""
    high_N, low_N = inverse.extremes_2N
    high = inverse.high + float(shift.extra_N @ high_N.square())
    high += c * float((keys_SN @ high_N).square().sum())
    forget_N = keys_SN.sum(0)
    for _ in range(POWER_STEPS):
        forget_N = torch.nn.functional.normalize(forget_N, dim=0)
        forget_N = c * (keys_SN.mT @ (keys_SN @ forget_N))
    inner_S1 = (solved_SN @ low_N).unsqueeze(1)
    taken_S1 = torch.cholesky_solve(inner_S1, lower_SS)
    # A^-1 = B^-1 - c B^-1 X_f (I + c H)^-1 X_fT B^-1.
    low = 1 / inverse.low - c * float((inner_S1 * taken_S1).sum())
    return max(high, float(forget_N.norm())) * low
