"""TOFU: probability, truth ratio, forget quality and model utility (Maini et al. 2024).

A loss is the mean negative log-likelihood of an answer's tokens, nats; a truth ratio R is
p(perturbed) / p(paraphrase), so that a model that knows the answer has a small R.
`compat` has OpenUnlearning's 1e-10 in its denominators; `correct` works with logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from grom.metrics.composite import harmonic
from grom.metrics.ks import ks_test
from grom.metrics.metric import Better, Metric, Variant, mean, mean_metric, not_computed

TruthRatio = Literal["geometric", "arithmetic", "prob_mean"]
"""How wrong answers are averaged: their losses, their probabilities, or their losses within
p / (p + p_wrong)."""

EPSILON = 1e-10
DESTROYED_NATS = 23.0
"""Loss whose probability is `EPSILON`: above it the truth ratio of `compat` tends to 0."""
NUM_UTILITY_PARTS = 9
LITTLE_POWER = 100
"""Values below which a damaged model can pass the forget quality test (forget01 has 40)."""


def probability(losses: Sequence[float], split: str, *, variant: Variant, better: Better) -> Metric:
    """Mean of exp(-loss) over answers, 0 to 1; both variants are the same number."""
    values = [_exp(-loss) for loss in losses]
    return mean_metric(f"{split} probability", values, variant=variant, better=better)


def normalised_probability(
    right_loss: float, wrong_losses: Sequence[float], variant: Variant
) -> float:
    """p / (p + sum of the wrong answers' p) of one question, 0 to 1; NaN without wrong answers.

    `compat` adds 1e-10 to the denominator, which makes it 0 instead of chance for a model that
    finds all answers improbable.
    """
    if not len(wrong_losses):
        return math.nan
    if variant == "correct":
        return 1 / math.fsum(_exp(right_loss - loss) for loss in (right_loss, *wrong_losses))
    right = _exp(-right_loss)
    return right / (right + math.fsum(_exp(-loss) for loss in wrong_losses) + EPSILON)


def truth_ratio(
    paraphrased_loss: float,
    perturbed_losses: Sequence[float],
    kind: TruthRatio,
    variant: Variant = "correct",
) -> float:
    """R = p(perturbed) / p(paraphrase) of one question; NaN without perturbed answers.

        geometric:   exp(-mean loss) / p, from 0 up; OpenUnlearning and TOFU's logs
        arithmetic:  mean of exp(-loss) / p, from 0 up
        prob_mean:   p / (p + exp(-mean loss)), 0 to 1; OpenUnlearning since 12/2025

    Args:
        paraphrased_loss: of the right answer in other words; on real authors and world facts, of
            the answer itself.
        perturbed_losses: of the wrong answers.
        kind: which of the three, which share a name in the literature.
        variant: with or without 1e-10 in the denominator.
    """
    if not len(perturbed_losses):
        return math.nan
    wrong_loss = mean(perturbed_losses)
    if kind == "arithmetic":
        least = min(perturbed_losses)
        wrong_loss = least - math.log(mean(_exp(least - loss) for loss in perturbed_losses))
    if variant == "correct":
        difference = paraphrased_loss - wrong_loss
        return 1 / (1 + _exp(difference)) if kind == "prob_mean" else _exp(difference)
    right, wrong = _exp(-paraphrased_loss), _exp(-wrong_loss)
    if kind == "prob_mean":
        return right / (right + wrong + EPSILON)
    return wrong / (right + EPSILON)


def forget_truth_ratio(ratios: Sequence[float], kind: TruthRatio, variant: Variant) -> Metric:
    """Summary of a forget set's truth ratios, 0 to 1.

    Mean of min(R, 1/R): 1 where right and wrong are equally likely, as without knowledge.
    Both knowledge and its opposite lower it, so it is read next to the retrained model's.  For
    prob_mean the mean of the values, .5 where equally likely; lower is better.
    """
    name = f"forget truth ratio ({kind})"
    if kind == "prob_mean":
        return mean_metric(name, ratios, variant=variant, better="lower")
    extra = EPSILON if variant == "compat" else 0.0
    values = [min(ratio, _inverse(ratio + extra)) for ratio in ratios]
    return mean_metric(name, values, variant=variant, better="reference")


def retain_truth_ratio(
    ratios: Sequence[float],
    paraphrased_losses: Sequence[float],
    split: str,
    kind: TruthRatio,
    variant: Variant,
) -> Metric:
    """Summary of the truth ratios of a set to keep, 0 to 1: mean of max(0, 1 - R).

    For prob_mean the mean of the values.  A destroyed model has no meaningful ratio, and in
    `compat` even a perfect one: losses above 23 nats are counted in a note.

    Args:
        ratios: of each question.
        paraphrased_losses: of each question, the ones that the ratios come from.
        split: name of the set.
        kind: of the ratios.
        variant: of the ratios.
    """
    values = ratios if kind == "prob_mean" else [_shortfall(ratio) for ratio in ratios]
    name = f"{split} truth ratio ({kind})"
    found = mean_metric(name, values, variant=variant, better="higher")
    destroyed = sum(loss > DESTROYED_NATS for loss in paraphrased_losses)
    note = (
        f"{destroyed} of {len(paraphrased_losses)} losses exceed {DESTROYED_NATS:.0f} nats: the "
        "model is destroyed there and its truth ratio means nothing"
    )
    return found.noted(note) if destroyed else found


def forget_quality(
    ratios: Sequence[float], reference_ratios: Sequence[float] | None, *, variant: Variant
) -> Metric:
    """p-value of the Kolmogorov-Smirnov test that truth ratios on the forget set are the retrained
    model's.

    0 to 1; 1 for equal ratios.  It cannot fall below 2 / C(n+m, n), which over-forgetting
    reaches as well as knowledge.  `details` has log10 p, the statistic D and the floor.

    Args:
        ratios: geometric truth ratios of the model on the forget set.
        reference_ratios: those of the retrained model on the same set, if there is one.
        variant: of the ratios.
    """
    why = _untestable(ratios, reference_ratios)
    if why or reference_ratios is None:
        return not_computed("forget quality", why, variant=variant, better="higher", low=0, high=1)
    test = ks_test(ratios, reference_ratios)
    found = Metric(
        "forget quality",
        test.p,
        len(ratios),
        variant,
        "higher",
        0,
        1,
        details={
            "log10 p": test.log10_p,
            "statistic": test.statistic,
            "floor": 10**test.log10_floor,
            "log10 floor": test.log10_floor,
        },
    )
    if test.log10_p <= test.log10_floor + 1e-6:
        found = found.noted(f"floor of n = {len(ratios)}, log10 p = {test.log10_p:.2f}")
    if min(len(ratios), len(reference_ratios)) < LITTLE_POWER:
        found = found.noted(f"n = {len(ratios)}: too few to find a damaged model out")
    return found


def model_utility(parts: Mapping[str, float], *, variant: Variant) -> Metric:
    """Harmonic mean of nine: probability, ROUGE-L recall and truth ratio on retain, real authors
    and world facts.

    0 to 1; 0, with the component's name, as soon as one of them is.

    Args:
        parts: the nine by name; probabilities of the last two sets are the normalised ones.
        variant: of the parts.
    """
    found = harmonic("model utility", parts, variant=variant)
    if len(parts) == NUM_UTILITY_PARTS:
        return found
    why = f"{len(parts)} components instead of {NUM_UTILITY_PARTS}"
    return not_computed("model utility", why, variant=variant, better="higher", low=0, high=1)


def _untestable(ratios: Sequence[float], reference_ratios: Sequence[float] | None) -> str:
    if reference_ratios is None or not len(reference_ratios):
        return "no retrained reference"
    if not len(ratios):
        return "no items"
    for whose, values in (("the model", ratios), ("the reference", reference_ratios)):
        if unknown := sum(map(math.isnan, values)):
            return f"{unknown} of {len(values)} truth ratios of {whose} are not numbers"
    return ""


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def _inverse(ratio: float) -> float:
    return 1 / ratio if ratio else math.inf


def _shortfall(ratio: float) -> float:
    # max(0, NaN) is 0: an unknown ratio would count as a bad one.
    return ratio if math.isnan(ratio) else max(0.0, 1 - ratio)
