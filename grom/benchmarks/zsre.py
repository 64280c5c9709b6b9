"""ZsRE and CounterFact: single facts, read as things to forget or as things to rewrite.

Layouts: MEND/ROME (`src`, `rephrase`, `loc`), KnowEdit (`prompt`, `rephrase_prompt`, `locality`),
CounterFact (`requested_rewrite`) and EasyEdit's flattened CounterFact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grom.benchmarks.benchmark import (
    Answers,
    Benchmark,
    Published,
    Row,
    Rows,
    Split,
    text_of,
    texts_of,
)
from grom.errors import DataError
from grom.items import Item
from grom.metrics import facts
from grom.metrics.metric import Metric

FACTS = "facts"


def zsre_items(rows: Rows) -> list[Item]:
    """The true answer and the new one to the question and its rephrasing; an unrelated question.

    Raises:
        DataError: a row is in neither layout.
    """
    found: list[Item] = []
    for number, row in enumerate(rows.get(FACTS, ())):
        mend = "src" in row
        question = text_of(row, "src" if mend else "prompt", FACTS, number)
        rephrased = text_of(row, "rephrase" if mend else "rephrase_prompt", FACTS, number)
        true = texts_of(row, "answers" if mend else "ground_truth", FACTS, number)[0]
        found.append(_fact(number, "rewrite true", question, true))
        found.append(_fact(number, "rephrase true", rephrased, true))
        new = row.get("alt" if mend else "target_new")
        if isinstance(new, str) and new.strip():  # some rows of the public files have none
            found.append(_fact(number, "rewrite new", question, new))
            found.append(_fact(number, "rephrase new", rephrased, new))
        for prompt, answer in _unrelated(row, number, mend=mend):
            found.append(_fact(number, "unrelated true", prompt, answer))
    return found


def counterfact_items(rows: Rows) -> list[Item]:
    """True and new object after the prompt, its paraphrases and its neighbours."""
    found: list[Item] = []
    for number, row in enumerate(rows.get(FACTS, ())):
        prompts, true, new = _counterfact(row, number)
        for role, listed in prompts.items():
            for at, prompt in enumerate(listed):
                found.append(_fact(number, f"{role} {at} true", prompt, true))
                found.append(_fact(number, f"{role} {at} new", prompt, new))
    return found


def _fact(number: int, role: str, prompt: str, answer: str) -> Item:
    return Item(FACTS, number, role, "likelihood", prompt, answer, plain=True)


def _unrelated(row: Row, number: int, *, mend: bool) -> list[tuple[str, str]]:
    if mend:
        return [(text_of(row, "loc", FACTS, number), text_of(row, "loc_ans", FACTS, number))]
    locality = row.get("locality")
    listed = locality.get("Relation_Specificity") if isinstance(locality, Mapping) else None
    if not listed:
        return []
    place = listed[0] if isinstance(listed, list) and isinstance(listed[0], Mapping) else {}
    truth = place.get("ground_truth")
    while isinstance(truth, list) and truth:
        truth = truth[0]
    found = {"prompt": place.get("prompt"), "ground_truth": truth}
    where = f"{FACTS}, `locality.Relation_Specificity`"
    return [
        (text_of(found, "prompt", where, number), text_of(found, "ground_truth", where, number))
    ]


def _counterfact(row: Row, number: int) -> tuple[dict[str, Sequence[str]], str, str]:
    asked: Any = row.get("requested_rewrite")
    if asked is None:
        # EasyEdit's layout: the neighbour's true answer is the row's own truth.
        prompts: dict[str, Sequence[str]] = {
            "rewrite": [text_of(row, "prompt", FACTS, number)],
            "paraphrase": [text_of(row, "rephrase_prompt", FACTS, number)],
            "neighbour": [text_of(row, "locality_prompt", FACTS, number)],
        }
        true, new = (text_of(row, name, FACTS, number) for name in ("ground_truth", "target_new"))
        return prompts, true, new
    try:
        true, new = asked["target_true"]["str"], asked["target_new"]["str"]
        prompt = asked["prompt"].replace("{}", asked["subject"])
        whole = all(isinstance(text, str) and text.strip() for text in (true, new, prompt))
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise DataError(
            f"{FACTS}, row {number + 1}: `requested_rewrite` is not in CounterFact's layout "
            "(prompt, subject, target_true.str, target_new.str). Correct or remove the row."
        )
    paraphrase, neighbour = (
        texts_of(row, name, FACTS, number)
        for name in ("paraphrase_prompts", "neighborhood_prompts")
    )
    return {"rewrite": [prompt], "paraphrase": paraphrase, "neighbour": neighbour}, true, new


def measure_zsre(answers: Answers, reference: Answers | None) -> list[Metric]:
    """Token accuracy of the true answer (to forget) and of the new one (to rewrite)."""
    unrelated = _accuracy(answers, "unrelated true")
    readings: tuple[tuple[facts.Reading, str], ...] = (("unlearning", "true"), ("editing", "new"))
    found = []
    for reading, which in readings:
        rewrite, rephrase = (
            _accuracy(answers, f"{role} {which}") for role in ("rewrite", "rephrase")
        )
        metrics = facts.zsre(rewrite, rephrase, unrelated, reading)
        found += [
            replace(metric, name=f"{metric.name} ({reading})")
            for metric in metrics[: 3 if reading == "unlearning" else 2]
        ]
    return answers.with_dtype(found)


def measure_counterfact(answers: Answers, reference: Answers | None) -> list[Metric]:
    """Efficacy, paraphrase, neighbourhood and score in both readings."""
    rewrite, paraphrase, near = (
        _pairs(answers, role) for role in ("rewrite", "paraphrase", "neighbour")
    )
    readings: tuple[facts.Reading, ...] = ("unlearning", "editing")
    found = [
        replace(metric, name=f"{metric.name} ({reading})")
        for reading in readings
        for metric in facts.counterfact(rewrite, paraphrase, near, reading)
    ]
    return answers.with_dtype(found)


def _accuracy(answers: Answers, role: str) -> list[float]:
    # Rendered answers hold no beginning-of-text token, so none is a target here.
    return answers.values(FACTS, role, "token_accuracy")


def _pairs(answers: Answers, role: str) -> list[list[tuple[float, float]]]:
    """Losses of the true and the new object by fact and prompt."""
    found: dict[int, list[tuple[float, float]]] = {}
    at = 0
    while true := answers.of(FACTS, f"{role} {at} true"):
        new = answers.of(FACTS, f"{role} {at} new")
        for known, other in zip(true, new, strict=True):
            found.setdefault(known.row, []).append((-known.mean_logprob, -other.mean_logprob))
        at += 1
    return [found[row] for row in sorted(found)]


def _facts(
    name: str, folder: str, files: tuple[str, ...], hub: str, items: Any, measure: Any
) -> Benchmark:
    return Benchmark(name, 1, folder, (Split(FACTS, files, hub),), items, measure)


ZSRE = replace(
    _facts(
        "zsre",
        "zsre",
        ("zsre_mend_eval", "zsre_mend_train_1k", "facts"),
        "zjunlp/KnowEdit:zsre:test",
        zsre_items,
        measure_zsre,
    ),
    published=(
        Published(
            "Llama-3.2-3B",
            {"efficacy": 0.3282, "generalisation": 0.3223, "specificity": 0.2812},
            "arXiv 2605.18879; its answers include BOS, which lowers all three",
        ),
    ),
)
COUNTERFACT = _facts(
    "counterfact",
    "counterfact",
    ("counterfact", "counterfact_500", "facts"),
    "azhx/counterfact:default:train",
    counterfact_items,
    measure_counterfact,
)
