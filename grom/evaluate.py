"""Likelihood of answers under teacher forcing: one forward pass, several measures.

Shapes: T answer tokens of a batch, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grom.examples import Batch, Rendering
from grom.forward import answer_hidden_TD, answer_logprobs
from grom.sites import unembedding_VD


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """How well a model knows one answer."""

    digest: str
    group: str
    num_tokens: int
    mean_logprob: float
    """Mean log-probability of the answer tokens, end of answer included, in nats."""
    probability: float
    """exp(mean_logprob), 0 to 1; TOFU's answer probability."""
    token_accuracy: float
    """Share of answer tokens that are the model's first choice, 0 to 1."""
    extraction_strength: float
    """Longest suffix of the answer that is predicted without a miss, as a share of the answer,
    0 to 1 (Carlini et al. 2021, as used for TOFU; floor 0)."""


@dataclass(frozen=True, slots=True)
class SetScore:
    """Means over a set of examples."""

    name: str
    num_examples: int
    probability: float
    token_accuracy: float
    extraction_strength: float


def score_examples(model: nn.Module, stream: Iterable[Batch]) -> list[ExampleScore]:
    """Score each example, in the order of the stream that was batched."""
    return score_hidden(model, stream, lambda batch: answer_hidden_TD(model, batch))


def score_hidden(
    model: nn.Module, stream: Iterable[Batch], hidden_of: Callable[[Batch], Tensor]
) -> list[ExampleScore]:
    """As `score_examples`, with the final hidden states (T, D) of a batch from a function."""
    device = unembedding_VD(model).device
    scored: dict[int, ExampleScore] = {}
    for cpu_batch in stream:
        batch = cpu_batch.to(device)
        logprob_T, first_T = answer_logprobs(model, hidden_of(batch), batch.gold_T)
        for row, position in enumerate(batch.positions):
            of_example = batch.example_T == row
            example = batch.examples[row]
            scored[position] = _score(
                example.digest, example.group, logprob_T[of_example], first_T[of_example]
            )
    return [scored[position] for position in sorted(scored)]


def _score(digest: str, group: str, logprob_T: Tensor, first_T: Tensor) -> ExampleScore:
    mean = float(logprob_T.double().mean())
    missed = (~first_T).nonzero()
    suffix = len(first_T) - 1 - int(missed[-1]) if len(missed) else len(first_T)
    return ExampleScore(
        digest=digest,
        group=group,
        num_tokens=len(first_T),
        mean_logprob=mean,
        probability=math.exp(mean),
        token_accuracy=float(first_T.double().mean()),
        extraction_strength=suffix / len(first_T),
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


def greedy_answers(
    model: nn.Module, rendering: Rendering, prompts: Sequence[str], *, max_new_tokens: int = 48
) -> list[str]:
    """What the model answers, greedily.  For showing on a terminal: never store the result."""
    tokenizer, answers = rendering.tokenizer, []
    for prompt in prompts:
        ids_1L = torch.tensor([rendering.prompt_ids(prompt)], device=unembedding_VD(model).device)
        with torch.inference_mode():
            output_1L = model.generate(  # type: ignore[operator]
                ids_1L,
                attention_mask=torch.ones_like(ids_1L),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            )
        new_L = output_1L[0, ids_1L.shape[1] :]
        answers.append(tokenizer.decode(new_L, skip_special_tokens=True).strip())
    return answers
