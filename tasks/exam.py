"""Stage evaluate, on a benchmark: all items in one go, resumable; metrics from the results."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.benchmark import Answers, Benchmark, Row
from grom.config import CollectConfig, Config
from grom.errors import ConfigError, EmptySet, MissingInput
from grom.exam import Item, ItemResult, take_exam
from grom.metrics import Metric
from grom.report import MetricTable, metric_table
from tasks.artifacts import Artifact, artifact_key
from tasks.codecs import read_json, read_table, write_json, write_table
from tasks.journal import Journal
from tasks.models import open_model, pad_id
from tasks.place import ModelRef, Place
from tasks.progress import counted
from tasks.tables import split_address, table_rows

logger = logging.getLogger(__name__)
RESULTS = "items.parquet"


class BenchmarkRef(Config):
    """A benchmark whose rows were found and read once."""

    name: str
    addresses: dict[str, str]
    """Split -> where its rows are."""
    num_rows: dict[str, int]
    limit: int | None
    num_items: int
    digest: str
    """Hash over everything that is asked, in order."""

    def items(self) -> list[Item]:
        """All that is asked."""
        return _items(self.name, _rows(self.addresses), self.limit)


class ExamRef(Config):
    """Results of one model on a benchmark."""

    artifact: Artifact
    label: str
    dtype: str
    seconds: float
    reused: bool

    def answers(self, place: Place) -> Answers:
        """The results, item by item."""
        return Answers(read_table(place.fetch(self.artifact) / RESULTS, ItemResult), self.dtype)


class Exams(Config):
    """Several models on one benchmark."""

    benchmark: BenchmarkRef
    exams: tuple[ExamRef, ...]
    reference: ExamRef | None = None
    """The one that the others are compared with; it is among `exams`, too."""


def benchmark_of(name: str) -> Benchmark:
    """A benchmark by name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    return BENCHMARKS[name]


@task
def load_benchmark(
    name: str, root: str, limit: int | None = None, splits: Mapping[str, str] | None = None
) -> BenchmarkRef:
    """Find and read a benchmark's splits.

    Args:
        name: which benchmark.
        root: folder, fsspec address or `hub`.
        limit: rows per split that are asked about, the first ones.
        splits: address of single splits that lie elsewhere.

    Raises:
        ConfigError: an unknown benchmark or split.
        MissingInput: a needed split is not there.
        DataError: a row lacks what the benchmark needs.
    """
    benchmark, given = benchmark_of(name), dict(splits or {})
    known = {split.name for split in benchmark.splits}
    if strange := sorted(set(given) - known):
        raise ConfigError(f"{name} has no split {strange[0]!r}; it has {', '.join(sorted(known))}")
    addresses: dict[str, str] = {}
    for split in benchmark.splits:
        address = given.get(split.name) or split_address(root, split)
        if address is not None:
            addresses[split.name] = address
        elif split.needed:
            raise MissingInput(
                root,
                f"no {' or '.join(split.files)} (.json, .jsonl, .parquet, .csv, .txt) there, the "
                f"{split.name!r} split of {name}. Give its folder with --data, its file with "
                f"--split '{split.name}=FILE', or `--data hub`",
            )
    rows = _rows(addresses)
    items = _items(name, rows, limit)
    if not items:
        raise EmptySet(name, root)
    sha = hashlib.sha256("".join(item.digest for item in items).encode()).hexdigest()
    return BenchmarkRef(
        name=name,
        addresses=addresses,
        num_rows={split: len(listed) for split, listed in rows.items()},
        limit=limit,
        num_items=len(items),
        digest=sha,
    )


def _rows(addresses: Mapping[str, str]) -> dict[str, list[Row]]:
    return {name: list(table_rows(address)) for name, address in addresses.items()}


def _items(name: str, rows: Mapping[str, list[Row]], limit: int | None) -> list[Item]:
    items = benchmark_of(name).items(rows)
    return [item for item in items if limit is None or item.row < limit]


