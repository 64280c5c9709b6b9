"""What all benchmarks share: rows become items, answers are found again, no number stands bare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.benchmark import Answers, text_of, texts_of
from grom.errors import DataError
from grom.items import Item
from grom.metrics.metric import mean_metric
from tests.exams import (
    Numbers,
    answered,
    destroyed,
    lettering,
    likely,
    measured,
    needs_data,
    perfect,
    shared_rows,
    spoken,
    without_value,
)
from tests.tiny import CANARY

ITEMS = {
    "tofu_forget01": 40 * 9 + 400 * 8 + 217 * 5,
    "tofu_forget05": 200 * 9 + 400 * 8 + 217 * 5,
    "tofu_forget10": 400 * 9 + 400 * 8 + 217 * 5,
    "muse_news": 200,
    "verbatim": 2 * (72 + 100 + 100),
    "mmlu": 2 * 1473,
    "mmlu_5shot": 2 * 1473,
    "zsre": 5 * 1000 - 4,
    "counterfact": 2 * 13 * 500,
}
"""Of the benchmarks whose rows are in the shared data."""


def test_each_benchmark_is_known_by_its_name_and_says_where_its_rows_lie() -> None:
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name
        names = [split.name for split in benchmark.splits]
        assert len(set(names)) == len(names)
        assert any(split.needed for split in benchmark.splits)
        for split in benchmark.splits:
            assert split.files
            assert split.hub.count(":") == 2
        assert all(row.source and row.values for row in benchmark.published)


@needs_data
@pytest.mark.parametrize("name", ITEMS)
def test_shared_rows_become_items(name: str) -> None:
    items = BENCHMARKS[name].items(shared_rows(name))
    assert len(items) == ITEMS[name]
    assert len({(item.split, item.row, item.role, item.ask) for item in items}) == len(items)
    assert all(item.answer.strip() for item in items)
    assert len({item.digest for item in items}) == len(items)


@needs_data
@pytest.mark.parametrize("name", ITEMS)
@pytest.mark.parametrize("model", [perfect, destroyed])
def test_every_metric_has_its_reading_and_without_a_reference_no_comparison(
    name: str, model: Callable[[Item], Numbers]
) -> None:
    benchmark = BENCHMARKS[name]
    answers = answered(benchmark.items(shared_rows(name)), model)
    metrics = measured(benchmark, Answers(answers.results, "bfloat16 nf4"))
    absent = without_value(metrics)
    for key, metric in metrics.items():
        assert metric.dtype == "bfloat16 nf4"
        if key not in absent:
            assert metric.num > 0
            assert metric.low <= metric.value <= metric.high
    compared = ("forget quality", "PrivLeak", "distance to reference", "AUC of reference")
    for key in metrics:
        if key[0] in compared or key[0].startswith("s-"):
            assert key in absent


@pytest.mark.parametrize("name", BENCHMARKS)
def test_without_any_answer_nothing_is_a_number(name: str) -> None:
    metrics = measured(BENCHMARKS[name], Answers([]))
    assert metrics
    assert without_value(metrics) == metrics
    assert measured(BENCHMARKS[name], Answers([]), Answers([])).keys() == metrics.keys()


@needs_data
@pytest.mark.parametrize("name", ITEMS)
def test_a_model_that_is_not_a_number_gets_none(name: str) -> None:
    def broken(item: Item) -> Numbers:
        if item.ask == "letters":
            return lettering(item, [math.nan] * 4)
        return dict.fromkeys(spoken(0) if item.ask == "generation" else likely(0), math.nan)

    answers = answered(BENCHMARKS[name].items(shared_rows(name)), broken)
    metrics = measured(BENCHMARKS[name], answers, answers)
    assert without_value(metrics) == metrics


def test_answers_are_in_the_order_of_the_rows_whatever_the_batches_were() -> None:
    items = [Item("forget", row, "answer", "likelihood", "p", "a") for row in (2, 0, 1)]
    answers = answered(items, lambda item: likely(-float(item.row)))
    assert [result.row for result in answers.of("forget", "answer")] == [0, 1, 2]
    assert answers.losses("forget", "answer") == [0, 1, 2]
    assert answers.values("forget", "answer", "probability") == [math.exp(-row) for row in range(3)]
    assert answers.of("forget", "answer", "generation") == answers.of("retain", "answer") == []


def test_metrics_get_the_type_of_the_weights() -> None:
    metric = mean_metric("m", [1.0], variant="correct", better="higher")
    assert Answers([], "float16").with_dtype([metric])[0].dtype == "float16"


@pytest.mark.parametrize("row", [{}, {"text": None}, {"text": 7}, {"text": " "}, {"text": ["a"]}])
def test_a_cell_that_is_no_text_is_refused_with_split_row_and_column(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"forget, row 4: `text` is .*columns there are") as caught:
        text_of({"other": CANARY, **row}, "text", "forget", 3)
    assert CANARY not in str(caught.value)
    assert "other" in str(caught.value)


def test_one_text_counts_as_a_list_of_one_and_an_empty_list_as_none() -> None:
    assert texts_of({"answer": "a"}, "answer", "s", 0) == ["a"]
    assert texts_of({"answer": ["a", "b"]}, "answer", "s", 0) == ["a", "b"]
    for wrong in ([], ["a", 1], None):
        with pytest.raises(DataError, match="s, row 1: `answer`"):
            texts_of({"answer": wrong}, "answer", "s", 0)


def test_what_is_asked_about_a_row_is_told_apart_by_role_and_kind() -> None:
    kinds = Counter(item.ask for item in BENCHMARKS["tofu_forget01"].items({"forget": [ROW]}))
    assert kinds == {"likelihood": 4, "generation": 1}


ROW = {"question": "q", "answer": "a", "perturbed_answer": ["b"], "paraphrased_answer": "c",
       "paraphrased_question": "d"}  # fmt: skip
