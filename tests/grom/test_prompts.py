"""Rewriting changes the prompt alone, keeps the question at its end, and leaves the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from grom.errors import ConfigError
from grom.examples import Example
from grom.prompts import PREFIXES, with_fact_stated, with_prefix, with_prompt
from tests.tiny import CANARY

ASKED = Example("rows.jsonl, line 1", "group", 3, prompt="Who wrote it?", answer=" Ada did. ")
REWRITES: list[Callable[[Example], Example]] = [
    with_fact_stated,
    *(lambda example, prefix=prefix: with_prefix(example, prefix) for prefix in PREFIXES.values()),
]


@pytest.mark.parametrize("rewrite", REWRITES)
def test_the_question_is_still_asked_and_only_the_prompt_differs(
    rewrite: Callable[[Example], Example],
) -> None:
    rewritten = rewrite(ASKED)
    assert rewritten.prompt is not None
    assert rewritten.prompt.endswith("Who wrote it?")
    assert rewritten.prompt != ASKED.prompt
    assert replace(rewritten, prompt=ASKED.prompt) == ASKED


def test_a_paraphrase_takes_the_place_of_the_question() -> None:
    assert with_prompt(ASKED, "Its author?") == replace(ASKED, prompt="Its author?")


def test_the_stated_fact_is_in_the_prompt_and_a_prefix_gives_nothing_away() -> None:
    assert "Ada did." in (with_fact_stated(ASKED).prompt or "")
    for prefix in PREFIXES.values():
        assert "Ada" not in (with_prefix(ASKED, prefix).prompt or "")


def test_prefixes_differ() -> None:
    assert len(set(PREFIXES.values())) == len(PREFIXES) >= 3


@pytest.mark.parametrize("rewrite", REWRITES)
def test_running_text_is_refused_without_quoting_it(rewrite: Callable[[Example], Example]) -> None:
    text = Example("book.jsonl, line 2", "group", 0, text=f"Once there was a {CANARY}.")
    with pytest.raises(ConfigError, match=r"book\.jsonl, line 2") as caught:
        rewrite(text)
    assert CANARY not in str(caught.value)
