"""What a benchmark measured, into MLflow: numbers, and tables without any text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from prefect import task

from grom.metrics import Metric
from tasks.codecs import write_json
from tasks.exam import RESULTS, Exams, metrics_of, summary_of
from tasks.models import scratch_folder
from tasks.place import Place
from tasks.register import TrackedRun
from tasks.tracking import log_dataset, log_metrics, log_table_file


@task
def log_exams(run: TrackedRun, exams: Exams, place: Place) -> None:
    """Each metric as `benchmark/metric/variant/model`, all of them as one JSON summary, and the
    numbers of every item as Parquet.  A metric without a value is in the summary with its reason.
    """
    benchmark = exams.benchmark
    for split, address in benchmark.addresses.items():
        log_dataset(
            *run.where,
            name=f"{benchmark.name}, {split}",
            uri=address,
            digest=benchmark.digest,
            context="evaluate",
            num_rows=benchmark.num_rows[split],
        )
    for label, metrics in metrics_of(exams, place).items():
        log_metrics(*run.where, _numbers(benchmark.name, label, metrics))
    _, work, run_id = run.where
    with scratch_folder(work / "scratch", f"exam-{run_id}") as folder:
        summary = folder / f"{benchmark.name}.json"
        write_json(summary, summary_of(exams, place))
        log_table_file(*run.where, summary)
        for exam in exams.exams:
            table = folder / f"{benchmark.name}-{exam.label.replace(' ', '-')}.parquet"
            table.write_bytes((place.fetch(exam.artifact) / RESULTS).read_bytes())
            log_table_file(*run.where, table)


def _numbers(benchmark: str, label: str, metrics: Sequence[Metric]) -> dict[str, float]:
    return {
        f"{benchmark}/{_plain(metric.name)}/{metric.variant}/{label}": metric.value
        for metric in metrics
        if not math.isnan(metric.value)
    }


def _plain(name: str) -> str:
    """With the characters that MLflow takes; min-k++ does not become min-k."""
    return re.sub(r"[^A-Za-z0-9_. -]", "", name.replace("+", "plus"))
