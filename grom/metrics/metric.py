"""A measured number with all that is needed to read it; never a bare float."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Variant = Literal["compat", "correct"]
"""compat: as OpenUnlearning, MUSE or lm-eval compute it, faults included.  correct: as defined."""
Better = Literal["higher", "lower", "reference"]
"""Which way is good for an unlearned model: up, down, or near the reference model's value."""
Z_95 = 1.959963984540054
"""Half width of the 95 % interval of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, how it was computed, from how many items, and what is missing."""

    name: str
    value: float
    """NaN where it could not be computed; `missing` says why."""
    num: int
    """Items that went into it."""
    variant: Variant
    better: Better
    low: float
    """Lowest possible value."""
    high: float
    """Highest possible value."""
    dtype: str = "float64"
    """Type of the numbers that it was computed from: the model's, or float64 for given arrays."""
    missing: str = ""
    """Why there is no value, e.g. "not computed: no retrained reference"."""
    interval: tuple[float, float] | None = None
    """95 % interval, where there is one."""
    notes: tuple[str, ...] = ()
    """What a reader must know: a floor that was reached, a component that is zero."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Components of a composite, by name."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the value that are no components: a logarithm, a floor, counts."""

    @property
    def worst(self) -> tuple[str, float] | None:
        """The component furthest from good: the lowest one, or the highest if lower is better."""
        known = {name: part for name, part in self.parts.items() if not math.isnan(part)}
        if not known:
            return None
        pick = max if self.better == "lower" else min
        return pick(known.items(), key=lambda part: part[1])

    def noted(self, note: str) -> Metric:
        """The same metric with one more note."""
        return replace(self, notes=(*self.notes, note))


def not_computed(
    name: str, why: str, *, variant: Variant, better: Better, low: float, high: float
) -> Metric:
    """A metric without a value, and the reason."""
    return Metric(name, math.nan, 0, variant, better, low, high, missing=f"not computed: {why}")


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean with exact summation; NaN of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def mean_metric(
    name: str,
    values: Iterable[float],
    *,
    variant: Variant,
    better: Better,
    low: float = 0.0,
    high: float = 1.0,
) -> Metric:
    """Mean of one value for each item, with its normal 95 % interval from two items on.

    Not computed without items, and where a value is not a number: leaving items out would change
    the set that the mean is of.
    """
    listed = [float(value) for value in values]
    unknown = sum(map(math.isnan, listed))
    if unknown or not listed:
        why = f"{unknown} of {len(listed)} values are not numbers" if listed else "no items"
        return not_computed(name, why, variant=variant, better=better, low=low, high=high)
    value = mean(listed)
    interval = _interval(listed, value, low, high)
    return Metric(name, value, len(listed), variant, better, low, high, interval=interval)


def _interval(
    values: Sequence[float], center: float, low: float, high: float
) -> tuple[float, float] | None:
    if len(values) < 2 or not math.isfinite(center):
        return None
    variance = math.fsum((value - center) ** 2 for value in values) / (len(values) - 1)
    if variance == 0:  # equal values say nothing of how far others may be
        return None
    half = Z_95 * math.sqrt(variance / len(values))
    return max(low, center - half), min(high, center + half)
