"""Running part of a model gives what running all of it gives, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import PreTrainedModel

import grom.forward
from grom.batches import Batch, make_batch
from grom.forward import (
    answer_hidden_TD,
    answer_logits,
    best_other_T,
    logits_from,
    recorded_inputs,
    recorded_outputs,
    run,
    starting_at,
    token_scores,
)
from grom.sites import decoder_layers, final_norm, find_sites, mlp_modules
from tests.reference import MODELS, PAD, random_rendered, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
RENDERED = random_rendered(seed=5, num_examples=4)


def some_batch() -> Batch:
    return make_batch(enumerate(RENDERED), PAD)


def final_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    hidden_BLD = run(model, batch)
    assert hidden_BLD is not None
    return hidden_BLD


def own_logits_TV(model: PreTrainedModel) -> Tensor:
    """The model's own logits at the predicting positions, one example at a time, unpadded."""
    rows = []
    for example in RENDERED:
        logits_LV = model(input_ids=torch.tensor([example.ids])).logits[0]
        rows.append(logits_LV[example.start - 1 : -1].float())
    return torch.cat(rows)


@every_model
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_starting_at_a_layer_ends_in_the_same_states(family: str, tied: bool, layer: int) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    here, below = decoder_layers(model)[layer], mlp_modules(model)[:layer]
    with recorded_inputs([here]) as inputs:
        expected_BLD = final_states(model, batch)
    with starting_at(model, layer, inputs[here]), recorded_inputs(below) as skipped:
        hidden_BLD = final_states(model, batch)
    assert torch.equal(hidden_BLD, expected_BLD)
    assert not skipped  # the layers below were not run


