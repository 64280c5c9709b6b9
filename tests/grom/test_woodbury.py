"""A small forget set solved from the retain part's factor is the solve of the whole system."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grom.audit import shifts_TC
from grom.changes import Request
from grom.config import RidgeConfig, TargetConfig
from grom.errors import EmptySet, NonFiniteKeys, NotPositiveDefinite
from grom.solve import RidgeFactor, factorise, solve_factored
from grom.target import LowRank, specificity, target_cross
from grom.woodbury import (
    RetainFactor,
    SmallSolve,
    factorise_retain,
    position_shifts,
    solve_small,
    sums_of,
)
from tests.reference import Keys, Tolerance, cross_of, random_keys, random_matrix

VOCAB, M, WIDTHS, TOWARD = 12, 6, (2, 5, 3), 7
N = sum(WIDTHS)
SIZE_N = torch.tensor([1.0] * 2 + [5.0] * 5 + [25.0] * 3).double()
"""Keys of one layer are larger than those of the next."""
TARGETS = {
    "suppression": TargetConfig(kind="suppression"),
    "replacement": TargetConfig(),
    "redirect": TargetConfig(kind="redirect", redirect_to="no"),
    "corruption": TargetConfig(kind="corruption", seed=3),
}
CASES = [
    (kind, head) for kind in TARGETS for head in (False, True) if not (head and kind[0] == "c")
]
RIDGES = [
    RidgeConfig(cache_retain=True),
    RidgeConfig(cache_retain=True, w_retain=1, rho=0.3),
    RidgeConfig(cache_retain=True, w_forget=50, mu=2.0),
]
EXACT = 1e-9
"""Relative, of P; float64, condition of A below 1e6."""
TIGHT: Tolerance = {"rtol": 1e-12, "atol": 1e-12}
seeds, ridges = st.integers(0, 10_000), st.sampled_from(RIDGES)


@dataclass(frozen=True)
class Problem:
    retain: Keys
    forget: Keys
    ridge: RidgeConfig
    kind: str = "replacement"
    head: bool = False

    @property
    def request(self) -> Request:
        return Request("all", self.forget.keys_TN, self.forget.gold_T, self.forget.alt_T)

    @property
    def alpha_V(self) -> Tensor:
        forget_V = self.forget.moments(VOCAB).counts_V
        return specificity(forget_V, self.retain.moments(VOCAB).counts_V, [2])

    @property
    def unembedding_VM(self) -> Tensor:
        return random_matrix(1, VOCAB, N if self.head else M).float()

    def whole(self) -> tuple[LowRank, RidgeFactor]:
        """The solve of the whole system."""
        retain, forget = self.retain.moments(VOCAB), self.forget.moments(VOCAB)
        cross = target_cross(
            forget, self.alpha_V, self.unembedding_VM, TARGETS[self.kind], head=self.head,
            redirect_token=TOWARD,
        )  # fmt: skip
        factor = factorise(retain, forget, self.ridge, site="W", widths=WIDTHS)
        return solve_factored(cross, factor, self.ridge), factor

    def factor(self) -> RetainFactor:
        return factorise_retain(self.retain.moments(VOCAB), self.ridge, site="W", widths=WIDTHS)

    def shifts(self) -> LowRank:
        return position_shifts(
            self.request, self.alpha_V, self.unembedding_VM, TARGETS[self.kind], head=self.head,
            redirect_token=TOWARD,
        )  # fmt: skip

    def small(self) -> SmallSolve:
        """The solve under test."""
        keys_SN = self.forget.keys_TN
        return solve_small(self.shifts(), keys_SN, self.factor(), self.ridge, site="W")


def problem(seed: int, ridge: RidgeConfig = RIDGES[0], num_forget: int = 7) -> Problem:
    retain, forget = random_keys(seed, 40, N, VOCAB), random_keys(seed + 1, num_forget, N, VOCAB)
    retain, forget = (replace(one, keys_TN=one.keys_TN * SIZE_N) for one in (retain, forget))
    return Problem(retain, forget, ridge)


@pytest.mark.parametrize(("kind", "head"), CASES)
@given(seed=seeds, ridge=ridges, num_forget=st.integers(1, 14))
def test_the_update_is_that_of_the_whole_system(
    kind: str, head: bool, seed: int, ridge: RidgeConfig, num_forget: int
) -> None:
    given_ = replace(problem(seed, ridge, num_forget), kind=kind, head=head)
    expected, _ = given_.whole()
    found = given_.small().update
    assert found.dense().shape == expected.dense().shape
    difference = float((found.dense() - expected.dense()).norm())
    assert difference <= EXACT * float(expected.dense().norm())


@given(seed=seeds, ridge=ridges)
def test_its_numbers_are_those_of_the_whole_system(seed: int, ridge: RidgeConfig) -> None:
    given_ = problem(seed, ridge)
    _, factor = given_.whole()
    small = given_.small()
    assert given_.factor().mus == factor.mus
    assert small.peak_ratios == pytest.approx(factor.peak_ratios, rel=1e-12)
    values = torch.linalg.eigvalsh(factor.lower_NN @ factor.lower_NN.mT)
    condition = float(values[-1] / values[0])
    assert 0.7 * condition <= small.condition <= 4 * condition


@given(seed=seeds, other=st.integers(1, 14))
def test_every_batch_gets_the_ridge_of_the_retain_part(seed: int, other: int) -> None:
    first, second = problem(seed), problem(seed, num_forget=other)
    means = [float(part.mean()) for part in torch.split(first.factor().diagonal_N, list(WIDTHS))]
    assert first.whole()[1].mus == second.whole()[1].mus
    assert first.factor().mus == pytest.approx([0.03 * mean for mean in means], rel=1e-12)


@pytest.mark.parametrize(("kind", "head"), CASES)
@given(seed=seeds)
def test_shifts_are_those_of_the_positions(kind: str, head: bool, seed: int) -> None:
    given_ = replace(problem(seed), kind=kind, head=head)
    expected_SM = shifts_TC(
        given_.forget.gold_T, given_.forget.alt_T, given_.alpha_V, given_.unembedding_VM,
        TARGETS[kind], rows_C=torch.arange(VOCAB) if head else None, redirect_token=TOWARD,
    )  # fmt: skip
    assert_close(given_.shifts().dense().mT, expected_SM, **TIGHT)


@given(seed=seeds)
def test_sums_without_a_gram_give_the_same_target(seed: int) -> None:
    given_ = problem(seed)
    sums = sums_of(given_.request, VOCAB)
    cross = target_cross(
        sums, given_.alpha_V, given_.unembedding_VM, TARGETS["replacement"], head=False
    )
    shifts_SM = given_.shifts().dense().mT
    assert_close(cross.dense(), cross_of(shifts_SM, given_.forget.keys_TN), rtol=1e-9, atol=1e-9)
    assert sums.num_tokens == 7
    assert bool(sums.gram_NN.isnan().all())


def test_a_ridge_that_depends_on_the_forget_set_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_retain"):
        problem(0, RidgeConfig()).factor()


def test_a_retain_set_without_tokens_has_no_factor() -> None:
    given_ = replace(problem(0), retain=random_keys(0, 0, N, VOCAB))
    for attempt in (given_.factor, given_.whole):
        with pytest.raises(EmptySet, match="retain"):
            attempt()


def test_no_forget_keys_are_refused() -> None:
    nothing = LowRank(torch.zeros(1, 0).double(), torch.ones(M, 1).double())
    with pytest.raises(EmptySet, match="forget"):
        solve_small(nothing, torch.zeros(0, N).double(), problem(0).factor(), RIDGES[0], site="W")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_keys_that_are_no_numbers_are_refused_with_the_site(value: float) -> None:
    given_ = problem(0)
    given_.forget.keys_TN[3, 2] = value
    with pytest.raises(NonFiniteKeys, match=r"W.*forget set"):
        given_.small()
    given_.retain.keys_TN[3, 2] = value
    with pytest.raises(NonFiniteKeys, match=r"W.*retain set"):
        given_.factor()


def test_a_ridge_that_is_too_small_is_refused() -> None:
    given_ = problem(0, RidgeConfig(cache_retain=True, mu=1e-30))
    flat = replace(given_.retain, keys_TN=torch.ones(40, N).double())
    with pytest.raises(NotPositiveDefinite, match="W"):
        replace(given_, retain=flat).factor()


def test_replacement_needs_what_should_be_said_instead() -> None:
    given_ = problem(0)
    without = replace(given_.request, alt_T=None)
    with pytest.raises(ValueError, match="instead"):
        position_shifts(
            without, given_.alpha_V, given_.unembedding_VM, TARGETS["replacement"], head=False
        )
