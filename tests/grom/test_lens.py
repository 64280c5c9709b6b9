"""The lens at the last layer is the model itself; at others it is norm and head on that layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import grom.lens
from grom.evaluate import mean_score, score_examples
from grom.lens import read_layers
from grom.sites import final_norm, unembedding_VD
from tests.reference import MODELS, in_batches, random_rendered, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
RENDERED = random_rendered(seed=11, num_examples=7)


def naive(
    model: torch.nn.Module, layer: int, *, softcap: float | None
) -> tuple[float, float, float]:
    """Answer probability, token probability and median rank at a layer; one example at a time."""
    probabilities: list[float] = []
    tokens: list[float] = []
    ranks: list[float] = []
    for example in RENDERED:
        output = model(input_ids=torch.tensor([example.ids]), output_hidden_states=True)
        hidden_LD: Tensor = output.hidden_states[layer + 1][0]
        logits_LV = final_norm(model)(hidden_LD) @ unembedding_VD(model).mT
        if softcap is not None:
            logits_LV = softcap * torch.tanh(logits_LV / softcap)
        logprobs = []
        for position in range(example.start, len(example.ids)):
            before_V, gold = logits_LV[position - 1].double(), example.ids[position]
            logprobs.append(float(before_V.log_softmax(0)[gold]))
            ranks.append(1 + sum(float(other) > float(before_V[gold]) for other in before_V))
        probabilities.append(math.exp(sum(logprobs) / len(logprobs)))
        tokens += [math.exp(logprob) for logprob in logprobs]
    means = (sum(probabilities) / len(RENDERED), sum(tokens) / len(tokens))
    return (*means, float(torch.tensor(ranks, dtype=torch.float64).quantile(0.5)))


@every_model
def test_at_the_last_layer_the_lens_is_the_models_own_answer(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    readings = read_layers(model, in_batches(RENDERED))
    own = mean_score("forget", score_examples(model, in_batches(RENDERED)))
    assert [reading.layer for reading in readings] == [0, 1, 2]
    # float32; the model's own norm and the lens's see the same states.
    assert readings[-1].probability == pytest.approx(own.probability, rel=1e-5)
    assert readings[-1].num_examples == own.num_examples == len(RENDERED)


@every_model
@pytest.mark.parametrize("layer", [0, 1])
def test_at_an_inner_layer_it_is_norm_and_head_on_that_layers_states(
    family: str, tied: bool, layer: int
) -> None:
    model = tiny_model(family, tied=tied)
    reading = read_layers(model, in_batches(RENDERED))[layer]
    softcap = getattr(model.config, "final_logit_softcapping", None)
    probability, token_probability, rank = naive(model, layer, softcap=softcap)
    assert reading.probability == pytest.approx(probability, rel=1e-4)
    assert reading.token_probability == pytest.approx(token_probability, rel=1e-4)
    assert reading.median_rank == rank


def test_neither_batches_nor_blocks_of_logits_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = read_layers(model, in_batches(RENDERED, 200))
    monkeypatch.setattr(grom.lens, "LOGIT_BLOCK", 2)
    for reading, other in zip(read_layers(model, in_batches(RENDERED, 1)), expected, strict=True):
        assert reading.probability == pytest.approx(other.probability, rel=1e-5)
        assert reading.median_rank == other.median_rank


def test_a_change_of_the_last_layer_does_not_show_below_it() -> None:
    model = tiny_model("llama")
    before = read_layers(model, in_batches(RENDERED))
    model.get_submodule("model.layers.2.mlp.down_proj").weight.mul_(-1)  # type: ignore[operator]
    after = read_layers(model, in_batches(RENDERED))
    assert after[:2] == before[:2]
    assert after[2] != before[2]


def test_a_readout_of_nothing_is_not_a_number() -> None:
    reading = read_layers(tiny_model("llama"), [])[0]
    assert reading.num_examples == 0
    assert math.isnan(reading.probability)
