"""The metrics of a benchmark on the terminal: a table, then what a reader must know about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.terminal import console

if TYPE_CHECKING:
    from grom.metrics import Metric, Variant
    from tasks.exam import Exams
    from tasks.place import Place

ByLabel = Mapping[str, "Sequence[Metric]"]
"""The same metrics of several models, by the model's label."""
NO_REFERENCE = "not computed: no retrained reference"
UNLIMITED = 1000
"""Columns of a terminal that any table fits in."""


def show_metrics(exams: Exams, place: Place) -> None:
    """A table with a column per model; notes; why some metrics have no value; published numbers."""
    from tasks.benchmark import benchmark_of
    from tasks.exam import metrics_of

    benchmark, found = exams.benchmark, metrics_of(exams, place)
    limit = f", {benchmark.limit} rows of each split" if benchmark.limit else ""
    title = f"{benchmark.name}: {benchmark.num_items} items{limit}"
    for intervals in (True, False):
        table = metric_rows(title, found, intervals=intervals)
        if _width(table) <= console.width:
            break
    console.print(table)
    _remark("weights: " + ", ".join(f"{exam.label} {exam.dtype}" for exam in exams.exams))
    if not intervals:
        _remark("95 % intervals need a wider terminal; they are in MLflow, too")
    for remark in remarks(found, None if exams.reference is None else exams.reference.label):
        _remark(remark)
    for published in benchmark_of(benchmark.name).published:
        values = ", ".join(f"{name} {value:g}" for name, value in published.values.items())
        _remark(f"published, {published.model}: {values} ({published.source})", style="dim")


def metric_rows(title: str, found: ByLabel, *, intervals: bool) -> Table:
    """A row per metric that has a value; variants that show the same numbers share one."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("metric", "variant", "better"):
        table.add_column(column)
    for column in ("n", *found):
        table.add_column(column, justify="right")
    for name, by_variant in _by_name(found).items():
        shown: dict[tuple[str, ...], list[Variant]] = {}
        for variant, metrics in by_variant.items():
            cells = tuple(_cell(metric, intervals=intervals) for metric in metrics)
            if any(not metric.missing for metric in metrics):
                num = max(metric.num for metric in metrics)
                shown.setdefault((metrics[0].better, str(num), *cells), []).append(variant)
        for (better, *numbers), variants in shown.items():
            label = "both" if len(variants) > 1 else variants[0]
            table.add_row(name, label, better.replace("reference", "as ref."), *numbers)
    return table


def remarks(found: ByLabel, reference: str | None) -> list[str]:
    """Notes, weakest components and missing values, each said once with all it is about.

    Args:
        found: metrics by model.
        reference: label of the model that the others are compared with; that it is not compared
            with itself need not be said.
    """
    places: dict[str, list[tuple[Metric, str]]] = {}
    for label, metrics in found.items():
        for metric in metrics:
            for text in _texts(metric):
                if not (label == reference and text == NO_REFERENCE):
                    places.setdefault(text, []).append((metric, label))
    return [f"{_where(listed, found)}: {text}" for text, listed in places.items()]


def _texts(metric: Metric) -> list[str]:
    texts = [*metric.notes, *([metric.missing] if metric.missing else [])]
    if not texts and metric.worst is not None:
        part, value = metric.worst
        texts.append(f"weakest part: {part} = {value:.3g}")
    return texts


def _where(listed: Sequence[tuple[Metric, str]], found: ByLabel) -> str:
    """Names, each with its variant and model unless all of them share the remark."""
    known = _by_name(found)
    about: dict[str, tuple[set[str], set[str]]] = {}
    for metric, label in listed:
        variants, labels = about.setdefault(metric.name, (set(), set()))
        variants.add(metric.variant)
        labels.add(label)
    names = []
    for name, (variants, labels) in about.items():
        some = [*sorted(variants if variants != set(known[name]) else ())]
        some += sorted(labels if labels != set(found) else ())
        names.append(f"{name} ({', '.join(some)})" if some else name)
    return "; ".join(names)


def _by_name(found: ByLabel) -> dict[str, dict[Variant, list[Metric]]]:
    """Metric name -> variant -> the metric of each model."""
    rows: dict[str, dict[Variant, list[Metric]]] = {}
    for metrics in found.values():
        for metric in metrics:
            rows.setdefault(metric.name, {}).setdefault(metric.variant, []).append(metric)
    return rows


def _cell(metric: Metric, *, intervals: bool) -> str:
    if math.isnan(metric.value):
        return "-"
    text = f"{metric.value:.2e}" if 0 < abs(metric.value) < 1e-3 else f"{metric.value:.3f}"
    if metric.interval is None or not intervals:
        return text
    return f"{text} [{metric.interval[0]:.3f}, {metric.interval[1]:.3f}]"


def _width(table: Table) -> int:
    return console.measure(table, options=console.options.update(width=UNLIMITED)).maximum


def _remark(text: str, style: str = "") -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, 2), expand=False))
