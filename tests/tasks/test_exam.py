"""A model is asked once: kept by weights, items and version; killed at item k it goes on at k."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from grom import exam as asking
from grom.benchmarks import BENCHMARKS
from grom.config import CollectConfig, ModelConfig
from grom.errors import DataError
from grom.items import ItemResult
from tasks import exam
from tasks.benchmark import BenchmarkRef, load_benchmark
from tasks.exam import ExamRef, Exams, exam_tables, examine, metrics_of, summary_of, truth_ratios_of
from tasks.load import load_model
from tasks.place import ModelRef, Place
from tests.exams import write_tofu
from tests.tiny import CANARY, checkpoint

ROOT = Path(exam.__file__).parents[1]
NAME = "tofu_forget01"
KILLED_AT = 57
SCRIPT = f"""
import os, signal, sys
from pathlib import Path
from tasks import exam, journal
from tests.tasks.test_exam import Bench

written = journal.Journal.record
def dying(self, results):
    for number, result in enumerate(written(self, results), start=1):
        yield result
        if number == {KILLED_AT}:
            os.kill(os.getpid(), signal.SIGKILL)
journal.Journal.record = dying
Bench(Path(sys.argv[1])).examine()
"""


class Bench:
    """A tiny checkpoint and a tiny benchmark below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = Place(work=str(folder / "work"), store=str(folder / "work" / "store"))

    def model(self, name: str = "model", **how: Any) -> ModelRef:
        folder = self.folder / name
        if not folder.is_dir():
            checkpoint(folder, **how)
        return load_model.fn(ModelConfig(source=str(folder)), self.place)

    def benchmark(self, limit: int | None = None) -> BenchmarkRef:
        folder = self.folder / "tofu"
        if not folder.is_dir():
            write_tofu(folder)
        return load_benchmark.fn(NAME, str(folder), limit)

    def examine(self, **changes: Any) -> ExamRef:
        given = {"label": "model", "model": self.model(), "benchmark": self.benchmark(),
                 "collect": CollectConfig(), "place": self.place}  # fmt: skip
        return examine.fn(**{**given, **changes})

    @property
    def journals(self) -> list[Path]:
        return list((self.folder / "work" / "scratch" / "journals").glob("*"))

    def rows(self, found: ExamRef) -> list[dict[str, Any]]:
        return [asdict(result) for result in found.answers(self.place).results]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the items that models are asked from here on."""
    seen: list[int] = []

    def counting(*args: Any, **how: Any) -> Iterator[tuple[int, ItemResult]]:
        for position, result in asking.take_exam(*args, **how):
            seen.append(position)
            yield position, result

    monkeypatch.setattr(exam, "take_exam", counting)
    return seen


def alike(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    """Equal but for rounding: other batches add in another order."""
    for one, other in zip(first, second, strict=True):
        for name, value in one.items():
            if isinstance(value, float):
                if not (math.isnan(value) and math.isnan(other[name])):
                    assert value == pytest.approx(other[name], abs=1e-5), name
            else:
                assert value == other[name], name
    return True


def test_results_are_the_exam_s_in_the_order_of_the_items(bench: Bench, asked: list[int]) -> None:
    found = bench.examine()
    items = bench.benchmark().items()
    rows = found.answers(bench.place).results
    assert sorted(asked) == list(range(len(items)))
    assert [row.digest for row in rows] == [item.digest for item in items]
    assert (found.dtype, found.reused, found.label) == ("float32", False, "model")
    assert bench.journals == []


def test_the_same_question_is_never_asked_twice(bench: Bench, asked: list[int]) -> None:
    first = bench.examine()
    count = len(asked)
    again = bench.examine(label="again", collect=CollectConfig(batch_tokens=64))
    assert len(asked) == count
    assert again.reused
    assert again.artifact == first.artifact
    assert alike(bench.rows(again), bench.rows(first))


def test_other_weights_items_or_version_are_asked_anew(
    bench: Bench, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {bench.examine().artifact.key}
    keys.add(bench.examine(model=bench.model("other", seed=1)).artifact.key)
    keys.add(bench.examine(benchmark=bench.benchmark(limit=1)).artifact.key)
    higher = replace(BENCHMARKS[NAME], version=BENCHMARKS[NAME].version + 1)
    monkeypatch.setitem(BENCHMARKS, NAME, higher)
    found = bench.examine()
    keys.add(found.artifact.key)
    assert len(keys) == 4
    assert not found.reused
    assert len(asked) == 3 * bench.benchmark().num_items + bench.benchmark(limit=1).num_items


def interrupt(bench: Bench, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exam that is broken off when it is about to give one more result than this."""

    def dying(*args: Any, **how: Any) -> Iterator[tuple[int, ItemResult]]:
        for number, result in enumerate(asking.take_exam(*args, **how)):
            if number == count:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setattr(exam, "take_exam", dying)
        with pytest.raises(KeyboardInterrupt):
            bench.examine()


