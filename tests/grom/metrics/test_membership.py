"""Membership scores by hand, and the AUC by counting pairs."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.membership import (
    auc,
    loss_score,
    membership_auc,
    min_k,
    min_k_plus_plus,
    reference_score,
    s_mia,
    zlib_score,
)

LOGPROB_T = np.array([-1.0, -4.0, -2.0, -3.0, -0.5])
SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=9)


@pytest.mark.parametrize(("k", "expected"), [(0.4, 3.5), (0.2, 4), (0.1, 4), (1, 2.1)])
def test_min_k_is_the_mean_of_the_least_likely_tokens(k: float, expected: float) -> None:
    assert min_k(LOGPROB_T, k) == pytest.approx(expected)
    assert min_k(LOGPROB_T[::-1], k) == pytest.approx(expected)


def test_short_texts_have_a_token_or_in_muse_nothing() -> None:
    assert min_k([-2.0, -1.0], 0.4) == min_k([-2.0, -1.0], 0.4, "openunlearning") == 2
    assert math.isnan(min_k([-2.0, -1.0], 0.4, "muse"))
    assert min_k(LOGPROB_T, 0.4, "muse") == 3.5


def test_texts_without_tokens() -> None:
    assert min_k([], 0.4, "openunlearning") == 0
    assert math.isnan(min_k([], 0.4))
    assert math.isnan(min_k([], 0.4, "muse"))
    assert math.isnan(loss_score([]))


def test_a_log_probability_that_is_not_a_number_is_not_sorted_away() -> None:
    assert math.isnan(min_k([-1.0, math.nan, -3.0], 0.4))


def test_min_k_plus_plus_standardises_over_the_vocabulary() -> None:
    mean_T, variance_T = np.full(5, -2.0), np.full(5, 4.0)
    expected = min_k((LOGPROB_T + 2) / 2, 0.4)
    assert min_k_plus_plus(LOGPROB_T, mean_T, variance_T, 0.4) == expected
    # A uniform distribution has no variance; 1e-6 stands in for it.
    assert min_k_plus_plus([-2.0], [-1.0], [0.0], 0.4) == pytest.approx(1000)


def test_infinite_log_probabilities_give_infinity_or_nothing_never_a_number() -> None:
    assert min_k_plus_plus([-math.inf, -1.0], [-1.0, -1.0], [1.0, 1.0], 0.4) == math.inf
    assert math.isnan(min_k_plus_plus([-math.inf, -1.0], [-math.inf, -1.0], [1.0, 1.0], 0.4))


def test_loss_zlib_and_reference_scores() -> None:
    assert loss_score(LOGPROB_T) == pytest.approx(2.1)
    assert len(zlib.compress(b"")) == 8
    assert zlib_score(2.0, len(zlib.compress(b""))) == 0.25
    assert reference_score(2.0, 3.0) == -1


def pairs(forget: list[float], holdout: list[float]) -> float:
    """The definition: the share of pairs in the right order, ties counting one half."""
    won = [(held > known) + (held == known) / 2 for known in forget for held in holdout]
    return sum(won) / len(won)


@given(forget=SCORES, holdout=SCORES)
def test_the_auc_counts_pairs(forget: list[float], holdout: list[float]) -> None:
    assert auc(forget, holdout) == pytest.approx(pairs(forget, holdout))


@given(forget=SCORES, holdout=SCORES)
def test_the_auc_turns_round_and_knows_only_the_order(
    forget: list[float], holdout: list[float]
) -> None:
    assert auc(forget, holdout) + auc(holdout, forget) == pytest.approx(1)
    raised = [[math.exp(score) for score in scores] for scores in (forget, holdout)]
    assert auc(*raised) == pytest.approx(auc(forget, holdout))
    assert auc(sorted(forget), holdout) == auc(forget, holdout)


@pytest.mark.parametrize(
    ("forget", "holdout", "expected"),
    [([1, 2], [3, 4], 1), ([3, 4], [1, 2], 0), ([1, 1], [1, 1], 0.5)],
)
def test_the_auc_is_one_when_forget_texts_look_familiar(
    forget: list[float], holdout: list[float], expected: float
) -> None:
    assert auc(forget, holdout) == expected
    assert membership_auc("min-k", forget, holdout).value == expected


def test_the_auc_of_nothing_says_why() -> None:
    assert membership_auc("loss", [], [1.0]).missing == (
        "not computed: no forget or no holdout texts"
    )
    assert membership_auc("loss", [math.nan], [1.0]).missing == (
        "not computed: a score is not a number"
    )
    assert math.isnan(auc([math.nan], [1.0]))


def test_the_interval_of_the_auc_is_hanleys() -> None:
    """Hanley and McNeil 1982: n = m = 10, AUC .5 has the standard error .1354."""
    scores = [float(score) for score in range(10)]
    interval = membership_auc("loss", scores, scores).interval
    error = math.sqrt((0.25 + 9 * (1 / 3 - 0.25) * 2) / 100)
    assert interval == pytest.approx((0.5 - 1.959964 * error, 0.5 + 1.959964 * error), rel=1e-6)
    assert membership_auc("loss", [1, 2], [3, 4]).interval is None


@given(value=st.floats(0, 1), reference=st.floats(0.01, 1))
def test_the_normalised_signal_is_one_at_the_reference_only(value: float, reference: float) -> None:
    found = s_mia(value, reference).value
    assert 0 <= found <= 1
    assert s_mia(reference, reference).value == 1
    assert found == pytest.approx(max(0, 1 - abs(value - reference) / reference))


def test_the_normalised_signal_needs_a_reference() -> None:
    for reference in (None, math.nan):
        assert s_mia(0.7, reference, "loss").missing == "not computed: no retrained reference"
    assert s_mia(math.nan, 0.5, "loss").missing == "not computed: no AUC of loss"
    assert "is 0" in s_mia(0.5, 0.0).missing
