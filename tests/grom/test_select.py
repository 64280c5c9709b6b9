"""Layers are scored by what they write to the gold tokens' logits, and the best band is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from grom.errors import ConfigError
from grom.examples import Rendered
from grom.select import LayerScore, best_band, layer_scores, mean_effects, sites_of
from grom.sites import decoder_layers, final_gain_D, final_norm, find_sites, unembedding_VD
from tests.reference import VOCAB, in_batches, random_rendered, tiny_model

RENDERED = random_rendered(seed=21, num_examples=5)
ALPHA_V = (torch.arange(VOCAB) % 4 / 3).double()
ADDED = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""What attention and MLP of a layer add to the residual stream, by the names of their modules."""
every_kind = pytest.mark.parametrize("family", sorted(ADDED))


def residual_parts(model: PreTrainedModel, ids: tuple[int, ...]) -> list[Tensor]:
    """Terms of the final residual (L, D) of one example: the start, then what attention and MLP
    of each layer add."""
    terms: list[Tensor] = []

    def record(_: nn.Module, inputs: Any, output: Any) -> None:
        terms.append(output[0] if isinstance(output, tuple) else output)

    layers, attention_and_mlp = decoder_layers(model), ADDED[model.config.model_type]
    with ExitStack() as stack:
        first = layers[0].register_forward_pre_hook(lambda _, args: terms.append(args[0]))
        stack.callback(first.remove)
        for layer in layers:
            for name in attention_and_mlp:
                hook = layer.get_submodule(name).register_forward_hook(record)
                stack.callback(hook.remove)
        model(input_ids=torch.tensor([ids]))
    return [term.reshape(len(ids), -1) for term in terms]


def effects(model: PreTrainedModel, example: Rendered) -> Iterator[tuple[int, list[float]]]:
    """Each gold token, and the effect of every term of the residual on its logit."""
    centred = isinstance(final_norm(model), nn.LayerNorm)
    gain_D, unembedding = final_gain_D(model).float(), unembedding_VD(model)
    parts = residual_parts(model, example.ids)
    for position in range(example.start - 1, len(example.ids) - 1):
        gold = example.ids[position + 1]
        terms = [part[position] for part in parts]
        if centred:
            terms = [term_D - term_D.mean() for term_D in terms]
        rms = torch.stack(terms).sum(0).square().mean().sqrt()
        yield gold, [float((gain_D * unembedding[gold]) @ term_D / rms) for term_D in terms]


def mlp_effects_by_hand(model: PreTrainedModel, weight_V: Tensor) -> list[float]:
    """Weighted means of the MLPs' effects over all answer positions."""
    total, weights = torch.zeros(3), 0.0
    for example in RENDERED:
        for gold, terms in effects(model, example):
            total += float(weight_V[gold]) * torch.tensor(terms[2::2])
            weights += float(weight_V[gold])
    return [float(value) for value in total / weights]


@every_kind
@pytest.mark.parametrize("weight_V", [ALPHA_V, torch.ones(VOCAB)], ids=["weighted", "plain"])
def test_effects_equal_direct_logit_attribution_by_hand(family: str, weight_V: Tensor) -> None:
    model = tiny_model(family, tied=True)
    found = mean_effects(model, in_batches(RENDERED), weight_V)
    # float32, sums of order 10.
    assert found == pytest.approx(mlp_effects_by_hand(model, weight_V), rel=1e-4, abs=1e-4)