@task(tags=["gpu"])
def examine(
    label: str,
    model: ModelRef,
    benchmark: BenchmarkRef,
    collect: CollectConfig,
    place: Place,
    quantisation: str | None = None,
    quantise_head: bool = False,
) -> ExamRef:
    """Ask a checkpoint, loaded afresh from disk, everything a benchmark asks.

    Results are kept by the hash of weights, items and the benchmark's version, so the same
    question is never asked twice; a killed run goes on with the first item it had not done.
    """
    facts = {
        "benchmark": benchmark.name,
        "version": benchmark_of(benchmark.name).version,
        "items": benchmark.digest,
        "model": model.fingerprint,
        "quantisation": quantisation,
        "quantise_head": quantise_head,
    }
    started = time.monotonic()
    phase = f"evaluate {label}: {benchmark.name}"

    def write(out: Path) -> None:
        opened = open_model(
            Path(model.folder),
            text_window=collect.text_window,
            quantisation=quantisation,
            quantise_head=quantise_head,
            editable=False,
        )
        items, key = benchmark.items(), artifact_key("evaluate", facts).replace("/", "-")
        journal = Journal(Path(place.work) / "scratch" / "journals" / f"{key}.jsonl")
        done = set(journal.found)
        asked = take_exam(
            opened.model,
            opened.rendering,
            items,
            collect,
            pad_id=pad_id(opened.rendering),
            done=done,
        )
        for _ in counted(journal.record(asked), phase, len(items), lambda _: 1, len(done)):
            pass
        results = [journal.found[position] for position in range(len(items))]
        write_table(out / RESULTS, results, ItemResult)
        dtype = str(next(opened.model.parameters()).dtype).removeprefix("torch.")
        details = {
            "dtype": f"{dtype} {quantisation}" if quantisation else dtype,
            "quantised_modules": list(opened.quantised_modules),
        }
        write_json(out / "exam.json", details)
        journal.close()

    artifact, reused = place.cached("evaluate", facts, write)
    seconds = time.monotonic() - started
    found = read_json(place.fetch(artifact) / "exam.json")
    how = "found in the store" if reused else f"{benchmark.num_items} items in {seconds:.0f} s"
    logger.info("%s: %s", phase, how)
    return ExamRef(
        artifact=artifact, label=label, dtype=found["dtype"], seconds=seconds, reused=reused
    )


def metrics_of(exams: Exams, place: Place) -> dict[str, list[Metric]]:
    """The benchmark's metrics of each model by its label, against the reference if there is one."""
    measure = benchmark_of(exams.benchmark.name).measure
    compared = None if exams.reference is None else exams.reference.answers(place)
    return {
        exam.label: measure(exam.answers(place), None if exam == exams.reference else compared)
        for exam in exams.exams
    }


def truth_ratios_of(exams: Exams, place: Place) -> dict[str, list[float]]:
    """Truth ratio of each forget item by model; empty if the benchmark has none."""
    ratios = benchmark_of(exams.benchmark.name).truth_ratios
    if ratios is None:
        return {}
    return {exam.label: ratios(exam.answers(place)) for exam in exams.exams}


def exam_tables(exams: Exams, place: Place) -> list[MetricTable]:
    """The metrics of all models as a table of the report."""
    benchmark = exams.benchmark
    limit = f", first {benchmark.limit} rows of each split" if benchmark.limit else ""
    title = f"Benchmark {benchmark.name}{limit}"
    return [metric_table(title, metrics_of(exams, place))]


def summary_of(exams: Exams, place: Place) -> dict[str, Any]:
    """All metrics of all models as JSON: names, values, variants, counts, what is missing."""
    benchmark = benchmark_of(exams.benchmark.name)
    return {
        "benchmark": benchmark.name,
        "version": benchmark.version,
        "items": exams.benchmark.digest,
        "rows": exams.benchmark.num_rows,
        "limit": exams.benchmark.limit,
        "models": {
            label: [asdict(metric) for metric in found]
            for label, found in metrics_of(exams, place).items()
        },
        "published": [asdict(row) for row in benchmark.published],
    }
