"""MUSE's measures on any text of one's own: one to forget, one to retain, one held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from grom.benchmarks.benchmark import Answers, Benchmark, Rows, Split, text_of
from grom.benchmarks.muse import (
    VARIANTS,
    continuation_item,
    f1_values,
    privacy_leak,
    text_item,
)
from grom.benchmarks.scoring import Mean, health, means, membership
from grom.errors import DataError
from grom.items import Item
from grom.metrics import muse
from grom.metrics.metric import Better, Metric

PASSAGE_CHARACTERS = 2_000
"""Cut in two halves, prompt and continuation."""
MAX_PASSAGES = 100
"""Of each text or list of texts, the first ones."""


def own_items(rows: Rows) -> list[Item]:
    """Passages of one's own texts: to continue, and to score.

    Raises:
        DataError: the texts of a split are too short for a passage.
    """
    found: list[Item] = []
    for split in ("forget", "retain", "holdout"):
        texts = [text_of(row, "text", split, at) for at, row in enumerate(rows.get(split, ()))]
        cut = list(islice(passages(texts), MAX_PASSAGES))
        if texts and not cut:
            raise DataError(
                f"{split}: none of {len(texts)} texts has {PASSAGE_CHARACTERS} characters, the "
                "length of one passage. Join short texts."
            )
        for number, passage in enumerate(cut):
            found.append(continuation_item(f"{split} verbatim", number, *_halves(passage)))
            found.append(text_item(f"{split} text", number, passage))
    return found


def _halves(passage: str) -> tuple[str, str]:
    """Cut at the last blank before the middle; in the middle where a script has no blanks."""
    middle = len(passage) // 2
    blank = passage.rfind(" ", middle // 2, middle)
    half = middle if blank < 0 else blank + 1
    return passage[:half], passage[half:]


def passages(texts: Iterable[str]) -> Iterator[str]:
    """Passages of about `PASSAGE_CHARACTERS`, cut at blanks; the last, shorter one is left out."""
    for text in texts:
        start = 0
        while start + PASSAGE_CHARACTERS <= len(text):
            end = text.rfind(" ", start, start + PASSAGE_CHARACTERS)
            end = end if end > start + PASSAGE_CHARACTERS // 2 else start + PASSAGE_CHARACTERS
            yield text[start:end].strip()
            start = end


def measure_own(answers: Answers, reference: Answers | None) -> list[Metric]:
    """VerbMem, extraction strength and probability of each text; PrivLeak and membership."""
    found = []
    for split in ("forget", "retain", "holdout"):
        better: Better = "lower" if split == "forget" else "higher"
        for variant in VARIANTS:
            f1s = f1_values(answers, f"{split} verbatim", "continuation", variant)
            repeated = muse.verbmem(f1s, variant=variant, split=split)
            found.append(replace(repeated, better=better))
        for name in ("probability", "extraction_strength", "exact_memorisation"):
            one = Mean(name.replace("_", " "), name, "correct", better)
            found += means(answers, f"{split} text", "text", [one])
    found += [privacy_leak(answers, reference, variant) for variant in VARIANTS]
    found += membership(answers, reference, "forget text", "holdout text", "text")
    found += health(answers, "forget verbatim", "continuation")
    return answers.with_dtype(found)


VERBATIM = Benchmark(
    name="verbatim",
    version=1,
    folder="books",
    splits=(
        Split("forget", ("forget", "alice_in_wonderland"), "muse-bench/MUSE-Books:raw:forget"),
        Split(
            "retain", ("retain", "pride_and_prejudice"), "muse-bench/MUSE-Books:raw:retain1", False
        ),
        Split(
            "holdout",
            ("holdout", "adventures_of_sherlock_holmes"),
            "muse-bench/MUSE-Books:raw:holdout",
            False,
        ),
    ),
    items=own_items,
    measure=measure_own,
)
