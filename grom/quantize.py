"""What a low-precision load makes of a weight: integer codes, and how many an edit changed.

Every scheme cuts the (M, N) weight, row after row, into blocks of consecutive weights; a block has
one float32 scale, and a weight becomes the code of the nearest level times that scale:

    nf4, fp4   16 levels between -1 and 1; scale max|w| of 64 weights; bitsandbytes' 4-bit formats
    int8       -127 ... 127; scale max|w| / 127 of a row, taken in float16 as bitsandbytes does
    int4       -7 ... 7; scale max|w| / 7 of a group of 128 inputs of one output: symmetric, no
               zero point, no calibration data

Shapes: M outputs of W, N inputs of W, B blocks, K weights of a block.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from grom.sites import untie_

Scheme = Literal["nf4", "fp4", "int8", "int4"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Level of each code: quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E)."""
FP4 = tuple(sixteenth / 192 for sixteenth in (0, 1, 128, 192, 64, 96, 32, 48)) + tuple(
    -sixteenth / 192 for sixteenth in (0, 1, 128, 192, 64, 96, 32, 48)
)
"""Level of each code: bits sign, exponent, exponent, mantissa; 0, 1/16, 8, 12, 4, 6, 2, 3 over 12
(bitsandbytes, `functional.get_4bit_type`).  Code 8, minus zero, is never given: it is code 0."""
CODEBOOKS: dict[Scheme, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4}
LARGEST: dict[Scheme, int] = {"int8": 127, "int4": 7}
BLOCK_WEIGHTS = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""
GROUPS = (128, 64, 32)
"""Inputs that share a scale in int4: the first that divides N; else the whole row."""
SMALLEST = 1e-30
"""A block whose weights are all smaller counts as zero; its inverse is a float32."""
ROW_BLOCK = 1024
"""Rows that are compared at once.  A multiple of 64: no block of any scheme is cut."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight as a low-precision load holds it."""

    codes_MN: Tensor
    """int8."""
    scales_B: Tensor
    """float32, of the blocks in the order of the flattened weight."""
    block_weights: int
    scheme: Scheme

    def values_MN(self) -> Tensor:
        """Level times scale, (M, N) float32: what the load computes with."""
        levels_MN = self.codes_MN.float()
        if self.scheme in CODEBOOKS:
            codebook = torch.tensor(CODEBOOKS[self.scheme], device=self.codes_MN.device)
            levels_MN = codebook[self.codes_MN.long()]
        scaled_BK = _blocks(levels_MN, self.block_weights) * self.scales_B.unsqueeze(1)
        return _unblocked(scaled_BK, self.codes_MN.shape)


@dataclass(frozen=True, slots=True)
class CodeChange:
    """How much of an edit is left after quantisation.  Counts of weights; they add."""

    changed_codes: int
    """Weights whose integer code differs."""
    changed_values: int
    """Weights whose dequantised float32 value differs: the code, or only the scale of the block,
    which the block's largest weight decides alone."""
    num: int
    """All weights."""
    num_edited: int
    """Weights that differ before quantisation."""

    @property
    def code_share(self) -> float:
        """changed_codes / num, 0 to 1; 0 without weights."""
        return self.changed_codes / max(self.num, 1)

    @property
    def value_share(self) -> float:
        """changed_values / num, 0 to 1; 0 without weights."""
        return self.changed_values / max(self.num, 1)

    def __add__(self, other: CodeChange) -> CodeChange:
        return CodeChange(
            self.changed_codes + other.changed_codes,
            self.changed_values + other.changed_values,
            self.num + other.num,
            self.num_edited + other.num_edited,
        )


def block_weights(num_inputs: int, scheme: Scheme) -> int:
    """Consecutive weights that share a scale."""
    if scheme in CODEBOOKS:
        return BLOCK_WEIGHTS
    if scheme == "int8":
        return num_inputs
    return next((group for group in GROUPS if num_inputs % group == 0), num_inputs)


def quantise(weight_MN: Tensor, scheme: Scheme) -> Quantised:
    """Codes and scales of a weight: each block's largest magnitude gets the outermost level, the
    others go to the nearest level.

    Args:
        weight_MN: (M, N), floating-point, outputs first whichever way the checkpoint stores it.
        scheme: nf4, fp4, int8 or int4.
    """
    block = block_weights(weight_MN.shape[1], scheme)
    plain_MN = (weight_MN.detach().half() if scheme == "int8" else weight_MN.detach()).float()
    weight_BK = _blocks(plain_MN, block)
    absmax_B = weight_BK.abs().amax(1)
    floor_B = absmax_B.clamp(min=SMALLEST)
    if scheme in CODEBOOKS:
        relative_BK = (weight_BK * (1 / floor_B).unsqueeze(1)).clamp(-1, 1)
        codes_BK, scales_B = _nearest(relative_BK, CODEBOOKS[scheme]), absmax_B
    else:
        largest = LARGEST[scheme]
        codes_BK = torch.round(weight_BK * (largest / floor_B).unsqueeze(1))
        scales_B = absmax_B / largest
    codes_MN = _unblocked(codes_BK.to(torch.int8), weight_MN.shape)
    return Quantised(codes_MN, scales_B, block, scheme)


