"""Whether a model still speaks when it is asked what it was to forget.

A low answer probability alone does not tell forgetting from a broken model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol

from grom.metrics.metric import Better, Metric, mean_metric
from grom.metrics.text import words

REPETITIVE = 0.5
"""Share of repeated 4-grams above which an answer counts as degenerate."""


class Said(Protocol):
    """One generated answer."""

    @property
    def ids(self) -> Sequence[int]:
        """New tokens without the one that ended them."""

    @property
    def text(self) -> str:
        """Decoded without special tokens."""

    @property
    def ended(self) -> bool:
        """By its own end token or a stop string, not by the limit."""


def rep_4(tokens: Sequence[Hashable]) -> float:
    """Share of 4-grams that occurred before: 1 - distinct / all; 0 to 1, 0 below four tokens.

    Source: Welleck et al. 2020 (seq-rep-4).
    """
    grams = [tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_degenerate(said: Said) -> bool:
    """Without a word in any script, or mostly repetition."""
    return not words(said.text) or rep_4(said.ids) > REPETITIVE


def generation_health(said: Sequence[Said], reference_lengths: Sequence[int]) -> tuple[Metric, ...]:
    """Repetition (mean rep-4), empty rate, EOS rate, degenerate rate and length ratio.

    All are shares from 0 to 1 of the answers, but for the length ratio: the mean of generated over
    reference length, both in tokens; 1 is as long as the reference.  It is not computed where a
    reference has no tokens.

    Args:
        said: generated answers.
        reference_lengths: tokens of each right answer.
    """
    ratios = [
        len(one.ids) / length if length else math.nan
        for one, length in zip(said, reference_lengths, strict=True)
    ]
    return (
        _rate("repetition", [rep_4(one.ids) for one in said], "lower"),
        _rate("empty rate", [not one.text.strip() for one in said], "lower"),
        _rate("EOS rate", [one.ended for one in said], "higher"),
        _rate("degenerate rate", [is_degenerate(one) for one in said], "lower"),
        mean_metric("length ratio", ratios, variant="correct", better="reference", high=math.inf),
    )


def _rate(name: str, values: Sequence[float], better: Better) -> Metric:
    return mean_metric(name, values, variant="correct", better=better)
