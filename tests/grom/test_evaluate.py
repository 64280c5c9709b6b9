"""Scores equal their definitions, one example at a time, and keep the order of the stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from grom.evaluate import ExampleScore, mean_score, score_examples, score_hidden
from grom.examples import Rendered
from tests.reference import BOS, MODELS, VOCAB, in_batches, random_rendered, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
RENDERED = random_rendered(seed=31, num_examples=7)


def answer_of(model: PreTrainedModel, example: Rendered) -> tuple[list[float], list[bool]]:
    """Log-probability of each answer token, and whether it is the first choice; no padding."""
    logits_LV: Tensor = model(input_ids=torch.tensor([example.ids])).logits[0]
    logprobs, first = [], []
    for position in range(example.start, len(example.ids)):
        gold, before_V = example.ids[position], logits_LV[position - 1].double()
        logprobs.append(float(before_V[gold] - torch.log(before_V.exp().sum())))
        first.append(int(before_V.argmax()) == gold)
    return logprobs, first


def suffix_share(first: Sequence[bool]) -> float:
    """The longest suffix without a miss, as a share."""
    length = 0
    while length < len(first) and first[len(first) - 1 - length]:
        length += 1
    return length / len(first)


def own_answer(model: PreTrainedModel, example: Rendered, start: int) -> Rendered:
    """The example with its answer replaced by the model's own greedy continuation."""
    ids = list(example.ids[:start])
    while len(ids) < len(example.ids):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return Rendered(tuple(ids), start, example.digest, example.group)


def assert_scored(model: PreTrainedModel, example: Rendered, score: ExampleScore) -> None:
    logprobs, first = answer_of(model, example)
    mean = sum(logprobs) / len(logprobs)
    assert (score.digest, score.group) == (example.digest, example.group)
    assert score.num_tokens == len(first) == example.num_answer_tokens
    # float32: padding changes the order of sums.
    assert score.mean_logprob == pytest.approx(mean, rel=1e-4, abs=1e-4)
    assert score.probability == pytest.approx(
        math.prod(map(math.exp, logprobs)) ** (1 / len(first)), rel=1e-4
    )
    assert score.token_accuracy == pytest.approx(sum(first) / len(first))
    assert score.extraction_strength == suffix_share(first)


@every_model
def test_scores_equal_their_definitions_in_the_order_of_the_stream(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    known = [own_answer(model, example, example.start) for example in RENDERED[:2]]
    examples = [*RENDERED, *known]
    scores = score_examples(model, in_batches(examples))
    batched = [example.digest for batch in in_batches(examples) for example in batch.examples]
    assert batched != [example.digest for example in examples]  # batches are sorted by length
    for example, score in zip(examples, scores, strict=True):
        assert_scored(model, example, score)


@pytest.mark.parametrize("batch_tokens", [1, 24, 1000])
def test_scores_do_not_depend_on_the_batch_size(batch_tokens: int) -> None:
    model = tiny_model("llama")
    reference = score_examples(model, in_batches(RENDERED, 50))
    for score, expected in zip(
        score_examples(model, in_batches(RENDERED, batch_tokens)), reference, strict=True
    ):
        assert score.digest == expected.digest
        assert score.mean_logprob == pytest.approx(expected.mean_logprob, rel=1e-5)
        assert score.extraction_strength == expected.extraction_strength


def test_an_answer_in_the_models_own_words_is_wholly_extracted() -> None:
    model = tiny_model("llama")
    (score,) = score_examples(model, in_batches([own_answer(model, RENDERED[0], 2)]))
    assert score.token_accuracy == score.extraction_strength == 1


@pytest.mark.parametrize(("wrong", "share"), [(-1, 0), (0, 4 / 5), (2, 2 / 5)])
def test_extraction_counts_what_comes_after_the_last_miss(wrong: int, share: float) -> None:
    """One token of five is wrong; hidden states are one-hot, so that the head reads them off."""
    model = tiny_model("llama")
    model.get_parameter("lm_head.weight").copy_(torch.eye(VOCAB, 16))
    said = torch.arange(3, 8)
    gold = said.clone()
    gold[wrong] = 11
    example = Rendered((BOS, *gold.tolist()), 1, "digest", "group")
    hidden_TD = 9 * torch.eye(16)[said]
    (score,) = score_hidden(model, in_batches([example]), lambda _: hidden_TD)
    assert score.extraction_strength == pytest.approx(share)
    assert score.token_accuracy == pytest.approx(4 / 5)


SHARES = st.floats(0, 1)


@given(numbers=st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=9))
def test_the_score_of_a_set_is_the_mean_over_its_examples(
    numbers: list[tuple[float, float, float]],
) -> None:
    scores = [ExampleScore("d", "g", 3, -1.0, *row, 0, 0, 0, 0) for row in numbers]
    mean = mean_score("a set", scores)
    means = torch.tensor(numbers, dtype=torch.float64).mean(0).tolist()
    assert (mean.name, mean.num_examples) == ("a set", len(numbers))
    found = [mean.probability, mean.token_accuracy, mean.extraction_strength]
    assert found == pytest.approx(means, rel=1e-12, abs=1e-300)


def test_the_score_of_nothing_is_not_a_number() -> None:
    score = mean_score("nothing", score_examples(tiny_model("llama"), []))
    assert score.num_examples == 0
    assert math.isnan(score.probability)
    assert math.isnan(score.token_accuracy)
    assert math.isnan(score.extraction_strength)
