"""Membership inference: scores that are high for texts the model has not seen, and their AUC.

Labels are forget = 0, holdout = 1 throughout.  MUSE's own code turns both round.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from grom.metrics.metric import Z_95, Metric, not_computed

Numbers = Sequence[float] | NDArray[np.float64]
MinK = Literal["correct", "openunlearning", "muse"]
LEAST_VARIANCE = 1e-6
"""Where all tokens are equally likely, min-k++ would divide by zero."""


def loss_score(logprob_T: Numbers) -> float:
    """Mean negative log-likelihood of a text, nats per token; NaN of none."""
    return -float(np.mean(logprob_T)) if len(logprob_T) else math.nan


def zlib_score(mean_nll: float, num_bytes: int) -> float:
    """Mean negative log-likelihood over the size of the text compressed by zlib, nats per byte.

    An empty text compresses to eight bytes, so the size is never 0.
    """
    return mean_nll / num_bytes


def reference_score(mean_nll: float, mean_nll_reference: float) -> float:
    """Mean negative log-likelihood less that of a model that never saw the text, nats per token."""
    return mean_nll - mean_nll_reference


def min_k(logprob_T: Numbers, k: float, kind: MinK = "correct") -> float:
    """Minus the mean of the lowest share k of log-probabilities, nats.

    NaN if any of them is.  At least one token counts, except in `muse`, where a text shorter than
    1/k tokens is NaN.  A text without tokens is NaN, in `openunlearning` 0.

    Source: Shi et al. 2024 (Min-K% Prob); k is .4 in the TOFU and MUSE settings.
    """
    values = np.asarray(logprob_T, dtype=np.float64)
    if not len(values):
        return 0.0 if kind == "openunlearning" else math.nan
    # Sorting would put NaN last and drop it without a word.
    count = int(k * len(values)) if kind == "muse" else max(1, int(k * len(values)))
    if np.isnan(values).any() or not count:
        return math.nan
    return float(-np.sort(values)[:count].mean())


def min_k_plus_plus(
    logprob_T: Numbers, mean_T: Numbers, variance_T: Numbers, k: float, kind: MinK = "correct"
) -> float:
    """`min_k` of log-probabilities standardised over the vocabulary, in standard deviations.

    Args:
        logprob_T: of the text's tokens.
        mean_T: mean log-probability under the model's own distribution, at each position.
        variance_T: its variance; values below 1e-6 count as 1e-6.
        k: share of tokens.
        kind: as in `min_k`.

    Source: Zhang et al. 2024 (Min-K%++).
    """
    deviation_T = np.sqrt(np.maximum(np.asarray(variance_T, dtype=np.float64), LEAST_VARIANCE))
    with np.errstate(invalid="ignore"):  # -inf less -inf is NaN, which min_k reports
        standard_T = (np.asarray(logprob_T) - np.asarray(mean_T)) / deviation_T
    return min_k(standard_T, k, kind)


def auc(forget: Numbers, holdout: Numbers) -> float:
    """Probability that a held-out text scores above a forget text, ties counting one half.

    1: forget texts are recognised as seen; .5: no difference; 0: they look less seen than unseen
    ones.  NaN if a set is empty or a score is not a number.
    """
    known, held = np.sort(np.asarray(forget, float)), np.asarray(holdout, float)
    if not len(known) or not len(held) or np.isnan(known).any() or np.isnan(held).any():
        return math.nan
    below = np.searchsorted(known, held, side="left").sum()
    not_above = np.searchsorted(known, held, side="right").sum()
    return float(below + not_above) / (2 * len(known) * len(held))


def membership_auc(attack: str, forget: Numbers, holdout: Numbers) -> Metric:
    """`auc` of an attack's scores with the 95 % interval of Hanley and McNeil 1982.

    The interval has no width at 0 and 1, where its variance is 0, and is left out there.
    """
    name = f"AUC of {attack}"
    value = auc(forget, holdout)
    if math.isnan(value):
        empty = not len(forget) or not len(holdout)
        why = "no forget or no holdout texts" if empty else "a score is not a number"
        return not_computed(name, why, variant="correct", better="reference", low=0, high=1)
    first, second = value / (2 - value), 2 * value**2 / (1 + value)
    spread = (len(forget) - 1) * (first - value**2) + (len(holdout) - 1) * (second - value**2)
    variance = (value * (1 - value) + spread) / (len(forget) * len(holdout))
    half = Z_95 * math.sqrt(variance)
    interval = (max(0.0, value - half), min(1.0, value + half)) if 0 < value < 1 else None
    num = len(forget) + len(holdout)
    return Metric(name, value, num, "correct", "reference", 0, 1, interval=interval)


def s_mia(auc: float, auc_reference: float | None, attack: str = "MIA", num: int = 1) -> Metric:
    """How near an attack's AUC is to the retrained model's: 1 - |AUC - AUC_ref| / AUC_ref.

    Cut to 0..1; 1 is the reference's own AUC.  Source: OpenUnlearning and UDS.

    Args:
        auc: of the attack on the model.
        auc_reference: of the attack on the retrained model, if there is one.
        attack: its name.
        num: texts behind the AUC.
    """
    name = f"s-{attack}"
    why = ""
    if auc_reference is None or math.isnan(auc_reference):
        why = "no retrained reference"
    elif auc_reference <= 0:
        why = "the AUC of the retrained reference is 0"
    elif math.isnan(auc):
        why = f"no AUC of {attack}"
    if why or auc_reference is None:
        return not_computed(name, why, variant="correct", better="higher", low=0, high=1)
    value = min(1.0, max(0.0, 1 - abs(auc - auc_reference) / auc_reference))
    return Metric(name, value, num, "correct", "higher", 0, 1)
