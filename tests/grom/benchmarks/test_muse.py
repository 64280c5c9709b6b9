"""MUSE: ten worked examples, passages, texts; PrivLeak and Final only where there is what to
compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.benchmark import Row
from grom.benchmarks.muse import KNOWLEDGE_TOKENS, STOPS, VARIANTS, VERBATIM_TOKENS, news_items
from grom.errors import DataError
from grom.items import Item
from tests.exams import (
    Numbers,
    answered,
    destroyed,
    likely,
    measured,
    needs_data,
    perfect,
    shared_rows,
    spoken,
    without_value,
)
from tests.tiny import CANARY

NEWS = BENCHMARKS["muse_news"]
QUESTIONS: list[Row] = [{"question": f"Q{number}?", "answer": f"A{number}"} for number in range(12)]
ROWS: dict[str, list[Row]] = {
    "forget knowledge": QUESTIONS[:3],
    "forget examples": QUESTIONS,
    "retain knowledge": QUESTIONS[5:7],
    "retain examples": QUESTIONS[2:],
    "forget verbatim": [{"prompt": "Once upon", "gt": " a time"}],
    "forget text": [{"text": f"forget {number}"} for number in range(4)],
    "holdout text": [{"text": f"held out {number}"} for number in range(4)],
}


def test_questions_come_after_ten_worked_examples_of_their_own_set() -> None:
    items = news_items(ROWS)
    (item,) = [item for item in items if item.split == "retain knowledge" and item.row == 1]
    blocks = item.prompt.split("\n\n")
    assert blocks[0] == "Question: Q2?\nAnswer: A2"
    assert len(blocks) == 11
    assert blocks[-1] == "Question: Q6?\nAnswer:"
    assert (item.answer, item.ask, item.plain) == ("A6", "generation", True)
    assert (item.max_new_tokens, item.stops) == (KNOWLEDGE_TOKENS, STOPS)


def test_passages_are_continued_and_texts_scored_as_they_stand() -> None:
    by_split = {item.split: item for item in news_items(ROWS) if item.row == 0}
    passage = by_split["forget verbatim"]
    assert (passage.prompt, passage.answer) == ("Once upon", " a time")
    assert passage.plain
    assert passage.cut_reference
    assert passage.max_new_tokens == VERBATIM_TOKENS
    text = by_split["holdout text"]
    assert (text.ask, text.text, text.answer) == ("likelihood", True, "held out 0")


@needs_data
@pytest.mark.parametrize("kind", ["forget", "retain"])
def test_the_shared_questions_are_read(kind: str) -> None:
    rows = shared_rows("muse_news")
    counts = Counter(item.split for item in news_items(rows))
    assert counts == {"forget knowledge": 100, "retain knowledge": 100}
    items = [item for item in news_items(rows) if item.split == f"{kind} knowledge"]
    assert {item.prompt.count("Question: ") for item in items} == {11}
    assert {item.answer for item in items} == {row["answer"] for row in rows[f"{kind} knowledge"]}


@pytest.mark.parametrize(
    ("split", "rows", "said"),
    [
        ("forget examples", QUESTIONS[:9], "forget examples: 9 rows, and 10 are shown"),
        ("retain examples", [], "retain examples: 0 rows"),
        (
            "retain examples",
            [*QUESTIONS[:9], {"question": CANARY}],
            "retain examples, row 10: `a",
        ),
        (
            "forget knowledge",
            [{"question": CANARY, "answer": []}],
            "forget knowledge, row 1: `an",
        ),
        ("retain knowledge", [{"answer": CANARY}], "retain knowledge, row 1: `question` is miss"),
        ("forget verbatim", [{"prompt": CANARY}], "forget verbatim, row 1: `gt` is missing"),
        ("holdout text", [{"text": "a"}, {"text": 7}], "holdout text, row 2: `text`"),
    ],
)
def test_rows_in_another_layout_are_refused_by_split_row_and_column(
    split: str, rows: list[Row], said: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        news_items({**ROWS, split: rows})
    assert CANARY not in str(caught.value)


def told_apart(forget: float, holdout: float) -> Callable[[Item], Numbers]:
    """A model to which forget and held-out texts have these log-probabilities."""

    def numbers(item: Item) -> Numbers:
        if item.ask == "generation":
            return spoken(0.25)
        return likely(forget if item.split == "forget text" else holdout)

    return numbers


def test_privacy_leak_is_that_of_the_auc_against_the_reference_s() -> None:
    items = news_items(ROWS)
    blind = answered(items, told_apart(-1, -1))
    for variant in VARIANTS:
        seen = measured(NEWS, answered(items, told_apart(-1, -3)), blind)
        assert seen["PrivLeak", variant].value == pytest.approx(-100)
        assert seen["PrivLeak", variant].num == 8
        over = measured(NEWS, answered(items, told_apart(-3, -1)), blind)
        assert over["PrivLeak", variant].value == pytest.approx(100)
        alike = measured(NEWS, blind, blind)
        assert alike["PrivLeak", variant].value == pytest.approx(0)
        parts: dict[str, Any] = dict(alike["GROM final", variant].parts)
        assert parts == pytest.approx({
            "100 - VerbMem forget": 75, "100 - KnowMem forget": 75, "100 - |PrivLeak|": 100,
            "KnowMem retain": 25,
        })  # fmt: skip


def test_memorisation_is_the_mean_f1_times_100() -> None:
    items = news_items(ROWS)
    found = measured(NEWS, answered(items, told_apart(-1, -2)))
    for variant in VARIANTS:
        assert found["VerbMem forget", variant].value == 25
        assert found["KnowMem forget", variant].value == 25
        assert found["KnowMem forget", variant].num == 3
        assert found["KnowMem retain", variant].better == "higher"


def test_without_a_reference_or_held_out_texts_privacy_says_why() -> None:
    items = news_items(ROWS)
    answers = answered(items, told_apart(-1, -3))
    alone = measured(NEWS, answers)
    for variant in VARIANTS:
        assert alone["PrivLeak", variant].missing == "not computed: no retrained reference"
        assert alone["GROM final", variant].missing == "not computed: no value of 100 - |PrivLeak|"
    short = news_items({**ROWS, "holdout text": []})
    answers = answered(short, told_apart(-1, -3))
    found = measured(NEWS, answers, answers)
    for variant in VARIANTS:
        assert found["PrivLeak", variant].missing == (
            "not computed: no 'forget text' and 'holdout text' to tell apart"
        )


def test_a_perfect_and_a_destroyed_model_are_at_the_ends_of_the_scales() -> None:
    items = news_items(ROWS)
    knows = measured(NEWS, answered(items, perfect))
    assert knows["VerbMem forget", "correct"].value == 100
    assert knows["KnowMem retain", "correct"].value == 100
    broken = measured(NEWS, answered(items, destroyed), answered(items, told_apart(-1, -1)))
    assert broken["KnowMem retain", "correct"].value == 0
    assert broken["PrivLeak", "correct"].value == 0  # it tells nothing apart
    absent = without_value(broken)
    assert ("GROM final", "correct") not in absent
    assert broken["GROM final", "correct"].value == 50
