"""What the audit says about a request is what solving again without it would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grom.audit import downdate, leave_one_out, shifts_TC
from grom.config import RidgeConfig, TargetConfig
from grom.solve import factorise, solve_edit, solve_factored
from grom.target import LowRank, target_cross
from tests.reference import (
    Tolerance,
    cross_of,
    moments_of,
    random_keys,
    random_matrix,
    ridge_system,
    solve_without,
)

seeds = st.integers(0, 10_000)
ridges = st.builds(
    RidgeConfig,
    w_retain=st.sampled_from([0.0, 1.0, 100.0]),
    w_forget=st.sampled_from([0.5, 3.0]),
    rho=st.sampled_from([0.03, 0.5]),
)
EXACT: Tolerance = {"rtol": 0.0, "atol": 1e-12}
"""float64, entries of order 1, condition of A below 1e3."""


def solved(
    seed: int, ridge: RidgeConfig, num_retain: int = 20
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Retain keys, forget keys, shifts, the edit, and the factor of its system."""
    retain_RN, forget_SN = random_keys(seed, num_retain).keys_TN, random_keys(seed + 1, 12).keys_TN
    shifts_SM = random_matrix(seed, 12, 4)
    P_MN, factor_NN = solve_edit(
        moments_of(retain_RN),
        moments_of(forget_SN),
        cross_of(shifts_SM, forget_SN),
        ridge,
        site="W",
        return_factor=True,
    )
    return retain_RN, forget_SN, shifts_SM, P_MN, factor_NN


@given(seed=seeds, ridge=ridges, size=st.sampled_from([1, 3, 4, 11]))
def test_each_request_taken_out_equals_solving_again_without_it(
    seed: int, ridge: RidgeConfig, size: int
) -> None:
    retain_RN, forget_SN, shifts_SM, P_MN, factor_NN = solved(seed, ridge)
    for first in range(0, 12, size):
        request = list(range(first, min(first + size, 12)))
        without_MN = leave_one_out(
            P_MN, forget_SN[request], shifts_SM[request], factor_NN, 12, ridge
        )
        expected_MN = solve_without(request, retain_RN, forget_SN, shifts_SM, ridge)
        assert_close(without_MN, expected_MN, **EXACT)


@given(seed=seeds)
def test_retain_keys_of_the_same_weight_are_taken_out_with_no_shift(seed: int) -> None:
    ridge = RidgeConfig(w_retain=20 / 12, w_forget=1, mu=0.3)  # w_r/r == w_f/s
    retain_RN, forget_SN, shifts_SM, P_MN, factor_NN = solved(seed, ridge)
    zeros_TM = torch.zeros(4, 4, dtype=torch.float64)
    without_MN = leave_one_out(P_MN, retain_RN[:4], zeros_TM, factor_NN, 12, ridge)
    A_NN, _ = ridge_system(retain_RN, forget_SN, ridge)
    smaller_NN = A_NN - retain_RN[:4].mT @ retain_RN[:4] / 12
    expected_MN = cross_of(shifts_SM, forget_SN) / 12 @ torch.linalg.inv(smaller_NN)
    assert_close(without_MN, expected_MN, **EXACT)


@given(seed=seeds, ridge=ridges)
def test_without_any_request_nothing_is_left_of_the_edit(seed: int, ridge: RidgeConfig) -> None:
    _, forget_SN, shifts_SM, P_MN, factor_NN = solved(seed, ridge)
    nothing_MN = leave_one_out(P_MN, forget_SN, shifts_SM, factor_NN, 12, ridge)
    assert_close(nothing_MN, torch.zeros_like(P_MN), **EXACT)


@given(seed=seeds, ridge=ridges)
def test_the_order_of_the_tokens_of_a_request_does_not_matter(
    seed: int, ridge: RidgeConfig
) -> None:
    _, forget_SN, shifts_SM, P_MN, factor_NN = solved(seed, ridge)
    order = torch.tensor([2, 0, 1])
    keys_TN, shifts_TM = forget_SN[:3], shifts_SM[:3]
    one_MN = leave_one_out(P_MN, keys_TN, shifts_TM, factor_NN, 12, ridge)
    other_MN = leave_one_out(P_MN, keys_TN[order], shifts_TM[order], factor_NN, 12, ridge)
    assert_close(one_MN, other_MN, **EXACT)


def joint_A_NN(retain_RN: Tensor, forget_SN: Tensor, ridge: RidgeConfig) -> Tensor:
    """A of two sites side by side, with 2 and 3 inputs: each has the mu of its own block."""
    A_NN, mu = ridge_system(retain_RN, forget_SN, ridge)
    A_NN -= mu * torch.eye(5, dtype=torch.float64)
    bounds = ((0, 2), (2, 5))
    means = [float(A_NN.diagonal()[start:stop].mean()) for start, stop in bounds]
    mus = 2 * [ridge.ridge(means[0])] + 3 * [ridge.ridge(means[1])]
    return A_NN + torch.tensor(mus, dtype=torch.float64).diag()