@every_model
def test_starting_from_other_states_ends_elsewhere(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    full_BLD = final_states(model, batch)
    with starting_at(model, 1, torch.randn(full_BLD.shape)):
        assert not torch.allclose(final_states(model, batch), full_BLD, atol=0.1)


@every_model
def test_the_skip_is_undone_also_after_an_exception(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    expected_BLD = final_states(model, batch)
    with pytest.raises(KeyboardInterrupt), starting_at(model, 2, torch.zeros(1)):
        raise KeyboardInterrupt
    assert torch.equal(final_states(model, batch), expected_BLD)
    assert all("forward" not in vars(layer) for layer in decoder_layers(model))
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(model))


def test_a_forward_that_was_replaced_before_is_put_back() -> None:
    model = tiny_model("llama")
    layer = decoder_layers(model)[0]
    original = layer.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:  # accelerate wraps modules like this
        return original(*args, **kwargs)

    layer.forward = wrapped
    with starting_at(model, 1, torch.zeros(1)):
        pass
    assert layer.forward is wrapped


@every_model
def test_a_recorder_that_stops_ends_the_pass_at_its_last_module(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    first, second = (site.module(model) for site in find_sites(model)[:2])
    later = [*mlp_modules(model)[2:], final_norm(model)]
    with recorded_inputs([first, second]) as complete:
        expected_BLD = final_states(model, batch)
    with recorded_inputs([first, second], stop=True) as inputs, recorded_inputs(later) as unreached:
        assert run(model, batch) is None
    assert not unreached
    assert all(torch.equal(inputs[module], complete[module]) for module in (first, second))
    assert torch.equal(final_states(model, batch), expected_BLD)


def test_recorders_leave_no_hooks_also_after_an_exception() -> None:
    model = tiny_model("llama")
    modules: list[nn.Module] = mlp_modules(model)
    with (
        pytest.raises(KeyboardInterrupt),
        recorded_inputs(modules),
        recorded_outputs(modules),
    ):
        raise KeyboardInterrupt
    assert not any(mlp._forward_pre_hooks or mlp._forward_hooks for mlp in modules)


def test_recorded_outputs_are_what_the_modules_return() -> None:
    model, batch = tiny_model("llama"), some_batch()
    mlp = mlp_modules(model)[1]
    with recorded_inputs([mlp]) as inputs, recorded_outputs([mlp]) as outputs:
        run(model, batch)
    assert torch.equal(outputs[mlp], mlp(inputs[mlp]))


@every_model
def test_log_probabilities_are_those_of_the_model_without_padding(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    scores = token_scores(answer_logits(model, batch), batch.gold_T, spread=True)
    logits_TV = own_logits_TV(model)
    expected_TV = logits_TV.log_softmax(1)
    # float32, three layers: padding only changes the order of sums.
    expected_T = expected_TV.gather(1, batch.gold_T.unsqueeze(1)).squeeze(1)
    assert_close(scores.logprob_T, expected_T, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.first_T, logits_TV.argmax(1) == batch.gold_T)
    p_TV = expected_TV.exp()
    mean_T = (p_TV * expected_TV).sum(1)
    variance_T = (p_TV * (expected_TV - mean_T[:, None]).square()).sum(1)
    assert_close(scores.mean_T, mean_T, rtol=1e-4, atol=1e-5)
    assert_close(scores.variance_T, variance_T, rtol=1e-3, atol=1e-4)


@every_model
def test_the_best_other_token_is_the_best_but_never_the_gold_one(family: str, tied: bool) -> None:
    model, batch = tiny_model(family, tied=tied), some_batch()
    hidden_TD, logits_TV = answer_hidden_TD(model, batch), own_logits_TV(model)
    first_T, second_T = logits_TV.topk(2, dim=1).indices.unbind(1)
    assert torch.equal(best_other_T(model, hidden_TD, first_T), second_T)
    assert torch.equal(best_other_T(model, hidden_TD, second_T), first_T)
    other_T = best_other_T(model, hidden_TD, batch.gold_T)
    assert torch.equal(other_T, torch.where(first_T == batch.gold_T, second_T, first_T))


def test_the_size_of_the_logit_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("gemma2", tied=True), some_batch()
    hidden_TD = answer_hidden_TD(model, batch)
    whole = token_scores(logits_from(model, hidden_TD), batch.gold_T)
    other_T = best_other_T(model, hidden_TD, batch.gold_T)
    monkeypatch.setattr(grom.forward, "LOGIT_BLOCK", 3)
    scores = token_scores(logits_from(model, hidden_TD), batch.gold_T)
    assert_close(scores.logprob_T, whole.logprob_T, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.first_T, whole.first_T)
    assert scores.mean_T.isnan().all()
    assert torch.equal(best_other_T(model, hidden_TD, batch.gold_T), other_T)


def test_a_padded_vocabulary_spoils_no_spread() -> None:
    """A logit of minus infinity: 0 · -inf must not become the mean."""
    model, batch = tiny_model("llama"), some_batch()
    hidden_TD = answer_hidden_TD(model, batch)
    head = model.get_submodule("lm_head")
    with torch.no_grad():
        head.register_forward_hook(lambda _, __, out: out.index_fill(1, torch.tensor([63]), -1e38))
        finite = token_scores(logits_from(model, hidden_TD), batch.gold_T, spread=True)
        head.register_forward_hook(
            lambda _, __, out: out.index_fill(1, torch.tensor([63]), -torch.inf)
        )
        scores = token_scores(logits_from(model, hidden_TD), batch.gold_T, spread=True)
    assert_close(scores.mean_T, finite.mean_T)
    assert_close(scores.variance_T, finite.variance_T)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_on_the_left_gives_what_padding_on_the_right_gives(family: str) -> None:
    model, right = tiny_model(family, tied=family == "gpt2"), some_batch()
    length = right.ids_BL.shape[1]
    shift = (length - right.mask_BL.sum(1)).tolist()
    left = replace(
        right,
        ids_BL=torch.stack([row.roll(by) for row, by in zip(right.ids_BL, shift, strict=True)]),
        mask_BL=torch.stack([row.roll(by) for row, by in zip(right.mask_BL, shift, strict=True)]),
        predicts_BL=torch.stack(
            [row.roll(by) for row, by in zip(right.predicts_BL, shift, strict=True)]
        ),
    )
    assert not torch.equal(left.mask_BL, right.mask_BL)
    expected = token_scores(answer_logits(model, right), right.gold_T)
    found = token_scores(answer_logits(model, left), left.gold_T)
    assert_close(found.logprob_T, expected.logprob_T, rtol=1e-5, atol=1e-5)


OTHERS = ("bloom", "opt", "cohere", "granite", "mixtral", "olmo2", "stablelm", "mamba")


@pytest.mark.parametrize("family", OTHERS)
def test_any_other_family_is_measured_by_its_own_logits(family: str) -> None:
    """Families without a rule, with ALiBi, scaled logits, experts or state spaces among them."""
    model, batch = tiny_model(family), some_batch()
    found = token_scores(answer_logits(model, batch), batch.gold_T, spread=True)
    logits_TV = own_logits_TV(model)
    expected_T = logits_TV.log_softmax(1).gather(1, batch.gold_T.unsqueeze(1)).squeeze(1)
    assert_close(found.logprob_T, expected_T, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.first_T, logits_TV.argmax(1) == batch.gold_T)
