"""How much one request changed the model: exact, without solving again.

Shapes: T tokens of the request, N inputs of W, M outputs of W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grom.config import RidgeConfig


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
        ValueError: the request's keys are not part of A: s/w_f I - H is not positive definite.
    """
    keys_NT, shifts_MT = keys_TN.double().mT, shifts_TM.double().mT
    solved_NT = torch.cholesky_solve(keys_NT.contiguous(), factor)
    H_TT = keys_NT.mT @ solved_NT
    core_TT = -H_TT
    core_TT.diagonal().add_(num_forget / ridge.w_forget)
    lower_TT, info = torch.linalg.cholesky_ex(core_TT)
    if int(info):
        raise ValueError("s/w_f I - H is not positive definite: these keys are not part of A")
    residual_MT = shifts_MT - P_MN @ keys_NT
    return P_MN - torch.cholesky_solve(residual_MT.mT, lower_TT).mT @ solved_NT.mT