@given(seed=seeds, ridge=ridges)
def test_in_a_joint_system_a_request_taken_out_equals_solving_again_without_it(
    seed: int, ridge: RidgeConfig
) -> None:
    retain_RN, forget_SN = random_keys(seed, 20).keys_TN, random_keys(seed + 1, 12).keys_TN
    forget_SN[:, 2:] *= 9  # the second site's keys are larger
    shifts_SM, scale = random_matrix(seed, 12, 4), ridge.w_forget / 12
    moments = moments_of(retain_RN), moments_of(forget_SN)
    factor = factorise(*moments, ridge, site="W", widths=(2, 3))
    P_MN = solve_factored(LowRank(cross_of(shifts_SM, forget_SN)), factor, ridge).dense()
    without_MN = leave_one_out(
        P_MN, forget_SN[:3], shifts_SM[:3], factor.lower_NN, factor.num_forget, ridge
    )
    smaller_NN = joint_A_NN(retain_RN, forget_SN, ridge) - scale * forget_SN[:3].mT @ forget_SN[:3]
    expected_MN = scale * cross_of(shifts_SM[3:], forget_SN[3:]) @ torch.linalg.inv(smaller_NN)
    # Keys of sizes 1 and 9 make the condition 100 times that of the other tests.
    assert_close(without_MN, expected_MN, rtol=0, atol=1e-10)


def test_an_empty_request_has_no_influence() -> None:
    ridge = RidgeConfig()
    _, forget_SN, shifts_SM, P_MN, factor_NN = solved(0, ridge)
    without_MN = leave_one_out(P_MN, forget_SN[:0], shifts_SM[:0], factor_NN, 12, ridge)
    assert torch.equal(without_MN, P_MN)


def test_keys_that_were_never_in_the_system_are_refused() -> None:
    ridge = RidgeConfig()
    _, forget_SN, shifts_SM, P_MN, factor_NN = solved(0, ridge)
    with pytest.raises(ValueError, match="not part of A"):
        leave_one_out(P_MN, 50 * forget_SN[:2], shifts_SM[:2], factor_NN, 12, ridge)


def test_a_downdate_says_how_much_of_a_direction_the_keys_decide() -> None:
    ridge = RidgeConfig()
    retain_RN, forget_SN, shifts_SM, P_MN, factor_NN = solved(3, ridge)
    keys_TN, weight = forget_SN[:4], ridge.w_forget / 12
    solved_TN = torch.cholesky_solve(keys_TN.mT, factor_NN).mT
    found = downdate(keys_TN, solved_TN, shifts_SM[:4] - keys_TN @ P_MN.mT, weight)
    assert found is not None
    A_NN, _ = ridge_system(retain_RN, forget_SN, ridge)
    mine_NN = weight * keys_TN.mT @ keys_TN
    expected = float(torch.linalg.eigvals(torch.linalg.solve(A_NN, mine_NN)).real.max())
    assert found.leverage == pytest.approx(expected, rel=1e-10)
    assert 0 < found.leverage < 1


def test_a_downdate_of_foreign_keys_is_none() -> None:
    _, forget_SN, _, P_MN, factor_NN = solved(0, RidgeConfig())
    keys_TN = 50 * forget_SN[:2]
    solved_TN = torch.cholesky_solve(keys_TN.mT, factor_NN).mT
    assert downdate(keys_TN, solved_TN, -keys_TN @ P_MN.mT, 1 / 12) is None


@given(seed=seeds, head=st.booleans())
@pytest.mark.parametrize("kind", ["suppression", "replacement", "redirect", "corruption"])
def test_shifts_times_keys_are_the_cross_moment_of_the_target(
    seed: int, head: bool, kind: str
) -> None:
    if head and kind == "corruption":
        return
    given, unembedding_VM = random_keys(seed, 30), random_matrix(seed, 8, 4)
    alpha_V = torch.rand(8, dtype=torch.float64).clamp(min=0.2) - 0.2
    target = TargetConfig.model_validate(
        {"kind": kind, "redirect_to": "no" if kind == "redirect" else None, "seed": 5}
    )
    cross = target_cross(
        given.moments(), alpha_V, unembedding_VM, target, head=head, redirect_token=2
    )
    shifts = shifts_TC(
        given.gold_T,
        given.alt_T,
        alpha_V,
        unembedding_VM,
        target,
        rows_C=torch.arange(8) if head else None,
        redirect_token=2,
    )
    assert_close(shifts.mT @ given.keys_TN, cross.dense(), **EXACT)


def test_replacement_without_alternatives_has_no_shifts() -> None:
    with pytest.raises(ValueError, match="without what should be said instead"):
        shifts_TC(torch.tensor([1]), None, torch.ones(8), random_matrix(0, 8, 4), TargetConfig())
