"""Every scheme really is what it is called, says which modules it changed, and blames the right
party when it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grom.errors import BrokenCheckpoint, ConfigError, QuantisedBase
from grom.quantize import SCHEMES, Int4Linear, Scheme, round_trip
from grom.sites import is_tied
from tasks.models import OpenModel, open_model
from tests.reference import BOS, EOS, PAD, VOCAB, embedding_VD
from tests.tiny import checkpoint, save_model

IDS_BL = torch.arange(4, 24).view(2, 10)
WIDTH = 64
MODELS = [("llama", False, 14), ("llama", True, 14), ("gpt2", True, 8)]
"""Family, tied head, linear modules in the layers."""
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_model = pytest.mark.parametrize(("family", "tied", "count"), MODELS)


def wide_model(family: str, tied: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of two layers whose widths bitsandbytes takes on CPU."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if family == "gpt2":
        sizes = {"n_embd": WIDTH, "n_inner": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}
    sizes |= {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    configure: Callable[..., Any] = CONFIG_MAPPING[family]
    build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
    model = build(configure(**sizes, tie_word_embeddings=tied, dtype=dtype), dtype=dtype)
    nn.Module.eval(model)
    return model


def opened(folder: Path, scheme: str, *, head: bool = False) -> OpenModel:
    return open_model(folder, text_window=64, quantisation=scheme, quantise_head=head)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS_BL).logits
    return found


def dequantised_MN(module: nn.Module) -> Tensor:
    """What a low-precision module computes with, float32, before its first call."""
    weight: Any = module.weight
    if isinstance(module, bitsandbytes.nn.Linear4bit):
        found = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
        found = bitsandbytes.functional.int8_vectorwise_dequant(weight.CB, weight.SCB)
    else:
        found = weight
    values_MN: Tensor = found.float()
    return values_MN


@every_scheme
@every_model
def test_every_linear_of_the_layers_holds_the_codes_of_its_weight(
    family: str, tied: bool, count: int, scheme: Scheme, tmp_path: Path
) -> None:
    plain = wide_model(family, tied)
    found = opened(save_model(tmp_path, plain), scheme)
    assert len(found.quantised_modules) == count
    for name in found.quantised_modules:
        before: Any = plain.get_submodule(name)
        after = found.model.get_submodule(name)
        assert type(after) is not type(before)
        weight_MN = before.weight.mT if isinstance(before, Conv1D) else before.weight
        expected = round_trip(weight_MN.detach().contiguous(), scheme)
        # float32, up to two roundings in another order.
        assert_close(dequantised_MN(after), expected, rtol=1e-6, atol=1e-8)
    assert "lm_head" not in found.quantised_modules
    assert type(found.model.lm_head) is nn.Linear
    assert is_tied(found.model) == tied
    shift = (logits(found.model) - logits(plain)).norm() / logits(plain).norm()
    assert 1e-3 < float(shift) < 0.3


@every_scheme
@every_model
def test_the_head_is_quantised_on_request_and_the_embedding_is_not(
    family: str, tied: bool, count: int, scheme: Scheme, tmp_path: Path
) -> None:
    plain = wide_model(family, tied)
    found = opened(save_model(tmp_path, plain), scheme, head=True)
    head = found.model.get_submodule("lm_head")
    assert len(found.quantised_modules) == count + 1
    assert "lm_head" in found.quantised_modules
    expected = round_trip(plain.get_submodule("lm_head").weight.detach(), scheme)  # type: ignore[operator]
    assert_close(dequantised_MN(head), expected, rtol=1e-6, atol=1e-8)
    assert torch.equal(embedding_VD(found.model), embedding_VD(plain))
    assert not torch.equal(logits(found.model), logits(opened(tmp_path, scheme).model))


def test_no_two_schemes_give_the_same_model(tmp_path: Path) -> None:
    folder = save_model(tmp_path, wide_model("llama", tied=False))
    said = [logits(opened(folder, scheme).model) for scheme in SCHEMES]
    for position, one in enumerate(said):
        assert not any(torch.allclose(one, other, atol=1e-4) for other in said[position + 1 :])


@every_scheme
def test_a_bfloat16_checkpoint_stays_one_and_says_nothing(
    scheme: Scheme, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model(tmp_path, wide_model("llama", tied=True, dtype=torch.bfloat16))
    found = opened(folder, scheme, head=True)
    with caplog.at_level(logging.WARNING):
        said = logits(found.model)
    assert said.dtype == torch.bfloat16
    assert bool(said.isfinite().all())
    assert caplog.records == []


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_odd_widths_are_no_obstacle_to_integers(scheme: Scheme, tmp_path: Path) -> None:
    found = opened(checkpoint(tmp_path), scheme, head=True)
    assert len(found.quantised_modules) == 22
    assert bool(logits(found.model).isfinite().all())
    assert (scheme == "int4") == isinstance(found.model.lm_head, Int4Linear)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit is that of the CPU")
@pytest.mark.parametrize("scheme", ["nf4", "fp4"])
def test_odd_widths_are_refused_in_four_bit_on_cpu(scheme: Scheme, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(checkpoint(tmp_path), scheme)
    message = str(caught.value)
    assert "model.layers.0.self_attn.q_proj has 16 inputs" in message
    assert f"{scheme} on CPU needs a multiple of 64" in message
    assert "int4 takes any width" in message


def test_an_unknown_scheme_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(checkpoint(tmp_path), "int3")
    assert str(caught.value) == "unknown quantisation 'int3'; known: nf4, fp4, int8, int4"


@every_scheme
def test_a_quantised_base_is_refused(scheme: Scheme, tmp_path: Path) -> None:
    model = wide_model("llama", tied=False)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(QuantisedBase):
        opened(save_model(tmp_path, model), scheme)


@every_scheme
@pytest.mark.parametrize(
    ("name", "content"), [("config.json", b"{"), ("model.safetensors", b"\x01" * 40)]
)
def test_a_damaged_file_is_the_checkpoints_fault(
    name: str, content: bytes, scheme: Scheme, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, wide_model("llama", tied=False))
    (folder / name).write_bytes(content)
    with pytest.raises(BrokenCheckpoint, match=f"{folder}: the model does not open"):
        opened(folder, scheme)


@pytest.mark.parametrize("error", [ValueError, KeyError, RuntimeError, ImportError])
def test_what_bitsandbytes_cannot_do_is_not_the_checkpoints_fault(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, wide_model("llama", tied=False))

    def fail(*_: Any, **__: Any) -> None:
        raise error("no kernel for this device")

    monkeypatch.setattr("transformers.integrations.replace_with_bnb_linear", fail)
    with pytest.raises(ConfigError) as caught:
        opened(folder, "nf4")
    message = str(caught.value)
    assert message.startswith(f"{folder}: bitsandbytes does not load this model in nf4")
    assert f"{error.__name__}: " in message
    assert "no kernel for this device" in message
    assert "int4 needs no bitsandbytes" in message


@every_scheme
def test_a_load_that_changes_no_module_is_refused(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, wide_model("llama", tied=False))
    monkeypatch.setattr(
        "transformers.integrations.replace_with_bnb_linear", lambda model, **_: model
    )
    monkeypatch.setattr("tasks.quantised.quantise_int4_", lambda model, **_: ())
    with pytest.raises(ConfigError, match=f"asked for {scheme}, but no module was quantised"):
        opened(folder, scheme)


@every_scheme
def test_a_head_that_stays_is_refused(
    scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grom.quantize import quantise_int4_

    folder = save_model(tmp_path, wide_model("llama", tied=False))
    monkeypatch.setattr("tasks.quantised._quantise_head_", lambda *_: None)
    monkeypatch.setattr("tasks.quantised.quantise_int4_", lambda model, **_: quantise_int4_(model))
    with pytest.raises(ConfigError, match="of the LM head, but it is as it was"):
        opened(folder, scheme, head=True)
