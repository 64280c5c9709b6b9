"""Sites solved side by side: one system, each site's own ridge, and effects that add up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grom.config import RidgeConfig
from grom.errors import NotPositiveDefinite
from grom.moments import KeyMoments
from grom.solve import RidgeFactor, factorise, solve_edit, solve_factored, split_columns
from grom.target import LowRank
from tests.reference import Tolerance, cross_of, moments_of, random_keys, random_matrix

seeds = st.integers(0, 10_000)
ridges = st.sampled_from([RidgeConfig(), RidgeConfig(w_retain=1, rho=0.3), RidgeConfig(mu=2.0)])
WIDTHS = (2, 3, 4)
SIZE_N = torch.tensor([1.0] * 2 + [5.0] * 3 + [25.0] * 4).double()
"""Keys of one layer are larger than those of the next."""
TIGHT: Tolerance = {"rtol": 1e-9, "atol": 1e-9}
"""float64, condition of A below 1e6."""


def joint_keys(seed: int, num_tokens: int) -> Tensor:
    return random_keys(seed, num_tokens, sum(WIDTHS)).keys_TN * SIZE_N


def system(seed: int, ridge: RidgeConfig) -> tuple[Tensor, Tensor, RidgeFactor]:
    retain_RN, forget_SN = joint_keys(seed, 30), joint_keys(seed + 1, 12)
    moments = moments_of(retain_RN), moments_of(forget_SN)
    return retain_RN, forget_SN, factorise(*moments, ridge, site="W", widths=WIDTHS)


@given(seed=seeds, ridge=ridges)
def test_each_site_gets_the_ridge_of_its_own_block(seed: int, ridge: RidgeConfig) -> None:
    retain_RN, forget_SN, factor = system(seed, ridge)
    bare_NN = ridge.w_retain / 30 * cross_of(retain_RN, retain_RN)
    bare_NN += ridge.w_forget / 12 * cross_of(forget_SN, forget_SN)
    added_NN = factor.lower_NN @ factor.lower_NN.mT - bare_NN
    mus: list[float] = []
    for number, block_N in enumerate(torch.split(bare_NN.diagonal(), list(WIDTHS))):
        mus += WIDTHS[number] * [ridge.ridge(float(block_N.mean()))]
        ratio = float(block_N.max() / block_N.mean())
        assert factor.peak_ratios[number] == pytest.approx(ratio)
        assert factor.mus[number] == pytest.approx(mus[-1], rel=1e-12)
    # A has entries up to 1e5.
    assert_close(added_NN, torch.tensor(mus).double().diag(), rtol=1e-6, atol=1e-8)


@given(seed=seeds, ridge=ridges, rank=st.integers(1, 6))
def test_the_effects_of_the_sites_add_up_to_that_of_the_joint_update(
    seed: int, ridge: RidgeConfig, rank: int
) -> None:
    retain_RN, _, factor = system(seed, ridge)
    cross = LowRank(random_matrix(seed, rank, 9), left_MK=random_matrix(seed + 1, 4, rank))
    for form in (cross, LowRank(cross.dense())):
        joint = solve_factored(form, factor, ridge)
        parts = split_columns(joint, WIDTHS)
        assert [part.dense().shape for part in parts] == [(4, width) for width in WIDTHS]
        keys = torch.split(retain_RN, list(WIDTHS), dim=1)
        effects = [key_TN @ part.dense().mT for key_TN, part in zip(keys, parts, strict=True)]
        assert_close(sum(effects), retain_RN @ joint.dense().mT, **TIGHT)


def test_rows_of_a_joint_update_stay_rows() -> None:
    rows = LowRank(random_matrix(0, 2, 9), rows_K=torch.tensor([6, 2]), num_outputs=8)
    parts = split_columns(rows, WIDTHS)
    assert torch.equal(torch.cat([part.dense() for part in parts], dim=1), rows.dense())
    assert all(part.right_KN.is_contiguous() for part in parts)


@given(seed=seeds, ridge=ridges)
def test_one_site_alone_is_a_joint_system_of_one(seed: int, ridge: RidgeConfig) -> None:
    moments = moments_of(joint_keys(seed, 30)), moments_of(joint_keys(seed + 1, 12))
    alone = factorise(*moments, ridge, site="W")
    assert torch.equal(alone.lower_NN, factorise(*moments, ridge, site="W", widths=[9]).lower_NN)


@given(seed=seeds)
def test_a_joint_update_leaves_retain_keys_more_alone_than_its_sites_one_by_one(seed: int) -> None:
    """At equal ridge: the joint objective is least at the joint solution, and sums the effects."""
    ridge = RidgeConfig(w_retain=10.0, mu=0.5)
    retain_RN, forget_SN, factor = system(seed, ridge)
    shifts_SM = random_matrix(seed, 12, 4)
    cross_MN = cross_of(shifts_SM, forget_SN)
    joint_MN = solve_factored(LowRank(cross_MN), factor, ridge).dense()
    retain, forget, alone = moments_of(retain_RN), moments_of(forget_SN), []
    for start, stop in ((0, 2), (2, 5), (5, 9)):
        blocks = retain.block(start, stop), forget.block(start, stop)
        alone.append(solve_edit(*blocks, cross_MN[:, start:stop], ridge, site="W"))

    def objective(P_MN: Tensor) -> float:
        keep = (retain_RN @ P_MN.mT).square().sum(1).mean()
        move = (forget_SN @ P_MN.mT - shifts_SM).square().sum(1).mean()
        return float(10 * keep + move + 0.5 * P_MN.square().sum())

    assert objective(joint_MN) < objective(torch.cat(alone, dim=1))


def test_a_failed_joint_factor_states_the_smallest_ridge() -> None:
    forget, retain = moments_of(torch.diag(SIZE_N)), KeyMoments.zeros(9, 1)
    foreign = moments_of(9 * torch.eye(9).double()[:1])
    with pytest.raises(NotPositiveDefinite, match=r"pivot 1 of 9, mu=0\.\d+"):
        factorise(retain, forget + forget - foreign, RidgeConfig(mu=0.25), site="W", widths=WIDTHS)
