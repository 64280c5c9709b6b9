"""The Kolmogorov-Smirnov test equals scipy's, the counting of paths, and the published floors."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from grom.metrics.ks import ks_test, log10_p_value


def by_enumeration(n: int, m: int, statistic: float) -> float:
    """The share of all merges of two samples that are at least that far apart."""
    reached = 0
    for ranks in itertools.combinations(range(n + m), n):
        first = [float(rank) for rank in ranks]
        second = [float(rank) for rank in range(n + m) if rank not in ranks]
        reached += bool(ks_2samp(first, second).statistic >= statistic - 1e-12)
    return reached / math.comb(n + m, n)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (2, 5), (4, 3)])
def test_the_p_value_is_the_share_of_all_merges(n: int, m: int) -> None:
    for apart in {abs(i * m - j * n) for i in range(n + 1) for j in range(m + 1)}:
        expected = by_enumeration(n, m, apart / (n * m))
        assert 10 ** log10_p_value(n, m, apart) == pytest.approx(expected)


@given(n=st.integers(1, 60), m=st.integers(1, 60), seed=st.integers(0, 99))
def test_the_test_is_scipys_where_scipys_is_exact(n: int, m: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    # Rounded, so that there are ties.
    first = random.normal(size=n).round(1 + seed % 2).tolist()
    second = (random.normal(size=m) + seed / 50).round(1 + seed % 2).tolist()
    test = ks_test(first, second)
    with warnings.catch_warnings(record=True) as fallback:
        warnings.simplefilter("always")
        theirs = ks_2samp(first, second, method="exact")
    assert test.statistic == pytest.approx(theirs.statistic, abs=1e-12)
    if not fallback:
        assert test.p == pytest.approx(theirs.pvalue, rel=1e-9)
    assert test.log10_floor - 1e-9 <= test.log10_p <= 0
    mirrored = ks_test(second, first)
    assert mirrored.log10_p == pytest.approx(test.log10_p, abs=1e-9)


def test_p_is_one_where_scipys_exact_test_gives_up() -> None:
    """The least D of five against five: every merge is at least that far apart."""
    test = ks_test([1, 3, 5, 7, 9], [2, 4, 6, 8, 10])
    assert test.statistic == pytest.approx(0.2)
    assert test.p == pytest.approx(1, abs=1e-14)
    assert test.p <= 1


@pytest.mark.parametrize(
    ("n", "floor"),
    [(4, 2 / 70), (40, 1.86e-23), (200, 1.94e-119), (300, 1.48e-179), (400, 1.06e-239)],
)
def test_disjoint_samples_reach_the_published_floor(n: int, floor: float) -> None:
    first = [float(value) for value in range(n)]
    test = ks_test(first, [value + n for value in first])
    assert test.p == pytest.approx(floor, rel=3e-3)
    assert test.log10_p == pytest.approx(test.log10_floor, abs=1e-9)
    assert test.log10_floor == pytest.approx(
        math.log10(2) - math.log10(math.comb(2 * n, n)), abs=1e-10
    )


@pytest.mark.parametrize("m", [1000, 700])
def test_the_logarithm_outlives_the_p_value(m: int) -> None:
    first = [float(value) for value in range(1000)]
    test = ks_test(first, [value + 1000.0 for value in range(m)])
    exact = math.log10(2) - math.log10(math.comb(1000 + m, 1000))
    assert test.p == 0
    assert test.log10_p == pytest.approx(exact, abs=1e-8)


def test_equal_samples_have_p_one() -> None:
    test = ks_test([1.0, 2.0, 2.0, 5.0], [2.0, 5.0, 1.0, 2.0])
    assert (test.p, test.statistic) == (1, 0)
    assert log10_p_value(4, 4, 0) == 0
