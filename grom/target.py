"""What the edit should make of each forget key: the shift D, as its product with the keys.

Shapes: T tokens, N inputs of W, M outputs of W, V vocabulary, K distinct tokens.

All targets are linear in the shift of one position d_j, and the solve needs only sum_j d_j k_jT,
the *cross moment* (M, N).  It follows from sums by token and by pair of tokens, so alpha, the
strength and the target can change after the keys were collected.  u[v] is the unit row v of the
unembedding, g_j the gold token, a_j its replacement:

    suppression   d_j = -alpha[g_j] u[g_j]
    replacement   d_j =  alpha[g_j] (u[a_j] - u[g_j])
    redirect      d_j =  alpha[g_j] (u[t] - u[g_j])       one token t for all
    corruption    d_j =  one random unit direction
    head sites    the same with e[v], the v-th basis vector, in place of u[v]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.config import TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.sums import TokenSums, compact


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix (M, N) kept as left @ right, or as some of its rows, or whole.

    left_MK given: left @ right.  rows_K given: row rows_K[i] is right[i], all others are zero.
    Neither: right is the matrix itself.  float64.
    """

    right_KN: Tensor
    left_MK: Tensor | None = None
    rows_K: Tensor | None = None
    num_outputs: int | None = None
    """M; needed with `rows_K` only."""

    def dense(self) -> Tensor:
        """The matrix (M, N), float64."""
        if self.left_MK is not None:
            return self.left_MK @ self.right_KN
        if self.rows_K is not None:
            assert self.num_outputs is not None
            dense_MN = self.right_KN.new_zeros(self.num_outputs, self.right_KN.shape[1])
            return dense_MN.index_add_(0, self.rows_K, self.right_KN)
        return self.right_KN

    def smallest(self) -> LowRank:
        """The same matrix in the form that takes least memory."""
        if self.left_MK is None:
            return self
        (num_outputs, rank), num_inputs = self.left_MK.shape, self.right_KN.shape[1]
        if rank * (num_outputs + num_inputs) <= num_outputs * num_inputs:
            return self
        return LowRank(self.dense())

    def scaled(self, factor: float) -> LowRank:
        """factor times the matrix."""
        return replace(self, right_KN=self.right_KN * factor)

    def norm(self) -> float:
        """Frobenius norm, without forming the matrix: |LR|^2 = tr(LT L R RT)."""
        if self.left_MK is None:
            return float(torch.linalg.matrix_norm(self.right_KN))
        inner = (self.left_MK.mT @ self.left_MK) * (self.right_KN @ self.right_KN.mT)
        return float(inner.sum().clamp(min=0).sqrt())


def specificity(
    forget_counts_V: Tensor, retain_counts_V: Tensor, special_ids: Iterable[int] = ()
) -> Tensor:
    """alpha: how specific each token is to the forget set, 0 (not at all) to 1 (only there).

        alpha_v = clamp(1 - rf_v / ff_v, 0, 1)

    with ff and rf the frequency of v among forget and retain gold tokens (arXiv 2608.05783).  Both
    must be counted alike, end of answer included; special tokens get 0, since a suppressed end
    token makes answers run on.  Without retain tokens alpha is 1 for every forget token.

    Returns:
        alpha_V, float64; 0 for tokens that do not occur in the forget set.
    """
    forget_V, retain_V = forget_counts_V.double(), retain_counts_V.double()
    ff_V = forget_V / forget_V.sum().clamp(min=1)
    rf_V = retain_V / retain_V.sum().clamp(min=1)
    occurs = ff_V > 0
    alpha_V = torch.where(occurs, 1 - rf_V / ff_V.where(occurs, torch.ones_like(ff_V)), 0.0)
    alpha_V = alpha_V.clamp(0, 1)
    special = torch.tensor(sorted(set(special_ids)), dtype=torch.int64, device=alpha_V.device)
    alpha_V[special[special < len(alpha_V)]] = 0
    return alpha_V


def suppression_cross(forget: KeyMoments, alpha_V: Tensor, unembedding_VM: Tensor) -> Tensor:
    """sum_j d_j k_jT with d_j = -alpha[g_j] u[g_j]: push the gold token down.

    Returns:
        cross_MN, float64, for unit strength.
    """
    return _suppression(forget, alpha_V, unembedding_VM).dense()


def replacement_cross(forget: KeyMoments, alpha_V: Tensor, unembedding_VM: Tensor) -> Tensor:
    """sum_j d_j k_jT with d_j = alpha[g_j] (u[a_j] - u[g_j]): say a_j instead of g_j.

    sum over pairs of alpha[g] u[a] pair_sums[g, a]T, less the same with u[g].  Positions that were
    given a weight when their keys were collected (`alt_sums`) keep it in the u[a] term.

    Returns:
        cross_MN, float64, for unit strength.
    """
    return _replacement(forget, alpha_V, unembedding_VM).dense()


