"""A whole evaluation on tiny checkpoints, with a reference: what MLflow and the disk then hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.config import BenchmarkConfig
from flows.evaluate import EvalConfig, Evaluated, evaluate
from grom.benchmarks import BENCHMARKS
from grom.config import ModelConfig
from grom.errors import DataError
from grom.items import ItemResult
from tasks.codecs import read_table
from tasks.exam import metrics_of
from tasks.tracking import Tracking, client_of
from tests.exams import write_tofu
from tests.tiny import CANARY, checkpoint, residue, write_rows

NAME = "tofu_forget01"


def config_of(folder: Path, **changes: Any) -> EvalConfig:
    benchmark = BenchmarkConfig(name=NAME, data=str(folder / "tofu"), limit=3)
    settings = EvalConfig(
        model=ModelConfig(source=str(folder / "model")),
        reference=ModelConfig(source=str(folder / "reference")),
        benchmark=benchmark,
        work=str(folder / "work"),
    )
    return settings.model_copy(update=changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One MLflow database for the module: making its tables takes seconds."""
    folder = tmp_path_factory.mktemp("eval")
    checkpoint(folder / "model")
    checkpoint(folder / "reference", "gpt2", tied=True)
    write_tofu(folder / "tofu")
    write_rows(folder / "holdout.jsonl", [{"question": CANARY, "answer": "w9 w10"}] * 3)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path, prefect_server: None) -> Evaluated:
    benchmark = config_of(folder).benchmark
    held = {"splits": {"holdout": str(folder / "holdout.jsonl")}}
    return evaluate(config_of(folder, benchmark=benchmark.model_copy(update=held)))


@pytest.fixture(scope="module")
def tables(done: Evaluated, folder: Path) -> Path:
    """The run's tables, downloaded."""
    client = client_of(Tracking(), folder / "work")
    target = folder / "downloaded"
    target.mkdir()
    return Path(client.download_artifacts(done.run_id, "tables", str(target)))


def test_every_number_is_a_metric_of_the_run_and_none_is_not_one(
    done: Evaluated, folder: Path
) -> None:
    run = client_of(Tracking(), folder / "work").get_run(done.run_id)
    assert run.info.status == "FINISHED"
    logged = run.data.metrics
    expected = 0
    for label, metrics in metrics_of(done.exams, done.place).items():
        for metric in metrics:
            if metric.missing:
                continue
            expected += 1
            plain = metric.name.replace("+", "plus").translate({ord(each): "" for each in "(),"})
            name = f"{NAME}/{plain}/{metric.variant}/{label}"
            assert logged[name] == pytest.approx(metric.value), name
    assert len(logged) == expected
    assert all(math.isfinite(value) for value in logged.values())
    assert f"{NAME}/AUC of min-k/correct/model" in logged
    assert f"{NAME}/AUC of min-kplusplus/correct/model" in logged
    assert f"{NAME}/distance to reference/correct/reference" not in logged


def test_the_run_names_its_data_and_settings(done: Evaluated, folder: Path) -> None:
    run = client_of(Tracking(), folder / "work").get_run(done.run_id)
    assert run.inputs is not None
    names = {entry.dataset.name for entry in run.inputs.dataset_inputs}
    assert names == {f"{NAME}, {split.name}" for split in BENCHMARKS[NAME].splits}
    assert run.data.params["benchmark.limit"] == "3"


def test_the_summary_has_variant_count_type_and_reason_of_each_metric(tables: Path) -> None:
    summary = json.loads((tables / f"{NAME}.json").read_text())
    assert list(summary["models"]) == ["model", "reference"]
    assert summary["limit"] == 3
    assert summary["rows"] == {
        "forget": 4, "retain": 4, "real authors": 4, "world facts": 4, "holdout": 3,
    }  # fmt: skip
    for metrics in summary["models"].values():
        for metric in metrics:
            assert metric["dtype"] == "float32"
            assert metric["variant"] in ("compat", "correct")
            assert (metric["value"] == "nan") == metric["missing"].startswith("not computed: ")
            assert metric["num"] > 0 or metric["missing"]
    (quality,) = [
        metric
        for metric in summary["models"]["model"]
        if (metric["name"], metric["variant"]) == ("forget quality", "correct")
    ]
    assert set(quality["details"]) == {"log10 p", "statistic", "floor", "log10 floor"}
    assert quality["num"] == 3


def test_the_numbers_of_every_item_are_a_table_without_any_text(
    tables: Path, done: Evaluated
) -> None:
    count = done.exams.benchmark.num_items
    for label in ("model", "reference"):
        path = tables / f"{NAME}-{label}.parquet"
        rows = read_table(path, ItemResult)
        assert len(rows) == count
        assert {row.split for row in rows} == {split.name for split in BENCHMARKS[NAME].splits}
        schema = pq.read_schema(path)
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        assert texts == ["split", "role", "ask", "digest"]


def test_nothing_on_disk_holds_the_text_of_an_item(done: Evaluated, folder: Path) -> None:
    seen = 0
    for path in (folder / "work").rglob("*"):
        if path.is_file():
            seen += 1
            assert CANARY.encode() not in path.read_bytes(), path
    assert seen > 5
    assert residue(folder / "work") == []


def test_models_of_two_families_are_compared(done: Evaluated) -> None:
    model, reference = done.exams.exams
    assert reference == done.exams.reference
    found = {
        label: {(metric.name, metric.variant): metric for metric in metrics}
        for label, metrics in metrics_of(done.exams, done.place).items()
    }
    for name in ("forget quality", "distance to reference", "s-loss", "AUC of reference"):
        assert not found["model"][name, "correct"].missing
        assert found["reference"][name, "correct"].missing
    assert model.artifact != reference.artifact


def test_asked_again_both_models_are_found_in_the_store(done: Evaluated, folder: Path) -> None:
    benchmark = BenchmarkConfig(
        name=NAME,
        data=str(folder / "tofu"),
        limit=3,
        splits={"holdout": str(folder / "holdout.jsonl")},
    )
    again = evaluate(config_of(folder, benchmark=benchmark))
    assert [exam.reused for exam in again.exams.exams] == [True, True]
    assert again.run_id != done.run_id
    assert [exam.artifact for exam in again.exams.exams] == [
        exam.artifact for exam in done.exams.exams
    ]


def test_an_evaluation_that_fails_is_a_failed_run(done: Evaluated, folder: Path) -> None:
    broken = folder / "broken"
    write_tofu(broken)
    rows = [{"question": CANARY, "answer": "w9"}]
    write_rows(broken / "retain_perturbed.json", rows)
    benchmark = BenchmarkConfig(name=NAME, data=str(broken))
    with pytest.raises(DataError, match="retain, row 1: `perturbed_answer` is miss") as caught:
        evaluate(config_of(folder, benchmark=benchmark, reference=None))
    assert CANARY not in str(caught.value)
    client = client_of(Tracking(), folder / "work")
    (experiment,) = client.search_experiments(filter_string="name = 'unlearning'")
    newest = client.search_runs([experiment.experiment_id])[0]
    assert (newest.info.run_name, newest.info.status) == (f"eval-{NAME}", "FAILED")
