"""Facts: what counts as known, in both readings, and that BOS is never asked for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.facts import Losses, Reading, counterfact, share_preferred, token_accuracy, zsre

BOS = 1
PAIRS = st.lists(
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)
KNOWN: Losses = [(1.0, 3.0), (2.0, 5.0)]
REWRITTEN: Losses = [(3.0, 1.0), (5.0, 2.0)]
MIXED: Losses = [(1.0, 3.0), (5.0, 2.0)]


def test_a_perfect_model_scores_one_with_and_without_bos() -> None:
    """Teacher forcing never predicts the first token, so BOS among the targets is always wrong."""
    assert token_accuracy([False, True, True, True], [BOS, 7, 8, 9], {BOS}) == 1
    assert token_accuracy([True, True, True], [7, 8, 9], {BOS}) == 1
    assert token_accuracy([False, True, True, True], [BOS, 7, 8, 9], ()) == 0.75


def test_an_answer_of_special_tokens_only_has_no_accuracy() -> None:
    assert math.isnan(token_accuracy([True], [BOS], {BOS}))
    assert math.isnan(token_accuracy([], [], {BOS}))


@given(flags=st.lists(st.booleans(), min_size=1, max_size=9))
def test_special_tokens_never_count(flags: list[bool]) -> None:
    ids = list(range(2, 2 + len(flags)))
    expected = sum(flags) / len(flags)
    for bos in (True, False):
        assert token_accuracy([bos, *flags], [BOS, *ids], {BOS}) == pytest.approx(expected)


def test_preference_by_hand() -> None:
    assert share_preferred(MIXED, "true") == share_preferred(MIXED, "new") == 0.5
    assert (share_preferred(KNOWN, "true"), share_preferred(KNOWN, "new")) == (1, 0)
    assert math.isnan(share_preferred([], "true"))
    assert math.isnan(share_preferred([(math.nan, 1.0)], "new"))


def test_equal_probabilities_prefer_neither() -> None:
    level: Losses = [(20.0, 20.0)]
    assert share_preferred(level, "true") == share_preferred(level, "new") == 0


@pytest.mark.parametrize(
    ("reading", "values", "directions"),
    [("editing", [1, 0.5, 1, 0.75], "higher"), ("unlearning", [0, 0.5, 1, 0.75], "lower")],
)
def test_counterfact_by_hand(reading: Reading, values: list[float], directions: str) -> None:
    """One fact is rewritten; of its two paraphrases one follows; the neighbours stay."""
    found = counterfact([REWRITTEN], [MIXED], [KNOWN], reading)
    assert [metric.value for metric in found] == pytest.approx(values)
    assert [metric.better for metric in found] == [directions, directions, "higher", "higher"]
    assert found[-1].value == pytest.approx(3 / (1 / 1 + 1 / 0.5 + 1 / 1))


@given(facts=PAIRS)
def test_the_two_readings_are_complements_without_ties(
    facts: list[list[tuple[float, float]]],
) -> None:
    untied: list[Losses] = [[(true, new + 10) for true, new in pairs] for pairs in facts]
    editing = counterfact(untied, untied, untied, "editing")
    unlearning = counterfact(untied, untied, untied, "unlearning")
    assert editing[0].value == pytest.approx(1 - unlearning[0].value)
    assert editing[2].value == unlearning[2].value


def test_prompts_are_averaged_within_facts_first() -> None:
    """One fact with one prompt weighs as much as one with two."""
    found = counterfact([REWRITTEN, [(1.0, 2.0)]], [KNOWN], [KNOWN], "editing")
    assert (found[0].value, found[0].num) == (0.5, 2)


def test_a_failed_edit_is_a_zero_with_its_name() -> None:
    score = counterfact([KNOWN], [REWRITTEN], [KNOWN], "editing")[-1]
    assert score.value == 0
    assert score.notes == ("0 (component efficacy = 0)",)


def test_an_unknown_loss_is_named_in_the_score() -> None:
    found = counterfact([[(math.nan, 1.0)]], [KNOWN], [KNOWN], "unlearning")
    assert found[0].missing == "not computed: 1 of 1 values are not numbers"
    assert found[-1].missing == "not computed: no value of 1 - efficacy"


@pytest.mark.parametrize(("reading", "better"), [("unlearning", "lower"), ("editing", "higher")])
def test_zsre_is_the_mean_accuracy_over_facts(reading: Reading, better: str) -> None:
    found = zsre([0.5, 1.0], [0.5, 0.0], [1.0], reading)
    assert [metric.value for metric in found] == [0.75, 0.25, 1]
    assert [metric.better for metric in found] == [better, better, "higher"]
    assert [metric.num for metric in found] == [2, 2, 1]
    assert zsre([], [], [], reading)[0].missing == "not computed: no items"