def redirect_cross(
    forget: KeyMoments, alpha_V: Tensor, unembedding_VM: Tensor, token: int
) -> Tensor:
    """sum_j d_j k_jT with d_j = alpha[g_j] (u[token] - u[g_j]): say one fixed token instead.

    Returns:
        cross_MN, float64, for unit strength.
    """
    return _redirect(forget, alpha_V, unembedding_VM, token).dense()


def corruption_cross(forget: KeyMoments, direction_M: Tensor) -> Tensor:
    """sum_j d_j k_jT with d_j = direction: move every forget key the same way.

    Returns:
        cross_MN, float64; its strength is the direction's length.
    """
    total_N = compact(forget.sums).rows_KN.sum(0)
    return torch.outer(direction_M.to(total_N), total_N)


def random_direction(num_outputs: int, seed: int) -> Tensor:
    """A unit vector (M,), float64, the same for a seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    direction_M = torch.randn(num_outputs, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(direction_M, dim=0)


def target_cross(
    forget: KeyMoments,
    alpha_V: Tensor,
    unembedding_VM: Tensor,
    target: TargetConfig,
    *,
    head: bool,
    redirect_token: int | None = None,
) -> LowRank:
    """The cross moment of one site at unit strength, in its smallest form.

    Args:
        forget: moments of the forget keys at this site.
        alpha_V: specificity.
        unembedding_VM: rows of the LM head; for a head site only its shape matters.
        target: which of the targets above.
        head: whether the site is the LM head itself.
        redirect_token: id of the token of `redirect`.

    Raises:
        ConfigError: corruption at the head, where a direction has no meaning.
    """
    basis = None if head else unembedding_VM
    if target.kind == "suppression":
        cross = _suppression(forget, alpha_V, basis)
    elif target.kind == "replacement":
        cross = _replacement(forget, alpha_V, basis)
    elif target.kind == "redirect":
        assert redirect_token is not None
        cross = _redirect(forget, alpha_V, basis, redirect_token)
    elif head:
        raise ConfigError("target `corruption` edits MLP sites; set `select.site: mlp`")
    else:
        direction_M = random_direction(unembedding_VM.shape[1], target.seed)
        total_1N = compact(forget.sums).rows_KN.sum(0, keepdim=True)
        cross = LowRank(total_1N, direction_M.to(total_1N).unsqueeze(1))
    return replace(cross, num_outputs=len(unembedding_VM)).smallest()


def _suppression(forget: KeyMoments, alpha_V: Tensor, basis_VM: Tensor | None) -> LowRank:
    return _along(basis_VM, [(_weighted(forget, alpha_V), -1.0)])


def _replacement(forget: KeyMoments, alpha_V: Tensor, basis_VM: Tensor | None) -> LowRank:
    gold, fixed = _weighted(forget, alpha_V), compact(forget.alt_sums)
    toward = forget.pair_sums.by_alternative(alpha_V)
    return _along(basis_VM, [(gold, -1.0), (toward, 1.0), (fixed, 1.0)])


def _redirect(forget: KeyMoments, alpha_V: Tensor, basis_VM: Tensor | None, token: int) -> LowRank:
    gold = _weighted(forget, alpha_V)
    toward = TokenSums(gold.rows_KN.shape[1], gold.vocab_size, gold.rows_KN.device)
    toward.add_(gold.ids_K.new_full((1,), token), gold.rows_KN.sum(0, keepdim=True))
    return _along(basis_VM, [(gold, -1.0), (toward, 1.0)])


def _weighted(forget: KeyMoments, alpha_V: Tensor) -> TokenSums:
    """alpha_v sums_v, without the tokens of alpha 0."""
    if not forget.keeps_sums:
        raise ValueError("these moments keep no sums by token, so they cannot give a target")
    sums = compact(forget.sums)
    alpha_K = alpha_V.to(sums.rows_KN)[sums.ids_K]
    active = alpha_K > 0
    result = TokenSums(sums.rows_KN.shape[1], sums.vocab_size, sums.rows_KN.device)
    result.add_(sums.ids_K[active], sums.rows_KN[active] * alpha_K[active].unsqueeze(1))
    return result


def _along(basis_VM: Tensor | None, terms: list[tuple[TokenSums, float]]) -> LowRank:
    """sum over terms of sign * sum_v u_v sums_vT; with no basis, rows v instead of u_v."""
    first = terms[0][0]
    total = TokenSums(first.rows_KN.shape[1], first.vocab_size, first.rows_KN.device)
    for sums, sign in terms:
        total.add_(sums.ids_K, sign * sums.rows_KN)
    if basis_VM is None:
        return LowRank(total.rows_KN, rows_K=total.ids_K, num_outputs=total.vocab_size)
    rows_KM = basis_VM[total.ids_K.to(basis_VM.device)].to(total.rows_KN)
    unit_KM = rows_KM / rows_KM.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return LowRank(total.rows_KN, left_MK=unit_KM.mT)
