"""Two-sample Kolmogorov-Smirnov test, exact, whose logarithm survives where p itself underflows.

scipy's exact test falls back to the asymptotic one where rounding takes p above 1, as it does for
five values against five.

Shapes: N values of the first sample, M of the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class KsTest:
    """Whether two samples come from one distribution."""

    p: float
    """Two-sided p-value; 0 where it is below the least float."""
    log10_p: float
    """Its decimal logarithm, never -inf."""
    statistic: float
    """D, the largest distance of the two distribution functions, 0 to 1."""
    log10_floor: float
    """Of the least p that samples of these sizes can have, 2 / C(n+m, n)."""


def ks_test(first: Sequence[float], second: Sequence[float]) -> KsTest:
    """The two-sided test of two samples, neither empty nor with NaN; time grows with n m.

    Ties count as in scipy: p is that of D for samples without ties, and thus too large.
    """
    n, m = len(first), len(second)
    first_N, second_M = np.sort(first), np.sort(second)
    values = np.concatenate([first_N, second_M])
    i, j = (np.searchsorted(sample, values, side="right") for sample in (first_N, second_M))
    apart = int(np.abs(i * m - j * n).max())
    log10_p = log10_p_value(n, m, apart)
    return KsTest(10**log10_p, log10_p, apart / (n * m), log10_p_value(n, m, n * m))


def log10_p_value(n: int, m: int, apart: int) -> float:
    """Decimal logarithm of the two-sided p-value of D = apart / (n m).

    Of the C(n+m, n) ways to merge the samples, each a lattice path from (0, 0) to (n, m), it is
    the share of those that anywhere have |i m - j n| >= apart.  The paths are counted row by row
    as logarithms, so that nothing underflows.
    """
    if apart == 0:
        return 0.0
    log_factorial = np.array([math.lgamma(value + 1) for value in range(n + m + 1)])
    j_M = np.arange(m + 1)
    reached_M = np.where(j_M * n >= apart, 0.0, -math.inf)
    for i in range(1, n + 1):
        inside = np.flatnonzero(np.abs(i * m - j_M * n) < apart)
        counted_M = log_factorial[i : i + m + 1] - log_factorial[i] - log_factorial[: m + 1]
        if len(inside):
            low, high = inside[0], inside[-1] + 1
            left = counted_M[low - 1] if low else -math.inf
            steps = np.concatenate([[left], reached_M[low:high]])
            counted_M[low:high] = np.logaddexp.accumulate(steps)[1:]
        reached_M = counted_M
    total = log_factorial[n + m] - log_factorial[n] - log_factorial[m]
    return min(0.0, float(reached_M[m] - total) / math.log(10))
