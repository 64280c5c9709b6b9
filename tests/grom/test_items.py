"""An item's digest is all that is asked; its example names its place and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from grom.items import LETTER_COLUMNS, Item, ItemResult, example_of
from tests.tiny import CANARY

ITEM = Item("forget", 2, "answer", "generation", "prompt", CANARY)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("split", "retain"),
        ("row", 3),
        ("role", "paraphrase"),
        ("ask", "likelihood"),
        ("prompt", "prompt "),
        ("answer", "other"),
        ("plain", True),
        ("text", True),
        ("max_new_tokens", 5),
        ("stops", ("\n",)),
        ("num_options", 4),
        ("cut_reference", True),
    ],
)
def test_the_digest_changes_with_everything_that_is_asked(field: str, value: Any) -> None:
    assert replace(ITEM).digest == ITEM.digest
    assert replace(ITEM, **{field: value}).digest != ITEM.digest
    assert len(ITEM.digest) == 16


def test_an_example_of_an_item_has_its_text_and_a_place_without_it() -> None:
    example = example_of(ITEM)
    assert (example.prompt, example.answer, example.text) == ("prompt", CANARY, None)
    assert example.place == "forget, row 3 (answer)"
    whole = example_of(replace(ITEM, text=True))
    assert (whole.prompt, whole.answer, whole.text) == (None, None, CANARY)


def test_a_result_is_a_flat_row_that_survives_json_with_nan() -> None:
    result = ItemResult("s", 1, "r", "letters", "d", 1, right=2, logprob_c=-0.5)
    again = ItemResult(**json.loads(json.dumps(asdict(result))))
    assert (again.split, again.row, again.right, again.logprob_c) == ("s", 1, 2, -0.5)
    assert math.isnan(again.probability)
    assert [name for name in asdict(result) if name in LETTER_COLUMNS] == list(LETTER_COLUMNS)
    assert again.letter_logprobs[2] == -0.5
    assert sum(map(math.isnan, again.letter_logprobs)) == 3
