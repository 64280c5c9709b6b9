"""Any text of one's own: passages of one length in any script, cut in two, compared."""

from __future__ import annotations

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.verbatim import MAX_PASSAGES, PASSAGE_CHARACTERS, own_items, passages
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

VERBATIM = BENCHMARKS["verbatim"]
ENGLISH = " ".join(f"word{number}" for number in range(1000))
CHINESE = "".join(chr(0x4E00 + number) for number in range(5000))


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_passages_are_consecutive_and_as_long_as_they_should_be(text: str) -> None:
    found = list(passages([text]))
    assert len(found) == len(text) // PASSAGE_CHARACTERS
    for passage in found:
        assert PASSAGE_CHARACTERS - 20 < len(passage) <= PASSAGE_CHARACTERS
    kept = text[: sum(map(len, found)) + len(found)]
    assert "".join(found).replace(" ", "") in kept.replace(" ", "")
    assert found[0][:20] == text[:20]


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, f"a {CHINESE}"])
def test_each_passage_is_cut_in_two_halves(text: str) -> None:
    items = own_items({"forget": [{"text": text}]})
    for said, whole in zip(items[::2], items[1::2], strict=True):
        assert (said.split, said.ask, said.row) == ("forget verbatim", "generation", whole.row)
        assert (whole.split, whole.ask, whole.text) == ("forget text", "likelihood", True)
        assert (said.prompt + said.answer).replace(" ", "") == whole.answer.replace(" ", "")
        assert 0.4 < len(said.prompt) / len(whole.answer) <= 0.5
        assert said.cut_reference


def test_no_more_than_the_first_hundred_passages_of_a_split_are_taken() -> None:
    items = own_items({"forget": [{"text": ENGLISH * 20}] * 3})
    assert len(items) == 2 * MAX_PASSAGES


def test_texts_too_short_for_a_passage_are_refused() -> None:
    with pytest.raises(DataError, match="retain: none of 2 texts has 2000 characters") as caught:
        own_items({"forget": [{"text": ENGLISH}], "retain": [{"text": CANARY}] * 2})
    assert CANARY not in str(caught.value)
    with pytest.raises(DataError, match="forget, row 1: `text` is missing"):
        own_items({"forget": [{"prompt": CANARY}]})


@needs_data
def test_the_three_books_are_forgotten_kept_and_held_out() -> None:
    items = own_items(shared_rows("verbatim"))
    first = {item.split: item.prompt for item in items if item.row == 0 if item.prompt}
    assert first["forget verbatim"].startswith("Alice")
    assert first["retain verbatim"].startswith("Chapter 1")
    assert "Sherlock Holmes" in first["holdout verbatim"]
    assert all(item.prompt.strip() and item.answer.strip() for item in items if item.role != "text")


def knows_alice(item: Item) -> Numbers:
    forget = item.split.startswith("forget")
    return likely(-0.1 if forget else -2) if item.ask == "likelihood" else spoken(float(forget))


def test_forgetting_is_lower_on_the_forget_text_and_keeping_higher_on_the_others() -> None:
    rows = [{"text": ENGLISH}]
    items = own_items({"forget": rows, "retain": rows, "holdout": rows})
    found = measured(VERBATIM, answered(items, knows_alice), answered(items, perfect))
    for measure in ("probability", "extraction strength", "exact memorisation"):
        assert found[f"forget text {measure}", "correct"].better == "lower"
        assert found[f"retain text {measure}", "correct"].better == "higher"
    assert found["VerbMem forget", "correct"].value == 100
    assert found["VerbMem forget", "correct"].better == "lower"
    assert found["VerbMem retain", "correct"].better == "higher"
    assert found["VerbMem retain", "correct"].value == 0
    assert found["PrivLeak", "correct"].value == pytest.approx(-100)
    assert found["AUC of loss", "correct"].value == 1
    assert without_value(found) == {}


def test_with_the_forget_text_alone_the_rest_says_why() -> None:
    items = own_items({"forget": [{"text": ENGLISH}]})
    found = measured(VERBATIM, answered(items, destroyed), answered(items, perfect))
    assert found["VerbMem forget", "correct"].value == 0
    assert found["forget text probability", "correct"].value == 0
    absent = without_value(found)
    assert found["VerbMem retain", "correct"].missing == "not computed: no items"
    assert ("PrivLeak", "correct") in absent
    assert found["AUC of loss", "correct"].missing == (
        "not computed: no 'holdout text' split to tell 'forget text' from"
    )
