"""Pruning zeroes the smallest weights of each matrix, nothing else, and leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grom.errors import ConfigError
from grom.prune import layer_linears, pruned
from tests.reference import MODELS, tiny_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)


def copied(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model: PreTrainedModel, before: dict[str, Tensor]) -> set[str]:
    after = model.state_dict()
    return {name for name in before if not torch.equal(before[name], after[name])}


@every_model
def test_only_matrices_of_the_layers_are_pruned_and_all_comes_back(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    before = copied(model)
    with pruned(model, 0.3) as zeroed:
        assert changed(model, before) == {f"{name}.weight" for name in zeroed}
        matrices = {
            name.removesuffix(".weight")
            for name, tensor in before.items()
            if tensor.dim() == 2 and ("layers." in name or ".h." in name)
        }
        assert set(zeroed) == matrices
    assert changed(model, before) == set()


@every_model
def test_pruning_nothing_changes_nothing(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    before = copied(model)
    with pruned(model, 0.0) as zeroed:
        assert changed(model, before) == set()
    assert set(zeroed.values()) == {0.0}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_weights_of_each_matrix_go(share: float, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    before = copied(model)
    with pruned(model, share) as zeroed:
        for name, module in layer_linears(model).items():
            old, new = before[f"{name}.weight"], module.weight
            assert isinstance(new, Tensor)
            gone = new == 0
            assert int(gone.sum()) == round(share * old.numel())
            assert zeroed[name] == pytest.approx(int(gone.sum()) / old.numel())
            assert torch.equal(new[~gone], old[~gone])
            if 0 < share < 1:
                assert old[gone].abs().max() <= old[~gone].abs().min()


def test_equal_weights_are_pruned_by_number_not_all_at_once() -> None:
    model = tiny_model("llama")
    (name, module), *_ = layer_linears(model).items()
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight.fill_(0.5)
    with pruned(model, 0.25) as zeroed:
        assert zeroed[name] == 0.25
    assert bool((weight == 0.5).all())


def test_an_exception_inside_restores_too() -> None:
    model = tiny_model("gpt2", tied=True)
    before = copied(model)
    with pytest.raises(KeyboardInterrupt), pruned(model, 0.5):
        raise KeyboardInterrupt
    assert changed(model, before) == set()


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="from 0 to 1"), pruned(tiny_model("llama"), share):
        pass
