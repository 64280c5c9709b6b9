"""A broken model shows, whatever else its numbers say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.health import generation_health, is_degenerate, rep_4
from grom.metrics.metric import Metric


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    text: str
    ended: bool


SPOKEN = Answer((5, 6, 7, 8, 9), "She was born in Paris.", ended=True)
NEWLINES = Answer((13,) * 64, "\n" * 64, ended=False)


def health(*answers: Answer, expected: int = 5) -> dict[str, Metric]:
    return {metric.name: metric for metric in generation_health(answers, [expected] * len(answers))}


def test_a_model_that_only_says_newlines_is_empty_and_degenerate_throughout() -> None:
    found = health(NEWLINES, NEWLINES)
    assert found["empty rate"].value == found["degenerate rate"].value == 1
    assert found["EOS rate"].value == 0
    assert found["repetition"].value == pytest.approx(60 / 61)
    assert found["length ratio"].value == pytest.approx(64 / 5)


def test_a_model_that_speaks_is_healthy() -> None:
    found = health(SPOKEN)
    assert [found[name].value for name in ("repetition", "empty rate", "degenerate rate")] == [
        0
    ] * 3
    assert found["EOS rate"].value == found["length ratio"].value == 1


def test_rates_are_means_over_answers_with_their_count() -> None:
    found = health(SPOKEN, NEWLINES, SPOKEN, SPOKEN)
    assert found["empty rate"].value == 0.25
    assert {metric.num for metric in found.values()} == {4}
    assert found["EOS rate"].better == "higher"
    assert found["empty rate"].better == "lower"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (SPOKEN, False),
        (Answer((1, 2), "...", ended=True), True),
        (Answer((1, 2) * 20, "no no no", ended=False), True),
        (Answer((1, 2, 3), "北京", ended=True), False),
    ],
)
def test_what_is_degenerate(answer: Answer, expected: bool) -> None:
    assert is_degenerate(answer) is expected


def test_no_answers_are_not_computed() -> None:
    assert all(metric.missing == "not computed: no items" for metric in generation_health([], []))


def test_a_reference_without_tokens_has_no_length_ratio() -> None:
    ratio = health(SPOKEN, expected=0)["length ratio"]
    assert math.isnan(ratio.value)
    assert ratio.missing == "not computed: 1 of 1 values are not numbers"


@given(tokens=st.lists(st.integers(0, 3), max_size=30))
def test_repetition_is_a_share_and_grows_when_a_text_is_said_again(tokens: list[int]) -> None:
    assert 0 <= rep_4(tokens) < 1
    if len(tokens) >= 4:
        assert rep_4(tokens * 3) > 0
        assert rep_4(tokens * 3) >= rep_4(tokens)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [("", 0), ("abc", 0), ("abcd", 0), ("aaaaa", 1 / 2), ("abcdabcd", 1 / 5), ("aaaaaaaa", 4 / 5)],
)
def test_repetition_by_hand(tokens: str, expected: float) -> None:
    assert rep_4(list(tokens)) == pytest.approx(expected)
