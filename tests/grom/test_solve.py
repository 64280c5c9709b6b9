"""The edit is the minimiser of its objective, and behaves as the formula says in every limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grom.config import RidgeConfig
from grom.errors import EmptySet, NonFiniteKeys, NotPositiveDefinite
from grom.moments import KeyMoments
from grom.solve import factorise, solve_edit, solve_factored
from grom.target import LowRank
from tests.reference import (
    Tolerance,
    cross_of,
    moments_of,
    objective,
    random_keys,
    random_matrix,
    ridge_system,
    solve_by_lstsq,
    solve_without,
)

seeds = st.integers(0, 10_000)
ridges = st.builds(
    RidgeConfig,
    w_retain=st.sampled_from([0.0, 1.0, 100.0]),
    w_forget=st.sampled_from([0.5, 1.0, 3.0]),
    rho=st.sampled_from([None, 0.003, 0.3]),
) | st.builds(RidgeConfig, w_retain=st.just(10.0), mu=st.sampled_from([0.01, 5.0]))
TIGHT: Tolerance = {"rtol": 1e-9, "atol": 1e-10}
"""float64, entries of order 1, condition of A below 1e5: 1e-16 * 1e5, with room."""


@dataclass(frozen=True, slots=True)
class Problem:
    retain_RN: Tensor
    forget_SN: Tensor
    shifts_SM: Tensor

    def edit(self, ridge: RidgeConfig) -> Tensor:
        """The solution under test."""
        cross_MN = cross_of(self.shifts_SM, self.forget_SN)
        retain, forget = moments_of(self.retain_RN), moments_of(self.forget_SN)
        return solve_edit(retain, forget, cross_MN, ridge, site="W")


def problem(seed: int, num_retain: int = 20, num_forget: int = 8) -> Problem:
    retain, forget = random_keys(seed, num_retain), random_keys(seed + 1, num_forget)
    return Problem(retain.keys_TN, forget.keys_TN, random_matrix(seed, num_forget, 4))


@given(seed=seeds, ridge=ridges)
def test_the_gradient_vanishes_at_the_solution(seed: int, ridge: RidgeConfig) -> None:
    case = problem(seed)
    P_MN = case.edit(ridge).requires_grad_()
    objective(P_MN, case.retain_RN, case.forget_SN, case.shifts_SM, ridge).backward()  # type: ignore[no-untyped-call]
    assert P_MN.grad is not None
    # The gradient's terms are of order w_r = 100; they cancel to rounding.
    assert_close(P_MN.grad, torch.zeros_like(P_MN), rtol=0, atol=1e-10)


@given(seed=seeds, ridge=ridges)
def test_the_solution_equals_least_squares_on_the_stacked_system(
    seed: int, ridge: RidgeConfig
) -> None:
    case = problem(seed)
    expected_MN = solve_by_lstsq(case.retain_RN, case.forget_SN, case.shifts_SM, ridge)
    assert_close(case.edit(ridge), expected_MN, **TIGHT)


@given(seed=seeds, ridge=ridges, num_forget=st.integers(1, 12))
def test_the_solution_equals_the_formula_with_an_explicit_inverse(
    seed: int, ridge: RidgeConfig, num_forget: int
) -> None:
    case = problem(seed, num_retain=0, num_forget=num_forget)
    expected_MN = solve_without([], case.retain_RN, case.forget_SN, case.shifts_SM, ridge)
    assert_close(case.edit(ridge), expected_MN, **TIGHT)


@given(seed=seeds, ridge=ridges)
def test_duplicating_the_data_changes_nothing(seed: int, ridge: RidgeConfig) -> None:
    case = problem(seed)
    sets = (case.retain_RN, case.forget_SN, case.shifts_SM)
    twice = Problem(*(torch.cat([rows, rows]) for rows in sets))
    assert_close(twice.edit(ridge), case.edit(ridge), **TIGHT)


@given(seed=seeds, ridge=ridges)
def test_rotating_the_keys_rotates_the_edit(seed: int, ridge: RidgeConfig) -> None:
    case = problem(seed)
    rotation_NN = torch.linalg.qr(random_matrix(seed, 5, 5)).Q
    rotated = Problem(case.retain_RN @ rotation_NN, case.forget_SN @ rotation_NN, case.shifts_SM)
    assert_close(rotated.edit(ridge), case.edit(ridge) @ rotation_NN, **TIGHT)


@given(seed=seeds, ridge=ridges)
def test_the_edit_is_linear_in_the_target(seed: int, ridge: RidgeConfig) -> None:
    case = problem(seed)
    tripled = replace(case, shifts_SM=3 * case.shifts_SM)
    assert_close(tripled.edit(ridge), 3 * case.edit(ridge), **TIGHT)


def test_no_shift_gives_no_edit() -> None:
    case = problem(0)
    assert not replace(case, shifts_SM=0 * case.shifts_SM).edit(RidgeConfig()).any()


@given(seed=seeds, mu=st.sampled_from([1e3, 1e6, 1e9]))
def test_a_large_ridge_makes_the_edit_vanish(seed: int, mu: float) -> None:
    case = problem(seed)
    # |A^-1| <= 1/mu, so |P| <= w_f/s |D XT| / mu.
    bound = float(cross_of(case.shifts_SM, case.forget_SN).norm()) / 8 / mu
    assert 0.5 * bound < float(case.edit(RidgeConfig(mu=mu)).norm()) <= bound


@given(seed=seeds, ridge=ridges)
def test_retain_keys_orthogonal_to_the_forget_keys_are_untouched(
    seed: int, ridge: RidgeConfig
) -> None:
    case = problem(seed)
    basis_NN = torch.linalg.qr(random_matrix(seed, 5, 5)).Q
    retain_RN = case.retain_RN[:, :3] @ basis_NN[:3]
    forget_SN = case.forget_SN[:, :2] @ basis_NN[3:]
    P_MN = Problem(retain_RN, forget_SN, case.shifts_SM).edit(ridge)
    assert_close(P_MN @ retain_RN.mT, torch.zeros(4, 20).double(), rtol=0, atol=1e-12)
    assert float((P_MN @ forget_SN.mT).norm()) > 0.01


@given(seed=seeds)
def test_a_large_retain_weight_leaves_retain_keys_alone(seed: int) -> None:
    case = problem(seed, num_retain=3)
    moved = [
        float((case.edit(RidgeConfig(w_retain=w, mu=0.01)) @ case.retain_RN.mT).norm())
        for w in (1.0, 1e3, 1e6)
    ]
    # Once it dominates, the shift of retain keys falls as 1/w_r.
    assert moved[0] > moved[1] > 100 * moved[2]
    assert moved[2] < 1e-4


@given(seed=seeds)
def test_without_retain_and_ridge_forget_keys_move_exactly_by_the_target(seed: int) -> None:
    case = problem(seed, num_retain=0, num_forget=3)
    orthonormal_SN = torch.linalg.qr(case.forget_SN.mT).Q.mT
    P_MN = Problem(case.retain_RN, orthonormal_SN, case.shifts_SM).edit(RidgeConfig(mu=1e-9))
    # Short of the target by s * mu / w_f = 3e-9 of it.
    assert_close(P_MN @ orthonormal_SN.mT, case.shifts_SM.mT, rtol=0, atol=1e-7)


def test_one_weight_can_be_solved_by_hand() -> None:
    case = Problem(*(torch.tensor([[x]], dtype=torch.float64) for x in (2.0, 3.0, 6.0)))
    ridge = RidgeConfig(w_retain=1, w_forget=1, mu=1)
    assert case.edit(ridge).item() == pytest.approx(18 / 14)  # 6*3 / (2*2 + 3*3 + 1)


@given(seed=seeds, rank=st.integers(1, 6))
def test_solving_the_factors_equals_solving_the_whole(seed: int, rank: int) -> None:
    case, ridge = problem(seed), RidgeConfig()
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    factor = factorise(retain, forget, ridge, site="W")
    left_MK, right_KN = random_matrix(seed, 4, rank), random_matrix(seed + 1, rank, 5)
    whole_MN = solve_edit(retain, forget, left_MK @ right_KN, ridge, site="W")
    solved = solve_factored(LowRank(right_KN, left_MK=left_MK), factor, ridge)
    assert solved.left_MK is left_MK
    assert_close(solved.dense(), whole_MN, **TIGHT)


def test_rows_of_the_head_are_solved_one_by_one() -> None:
    case, ridge = problem(0), RidgeConfig()
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    rows = LowRank(random_matrix(0, 2, 5), rows_K=torch.tensor([6, 2]), num_outputs=9)
    solved = solve_factored(rows, factorise(retain, forget, ridge, site="W"), ridge)
    whole_MN = solve_edit(retain, forget, rows.dense(), ridge, site="W")
    assert_close(solved.dense(), whole_MN, **TIGHT)
    assert solved.dense().any(1).nonzero()[:, 0].tolist() == [2, 6]


@given(seed=seeds, ridge=ridges)
def test_the_factor_is_the_factor_of_the_system(seed: int, ridge: RidgeConfig) -> None:
    case = problem(seed)
    A_NN, mu = ridge_system(case.retain_RN, case.forget_SN, ridge)
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    factor = factorise(retain, forget, ridge, site="W")
    assert_close(factor.lower_NN @ factor.lower_NN.mT, A_NN, **TIGHT)
    diagonal_N = A_NN.diagonal() - mu
    assert (factor.num_retain, factor.num_forget) == (20, 8)
    assert factor.mus[0] == pytest.approx(mu, rel=1e-12)
    assert factor.peak_ratios[0] == pytest.approx(float(diagonal_N.max() / diagonal_N.mean()))


def test_the_returned_factor_is_the_one_that_solved() -> None:
    case, ridge = problem(0), RidgeConfig()
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    cross_MN = cross_of(case.shifts_SM, case.forget_SN)
    P_MN, lower_NN = solve_edit(retain, forget, cross_MN, ridge, site="W", return_factor=True)
    assert torch.equal(P_MN, case.edit(ridge))
    assert_close(P_MN @ lower_NN @ lower_NN.mT, cross_MN / 8, **TIGHT)


def test_solving_leaves_the_moments_as_they_were() -> None:
    case = problem(0)
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    solve_edit(retain, forget, torch.ones(4, 5).double(), RidgeConfig(), site="W")
    assert torch.equal(retain.gram_NN, moments_of(case.retain_RN).gram_NN)
    assert torch.equal(forget.gram_NN, moments_of(case.forget_SN).gram_NN)


@given(seed=seeds, rho=st.sampled_from([1e-6, 1e-3, 1.0]))
def test_the_condition_estimate_is_a_close_lower_bound(seed: int, rho: float) -> None:
    case, ridge = problem(seed), RidgeConfig(rho=rho)
    retain, forget = moments_of(case.retain_RN), moments_of(case.forget_SN)
    A_NN, _ = ridge_system(case.retain_RN, case.forget_SN, ridge)
    estimate = factorise(retain, forget, ridge, site="W").condition()
    true = float(torch.linalg.cond(A_NN))
    assert 0.5 * true < estimate <= true * (1 + 1e-9)


def test_a_failed_factor_names_site_pivot_ridge_and_cure() -> None:
    forget, retain = moments_of(torch.eye(3).double()), KeyMoments.zeros(3, 1)
    foreign = moments_of(torch.tensor([[0.0, 9.0, 0.0]], dtype=torch.float64))
    broken = forget - foreign + moments_of(torch.zeros(1, 3).double())
    with pytest.raises(NotPositiveDefinite) as error:
        factorise(retain, broken, RidgeConfig(mu=0.5), site="layers.7.down")
    for part in ("layers.7.down", "pivot 2 of 3", "mu=0.5", "Raise `rho` or `mu`"):
        assert part in str(error.value)


def test_an_empty_forget_set_is_refused_by_name() -> None:
    with pytest.raises(EmptySet, match=r"layers\.7\.down: the forget set has no rows"):
        factorise(
            moments_of(torch.eye(3)), KeyMoments.zeros(3, 1), RidgeConfig(), site="layers.7.down"
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["retain", "forget"])
def test_keys_that_are_not_finite_are_refused_by_site_and_set(name: str, value: float) -> None:
    sets = {"retain": torch.eye(3).double(), "forget": torch.eye(3).double()}
    sets[name][1, 2] = value
    retain, forget = (moments_of(sets[key]) for key in ("retain", "forget"))
    with pytest.raises(NonFiniteKeys, match=f"down: NaN or Inf in the keys of the {name} set"):
        factorise(retain, forget, RidgeConfig(), site="layers.7.down")
