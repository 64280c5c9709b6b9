"""A metric is never a bare float, and never a silent default."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import grom.metrics
from grom.metrics.metric import Better, Metric, mean, mean_metric, not_computed

SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=12)


def averaged(values: list[float], better: Better = "higher") -> Metric:
    return mean_metric("a share", values, variant="correct", better=better)


@given(values=SHARES)
def test_a_mean_lies_in_its_interval_and_the_interval_in_its_range(values: list[float]) -> None:
    metric = averaged(values)
    assert metric.value == pytest.approx(statistics.fmean(values))
    assert metric.num == len(values)
    if len(set(values)) == 1:  # equal values say nothing of how far others may be
        assert metric.interval is None
        return
    assert metric.interval is not None
    low, high = metric.interval
    assert 0 <= low <= metric.value + 1e-12
    assert metric.value - 1e-12 <= high <= 1


def test_the_interval_is_the_normal_one() -> None:
    metric = averaged([0.25, 0.5, 0.75, 0.5])
    half = 1.959964 * statistics.stdev([0.25, 0.5, 0.75, 0.5]) / 2
    assert metric.interval == pytest.approx((0.5 - half, 0.5 + half), rel=1e-6)


def test_one_value_has_no_interval() -> None:
    assert averaged([0.5]).interval is None


def test_nothing_is_not_computed() -> None:
    metric = averaged([])
    assert math.isnan(metric.value)
    assert metric.missing == "not computed: no items"
    assert math.isnan(mean([]))


def test_a_value_that_is_not_a_number_is_counted_not_dropped() -> None:
    metric = averaged([0.5, math.nan, 0.7])
    assert math.isnan(metric.value)
    assert metric.missing == "not computed: 1 of 3 values are not numbers"


def test_the_worst_part_is_the_lowest_or_the_highest_where_lower_is_better() -> None:
    parts = {"a": 0.2, "b": 0.9, "c": math.nan}
    high = Metric("m", 0.5, 3, "correct", "higher", 0, 1, parts=parts)
    low = Metric("m", 0.5, 3, "correct", "lower", 0, 1, parts=parts)
    assert (high.worst, low.worst) == (("a", 0.2), ("b", 0.9))
    assert averaged([0.5]).worst is None


def test_notes_add_up() -> None:
    assert averaged([0.5]).noted("first").noted("second").notes == ("first", "second")


def test_what_is_missing_is_said_with_range_and_direction() -> None:
    metric = not_computed(
        "PrivLeak", "no reference", variant="compat", better="reference", low=-100, high=100
    )
    assert (metric.num, metric.low, metric.high) == (0, -100, 100)
    assert metric.missing == "not computed: no reference"


def test_the_package_lists_every_name_once_and_in_order() -> None:
    assert list(grom.metrics.__all__) == sorted(set(grom.metrics.__all__))
    assert all(hasattr(grom.metrics, name) for name in grom.metrics.__all__)
