"""Stage evaluate, on a benchmark: all items in one go, resumable; metrics from the results."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task

from grom.benchmarks.benchmark import Answers
from grom.config import CollectConfig, Config
from grom.exam import take_exam
from grom.examples import warn_without_template
from grom.items import Item, ItemResult
from grom.metrics import Metric
from grom.report import MetricTable, metric_table
from tasks.artifacts import Artifact, artifact_key
from tasks.benchmark import BenchmarkRef, benchmark_of
from tasks.codecs import read_json, read_table, write_json, write_table
from tasks.journal import Journal
from tasks.models import OpenModel, open_model, pad_id
from tasks.place import ModelRef, Place
from tasks.progress import counted

logger = logging.getLogger(__name__)
RESULTS = "items.parquet"


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
        key = artifact_key("evaluate", facts).replace("/", "-")
        journal = Journal(Path(place.work) / "scratch" / "journals" / f"{key}.jsonl")
        results = _ask(opened, benchmark.items(), collect, journal, phase)
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


def _ask(
    opened: OpenModel, items: list[Item], collect: CollectConfig, journal: Journal, phase: str
) -> list[ItemResult]:
    """Results of all items in order; those that the journal has are not asked again."""
    if any(not item.plain for item in items):
        warn_without_template(opened.rendering.tokenizer)
    done = set(journal.found)
    asked = take_exam(
        opened.model, opened.rendering, items, collect, pad_id=pad_id(opened.rendering), done=done
    )
    for _ in counted(journal.record(asked), phase, len(items), lambda _: 1, len(done)):
        pass
    return [journal.found[position] for position in range(len(items))]


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
    limit = f", {benchmark.limit} rows of each split" if benchmark.limit else ""
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
