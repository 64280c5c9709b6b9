"""Items and answers for tests: a tokenizer with letters, made-up results, real benchmark rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flows.presets import shared
from grom.benchmarks import BENCHMARKS, Benchmark
from grom.benchmarks.benchmark import Answers, Row
from grom.examples import Rendering
from grom.items import Item, ItemResult
from grom.metrics import Metric, Variant
from tasks.tables import split_address, table_rows
from tests.reference import VOCAB
from tests.tiny import CANARY, SPECIAL, TEMPLATE, words, write_rows

DATA = shared() / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the benchmark data, GROM_SHARED")
LETTERS = "ABCD"
FIRST_LETTER = len(SPECIAL)
"""Tokens 4 to 7; the others are w8, w9 ... up to the vocabulary's size."""
Numbers = dict[str, Any]
TOFU_FILES = {
    "forget01_perturbed": 5,
    "retain_perturbed": 5,
    "real_authors_perturbed": 3,
    "world_facts_perturbed": 3,
}
"""Each with the number of perturbed answers of a row."""


def lettered(*, template: str | None = TEMPLATE, max_tokens: int = 64) -> Rendering:
    """One token per word; A to D are words, the template's `w4` is not."""
    plain = [f"w{number}" for number in range(FIRST_LETTER + len(LETTERS), VOCAB)]
    vocabulary = {name: number for number, name in enumerate([*SPECIAL, *LETTERS, *plain])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Callable[..., Any] = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    return Rendering(tokenizer, max_tokens)


def write_tofu(folder: Path, count: int = 4) -> Path:
    """Rows in TOFU's layout, one split per file; each text has the canary in it."""
    for number, (split, perturbed) in enumerate(TOFU_FILES.items()):
        rows = []
        for row in range(count):
            start = 8 + 4 * number + 2 * row
            rows.append(
                {
                    "question": f"{words(start, 3)} {CANARY}",
                    "answer": f"{words(start + 20, 2 + row)} {CANARY}",
                    "perturbed_answer": [
                        f"{CANARY} {words(start + 9 + at, 2)}" for at in range(perturbed)
                    ],
                }
            )
            if perturbed == 5:
                rows[-1]["paraphrased_answer"] = f"{CANARY} {words(start + 20, 2)}"
                rows[-1]["paraphrased_question"] = f"{CANARY} {words(start, 4)}"
        write_rows(folder / f"{split}.json", rows)
    return folder


@cache
def shared_rows(benchmark: str) -> dict[str, list[Row]]:
    """Every row of a benchmark's splits that the shared data has."""
    wanted = BENCHMARKS[benchmark]
    root = str(DATA / wanted.folder)
    found = {split.name: split_address(root, split) for split in wanted.splits}
    return {name: list(table_rows(address)) for name, address in found.items() if address}


def result_of(item: Item, numbers: Numbers) -> ItemResult:
    """A made-up result of an item; a log-probability also gives the probability."""
    if "mean_logprob" in numbers:
        numbers = {"probability": math.exp(numbers["mean_logprob"]), **numbers}
    where = (item.split, item.row, item.role, item.ask, item.digest, 3)
    return ItemResult(*where, **numbers)


def answered(items: Sequence[Item], how: Callable[[Item], Numbers]) -> Answers:
    """Answers of a made-up model."""
    return Answers([result_of(item, how(item)) for item in items])


def likely(logprob: float) -> Numbers:
    """What a model gets for an answer of this mean log-probability, all or nothing otherwise."""
    known = float(logprob > -1)
    names = ("token_accuracy", "extraction_strength", "exact_memorisation", "extraction_compat")
    scores = {
        "min_k": -logprob,
        "min_k_compat": -logprob,
        "min_k_plus_plus": -logprob,
        "zlib": -logprob / 50,
    }
    return {"mean_logprob": logprob, **dict.fromkeys(names, known), **scores}


def spoken(overlap: float) -> Numbers:
    """What a model gets for a generation of this overlap with the truth."""
    names = ("rouge_l_recall", "rouge_l_f1", "rouge_l_recall_correct", "rouge_l_f1_correct")
    health = {"rep_4": 0.0, "ended": 1.0, "empty": 0.0, "degenerate": 0.0, "length_ratio": 1.0}
    return {**dict.fromkeys(names, overlap), **health}


def lettering(item: Item, logprobs: Sequence[float]) -> Numbers:
    """What a model gets for a question with these log-probabilities of its letters."""
    columns = ("logprob_a", "logprob_b", "logprob_c", "logprob_d")
    return {"right": LETTERS.index(item.answer), **dict(zip(columns, logprobs, strict=True))}


def perfect(item: Item) -> Numbers:
    """A model that knows every right answer and finds every wrong one impossible."""
    if item.ask == "generation":
        return spoken(1.0)
    if item.ask == "letters":
        return lettering(item, [0.0 if letter == item.answer else -50.0 for letter in LETTERS])
    wrong = item.role.startswith("perturbed") or item.role.endswith("new")
    return likely(-50.0 if wrong else 0.0)


def destroyed(item: Item) -> Numbers:
    """A model to which every text is impossible."""
    if item.ask == "generation":
        return spoken(0.0)
    if item.ask == "letters":
        return lettering(item, [-math.inf] * 4)
    return likely(-math.inf)


def measured(
    benchmark: Benchmark, answers: Answers, reference: Answers | None = None
) -> dict[tuple[str, Variant], Metric]:
    """A benchmark's metrics by name and variant; no two share both."""
    metrics = benchmark.measure(answers, reference)
    found = {(metric.name, metric.variant): metric for metric in metrics}
    assert len(found) == len(metrics)
    return found


def without_value(metrics: dict[tuple[str, Variant], Metric]) -> dict[tuple[str, Variant], Metric]:
    """Those that were not computed; each says why, and none has a number."""
    for metric in metrics.values():
        assert math.isnan(metric.value) == metric.missing.startswith("not computed: ")
    return {key: metric for key, metric in metrics.items() if metric.missing}
