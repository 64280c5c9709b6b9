"""Which layers to edit: where the forget tokens are written and the retain tokens are not.

Shapes: T answer tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grom.batches import Batch
from grom.collect import spread_T
from grom.errors import ConfigError
from grom.forward import recorded_inputs, recorded_outputs, run
from grom.sites import (
    Site,
    final_gain_D,
    final_norm,
    find_sites,
    mlp_modules,
    norm_centres,
    unembedding_VD,
)


@dataclass(frozen=True, slots=True)
class LayerScore:
    """How specifically one layer writes the forget set's tokens."""

    layer: int
    forget_effect: float
    """F: mean direct effect on the forget gold tokens' logits, weighted by alpha, in nats."""
    retain_effect: float
    """R: the same on the retain set, unweighted, in nats."""

    @property
    def score(self) -> float:
        """S = F - R, in nats."""
        return self.forget_effect - self.retain_effect


def layer_scores(
    model: nn.Module,
    forget: Iterable[Batch],
    retain: Iterable[Batch],
    alpha_V: Tensor,
) -> list[LayerScore]:
    """S_l = F_l - R_l of each layer, from one forward pass with hooks.

    The direct effect of layer l at position j is what its MLP output o adds to the gold token's
    logit, read through the final norm: (gain * W_U[g_j]) . o / rms_j (direct logit attribution).
    Where that norm is a LayerNorm, o and the residual count without their mean.
    """
    forget_effect = mean_effects(model, forget, alpha_V)
    retain_effect = mean_effects(model, retain, torch.ones_like(alpha_V))
    return [
        LayerScore(layer, f, r)
        for layer, (f, r) in enumerate(zip(forget_effect, retain_effect, strict=True))
    ]


def mean_effects(model: nn.Module, stream: Iterable[Batch], weight_V: Tensor) -> list[float]:
    """Weighted mean direct logit effect of each layer's MLP on the gold tokens, in nats."""
    mlps, norm = mlp_modules(model), final_norm(model)
    gain_D, unembedding = final_gain_D(model).float(), unembedding_VD(model)
    weight_V = weight_V.to(unembedding.device).float()
    totals, weights = [0.0] * len(mlps), 0.0
    for cpu_batch in stream:
        batch = cpu_batch.to(unembedding.device)
        with recorded_outputs(mlps) as outputs, recorded_inputs([norm]) as inputs:
            run(model, batch)
        at = batch.predicts_BL
        rms_T = spread_T(model, inputs[norm][at].float())
        weight_T = weight_V[batch.gold_T]
        reader_TD = unembedding[batch.gold_T].float() * gain_D
        if norm_centres(model):
            reader_TD -= reader_TD.mean(1, keepdim=True)
        reader_TD *= (weight_T / rms_T).unsqueeze(1)
        weights += float(weight_T.sum())
        for layer, mlp in enumerate(mlps):
            totals[layer] += float((outputs[mlp][at].float() * reader_TD).sum())
    return [total / max(weights, 1e-12) for total in totals]


def best_band(scores: list[LayerScore], width: int) -> tuple[int, ...]:
    """The contiguous band of `width` layers with the largest mean score.

    Raises:
        ConfigError: the band is wider than the model.
    """
    if width > len(scores):
        raise ConfigError(f"select.width is {width}, and the model has {len(scores)} layers")
    means = [
        sum(score.score for score in scores[first : first + width])
        for first in range(len(scores) - width + 1)
    ]
    first = max(range(len(means)), key=means.__getitem__)
    return tuple(range(first, first + width))


def sites_of(model: nn.Module, kind: str, layers: tuple[int, ...]) -> tuple[Site, ...]:
    """The sites of these layers, or the head.

    Raises:
        ConfigError: a layer that the model does not have.
    """
    sites = find_sites(model)
    if kind == "head":
        return sites[-1:]
    if wrong := [layer for layer in layers if not 0 <= layer < len(sites) - 1]:
        raise ConfigError(
            f"select.layers: {wrong} not in the model, which has layers 0 to {len(sites) - 2}"
        )
    return tuple(sites[layer] for layer in sorted(set(layers)))
