"""Multiple choice: every public layout is read, and a model that goes by letters is found out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.benchmarks.choices import asked_as, choice_items, choice_metrics, parsed, worked
from grom.errors import DataError
from grom.items import Item
from tasks.tables import table_rows
from tests.exams import LETTERS, Numbers, answered, lettering
from tests.tiny import CANARY

OPTIONS = ["one", "two", "three", "four"]
ROW = {"question": " What? ", "choices": OPTIONS, "answer": 2}
TEXT = "What?\nA. one\nB. two\nC. three\nD. four\nAnswer:"


@pytest.mark.parametrize(
    ("row", "right"),
    [
        (ROW, 2),
        ({**ROW, "answer": "C"}, 2),
        ({**ROW, "answer": " 3 "}, 3),
        ({**ROW, "answer": 1.0}, 1),
        ({**ROW, "choices": "['one', 'two', 'three', 'four']"}, 2),
        ({**ROW, "choices": "['one' \"two\"\n 'three' 'four']"}, 2),
        ({"question": "What?", "answer": "B", **dict(zip("ABCD", OPTIONS, strict=True))}, 1),
        (
            {"question": "What?", "answer": "0", **{f"choice{at}": OPTIONS[at] for at in range(4)}},
            0,
        ),
    ],
)
def test_answers_are_letters_or_count_from_0(row: dict[str, Any], right: int) -> None:
    question, options, found = parsed(row, "test", 0)
    assert (question.strip(), options, found) == ("What?", OPTIONS, right)


def test_parquet_and_both_kinds_of_csv_give_the_same_question(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text(
        "question,choice0,choice1,choice2,choice3,answer\n What? ,one,two,three,four,2\n"
    )
    (tmp_path / "c.csv").write_text(" What? ,one,two,three,four,C\n")
    items = [
        choice_items("test", 0, row, "Head.\n\n")
        for name in ("a.parquet", "b.csv", "c.csv")
        for row in table_rows(str(tmp_path / name))
    ]
    assert items[0] == items[1] == items[2]


def test_a_question_is_asked_as_lm_eval_does_and_once_more_with_its_options_turned() -> None:
    assert asked_as(" What? ", OPTIONS) == TEXT
    turns = set()
    for number in range(40):
        given, turned = choice_items("test", number, ROW, "Head.\n\n")
        assert (given.prompt, given.answer, given.role) == (f"Head.\n\n{TEXT}", "C", "as given")
        assert given.plain
        assert given.num_options == turned.num_options == 4
        lines = turned.prompt.splitlines()[3:7]
        options = [line.split(". ")[1] for line in lines]
        turn = options.index("one")
        assert [options[(turn + at) % 4] for at in range(4)] == OPTIONS
        assert options[LETTERS.index(turned.answer)] == "three"
        turns.add(turn)
    assert turns == {1, 2, 3}  # never as given


def test_worked_examples_end_in_their_letter() -> None:
    assert worked("dev", [ROW, {**ROW, "answer": 0}]) == f"{TEXT} C\n\n{TEXT} A\n\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": ""}, "test, row 8: `question` is empty"),
        ({"choices": OPTIONS[:3]}, "test, row 8: 3 options"),
        ({"choices": [*OPTIONS, "five"]}, "test, row 8: 5 options"),
        ({"choices": [*OPTIONS[:3], None]}, "test, row 8: 3 options"),
        ({"choices": [*OPTIONS[:3], " "]}, "test, row 8: 3 options"),
        ({"choices": CANARY[:4]}, "test, row 8: 0 options"),
        ({"choices": None}, "test, row 8: 0 options"),
        ({"answer": 4}, "test, row 8: `answer` is neither 0 to 3"),
        ({"answer": -1}, "test, row 8: `answer`"),
        ({"answer": "E"}, "test, row 8: `answer`"),
        ({"answer": "AB"}, "test, row 8: `answer`"),
        ({"answer": "\u00b2"}, "test, row 8: `answer`"),
        ({"answer": None}, "test, row 8: `answer`"),
        ({"answer": CANARY}, "test, row 8: `answer`"),
    ],
)
def test_a_row_in_another_layout_is_refused_by_split_row_and_column(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        choice_items("test", 7, {**ROW, **change, "subject": CANARY}, "")
    assert CANARY not in str(caught.value)


def found(how: Any, count: int = 60) -> Any:
    """Accuracy as given, accuracy turned, same choice, of a model on questions whose right option
    is each letter in turn."""
    items = [
        item
        for number in range(count)
        for item in choice_items("test", number, {**ROW, "answer": number % 4}, "")
    ]
    return choice_metrics(answered(items, how), "test", "accuracy", "higher")


def test_a_model_that_always_says_c_is_at_chance_and_is_said_to() -> None:
    given, turned, same = found(lambda item: lettering(item, [-2.0, -2.0, -1.0, -2.0]))
    assert given.value == 0.25
    assert given.interval[0] < 0.25 < given.interval[1]
    assert given.details == {"answers A": 0, "answers B": 0, "answers C": 60, "answers D": 0}
    assert given.notes == turned.notes == ("says C to 100% of the questions",)
    assert same.value == 0  # the same letter never stands for the same option


def test_a_model_that_goes_by_options_chooses_the_same_one_wherever_it_stands() -> None:
    def likes_three(item: Item) -> Numbers:
        lines = item.prompt.splitlines()[1:5]
        return lettering(item, [0.0 if line.endswith("three") else -1.0 for line in lines])

    given, turned, same = found(likes_three)
    assert given.value == turned.value == 0.25
    assert same.value == 1
    assert same.num == 60


def test_a_model_that_knows_is_right_both_times_and_one_that_is_nan_has_no_accuracy() -> None:
    given, turned, same = found(
        lambda item: lettering(item, [float(letter == item.answer) for letter in LETTERS])
    )
    assert given.value == turned.value == same.value == 1
    for nan in (math.nan, -math.inf):
        for metric in found(lambda item, nan=nan: lettering(item, [nan] * 4)):
            assert math.isnan(metric.value)
            assert metric.missing == "not computed: 60 of 60 questions without a likeliest letter"


def test_equal_letters_are_a_note_not_an_answer() -> None:
    given, _, _ = found(lambda item: lettering(item, [-1.0] * 4))
    assert given.notes[-1] == "60 of 60 questions tied; the first letter was taken"


def test_without_questions_there_is_no_accuracy() -> None:
    assert {metric.missing for metric in found(lambda item: {}, 0)} == {"not computed: no items"}
