"""Extraction strength and exact memorisation: the fixtures by hand, and the floor of compat."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.memorisation import exact_memorisation, extraction_strength

LABELS = (7, 8, 9, 10)
FLAGS = st.lists(st.booleans(), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("said", "compat", "correct", "exact"),
    [
        ((1, 1, 9, 10), 0.5, 0.5, 0.5),
        ((1, 1, 1, 1), 0.25, 0, 0),
        ((7, 8, 9, 1), 0.25, 0, 0.75),
        (LABELS, 1, 1, 1),
        ((7, 8, 1, 10), 0.25, 0.25, 0.75),
    ],
)
def test_hand_made_answers(
    said: tuple[int, ...], compat: float, correct: float, exact: float
) -> None:
    first = [one == label for one, label in zip(said, LABELS, strict=True)]
    assert extraction_strength(first, "compat") == compat
    assert extraction_strength(first, "correct") == correct
    assert exact_memorisation(first) == exact


def test_no_tokens_are_nothing_and_in_compat_zero() -> None:
    assert extraction_strength([], "compat") == 0
    assert math.isnan(extraction_strength([], "correct"))
    assert math.isnan(exact_memorisation([]))


@given(first=FLAGS)
def test_variants_differ_only_at_the_floor(first: list[bool]) -> None:
    compat, correct = (extraction_strength(first, name) for name in ("compat", "correct"))
    assert compat == max(correct, 1 / len(first))


@given(first=FLAGS)
def test_the_suffix_is_a_part_of_all_that_is_right(first: list[bool]) -> None:
    assert 0 <= extraction_strength(first, "correct") <= exact_memorisation(first) <= 1


@given(first=FLAGS)
def test_one_more_right_token_at_the_end_never_extracts_less(first: list[bool]) -> None:
    longer = extraction_strength([*first, True], "correct")
    assert longer >= extraction_strength(first, "correct")
    assert extraction_strength([*first, False], "correct") == 0
