"""MMLU: the subject is said, five examples of it are shown, and the shared questions are read."""

from __future__ import annotations

from collections import Counter

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.mmlu import SHOTS, items, items_after_examples, subject_of
from grom.errors import DataError
from tests.exams import answered, lettering, measured, needs_data, perfect, shared_rows
from tests.tiny import CANARY

ROW = {"question": "What?", "choices": list("wxyz"), "answer": 1}
DEV = [{**ROW, "question": f"Dev {number}?", "subject": "us_foreign_policy"} for number in range(7)]
ABOUT = "The following are multiple choice questions (with answers) about us foreign policy.\n\n"


@pytest.mark.parametrize(
    ("row", "subject"),
    [
        ({"subject": "us_foreign_policy"}, "us foreign policy"),
        ({"file": "us_foreign_policy_test.csv"}, "us foreign policy"),
        ({"file": "us_foreign_policy_dev.csv"}, "us foreign policy"),
        ({"subject": "anatomy", "file": "all.csv"}, "anatomy"),
        ({}, ""),
    ],
)
def test_the_subject_is_a_column_or_the_file_s_name(row: dict[str, str], subject: str) -> None:
    assert subject_of(row) == subject


def test_the_prompt_says_the_subject_if_there_is_one() -> None:
    (given, _) = items({"test": [{**ROW, "file": "us_foreign_policy_test.csv"}]})
    assert given.prompt == f"{ABOUT}What?\nA. w\nB. x\nC. y\nD. z\nAnswer:"
    (given, _) = items({"test": [ROW]})
    assert given.prompt.startswith("The following are multiple choice questions (with answers).\n")


def test_the_first_five_examples_of_the_subject_come_first() -> None:
    test = {**ROW, "file": "us_foreign_policy_test.csv"}
    other = [{**row, "subject": "anatomy", "question": CANARY} for row in DEV]
    given, turned = items_after_examples({"test": [test], "dev": [*other, *DEV]})
    parts = given.prompt.removeprefix(ABOUT).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == [*(f"Dev {at}?" for at in range(5)), "What?"]
    assert all(part.endswith("Answer: B") for part in parts[:SHOTS])
    assert given.prompt.endswith("Answer:")
    assert turned.prompt.split("What?")[0] == given.prompt.split("What?")[0]
    assert CANARY not in given.prompt


def test_a_subject_without_five_examples_is_not_asked_without_them() -> None:
    test = {**ROW, "subject": "us_foreign_policy", "question": CANARY}
    with pytest.raises(DataError, match="test, row 2: fewer than 5 `dev` rows") as caught:
        items_after_examples({"test": [{**ROW, "subject": "a"}, test],
                              "dev": [*DEV[:4], *[{**ROW, "subject": "a"}] * 5]})  # fmt: skip
    assert CANARY not in str(caught.value)


@needs_data
def test_the_shared_questions_are_read_with_their_one_repeated_row() -> None:
    rows = shared_rows("mmlu_5shot")
    assert (len(rows["test"]), len(rows["dev"])) == (1473, 60)
    counts = Counter(subject_of(row) for row in rows["test"])
    assert len(counts) == 12
    assert counts["us foreign policy"] == 100
    asked = Counter(item.prompt for item in items(rows) if item.role == "as given")
    (repeated,) = [prompt for prompt, count in asked.items() if count > 1]
    assert "about us foreign policy" in repeated
    assert asked[repeated] == 2


@needs_data
@pytest.mark.parametrize("name", ["mmlu", "mmlu_5shot"])
def test_accuracy_is_the_share_of_right_letters(name: str) -> None:
    benchmark = BENCHMARKS[name]
    asked = benchmark.items(shared_rows(name))
    found = measured(benchmark, answered(asked, perfect))
    accuracy = found["MMLU accuracy", "compat"]
    assert (accuracy.value, accuracy.num, accuracy.better) == (1, 1473, "higher")
    always_a = measured(benchmark, answered(asked, lambda item: lettering(item, [-1, -2, -2, -2])))
    share = sum(item.answer == "A" for item in asked if item.role == "as given") / 1473
    assert always_a["MMLU accuracy", "compat"].value == pytest.approx(share)