@every_kind
def test_the_mlps_effects_and_all_others_add_up_to_the_logit(family: str) -> None:
    model = tiny_model(family, tied=True)
    mlps = sum(mean_effects(model, in_batches(RENDERED), torch.ones(VOCAB)))
    bias_D = getattr(final_norm(model), "bias", None)
    others, logits = [], []
    for example in RENDERED:
        hidden_LD = model.base_model(input_ids=torch.tensor([example.ids])).last_hidden_state[0]
        if bias_D is not None:
            hidden_LD = hidden_LD - bias_D
        for position, (gold, terms) in enumerate(effects(model, example), example.start - 1):
            others.append(terms[0] + sum(terms[1::2]))
            logits.append(float(hidden_LD[position] @ unembedding_VD(model)[gold]))
    expected = sum(logits) / len(logits)
    # The norm's epsilon, at most 1e-5 beside a mean square of order 1, is the only difference.
    assert mlps + sum(others) / len(others) == pytest.approx(expected, rel=1e-3, abs=1e-3)


@every_kind
def test_effects_do_not_depend_on_the_batches(family: str) -> None:
    model = tiny_model(family, tied=True)
    single, large = (mean_effects(model, in_batches(RENDERED, n), ALPHA_V) for n in (1, 1000))
    assert single == pytest.approx(large, rel=1e-4, abs=1e-5)  # float32 sums in another order


def test_a_layer_that_adds_nothing_has_no_effect() -> None:
    model = tiny_model("llama")
    find_sites(model)[1].weight_MN(model).zero_()
    found = mean_effects(model, in_batches(RENDERED), ALPHA_V)
    assert found[1] == 0
    assert found[0] != 0 != found[2]


def test_a_set_without_specific_tokens_has_no_effect() -> None:
    model = tiny_model("llama")
    assert mean_effects(model, in_batches(RENDERED), torch.zeros(VOCAB)) == [0, 0, 0]
    assert mean_effects(model, [], ALPHA_V) == [0, 0, 0]


def test_a_score_is_the_weighted_forget_effect_less_the_plain_retain_effect() -> None:
    model, retain = tiny_model("llama"), in_batches(random_rendered(22, 4))
    scores = layer_scores(model, in_batches(RENDERED), retain, ALPHA_V)
    forget_effects = mean_effects(model, in_batches(RENDERED), ALPHA_V)
    retain_effects = mean_effects(model, retain, torch.ones(VOCAB))
    assert [score.layer for score in scores] == [0, 1, 2]
    assert [score.forget_effect for score in scores] == forget_effects
    assert [score.retain_effect for score in scores] == retain_effects
    for score in scores:
        assert score.score == score.forget_effect - score.retain_effect


NUMBERS = st.lists(st.integers(-9, 9), min_size=1, max_size=9)


@given(values=NUMBERS, share=st.floats(0, 1))
def test_the_best_band_is_contiguous_and_no_other_is_better(
    values: list[int], share: float
) -> None:
    width = 1 + round(share * (len(values) - 1))
    scores = [LayerScore(layer, value + 1.0, 1.0) for layer, value in enumerate(values)]
    band = best_band(scores, width)
    assert band == tuple(range(band[0], band[0] + width))
    sums = [sum(values[first : first + width]) for first in range(len(values) - width + 1)]
    assert sums[band[0]] == max(sums)


def test_a_band_wider_than_the_model_is_refused_with_both_numbers() -> None:
    scores = [LayerScore(layer, 1.0, 0.0) for layer in range(3)]
    with pytest.raises(ConfigError, match=r"select\.width is 4, and the model has 3 layers"):
        best_band(scores, 4)


def test_sites_are_those_of_the_layers_upwards_and_once() -> None:
    model = tiny_model("llama")
    assert [site.layer for site in sites_of(model, "mlp", (2, 0, 2))] == [0, 2]
    assert [site.name for site in sites_of(model, "head", ())] == ["lm_head"]


@pytest.mark.parametrize(("layers", "wrong"), [((1, 3), "[3]"), ((-1, 0, 9), "[-1, 9]")])
def test_layers_that_the_model_lacks_are_named(layers: tuple[int, ...], wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        sites_of(tiny_model("llama"), "mlp", layers)
    assert f"select.layers: {wrong} not in the model, which has layers 0 to 2" in str(error.value)
