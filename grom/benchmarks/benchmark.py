"""What a benchmark is: splits, the items that its rows become, and the metrics of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grom.errors import DataError
from grom.items import Item, ItemResult
from grom.metrics.metric import Metric

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""Rows of each split that was found, in order."""


@dataclass(frozen=True, slots=True)
class Split:
    """One part of a benchmark, and where it lies."""

    name: str
    files: tuple[str, ...]
    """Names below the data folder without their ending, globs allowed; the first one found is
    taken."""
    hub: str
    """Hugging Face address: `name:config:split`."""
    needed: bool = True
    """Without it the benchmark cannot run; otherwise its metrics are reported as not computed."""


@dataclass(frozen=True, slots=True)
class Published:
    """Numbers that others report for one model on this benchmark."""

    model: str
    values: Mapping[str, float]
    source: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A named set of questions with its scoring."""

    name: str
    version: int
    """Raise it when the same answers give other numbers, or the same rows other items."""
    folder: str
    """Folder that usually holds its files."""
    splits: tuple[Split, ...]
    items: Callable[[Rows], list[Item]]
    """All that is asked, in order."""
    measure: Callable[[Answers, Answers | None], list[Metric]]
    """Metrics of a model's answers, given those of the reference (retrained) model if any."""
    published: tuple[Published, ...] = ()
    truth_ratios: Callable[[Answers], list[float]] | None = None
    """Truth ratio of each forget item, where the benchmark has any."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Results of one model on the items of a benchmark."""

    results: Sequence[ItemResult]
    dtype: str = "float32"
    """Type of the weights that were measured."""
    by_role: dict[tuple[str, str, str], list[ItemResult]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the results by split, role and kind of question."""
        sorted_results: dict[tuple[str, str, str], list[ItemResult]] = {}
        for result in sorted(self.results, key=lambda result: result.row):
            key = (result.split, result.role, result.ask)
            sorted_results.setdefault(key, []).append(result)
        object.__setattr__(self, "by_role", sorted_results)

    def of(self, split: str, role: str, ask: str = "likelihood") -> list[ItemResult]:
        """Results of one role in the order of the rows; empty if it was not asked."""
        return self.by_role.get((split, role, ask), [])

    def values(self, split: str, role: str, measure: str, ask: str = "likelihood") -> list[float]:
        """One measure of one role in the order of the rows."""
        return [float(getattr(result, measure)) for result in self.of(split, role, ask)]

    def losses(self, split: str, role: str) -> list[float]:
        """Mean negative log-likelihood of each answer token, nats, by row."""
        return [-value for value in self.values(split, role, "mean_logprob")]

    def with_dtype(self, metrics: Iterable[Metric]) -> list[Metric]:
        """The metrics with the type of the weights that they come from."""
        return [replace(metric, dtype=self.dtype) for metric in metrics]


def text_of(row: Row, column: str, split: str, number: int) -> str:
    """A text cell of a row.

    Raises:
        DataError: it is missing, empty or not text; the message has no content of the row.
    """
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        what = "is missing" if column not in row else "is empty or not a text"
        known = ", ".join(sorted(map(str, row)))
        raise DataError(
            f"{split}, row {number + 1}: `{column}` {what}. The columns there are {known}; "
            "see the benchmark's file in grom/benchmarks for those it needs."
        )
    return value


def texts_of(row: Row, column: str, split: str, number: int) -> list[str]:
    """A list of texts of a row; one text counts as a list of one."""
    value = row.get(column)
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return list(value)
    return [text_of(row, column, split, number)]
