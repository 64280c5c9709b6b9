"""Single facts, forgotten or rewritten: CounterFact by probabilities, ZsRE by tokens.

The same numbers are read two ways.  `unlearning`: the true answer should be gone, lower is better.
`editing`: the new answer should have taken its place, higher is better.  Neighbouring and
unrelated facts should stay in both.

Shapes: T answer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from grom.metrics.composite import harmonic
from grom.metrics.metric import Better, Metric, Variant, mean, mean_metric

Reading = Literal["unlearning", "editing"]
Losses = Sequence[tuple[float, float]]
"""Loss of the true and of the new object after each prompt of one fact, nats per token."""


def token_accuracy(
    first_T: Sequence[bool] | NDArray[Any], ids_T: Sequence[int], special_ids: Collection[int]
) -> float:
    """Share of answer tokens that are the model's first choice, special tokens left out; 0 to 1.

    A BOS among the targets, which no model predicts, would hold a perfect one below 1.  NaN if no
    token is left.

    Args:
        first_T: whether each token was the first choice under teacher forcing.
        ids_T: the tokens.
        special_ids: tokens that are no part of an answer.
    """
    asked = [
        bool(first) for first, token in zip(first_T, ids_T, strict=True) if token not in special_ids
    ]
    return mean(asked)


def share_preferred(losses: Losses, preferred: Literal["true", "new"]) -> float:
    """Share of a fact's prompts with P(preferred) > P(other); NaN without prompts or with NaN.

    Equal probabilities prefer neither, so that a destroyed model has no successes.
    """
    if any(math.isnan(loss) for pair in losses for loss in pair):
        return math.nan
    return mean((true < new) if preferred == "true" else (new < true) for true, new in losses)


def counterfact(
    rewrite: Sequence[Losses],
    paraphrase: Sequence[Losses],
    neighbourhood: Sequence[Losses],
    reading: Reading,
    *,
    variant: Variant = "correct",
) -> tuple[Metric, Metric, Metric, Metric]:
    """CounterFact's efficacy, paraphrase, neighbourhood and score, each 0 to 1.

    For each fact the share of its prompts where the one object is likelier than the other, then
    the mean over facts: the new one on the rewritten prompt and its paraphrases (`editing`), or
    the true one there (`unlearning`); the true one on neighbours.  The score is their harmonic
    mean, of 1 - efficacy and 1 - paraphrase in `unlearning`.  Source: Meng et al. 2022.

    Args:
        rewrite: losses by fact and prompt.
        paraphrase: the same after paraphrases.
        neighbourhood: the same after prompts on other subjects with the same true object.
        reading: what success is.
        variant: how the losses were measured.
    """
    unlearned = reading == "unlearning"
    wanted: Literal["true", "new"] = "true" if unlearned else "new"
    better: Better = "lower" if unlearned else "higher"
    efficacy = _over_facts("CounterFact efficacy", rewrite, wanted, variant, better)
    general = _over_facts("CounterFact paraphrase", paraphrase, wanted, variant, better)
    near = _over_facts("CounterFact neighbourhood", neighbourhood, "true", variant, "higher")
    parts = {
        ("1 - efficacy" if unlearned else "efficacy"): _success(efficacy, unlearned),
        ("1 - paraphrase" if unlearned else "paraphrase"): _success(general, unlearned),
        "neighbourhood": near.value,
    }
    return efficacy, general, near, harmonic("CounterFact score", parts, variant=variant)


def zsre(
    rewrite: Sequence[float],
    rephrase: Sequence[float],
    locality: Sequence[float],
    reading: Reading,
    *,
    variant: Variant = "correct",
) -> tuple[Metric, Metric, Metric]:
    """ZsRE's efficacy, generalisation and specificity: mean `token_accuracy`, each 0 to 1.

    Args:
        rewrite: of the answer to each fact's question: the true one in `unlearning`, the new one
            in `editing`.
        rephrase: of the same answer to the question in other words.
        locality: of the true answer to an unrelated question.
        reading: what success is.
        variant: how the tokens were chosen.
    """
    better: Better = "lower" if reading == "unlearning" else "higher"
    return (
        mean_metric("ZsRE efficacy", rewrite, variant=variant, better=better),
        mean_metric("ZsRE generalisation", rephrase, variant=variant, better=better),
        mean_metric("ZsRE specificity", locality, variant=variant, better="higher"),
    )


def _over_facts(
    name: str,
    facts: Sequence[Losses],
    preferred: Literal["true", "new"],
    variant: Variant,
    better: Better,
) -> Metric:
    shares = [share_preferred(losses, preferred) for losses in facts]
    return mean_metric(name, shares, variant=variant, better=better)


def _success(metric: Metric, unlearned: bool) -> float:
    return 1 - metric.value if unlearned else metric.value
