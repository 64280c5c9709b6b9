"""How much one request changed the model: exact, without solving again.

Shapes: T tokens of the request, N inputs of W, M outputs of W, C outputs that are kept: all M, or
at the LM head those of the tokens that the edit writes.  V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grom.config import RidgeConfig, TargetConfig
from grom.target import random_direction

MIN_GAP = 1e-6
"""Of 1 - leverage: below it a downdate keeps less than ten digits, and is not made."""


def leave_one_out(
    P_MN: Tensor,
    keys_TN: Tensor,
    shifts_TM: Tensor,
    factor: Tensor,
    num_forget: int,
    ridge: RidgeConfig,
) -> Tensor:
    """The update that the solve would have given without one request.

    A Woodbury downdate of the ridge system, with s, r, mu and alpha frozen.  With the request's
    keys K (N, t) and shifts D_e (M, t), and H = KT A^-1 K:

        P_-e = P - (D_e - P K) (s/w_f I - H)^-1 KT A^-1

    Args:
        P_MN: the update with the request, float64.
        keys_TN: the request's keys at this site, one per row.
        shifts_TM: their target shifts at the strength of P, one per row; zeros for retain keys
            of weight w_f/s.
        factor: Cholesky factor L_NN of A, as `solve_edit(..., return_factor=True)` gives it.
        num_forget: s, the number of all forget tokens, these included.
        ridge: the weights of the solve; only w_f is used.

    Returns:
        P_-e (M, N), float64.  |P - P_-e| is the request's influence at this site.

    Raises:
        ValueError: the request's keys are not part of A: s/w_f I - H is not positive definite; or
            they are nearly all that A has in some direction, so that digits would be lost.
    """
    keys_TN = keys_TN.double()
    solved_TN = torch.cholesky_solve(keys_TN.mT.contiguous(), factor).mT
    residual_TM = shifts_TM.double() - keys_TN @ P_MN.mT
    found = downdate(keys_TN, solved_TN, residual_TM, ridge.w_forget / num_forget)
    if found is None:
        raise ValueError("s/w_f I - H is not positive definite: these keys are not part of A")
    if 1 - found.leverage < MIN_GAP:
        raise ValueError(
            f"leverage {found.leverage:.9f}: hardly a digit is left of what the others say in the "
            "direction of these keys; solve again without them"
        )
    return P_MN - found.left_TC.mT @ solved_TN


@dataclass(frozen=True, slots=True)
class Downdate:
    """What some keys changed P by: P - P_-e = leftT KT A^-1."""

    left_TC: Tensor
    """(c^-1 I - H)^-1 (D_e - P K)T."""
    leverage: float
    """Largest eigenvalue of c H, 0 to 1; near 1 the difference 1 - leverage has no digits left."""


def downdate(
    keys_TN: Tensor, solved_TN: Tensor, residual_TC: Tensor, weight: float
) -> Downdate | None:
    """Take keys that count with a weight c in A out of the system, everything else frozen.

    The D = 0 identity is the same with D_e = 0: so retain keys are taken out, with c = w_r/r.

    Args:
        keys_TN: the keys, float64.
        solved_TN: A^-1 K, transposed.
        residual_TC: D_e - P K, transposed.
        weight: c: w_f/s for forget keys, w_r/r for retain keys.

    Returns:
        what they changed, or None if c^-1 I - H is not positive definite: the keys are not part
        of A, or no digit is left of what remains.
    """
    H_TT = weight * (keys_TN @ solved_TN.mT)
    H_TT = (H_TT + H_TT.mT) / 2
    leverage = float(torch.linalg.eigvalsh(H_TT)[-1]) if len(H_TT) else 0.0
    core_TT = -H_TT
    core_TT.diagonal().add_(1)
    lower_TT, info = torch.linalg.cholesky_ex(core_TT)
    if int(info):
        return None
    return Downdate(torch.cholesky_solve(weight * residual_TC, lower_TT), leverage)


def shifts_TC(
    gold_T: Tensor,
    alt_T: Tensor | None,
    alpha_V: Tensor,
    unembedding_VM: Tensor,
    target: TargetConfig,
    *,
    rows_C: Tensor | None = None,
    redirect_token: int | None = None,
) -> Tensor:
    """The shift of each position at unit strength, as `grom.target` defines them.

    Args:
        gold_T: the token that each position has to predict.
        alt_T: what should be said instead; for replacement only.
        alpha_V: specificity, of the whole forget set.
        unembedding_VM: rows of the LM head.
        target: which target.
        rows_C: at the LM head, the tokens whose outputs are kept; None elsewhere.
        redirect_token: id of the token of `redirect`.

    Returns:
        (T, M), or (T, C) at the head; float64.

    Raises:
        ValueError: replacement without alternatives.
    """
    if target.kind == "corruption":
        direction_M = random_direction(unembedding_VM.shape[1], target.seed)
        return direction_M.to(gold_T.device).expand(len(gold_T), -1)
    weight_T1 = alpha_V.to(gold_T.device).double()[gold_T].unsqueeze(1)
    shift_TC = -directions(gold_T, unembedding_VM, rows_C)
    if target.kind == "replacement":
        if alt_T is None:
            raise ValueError("these keys were collected without what should be said instead")
        shift_TC += directions(alt_T, unembedding_VM, rows_C)
    elif target.kind == "redirect":
        assert redirect_token is not None
        toward_T = torch.full_like(gold_T, redirect_token)
        shift_TC += directions(toward_T, unembedding_VM, rows_C)
    return weight_T1 * shift_TC


def directions(token_T: Tensor, unembedding_VM: Tensor, rows_C: Tensor | None) -> Tensor:
    """u[v] of each token, or e[v] among the kept outputs; 0 for a token that is not kept."""
    if rows_C is not None:
        return (token_T.unsqueeze(1) == rows_C.to(token_T.device)).double()
    rows_TM = unembedding_VM[token_T.to(unembedding_VM.device)].to(token_T.device).double()
    unit_TM: Tensor = rows_TM / rows_TM.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return unit_TM
