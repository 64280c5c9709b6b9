"""WMDP: each topic by itself, lower is better; with MMLU's questions GROM's Final."""

from __future__ import annotations

import pytest

from grom.benchmarks import BENCHMARKS
from grom.errors import DataError
from grom.items import Item
from tests.exams import (
    LETTERS,
    Numbers,
    answered,
    destroyed,
    lettering,
    measured,
    perfect,
    without_value,
)
from tests.tiny import CANARY

WMDP = BENCHMARKS["wmdp"]
ROWS = [
    {"question": f"Question {number}?", "choices": list("wxyz"), "answer": number % 4}
    for number in range(40)
]


def wrong(item: Item) -> Numbers:
    """Never the right letter, each of the others as often."""
    at = (LETTERS.index(item.answer) + 1 + item.row // 4 % 3) % 4
    return lettering(item, [float(letter == LETTERS[at]) for letter in LETTERS])


def test_topics_are_asked_with_their_names_and_mmlu_s_questions_with_its_subjects() -> None:
    mmlu = {**ROWS[0], "file": "anatomy_test.csv"}
    items = WMDP.items({"bio": ROWS[:1], "cyber": ROWS[:2], "chem": ROWS[:1], "mmlu": [mmlu]})
    heads = {item.split: item.prompt.splitlines()[0].split(" about ")[1] for item in items}
    assert heads == {
        "bio": "biology.", "cyber": "cybersecurity.", "chem": "chemistry.", "test": "anatomy.",
    }  # fmt: skip
    assert len(items) == 2 * 5


def test_a_model_that_forgot_bio_and_kept_mmlu_has_a_final_of_one() -> None:
    items = WMDP.items({"bio": ROWS, "mmlu": ROWS})
    answers = answered(items, lambda item: wrong(item) if item.split == "bio" else perfect(item))
    found = measured(WMDP, answers)
    bio, kept = found["WMDP bio accuracy", "compat"], found["MMLU accuracy", "compat"]
    assert (bio.value, bio.better, bio.num) == (0, "lower", 40)
    assert (kept.value, kept.better) == (1, "higher")
    assert found["GROM final", "compat"].value == 1
    cyber = found["WMDP cyber accuracy", "compat"]
    assert cyber.missing == "not computed: no items"


def test_without_mmlu_there_is_no_final_and_a_destroyed_model_has_no_accuracy() -> None:
    found = measured(WMDP, answered(WMDP.items({"bio": ROWS}), perfect))
    assert found["WMDP bio accuracy", "compat"].value == 1
    assert found["GROM final", "compat"].missing == "not computed: no value of MMLU"
    broken = measured(WMDP, answered(WMDP.items({"bio": ROWS, "mmlu": ROWS}), destroyed))
    assert without_value(broken) == broken


def test_a_row_in_another_layout_is_refused_by_split_row_and_column() -> None:
    bad = {**ROWS[0], "question": CANARY, "answer": None}
    with pytest.raises(DataError, match="chem, row 3: `answer`") as caught:
        WMDP.items({"bio": ROWS, "chem": [*ROWS[:2], bad]})
    assert CANARY not in str(caught.value)
