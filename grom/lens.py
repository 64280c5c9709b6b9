"""The logit lens: is the answer readable at a layer before the last?

Shapes: B examples, L positions, T answer tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grom.batches import Batch
from grom.forward import LOGIT_BLOCK, recorded_inputs, run
from grom.sites import answer_logits_TV, decoder_layers, final_norm, unembedding_VD


@dataclass(frozen=True, slots=True)
class LayerReading:
    """What the model's own final norm and head read from the residual stream after one layer."""

    layer: int
    """Counted from 0; the last one is the model's own answer."""
    probability: float
    """Mean over examples of exp(mean log p(gold)), 0 to 1: the answer probability at this layer."""
    token_probability: float
    """Mean over answer tokens of p(gold), 0 to 1; shows what single unlikely tokens hide in the
    answer probability."""
    median_rank: float
    """Median over answer tokens of the gold token's rank, 1 for the first choice."""
    num_examples: int


class _Read(NamedTuple):
    logprob_T: Tensor
    rank_T: Tensor
    example_T: Tensor


def read_layers(model: nn.Module, stream: Iterable[Batch]) -> list[LayerReading]:
    """The lens at every layer, from one forward pass per batch.

    The residual stream after layer l goes through the final norm and the head, as nostalgebraist's
    logit lens (2020) does.  Logits are held for one block of positions at a time.
    """
    modules = [*decoder_layers(model)[1:], final_norm(model)]
    read: list[list[_Read]] = [[] for _ in modules]
    device, num_examples = unembedding_VD(model).device, 0
    for cpu_batch in stream:
        batch = cpu_batch.to(device)
        with recorded_inputs(modules) as inputs:
            run(model, batch)
        # What a module takes in is what the layer before it gave out, in every family.
        for layer, module in enumerate(modules):
            logprob_T, rank_T = _gold_T(model, inputs[module][batch.predicts_BL], batch.gold_T)
            read[layer].append(_Read(logprob_T, rank_T, batch.example_T.cpu() + num_examples))
        num_examples += len(batch.examples)
    return [_reading(layer, found, num_examples) for layer, found in enumerate(read)]


def _gold_T(model: nn.Module, hidden_TD: Tensor, gold_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and rank of the gold tokens, read from hidden states before the norm."""
    logprob_T = torch.empty(len(gold_T), dtype=torch.float64)
    rank_T = torch.empty(len(gold_T), dtype=torch.int64)
    for start in range(0, len(gold_T), LOGIT_BLOCK):
        block = slice(start, start + LOGIT_BLOCK)
        with torch.inference_mode():
            logits_TV = answer_logits_TV(model, final_norm(model)(hidden_TD[block]))
            gold_logit_T1 = logits_TV.gather(1, gold_T[block].unsqueeze(1))
            logprob_T[block] = (
                (gold_logit_T1 - logits_TV.logsumexp(1, keepdim=True)).squeeze(1).cpu()
            )
            rank_T[block] = (logits_TV > gold_logit_T1).sum(1).cpu() + 1
    return logprob_T, rank_T


def _reading(layer: int, read: list[_Read], num_examples: int) -> LayerReading:
    if num_examples == 0:
        return LayerReading(layer, math.nan, math.nan, math.nan, 0)
    logprob_T, rank_T, example_T = (torch.cat(column) for column in zip(*read, strict=True))
    sums = torch.zeros(num_examples, dtype=torch.float64).index_add_(0, example_T, logprob_T)
    means = sums / example_T.bincount(minlength=num_examples)
    return LayerReading(
        layer=layer,
        probability=float(means.exp().mean()),
        token_probability=float(logprob_T.exp().mean()),
        median_rank=float(rank_T.double().quantile(0.5)),
        num_examples=num_examples,
    )
