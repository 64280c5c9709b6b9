"""Codes are bitsandbytes' codes, blocks are where the formats have them, and a change that
quantisation swallows is told from one that stays."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.pytorch_utils import Conv1D

from grom.quantize import (
    CODEBOOKS,
    NF4,
    SCHEMES,
    CodeChange,
    Int4Linear,
    Scheme,
    block_weights,
    code_change,
    codes,
    quantise,
    quantise_int4_,
    round_trip,
)
from grom.sites import family_of, is_tied
from tests.reference import embedding_VD, random_matrix, tiny_model

IDS_BL = torch.arange(4, 24).view(2, 10)
TIE = 1e-6
"""A weight this near to the middle of two levels may go either way: float32 rounds at 6e-8."""
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
four_bit = pytest.mark.parametrize("scheme", ["nf4", "fp4"])


def weight(num_outputs: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_matrix(0, num_outputs, num_inputs).to(dtype)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS_BL).logits
    return found


def bitsandbytes_four_bit(weight_MN: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Codes, FP4's minus zero as zero, and dequantised values."""
    packed, state = bitsandbytes.functional.quantize_4bit(weight_MN, quant_type=scheme)
    halves = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)
    found = halves[: weight_MN.numel()].view_as(weight_MN).to(torch.int8)
    if scheme == "fp4":
        found[found == 8] = 0
    return found, bitsandbytes.functional.dequantize_4bit(packed, state)


def near_tie(weight_MN: Tensor, scheme: Scheme) -> Tensor:
    """Weights in the middle of two levels."""
    levels = torch.tensor(sorted(set(CODEBOOKS[scheme])))
    flat = weight_MN.float().view(-1)
    blocks = [block / block.abs().max() for block in flat.split(64)]  # type: ignore[no-untyped-call]
    distance = torch.cat(blocks).unsqueeze(1) - (levels[:-1] + levels[1:]) / 2
    return (distance.abs().amin(1) < TIE).view_as(weight_MN)