def test_interrupted_at_item_57_it_goes_on_at_item_57(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    whole = bench.rows(bench.examine())
    other = Bench(tmp_path / "other")
    other.folder.mkdir()
    order = asked.copy()
    interrupt(other, KILLED_AT, monkeypatch)
    (journal,) = other.journals
    assert CANARY not in journal.read_text()
    assert list((other.folder / "work" / "store").glob("evaluate/*")) == []
    asked.clear()
    found = other.examine()
    assert sorted(asked) == sorted(order[KILLED_AT:])
    assert not found.reused
    assert alike(other.rows(found), whole)
    assert other.journals == []


@pytest.mark.e2e
def test_killed_outright_at_item_57_it_goes_on_at_item_57(bench: Bench, asked: list[int]) -> None:
    bench.model()
    bench.benchmark()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(bench.folder)], env=environment, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    (journal,) = bench.journals
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line]
    assert len(lines) == KILLED_AT
    found = bench.examine()
    assert len(asked) == bench.benchmark().num_items - KILLED_AT
    assert not {line["at"] for line in lines} & set(asked)
    assert len(bench.rows(found)) == bench.benchmark().num_items


def test_a_journal_of_another_question_is_not_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    interrupt(bench, 5, monkeypatch)
    bench.examine(model=bench.model("other", seed=1))
    assert len(asked) == bench.benchmark().num_items
    assert len(bench.journals) == 1


def test_rows_that_changed_after_they_were_read_are_not_asked(
    bench: Bench, asked: list[int]
) -> None:
    benchmark = bench.benchmark()
    write_tofu(bench.folder / "tofu", 5)
    with pytest.raises(DataError, match="changed while the run"):
        bench.examine(benchmark=benchmark)
    assert asked == []


def both(bench: Bench) -> Exams:
    reference = bench.examine(label="reference", model=bench.model("other", seed=1))
    model = bench.examine()
    return Exams(benchmark=bench.benchmark(), exams=(model, reference), reference=reference)


def test_metrics_tables_and_ratios_are_there_for_each_model(bench: Bench) -> None:
    exams = both(bench)
    found = metrics_of(exams, bench.place)
    assert list(found) == ["model", "reference"]
    by_name = {label: {m.name: m for m in metrics} for label, metrics in found.items()}
    assert not by_name["model"]["forget quality"].missing
    assert by_name["reference"]["forget quality"].missing == "not computed: no retrained reference"
    assert {len(values) for values in truth_ratios_of(exams, bench.place).values()} == {4}
    (table,) = exam_tables(exams, bench.place)
    assert table.name == f"Benchmark {NAME}"


def test_the_summary_has_each_metric_with_variant_count_type_and_reason(bench: Bench) -> None:
    summary = summary_of(both(bench), bench.place)
    assert (summary["benchmark"], summary["version"]) == (NAME, BENCHMARKS[NAME].version)
    assert summary["rows"]["forget"] == 4
    assert CANARY not in json.dumps(summary)
    for metrics in summary["models"].values():
        for metric in metrics:
            assert metric["variant"] in ("compat", "correct")
            assert metric["dtype"] == "float32"
            assert bool(metric["missing"]) == math.isnan(metric["value"])
            assert metric["num"] > 0 or metric["missing"]
