"""Multiple choice: what is chosen, how sure the share is, and when nothing is chosen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.errors import DataError
from grom.metrics.choice import (
    always_one_letter,
    choice_accuracy,
    choices_Q,
    letter_counts,
    shuffled_agreement,
)

NAN, INF = math.nan, math.inf
A, B, C, D = np.log([[0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1],
                     [0.1, 0.1, 0.1, 0.7]]).tolist()  # fmt: skip
ROWS = {"A": A, "B": B, "C": C, "D": D}
LETTERS = st.text("ABCD", min_size=1, max_size=30)


def saying(letters: str) -> list[list[float]]:
    return [ROWS[letter] for letter in letters]


def indices(letters: str) -> list[int]:
    return ["ABCD".index(letter) for letter in letters]


@given(said=LETTERS)
def test_accuracy_is_the_share_of_right_letters(said: str) -> None:
    right = "ABCD" * len(said)
    found = choice_accuracy(saying(said), indices(right[: len(said)]))
    hits = sum(one == other for one, other in zip(said, right, strict=False))
    assert found.value == pytest.approx(hits / len(said))
    assert found.num == len(said)
    assert found.interval is not None
    assert 0 <= found.interval[0] <= found.value <= found.interval[1] <= 1
    assert letter_counts(saying(said)) == {letter: said.count(letter) for letter in "ABCD"}
    assert found.details == {f"answers {letter}": said.count(letter) for letter in "ABCD"}


def test_the_interval_is_wilsons() -> None:
    """Textbook form: (p + z2/2n -+ z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n)."""
    found = choice_accuracy(saying("A" * 29 + "B" * 71), [0] * 100)
    z, n, p = 1.959964, 100, 0.29
    center, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    scale = 1 + z * z / n
    assert found.interval == pytest.approx(
        ((center - half) / scale, (center + half) / scale), rel=1e-6
    )


def test_always_the_same_letter_is_at_chance_and_said() -> None:
    found = choice_accuracy(saying("C" * 20), indices("ABCD" * 5), better="lower")
    assert found.value == 0.25
    assert found.notes == ("says C to 100% of the questions",)
    assert found.better == "lower"


@pytest.mark.parametrize(
    ("counts", "note"),
    [
        ({"A": 9, "B": 1}, ""),
        ({"A": 91, "B": 9}, "says A to 91% of the questions"),
        ({"A": 0, "B": 0}, ""),
        ({}, ""),
    ],
)
def test_one_letter_counts_above_nine_tenths(counts: dict[str, int], note: str) -> None:
    assert always_one_letter(counts) == note


@pytest.mark.parametrize("row", [[NAN] * 4, [NAN, -1, -2, -3], [-INF] * 4, [INF, -1, -2, -3]])
def test_broken_log_probabilities_never_become_a_choice(row: list[float]) -> None:
    assert choices_Q([row, B]).tolist() == [-1, 1]
    found = choice_accuracy([row, B], [0, 1])
    assert math.isnan(found.value)
    assert found.missing == "not computed: 1 of 2 questions without a likeliest letter"


def test_an_impossible_letter_leaves_the_others_to_choose_from() -> None:
    assert choices_Q([[-INF, -3, -2, -INF]]).tolist() == [2]


def test_ties_are_counted() -> None:
    found = choice_accuracy([[-1, -1, -2, -2], B], [0, 1])
    assert found.value == 1
    assert found.notes == ("1 of 2 questions tied; the first letter was taken",)


def test_no_questions_are_not_computed() -> None:
    assert choice_accuracy([], []).missing == "not computed: no items"
    assert shuffled_agreement([], [], []).missing == "not computed: no items"
    assert letter_counts([]) == {}


@pytest.mark.parametrize(
    ("answers", "match"),
    [([0], "2 questions and 1 answers"), ([0, 4], "question 2"), ([-1, 0], "1")],
)
def test_answers_that_do_not_fit_are_refused(answers: list[int], match: str) -> None:
    with pytest.raises(DataError, match=match):
        choice_accuracy(saying("AB"), answers)


ORDERS = st.permutations(range(4))


@given(said=LETTERS, order=ORDERS)
def test_a_model_that_goes_by_content_agrees_with_itself(said: str, order: list[int]) -> None:
    given_QC = np.array(saying(said))
    found = shuffled_agreement(given_QC, given_QC[:, order], [order] * len(said))
    assert found.value == 1


@given(said=LETTERS)
def test_a_model_that_goes_by_letters_disagrees_when_all_options_move(said: str) -> None:
    moved = [[1, 2, 3, 0]] * len(said)
    assert shuffled_agreement(saying(said), saying(said), moved).value == 0


def test_agreement_needs_choices_and_whole_orders() -> None:
    found = shuffled_agreement([A], [[NAN] * 4], [[0, 1, 2, 3]])
    assert found.missing == "not computed: 1 of 1 questions without a likeliest letter"
    with pytest.raises(DataError, match="no permutation"):
        shuffled_agreement([A], [A], [[0, 0, 2, 3]])
    with pytest.raises(DataError, match="differ in number"):
        shuffled_agreement([A, B], [A], [[0, 1, 2, 3]])
