"""Metrics that several benchmarks share, from the answers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grom.benchmarks.benchmark import Answers
from grom.metrics.composite import privacy_score
from grom.metrics.membership import membership_auc, reference_score, s_mia
from grom.metrics.metric import Better, Metric, Variant, mean_metric, not_computed

ATTACKS = (
    ("loss", "mean_logprob", -1.0),
    ("zlib", "zlib", 1.0),
    ("min-k", "min_k", 1.0),
    ("min-k++", "min_k_plus_plus", 1.0),
)
"""Name, measure of an item, and its sign: scores are high for texts that were not seen."""


class Mean(NamedTuple):
    """A mean over the items of one role."""

    name: str
    measure: str
    variant: Variant
    better: Better
    ask: str = "likelihood"


def means(answers: Answers, split: str, role: str, wanted: Sequence[Mean]) -> list[Metric]:
    """Means of item values, each named after the split."""
    return [
        mean_metric(
            f"{split} {one.name}",
            answers.values(split, role, one.measure, one.ask),
            variant=one.variant,
            better=one.better,
        )
        for one in wanted
    ]


def health(answers: Answers, split: str, role: str) -> list[Metric]:
    """Whether the model still speaks: repetition, empty, ended and degenerate answers, length."""
    rates: tuple[tuple[str, str, Better], ...] = (
        ("repetition", "rep_4", "lower"),
        ("empty rate", "empty", "lower"),
        ("EOS rate", "ended", "higher"),
        ("degenerate rate", "degenerate", "lower"),
    )
    found = [
        mean_metric(
            f"{split} {name}",
            answers.values(split, role, measure, "generation"),
            variant="correct",
            better=better,
        )
        for name, measure, better in rates
    ]
    ratios = answers.values(split, role, "length_ratio", "generation")
    ratio = mean_metric(
        f"{split} length ratio", ratios, variant="correct", better="reference", high=float("inf")
    )
    return [*found, ratio]


def membership(
    answers: Answers, reference: Answers | None, split: str, holdout: str, role: str
) -> list[Metric]:
    """AUC of each attack between two splits, and how near it is to the retrained model's."""
    if not answers.of(split, role) or not answers.of(holdout, role):
        why = f"no {holdout!r} split to tell {split!r} from"
        return [
            not_computed(
                f"AUC of {name}", why, variant="correct", better="reference", low=0, high=1
            )
            for name, _, _ in ATTACKS
        ]
    found = []
    for name, measure, sign in ATTACKS:
        own = membership_auc(name, *_scores(answers, (split, holdout), role, measure, sign))
        compared = None
        if reference is not None:
            scores = _scores(reference, (split, holdout), role, measure, sign)
            compared = membership_auc(name, *scores).value
        found += [own, s_mia(own.value, compared, name, own.num)]
    near = {metric.name: metric.value for metric in found if metric.name.startswith("s-")}
    score = privacy_score(near, variant="correct")
    return [*found, _reference_attack(answers, reference, (split, holdout), role), score]


def _reference_attack(
    answers: Answers, reference: Answers | None, splits: tuple[str, str], role: str
) -> Metric:
    """The loss against a model that never saw the text."""
    if reference is None:
        why = "no retrained reference"
        return not_computed(
            "AUC of reference", why, variant="correct", better="reference", low=0, high=1
        )
    scores = [
        [
            reference_score(own, other)
            for own, other in zip(
                answers.losses(split, role), reference.losses(split, role), strict=True
            )
        ]
        for split in splits
    ]
    return membership_auc("reference", scores[0], scores[1])


def _scores(
    answers: Answers, splits: tuple[str, str], role: str, measure: str, sign: float
) -> tuple[list[float], list[float]]:
    first, second = (
        [sign * value for value in answers.values(split, role, measure)] for split in splits
    )
    return first, second