@four_bit
@pytest.mark.parametrize("shape", [(4, 64), (3, 192), (16, 24), (5, 22), (2, 2), (257, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bit_equals_bitsandbytes(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight_MN = weight(*shape, dtype)
    expected, values_MN = bitsandbytes_four_bit(weight_MN, scheme)
    ties = near_tie(weight_MN, scheme)
    assert torch.equal(codes(weight_MN, scheme)[~ties], expected[~ties])
    assert ties.sum() <= 0.01 * weight_MN.numel()
    # One rounding in float32 or in the weight's own dtype lies between the two products.
    rtol = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    found = round_trip(weight_MN, scheme)
    assert found.dtype == dtype
    assert_close(found[~ties], values_MN[~ties], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 64), (16, 24), (5, 22)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_equals_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight_MN = weight(*shape, dtype)
    expected, row_stats, _ = bitsandbytes.functional.int8_vectorwise_quant(weight_MN.half())
    assert torch.equal(codes(weight_MN, "int8"), expected)
    values_MN = bitsandbytes.functional.int8_vectorwise_dequant(expected, row_stats)
    # Up to two roundings in float32, or one in bfloat16.
    rtol = 1e-6 if dtype == torch.float32 else 2**-7
    assert_close(round_trip(weight_MN, "int8"), values_MN.to(dtype), rtol=rtol, atol=1e-7)


def test_int4_of_a_small_group_by_hand() -> None:
    weight_MN = torch.tensor([[7.0, -3.4, 0.4, 0.6], [0.0, 0.0, 0.0, 0.0], [-14.0, 1.1, 3, 13]])
    expected = torch.tensor([[7, -3, 0, 1], [0, 0, 0, 0], [-7, 1, 2, 6]], dtype=torch.int8)
    assert torch.equal(codes(weight_MN, "int4"), expected)
    scales = torch.tensor([[1.0], [0.0], [2.0]])
    assert torch.equal(round_trip(weight_MN, "int4"), expected * scales)


@pytest.mark.parametrize(
    ("num_inputs", "group"),
    [(256, 128), (384, 128), (576, 64), (96, 32), (32, 32), (48, 48), (24, 24), (200, 200)],
)
def test_int4_groups_divide_the_inputs(num_inputs: int, group: int) -> None:
    assert len(quantise(weight(3, num_inputs), "int4").scales_B) == 3 * num_inputs // group


@every_scheme
def test_one_large_weight_coarsens_its_block_alone(scheme: Scheme) -> None:
    before_MN = weight(4, 256)
    after_MN = before_MN.clone()
    after_MN[1, 5] = 100.0
    same = codes(before_MN, scheme) == codes(after_MN, scheme)
    touched, block = torch.zeros_like(same), block_weights(256, scheme)
    touched[1, :block] = True
    assert bool(same[~touched].all())
    assert int((~same)[touched].sum()) > block // 2


@every_scheme
def test_rounding_twice_is_rounding_once_and_zeros_stay(scheme: Scheme) -> None:
    weight_MN = weight(8, 128)
    once = round_trip(weight_MN, scheme)
    assert torch.equal(codes(once, scheme), codes(weight_MN, scheme))
    # int8 passes float16, which rounds its scale.
    assert_close(round_trip(once, scheme), once, rtol=2**-10, atol=0)
    assert torch.equal(round_trip(0 * weight_MN, scheme), 0 * weight_MN)


def test_a_finer_scheme_is_nearer() -> None:
    weight_MN = weight(64, 256)
    lost = {
        scheme: float((round_trip(weight_MN, scheme) - weight_MN).norm() / weight_MN.norm())
        for scheme in SCHEMES
    }
    assert 0 < lost["int8"] < lost["nf4"] < lost["fp4"] < 0.2
    assert lost["nf4"] < lost["int4"] < 0.2


def on_levels() -> Tensor:
    """A weight whose every entry is a level of NF4 times its block's scale."""
    levels = torch.tensor(NF4)[torch.arange(256) % 16].view(4, 64)
    return levels * torch.tensor([[1.0], [0.5], [2.0], [4.0]])


def test_an_edit_below_half_a_bin_leaves_nothing() -> None:
    before_MN = on_levels()
    # The narrowest bin is 0.08 wide, relative to the scale; each block's largest weight stays.
    after_MN = torch.where(before_MN.abs() < 0.9 * before_MN.abs().amax(1, True), 0.015, 0.0)
    change = code_change(before_MN, before_MN + after_MN, "nf4")
    assert change == CodeChange(0, 0, 256, int((after_MN > 0).sum()))
    assert change.num_edited > 200
    assert change.code_share == change.value_share == 0


def test_a_scale_that_moves_alone_changes_values_but_no_code() -> None:
    before_MN = on_levels()
    after_MN = before_MN.clone()
    after_MN[2] *= 1.001
    change = code_change(before_MN, after_MN, "nf4")
    # Of each sixteen levels one is zero and stays zero.
    assert change == CodeChange(0, 60, 256, 60)
    assert change.value_share == 60 / 256


@every_scheme
def test_rows_that_are_rewritten_are_counted_and_others_are_not(scheme: Scheme) -> None:
    before_MN = weight(1100, 64)
    after_MN = before_MN.clone()
    after_MN[[3, 1050]] *= -1
    change = code_change(before_MN, after_MN, scheme)
    different = codes(before_MN, scheme) != codes(after_MN, scheme)
    moved = round_trip(before_MN, scheme) != round_trip(after_MN, scheme)
    assert change == CodeChange(int(different.sum()), int(moved.sum()), 1100 * 64, 128)
    assert 64 < change.changed_codes <= 128


def test_changes_of_parts_add_to_the_change_of_the_whole() -> None:
    before_MN, after_MN = weight(12, 64), weight(12, 64) + 0.2 * random_matrix(5, 12, 64).float()
    whole = code_change(before_MN, after_MN, "int4")
    parts = [
        code_change(before_MN[rows], after_MN[rows], "int4") for rows in (slice(5), slice(5, 12))
    ]
    assert parts[0] + parts[1] == whole
    assert 0 < whole.code_share < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_computes_with_the_round_trip(dtype: torch.dtype) -> None:
    weight_MN, inputs_TN = weight(12, 96, dtype), random_matrix(1, 5, 96).to(dtype)
    bias_M = nn.Parameter(random_matrix(2, 1, 12)[0].to(dtype))
    module = Int4Linear(weight_MN, bias_M)
    assert torch.equal(module.weight, round_trip(weight_MN, "int4"))
    expected = inputs_TN @ round_trip(weight_MN, "int4").mT + bias_M
    # The same sum in another order: some roundings of the outputs' size.
    atol = 1e-5 if dtype == torch.float32 else 0.2
    assert_close(module(inputs_TN), expected, rtol=0, atol=atol)
    assert module.codes_MN.dtype == torch.int8


@pytest.mark.parametrize(("family", "count"), [("llama", 7), ("gpt2", 4), ("gpt_neox", 4)])
def test_every_linear_of_the_layers_is_replaced_and_computes_the_same(
    family: str, count: int
) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    for module in plain.modules():
        if isinstance(module, nn.Linear) and module is not plain.get_submodule(
            family_of(model).head
        ):
            module.weight.data = round_trip(module.weight.data, "int4")
        if isinstance(module, Conv1D):
            module.weight.data = round_trip(module.weight.data.mT, "int4").mT
    names = quantise_int4_(model)
    assert len(names) == 3 * count
    assert all(isinstance(model.get_submodule(name), Int4Linear) for name in names)
    assert type(model.get_submodule(family_of(model).head)) is nn.Linear
    assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)  # float32, logits of order 10
    assert not torch.allclose(logits(model), logits(tiny_model(family)), atol=0.01)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_on_request_leaves_the_embedding_alone(tied: bool) -> None:
    model = tiny_model("llama", tied=tied)
    embedding = embedding_VD(model).clone()
    head = model.get_submodule("lm_head")
    assert isinstance(head, nn.Linear)
    expected = round_trip(head.weight.data, "int4")
    names = quantise_int4_(model, head=True)
    assert len(names) == 22
    replaced = model.get_submodule("lm_head")
    assert isinstance(replaced, Int4Linear)
    assert torch.equal(replaced.weight, expected)
    assert torch.equal(embedding_VD(model), embedding)
    assert not is_tied(model)
    assert model.config.tie_word_embeddings is False


def test_skipped_modules_stay() -> None:
    model = tiny_model("llama")
    skipped = "model.layers.1.mlp.down_proj"
    names = quantise_int4_(model, [skipped])
    assert len(names) == 20
    assert skipped not in names
    assert type(model.get_submodule(skipped)) is nn.Linear
