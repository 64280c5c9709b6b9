"""Targets: alpha from counts, and D XT from sums by token, equal their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from grom.config import TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.target import (
    LowRank,
    corruption_cross,
    random_direction,
    redirect_cross,
    replacement_cross,
    specificity,
    suppression_cross,
    target_cross,
)
from tests.reference import Keys, Tolerance, cross_of, random_keys, random_matrix, specificity_of

seeds = st.integers(0, 10_000)
V, M = 8, 6
TOWARD = 5
TARGETS = {
    "suppression": TargetConfig(kind="suppression"),
    "replacement": TargetConfig(kind="replacement"),
    "redirect": TargetConfig(kind="redirect", redirect_to="no"),
    "corruption": TargetConfig(kind="corruption", seed=3),
}
TIGHT: Tolerance = {"rtol": 0.0, "atol": 1e-12}
"""Sums of at most 30 float64 products of order 1."""


def shifts_of(kind: str, keys: Keys, alpha_V: Tensor, directions_VM: Tensor) -> Tensor:
    """D, one position at a time, with one direction per token."""
    shifts = []
    for _, gold, alt in keys.rows:
        away_M = -alpha_V[gold] * directions_VM[gold]
        toward = {"replacement": alt, "redirect": TOWARD}.get(kind)
        toward_M = 0 if toward is None else alpha_V[gold] * directions_VM[toward]
        shifts.append(away_M + toward_M)
    return torch.stack(shifts)


def forget_set(seed: int) -> tuple[Keys, Tensor, KeyMoments]:
    keys = random_keys(seed, 30)
    retain = random_keys(seed + 1, 50).gold_T.tolist()
    alpha_V = specificity_of(keys.gold_T.tolist(), retain, V)
    return keys, alpha_V, keys.moments()


@given(seed=seeds, num_forget=st.integers(1, 40), num_retain=st.integers(0, 40))
def test_specificity_equals_its_definition(seed: int, num_forget: int, num_retain: int) -> None:
    forget, retain = random_keys(seed, num_forget), random_keys(seed + 1, num_retain)
    alpha_V = specificity(forget.moments().counts_V, retain.moments().counts_V, [2, 6])
    expected_V = specificity_of(forget.gold_T.tolist(), retain.gold_T.tolist(), V, [2, 6])
    assert_close(alpha_V, expected_V, **TIGHT)


@given(seed=seeds, times=st.integers(1, 7))
def test_a_set_is_not_specific_against_itself(seed: int, times: int) -> None:
    counts_V = random_keys(seed, 30).moments().counts_V
    assert_close(specificity(counts_V, times * counts_V), torch.zeros(V).double(), **TIGHT)


def test_without_retain_tokens_every_forget_token_is_wholly_specific() -> None:
    alpha_V = specificity(torch.tensor([3, 0, 1]), torch.tensor([0, 0, 0]))
    assert alpha_V.tolist() == [1.0, 0.0, 1.0]


def test_special_tokens_are_not_specific_even_beyond_the_vocabulary() -> None:
    alpha_V = specificity(torch.tensor([3, 2, 1]), torch.tensor([0, 0, 0]), [1, 3, 99])
    assert alpha_V.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("kind", ["suppression", "replacement", "redirect"])
@given(seed=seeds)
def test_a_cross_moment_equals_the_sum_over_positions(kind: str, seed: int) -> None:
    keys, alpha_V, moments = forget_set(seed)
    unembedding_VM = random_matrix(seed, V, M)
    crosses = {
        "suppression": suppression_cross(moments, alpha_V, unembedding_VM),
        "replacement": replacement_cross(moments, alpha_V, unembedding_VM),
        "redirect": redirect_cross(moments, alpha_V, unembedding_VM, TOWARD),
    }
    unit_VM = torch.stack([row / row.norm() for row in unembedding_VM])
    expected_MN = cross_of(shifts_of(kind, keys, alpha_V, unit_VM), keys.keys_TN)
    assert_close(crosses[kind], expected_MN, **TIGHT)


@given(seed=seeds)
def test_corruption_moves_every_key_the_same_way(seed: int) -> None:
    keys, _, moments = forget_set(seed)
    direction_M = random_direction(M, seed)
    expected_MN = cross_of(direction_M.expand(30, M), keys.keys_TN)
    assert_close(corruption_cross(moments, 2 * direction_M), 2 * expected_MN, **TIGHT)


@pytest.mark.parametrize("kind", sorted(TARGETS))
@given(seed=seeds)
def test_the_chosen_target_is_the_one_that_was_asked_for(kind: str, seed: int) -> None:
    _, alpha_V, moments = forget_set(seed)
    unembedding_VM = random_matrix(seed, V, M)
    expected = {
        "suppression": suppression_cross(moments, alpha_V, unembedding_VM),
        "replacement": replacement_cross(moments, alpha_V, unembedding_VM),
        "redirect": redirect_cross(moments, alpha_V, unembedding_VM, TOWARD),
        "corruption": corruption_cross(moments, random_direction(M, 3)),
    }
    cross = target_cross(
        moments, alpha_V, unembedding_VM, TARGETS[kind], head=False, redirect_token=TOWARD
    )
    assert_close(cross.dense(), expected[kind], **TIGHT)


@pytest.mark.parametrize("kind", ["suppression", "replacement", "redirect"])
@given(seed=seeds)
def test_at_the_head_a_token_shifts_its_own_row_only(kind: str, seed: int) -> None:
    keys, alpha_V, moments = forget_set(seed)
    head_VM = random_matrix(seed, V, 5)
    cross = target_cross(moments, alpha_V, head_VM, TARGETS[kind], head=True, redirect_token=TOWARD)
    basis_VV = torch.eye(V, dtype=torch.float64)
    expected_VN = cross_of(shifts_of(kind, keys, alpha_V, basis_VV), keys.keys_TN)
    assert_close(cross.dense(), expected_VN, **TIGHT)
    assert cross.rows_K is not None
    assert set(cross.rows_K.tolist()) >= set(expected_VN.any(1).nonzero()[:, 0].tolist())


def test_at_the_head_only_suppressed_tokens_take_memory() -> None:
    _, alpha_V, moments = forget_set(0)
    head_VM = random_matrix(0, V, 5)
    cross = target_cross(moments, alpha_V, head_VM, TARGETS["suppression"], head=True)
    assert 0 < (alpha_V > 0).sum() < V
    assert len(cross.right_KN) == (alpha_V > 0).sum()


def test_corruption_at_the_head_is_refused_with_the_setting_to_change() -> None:
    _, alpha_V, moments = forget_set(0)
    with pytest.raises(ConfigError, match=r"select\.site: mlp"):
        target_cross(moments, alpha_V, random_matrix(0, V, 5), TARGETS["corruption"], head=True)


@given(seed=seeds, factor=st.sampled_from([0.0, 0.5, 2.0]))
def test_replacements_follow_the_alpha_of_the_target(seed: int, factor: float) -> None:
    _, alpha_V, moments = forget_set(seed)
    unembedding_VM = random_matrix(seed, V, M)
    scaled_MN = replacement_cross(moments, factor * alpha_V, unembedding_VM)
    expected_MN = factor * replacement_cross(moments, alpha_V, unembedding_VM)
    assert_close(scaled_MN, expected_MN, **TIGHT)


@given(seed=seeds)
def test_a_replacement_that_was_given_its_weight_keeps_it(seed: int) -> None:
    keys, alpha_V, moments = forget_set(seed)
    fixed = KeyMoments.zeros(5, V)
    fixed.update_(keys.keys_TN, keys.gold_T, keys.alt_T, alpha_V[keys.gold_T])
    unembedding_VM = random_matrix(seed, V, M)
    expected_MN = replacement_cross(moments, alpha_V, unembedding_VM)
    assert_close(replacement_cross(fixed, alpha_V, unembedding_VM), expected_MN, **TIGHT)
    away_MN = suppression_cross(moments, alpha_V, unembedding_VM)
    halved_MN = replacement_cross(fixed, alpha_V / 2, unembedding_VM)
    assert_close(halved_MN, expected_MN - away_MN / 2, **TIGHT)


def forms() -> dict[str, LowRank]:
    left_MK, right_KN = random_matrix(0, M, 2), random_matrix(1, 2, 5)
    rows_K = torch.tensor([4, 1])
    return {
        "factors": LowRank(right_KN, left_MK=left_MK),
        "rows": LowRank(right_KN, rows_K=rows_K, num_outputs=M),
        "whole": LowRank(random_matrix(2, M, 5)),
    }


@pytest.mark.parametrize("form", sorted(forms()))
def test_each_form_of_a_matrix_has_the_norm_and_multiples_of_that_matrix(form: str) -> None:
    low_rank = forms()[form]
    assert low_rank.dense().shape == (M, 5)
    assert low_rank.norm() == pytest.approx(float(low_rank.dense().norm()), rel=1e-12)
    assert_close(low_rank.scaled(-3).dense(), -3 * low_rank.dense(), **TIGHT)
    assert_close(low_rank.smallest().dense(), low_rank.dense(), **TIGHT)


def test_rows_land_where_they_belong() -> None:
    rows = forms()["rows"]
    assert torch.equal(rows.dense()[[4, 1]], rows.right_KN)
    assert not rows.dense()[[0, 2, 3, 5]].any()


@given(rank=st.integers(1, 12))
def test_the_smallest_form_takes_no_more_numbers_than_any_other(rank: int) -> None:
    low_rank = LowRank(random_matrix(0, rank, 5), left_MK=random_matrix(1, M, rank))
    smallest = low_rank.smallest()
    taken = smallest.right_KN.numel()
    taken += 0 if smallest.left_MK is None else smallest.left_MK.numel()
    assert taken <= min(rank * (M + 5), M * 5)
    assert_close(smallest.dense(), low_rank.dense(), **TIGHT)


def test_a_random_direction_has_length_one_and_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    one_M = random_direction(50, 7)
    torch.manual_seed(2)
    assert torch.equal(one_M, random_direction(50, 7))
    assert float(one_M.norm()) == pytest.approx(1, abs=1e-12)
    assert abs(float(one_M @ random_direction(50, 8))) < 0.5
