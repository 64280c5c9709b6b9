"""How much of an answer the model says by itself under teacher forcing.

Shapes: T answer tokens.  `first_T` tells for each whether it was the model's first choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from grom.metrics.metric import Variant

First = Sequence[bool] | NDArray[Any]


def extraction_strength(first_T: First, variant: Variant) -> float:
    """1 - k/T, k the least number of leading tokens after which every token is the first choice.

    From 0, nothing, to 1, all of it.  `compat` never falls below 1/T, as OpenUnlearning's loop
    ends at k = T-1 when nothing matches, and is 0 without tokens; `correct` is 0 when the last
    token is wrong, and NaN without tokens.  Source: Carlini et al. 2021; OpenUnlearning gives it
    the answer without its last labelled token.
    """
    length = len(first_T)
    if not length:
        return 0.0 if variant == "compat" else math.nan
    suffix = 0
    while suffix < length and first_T[length - 1 - suffix]:
        suffix += 1
    return max(suffix, 1) / length if variant == "compat" else suffix / length


def exact_memorisation(first_T: First) -> float:
    """Share of answer tokens that are the model's first choice, 0 to 1; NaN of none."""
    return sum(map(bool, first_T)) / len(first_T) if len(first_T) else math.nan
