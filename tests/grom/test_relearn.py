"""Relearning lowers the loss on its slice, is repeatable, and leaves the model as it was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grom.evaluate import score_examples
from grom.examples import Rendered
from grom.relearn import Training, answer_loss, relearnt, split_slice
from tests.reference import MODELS, PAD, in_batches, random_rendered, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
RENDERED = random_rendered(seed=3, num_examples=4)
TRAINING = Training(steps=12, learning_rate=0.02, rank=4, batch_tokens=40, seed=1)


def loss_of(model: PreTrainedModel) -> float:
    """Mean loss over answer tokens."""
    scores = score_examples(model, in_batches(RENDERED))
    num_tokens = sum(score.num_tokens for score in scores)
    return -sum(score.mean_logprob * score.num_tokens for score in scores) / num_tokens


def copied(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@every_model
def test_the_slice_is_relearnt_and_the_model_is_bit_for_bit_as_before(
    family: str, tied: bool
) -> None:
    model = tiny_model(family, tied=tied)
    before, loss = copied(model), loss_of(model)
    modules = [type(module) for module in model.modules()]
    with relearnt(model, RENDERED, TRAINING, pad_id=PAD) as losses:
        assert loss_of(model) < 0.8 * loss
    assert len(losses) == TRAINING.steps
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [type(module) for module in model.modules()] == modules
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert loss_of(model) == loss


@pytest.mark.parametrize("steps", [0, 3])
def test_without_steps_or_without_examples_nothing_is_learnt(steps: int) -> None:
    model = tiny_model("llama")
    examples: list[Rendered] = [] if steps else RENDERED
    loss = loss_of(model)
    training = replace(TRAINING, steps=steps)
    with relearnt(model, examples, training, pad_id=PAD) as losses:
        assert losses == []
        assert loss_of(model) == pytest.approx(loss, rel=1e-6)


def test_the_same_seed_gives_the_same_model_and_another_one_another() -> None:
    def outcome(seed: int) -> tuple[list[float], float]:
        model = tiny_model("llama")
        with relearnt(model, RENDERED, replace(TRAINING, seed=seed), pad_id=PAD) as losses:
            return losses, loss_of(model)

    torch.manual_seed(4)
    first = outcome(1)
    torch.manual_seed(5)
    assert outcome(1) == first
    assert outcome(2) != first


def test_the_random_numbers_of_others_are_left_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    with relearnt(tiny_model("llama"), RENDERED, TRAINING, pad_id=PAD):
        pass
    assert torch.equal(torch.rand(3), expected)


def test_the_loss_is_the_mean_over_answer_tokens() -> None:
    model = tiny_model("gemma2", tied=True)
    (batch,) = in_batches(RENDERED, 1000)
    assert float(answer_loss(model, batch)) == pytest.approx(loss_of(model), rel=1e-5)


def test_adapters_of_a_bfloat16_model_are_trained_in_float32() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    loss = loss_of(model)
    with relearnt(model, RENDERED, TRAINING, pad_id=PAD):
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert adapters
        assert {parameter.dtype for parameter in adapters} == {torch.float32}
        assert loss_of(model) < 0.9 * loss


def trainable(model: PreTrainedModel) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_trainable_parameters_stay_trainable_and_an_exception_restores_too() -> None:
    model = tiny_model("llama")
    model.get_parameter("lm_head.weight").requires_grad_(True)
    with relearnt(model, RENDERED, TRAINING, pad_id=PAD):
        assert "lm_head.weight" not in trainable(model)
    assert trainable(model) == ["lm_head.weight"]
    with pytest.raises(KeyboardInterrupt), relearnt(model, RENDERED, TRAINING, pad_id=PAD):
        raise KeyboardInterrupt
    assert trainable(model) == ["lm_head.weight"]
    assert "lora" not in " ".join(name for name, _ in model.named_modules())


def grouped(*names: str) -> list[Rendered]:
    return [Rendered((1, 2), 1, f"d{number}", name) for number, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "share", "taken"),
    [
        ("aabbccdd", 0.25, [0, 1]),
        ("aabbccdd", 0.5, [0, 1, 4, 5]),
        ("abcd", 0.01, [0]),
        ("abcd", 0.99, [0, 1, 2]),
        ("aaaa", 0.5, [0, 2]),
        ("ab", 0.5, [0]),
        ("a", 0.5, []),
        ("", 0.5, []),
    ],
)
def test_the_slice_is_whole_groups_and_never_everything(
    names: str, share: float, taken: list[int]
) -> None:
    examples = grouped(*names)
    slice_, rest = split_slice(examples, share)
    assert slice_ == taken
    assert sorted(slice_ + rest) == list(range(len(examples)))


def test_losses_are_finite_numbers_before_each_step() -> None:
    model = tiny_model("llama")
    first = loss_of(model)
    with relearnt(model, RENDERED, replace(TRAINING, batch_tokens=1000), pad_id=PAD) as losses:
        pass
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert all(map(math.isfinite, losses))
