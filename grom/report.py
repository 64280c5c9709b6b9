"""The report of a run: one HTML page that needs no server, no script and no other file.

The page is given numbers, digests and settings, never the text of an example.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from jinja2 import Environment, StrictUndefined

from grom.gate import Condition
from grom.metrics.metric import Metric

TEMPLATE = "report.html.j2"
Cell: TypeAlias = float | str | None
DIRECTIONS = {
    "higher": "higher is better",
    "lower": "lower is better",
    "reference": "best near the retrained model",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """One number that the run was about, large at the top."""

    name: str
    before: float
    after: float
    should_fall: bool = False
    measure: str = "mean answer probability"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One metric of several models, with what is needed to read it."""

    name: str
    cells: tuple[Cell, ...]
    """One per column; None or NaN is shown as n/a."""
    variant: str = ""
    num: str = ""
    """Items that went into it."""
    dtype: str = ""
    better: str = ""
    notes: tuple[str, ...] = ()
    missing: str = ""
    """Why there is no value."""

    @property
    def details(self) -> str:
        """Variant, number of items, dtype and direction, as far as known."""
        num = f"n = {self.num}" if self.num else ""
        parts = (self.variant, num, self.dtype, DIRECTIONS.get(self.better, self.better))
        return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class MetricTable:
    """A table: metrics down, models across."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure and what it shows."""

    caption: str
    png: bytes

    @property
    def source(self) -> str:
        """The figure as a data URI."""
        return f"data:image/png;base64,{b64encode(self.png).decode()}"


@dataclass(frozen=True, slots=True)
class ReportPage:
    """Everything that the page shows, in its order."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    """What identifies the run: model, digests, versions."""
    headlines: Sequence[Headline] = ()
    conditions: Sequence[Condition] = ()
    """The gate; empty if nothing was judged."""
    warnings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[MetricTable] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain nested mappings, lists, strings and numbers, as from JSON."""

    @property
    def failed(self) -> list[str]:
        """Names of the conditions that were not met."""
        return [condition.name for condition in self.conditions if not condition.passed]


def render_report(page: ReportPage) -> str:
    """The page as HTML, everything escaped, figures inside.

    Raises:
        ValueError: a row of a table has not one cell per column.
    """
    for table in page.tables:
        if strange := [row.name for row in table.rows if len(row.cells) != len(table.columns)]:
            raise ValueError(f"{table.name}: {strange[0]!r} needs {len(table.columns)} cells")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "settings": settings_text}
    text = Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text).render(page=page)


def number(value: Cell, sign: str = "") -> str:
    """A number as people read it: three significant decimals, n/a for none, text as it is.

    Args:
        value: number, text or None.
        sign: `+` to write the plus of positive numbers.
    """
    if isinstance(value, str):
        return value
    if value is None or math.isnan(value):
        return "n/a"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if isinstance(value, int) or abs(value) >= 999.5:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}#.3g}".rstrip(".")


def settings_text(config: Mapping[str, Any]) -> str:
    """Settings as YAML, in their order."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100).strip()


def metric_table(name: str, found: Mapping[str, Sequence[Metric]], note: str = "") -> MetricTable:
    """A table of metrics by model: a row for each name and variant, a column for each model.

    Args:
        name: heading.
        found: model -> its metrics.
        note: below the heading.
    """
    by_row: dict[tuple[str, str], dict[str, Metric]] = {}
    for model, metrics in found.items():
        for metric in metrics:
            by_row.setdefault((metric.name, metric.variant), {})[model] = metric
    rows = tuple(_metric_row(metrics, list(found)) for metrics in by_row.values())
    return MetricTable(name, tuple(found), rows, note)


def _metric_row(metrics: Mapping[str, Metric], models: Sequence[str]) -> TableRow:
    first = next(iter(metrics.values()))
    measured = [metric for metric in metrics.values() if not metric.missing]
    reasons: dict[str, list[str]] = {}
    for model in models:
        reason = metrics[model].missing if model in metrics else "not computed"
        if reason:
            reasons.setdefault(reason, []).append(model)
    return TableRow(
        name=first.name,
        cells=tuple(_metric_cell(metrics.get(model)) for model in models),
        variant=first.variant,
        num=_distinct(f"{metric.num:,}" for metric in measured),
        dtype=_distinct(metric.dtype for metric in measured),
        better=first.better,
        notes=tuple(
            f"{model}: {note}" for model, metric in metrics.items() for note in _remarks(metric)
        ),
        missing="; ".join(f"{reason} ({', '.join(names)})" for reason, names in reasons.items()),
    )


def _metric_cell(metric: Metric | None) -> Cell:
    if metric is None or metric.interval is None or math.isnan(metric.value):
        return None if metric is None else metric.value
    low, high = metric.interval
    return f"{number(metric.value)} ({number(low)} to {number(high)})"


def _remarks(metric: Metric) -> list[str]:
    """What a reader must know of a metric, its worst part and the numbers beside it."""
    remarks = list(metric.notes)
    if metric.worst is not None:
        remarks.append(f"worst part: {metric.worst[0]} {number(metric.worst[1])}")
    if metric.details:
        remarks.append(", ".join(f"{name} {number(v)}" for name, v in metric.details.items()))
    return remarks


def _distinct(values: Iterable[str]) -> str:
    return " / ".join(dict.fromkeys(values))
