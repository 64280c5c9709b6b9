"""Models that cannot be edited are refused by name, and nothing half-made stays."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from grom.config import (
    ModelConfig,
    SelectConfig,
    StrengthConfig,
)
from grom.errors import (
    BrokenCheckpoint,
    ConfigError,
    ErasedByRounding,
    MissingInput,
    MixtureOfExperts,
    NonFiniteKeys,
    QuantisedBase,
    UnknownFamily,
)
from tasks.models import open_model
from tests.reference import tiny_model
from tests.stages import Stages, refused, stages, with_model
from tests.tiny import (
    checkpoint,
    residue,
    save_model,
)


@pytest.fixture
def run(tmp_path: Path) -> Stages:
    """A run that would succeed."""
    return stages(tmp_path)


@pytest.mark.parametrize("joint", [False, True])
def test_nan_in_the_weights_is_named_by_site(joint: bool, run: Stages) -> None:
    model = tiny_model("llama")
    broken = model.get_submodule("model.layers.1.mlp.gate_proj").weight
    assert isinstance(broken, nn.Parameter)
    broken.data[3, 2] = torch.nan
    run = with_model(run, model).but(select=SelectConfig(layers=(1, 2), joint=joint))
    for stage in ("kept", "moved"):
        with pytest.raises(NonFiniteKeys) as caught:
            getattr(run, stage)
        assert str(caught.value).startswith("model.layers.1.mlp.down_proj: NaN or Inf in the keys")
        assert "Check the checkpoint for NaN" in str(caught.value)
        assert list((run.work / "store").glob("collect/*")) == []
        assert residue(run.work) == []


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_an_unknown_family_is_named_with_those_that_are_known(family: str, run: Stages) -> None:
    message = refused(with_model(run, other_family(family)), "sites", UnknownFamily)
    assert message.startswith(f"model type '{family}' is not a known family; searched gemma2, ")
    assert "Add one row to FAMILIES in grom/sites.py" in message


def test_a_mixture_of_experts_is_named_by_module(run: Stages) -> None:
    message = refused(with_model(run, tiny_model("mixtral")), "sites", MixtureOfExperts)
    assert "'mixtral' is a mixture of experts" in message
    assert "model.layers.0." in message
    assert "Use a dense model" in message


def other_family(family: str) -> PreTrainedModel:
    """A small model that this method does not know."""
    sizes: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "n_layer": 2}
    sizes |= {"n_head": 2, "num_attention_heads": 2, "word_embed_proj_dim": 16, "vocab_size": 64}
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    configure: Callable[..., Any] = CONFIG_MAPPING[family]
    return build(configure(**sizes))


def test_a_quantised_base_is_refused_before_anything_is_loaded(run: Stages) -> None:
    path = Path(run.config.model.source) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": None}))
    assert run.but().model.folder == str(path.parent)
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    message = refused(run, "model", QuantisedBase)
    assert message.startswith(f"{path.parent}: the weights are quantised (gptq)")
    assert "Edit the unquantised checkpoint" in message


@pytest.mark.parametrize(("name", "made"), [("nowhere", False), ("empty", True)])
def test_a_folder_without_a_model_is_named(name: str, made: bool, run: Stages) -> None:
    folder = run.work.parent / name
    if made:
        folder.mkdir()
    run = run.but(model=ModelConfig(source=str(folder)))
    assert refused(run, "model", MissingInput).startswith(f"{folder}: ")


def test_without_a_chat_template_there_is_one_warning_and_plain_rendering(
    run: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_model(run, tiny_model("llama"), template=None)
    with caplog.at_level(logging.WARNING):
        run.score(edited=True)
    (record,) = caplog.records
    assert "no chat template: prompts are rendered plainly" in record.getMessage()
    assert "set `model.chat_template`" in record.getMessage()


def test_an_edit_below_the_rounding_of_the_checkpoint_is_refused(run: Stages) -> None:
    run = with_model(run, tiny_model("llama", dtype=torch.bfloat16))
    run = run.but(strength=StrengthConfig(nats=1e-7))
    message = refused(run, "edited", ErasedByRounding)
    assert message.startswith("model.layers.1.mlp.down_proj: 0 weights changed")
    assert "bfloat16. Raise the strength" in message


def test_a_reference_with_another_vocabulary_is_refused(run: Stages) -> None:
    other = tiny_model("llama")
    other.resize_token_embeddings(40)
    folder = save_model(run.work.parent / "reference", other)
    run = run.but(reference=ModelConfig(source=str(folder)))
    assert run.kept.reused is False
    with pytest.raises(ConfigError) as caught:
        assert run.moved
    assert str(caught.value) == (
        f"{folder}: vocabulary of 40 tokens, the model has 64. Take a reference of the same series."
    )
    assert residue(run.work) == []


def test_a_truncated_checkpoint_is_refused_by_folder(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(BrokenCheckpoint, match=f"{folder}: the model does not open"):
        open_model(folder, text_window=64)
