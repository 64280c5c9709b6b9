"""Likelihood of answers under teacher forcing: one forward pass, several measures.

Shapes: T answer tokens of a batch, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from grom.batches import Batch
from grom.examples import Rendered
from grom.forward import TokenScores, answer_logits, logits_from, token_scores
from grom.metrics.membership import min_k, min_k_plus_plus
from grom.metrics.memorisation import exact_memorisation, extraction_strength
from grom.sites import device_of

MIN_K = 0.4
"""Share of the least likely tokens that min-k and min-k++ look at, as for TOFU and MUSE."""


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """How well a model knows one answer.  All measures come from one forward pass."""

    digest: str
    group: str
    num_tokens: int
    mean_logprob: float
    """Mean log-probability of the answer tokens, end of answer included, in nats."""
    probability: float
    """exp(mean_logprob), 0 to 1; TOFU's answer probability."""
    token_accuracy: float
    """Share of answer tokens, end of answer included, that are the model's first choice, 0 to 1."""
    extraction_strength: float
    """Longest suffix of the answer that is predicted without a miss, as a share of the answer,
    0 to 1 (Carlini et al. 2021, as used for TOFU; floor 0).  A rendered end of answer does not
    count: nearly every model predicts it."""
    extraction_compat: float
    """The same as OpenUnlearning computes it: without the last token, whatever it is, and never
    below one token's share."""
    exact_memorisation: float
    """Share of answer tokens without the end of answer that are the first choice, 0 to 1."""
    min_k: float
    """Minus the mean log-probability of the least likely 40 % of the tokens, nats; high for
    texts that the model has not seen."""
    min_k_plus_plus: float
    """The same with each log-probability standardised over the vocabulary; NaN unless asked for."""
    min_k_compat: float = math.nan
    """`min_k` as OpenUnlearning computes it: without the last token, whatever it is."""


@dataclass(frozen=True, slots=True)
class SetScore:
    """Means over a set of examples."""

    name: str
    num_examples: int
    probability: float
    token_accuracy: float
    extraction_strength: float


def score_examples(
    model: nn.Module, stream: Iterable[Batch], *, spread: bool = False
) -> list[ExampleScore]:
    """Score each example, in the order of the stream that was batched."""
    scored = dict(score_stream(model, stream, spread=spread))
    return [scored[position] for position in sorted(scored)]


def score_hidden(
    model: nn.Module, stream: Iterable[Batch], hidden_of: Callable[[Batch], Tensor]
) -> list[ExampleScore]:
    """As `score_examples`, with the final hidden states (T, D) of a batch from a function."""
    scored = dict(score_stream(model, stream, hidden_of))
    return [scored[position] for position in sorted(scored)]


def score_stream(
    model: nn.Module,
    stream: Iterable[Batch],
    hidden_of: Callable[[Batch], Tensor] | None = None,
    *,
    spread: bool = False,
) -> Iterator[tuple[int, ExampleScore]]:
    """Position and score of each example, as soon as its batch is done.

    Args:
        model: model to score.
        stream: batches.
        hidden_of: final hidden states (T, D) of a batch; not given: the model's own.
        spread: also compute what needs the whole distribution (min-k++).
    """
    device = device_of(model)
    for cpu_batch in stream:
        batch = cpu_batch.to(device)
        logits_of = (
            logits_from(model, hidden_of(batch)) if hidden_of else answer_logits(model, batch)
        )
        tokens = token_scores(logits_of, batch.gold_T, spread=spread)
        for row, position in enumerate(batch.positions):
            yield position, score_answer(batch.examples[row], tokens.rows(batch.example_T == row))


def score_answer(example: Rendered, tokens: TokenScores) -> ExampleScore:
    """All measures of one answer from its tokens."""
    logprob_T = tokens.logprob_T.double().cpu().numpy()
    first_T = tokens.first_T.cpu().numpy()
    content_T = first_T[: len(first_T) - example.ends]
    mean = float(logprob_T.mean())
    return ExampleScore(
        digest=example.digest,
        group=example.group,
        num_tokens=len(first_T),
        mean_logprob=mean,
        probability=math.exp(mean),
        token_accuracy=float(first_T.mean()),
        extraction_strength=extraction_strength(content_T, "correct"),
        extraction_compat=extraction_strength(first_T[:-1], "compat"),
        exact_memorisation=exact_memorisation(content_T),
        min_k=min_k(logprob_T, MIN_K),
        min_k_plus_plus=min_k_plus_plus(
            logprob_T,
            tokens.mean_T.double().cpu().numpy(),
            tokens.variance_T.double().cpu().numpy(),
            MIN_K,
        ),
        min_k_compat=min_k(logprob_T[:-1], MIN_K, "openunlearning"),
    )


def mean_score(name: str, scores: Sequence[ExampleScore]) -> SetScore:
    """Means over a set; NaN where there is nothing to average."""

    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / len(scores) if scores else math.nan

    return SetScore(
        name=name,
        num_examples=len(scores),
        probability=mean(score.probability for score in scores),
        token_accuracy=mean(score.token_accuracy for score in scores),
        extraction_strength=mean(score.extraction_strength for score in scores),
    )