def codes(weight_MN: Tensor, scheme: Scheme) -> Tensor:
    """The integer code of each weight, (M, N) int8; see `quantise`."""
    return quantise(weight_MN, scheme).codes_MN


def round_trip(weight_MN: Tensor, scheme: Scheme) -> Tensor:
    """The weight after quantising and back, (M, N), in its own dtype; see `quantise`."""
    return quantise(weight_MN, scheme).values_MN().to(weight_MN.dtype)


def code_change(before_MN: Tensor, after_MN: Tensor, scheme: Scheme) -> CodeChange:
    """What quantisation leaves of the difference between two weights of the same shape.

    Codes are compared as they are, so that a block in which only the scale moved counts among
    the values alone.  Memory: a thousand rows in float32.
    """
    total = CodeChange(0, 0, 0, 0)
    for first in range(0, len(before_MN), ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        before, after = quantise(before_MN[rows], scheme), quantise(after_MN[rows], scheme)
        total += CodeChange(
            int((before.codes_MN != after.codes_MN).sum()),
            int((before.values_MN() != after.values_MN()).sum()),
            before.codes_MN.numel(),
            int((before_MN[rows] != after_MN[rows]).sum()),
        )
    return total


class Int4Linear(nn.Module):
    """A linear module that holds int4 codes, one per byte, and dequantises in every call."""

    codes_MN: Tensor
    scales_B: Tensor

    def __init__(self, weight_MN: Tensor, bias_M: nn.Parameter | None) -> None:
        super().__init__()
        quantised = quantise(weight_MN, "int4")
        self.register_buffer("codes_MN", quantised.codes_MN)
        self.register_buffer("scales_B", quantised.scales_B)
        self.bias, self.dtype = bias_M, weight_MN.dtype
        self.out_features, self.in_features = weight_MN.shape

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, (M, N), in the dtype of the weight that was replaced."""
        levels_BK = self.codes_MN.view(len(self.scales_B), -1)
        return (levels_BK * self.scales_B.unsqueeze(1)).view_as(self.codes_MN).to(self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """W x + b with the dequantised W."""
        return functional.linear(inputs, self.weight, self.bias)


def quantise_int4_(
    model: nn.Module, skip: Collection[str] = (), *, head: bool = False
) -> tuple[str, ...]:
    """Replace the model's linear modules, transformers' Conv1D among them, by `Int4Linear`.

    Args:
        model: changed in place; embeddings, norms and biases stay as they are.
        skip: names of modules to leave alone.
        head: also replace the LM head.  A tied head is untied first; the embedding stays.

    Returns:
        the names of the replaced modules.

    Raises:
        UnknownFamily: a tied head is to be replaced in a family without a rule for it.
    """
    last = model.get_output_embeddings()  # type: ignore[operator]
    heads = {name for name, module in model.named_modules() if module is last}
    kept = {*skip} if head else {*skip, *heads}
    if head:
        untie_(model)
    replaced = []
    for name, module in list(model.named_modules()):
        if name in kept or not isinstance(module, nn.Linear | Conv1D):
            continue
        stored: Tensor = module.weight.detach()
        weight_MN = stored.mT if isinstance(module, Conv1D) else stored
        model.set_submodule(name, Int4Linear(weight_MN, module.bias))
        replaced.append(name)
    return tuple(replaced)


def _blocks(matrix_MN: Tensor, block: int) -> Tensor:
    """Rows of consecutive entries, (B, K), the last one filled up with zeros."""
    flat = matrix_MN.reshape(-1)
    return functional.pad(flat, (0, -len(flat) % block)).view(-1, block)


def _unblocked(blocks_BK: Tensor, shape: torch.Size) -> Tensor:
    return blocks_BK.reshape(-1)[: shape.numel()].view(shape)


def _nearest(relative_BK: Tensor, codebook: tuple[float, ...]) -> Tensor:
    """Code of the nearest level; halfway goes to the lower one."""
    levels = torch.tensor(sorted(set(codebook)), device=relative_BK.device)
    by_level = torch.tensor(
        [codebook.index(level) for level in sorted(set(codebook))], device=relative_BK.device
    )
    return by_level[torch.bucketize(relative_BK, (levels[:-1] + levels[1:]) / 2)]
