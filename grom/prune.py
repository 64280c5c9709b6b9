"""Magnitude pruning as an attack: small weights go, and what was merely covered may show again.

Shapes: M outputs of W, N inputs of W.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grom.errors import ConfigError
from grom.sites import decoder_layers, family_of


def layer_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear modules within the layers by their names; embeddings and head are none of them."""
    prefix = family_of(model).layers
    return {
        f"{prefix}.{name}": module
        for name, module in decoder_layers(model).named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


@contextmanager
def pruned(model: nn.Module, share: float) -> Iterator[dict[str, float]]:
    """The model with the smallest weights of each matrix at zero, and exactly as before after it.

    Of each linear matrix in the layers the `share` of entries with the smallest magnitude is set
    to zero (one threshold per matrix, no calibration data); embeddings, head, norms and biases
    stay.  The originals are kept: memory grows by the layers' weights.

    Args:
        model: changed in place while the context is open.
        share: share of each matrix to zero, 0 to 1.

    Yields:
        share of zeros of each matrix by module name.

    Raises:
        ConfigError: the share is not a share.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"prune share {share}: give a number from 0 to 1")
    saved: list[tuple[nn.Parameter, Tensor]] = []
    zeroed: dict[str, float] = {}
    try:
        for name, module in layer_linears(model).items():
            weight = cast(nn.Parameter, module.weight)
            saved.append((weight, weight.detach().clone()))
            _zero_smallest_(weight.detach(), share)
            zeroed[name] = float((weight.detach() == 0).double().mean())
        yield zeroed
    finally:
        with torch.no_grad():
            for weight, original in saved:
                weight.copy_(original)


def _zero_smallest_(weight_MN: Tensor, share: float) -> None:
    """Zero the smallest entries; of those as large as the threshold the first ones in the matrix,
    so that exactly the share is zeroed."""
    count = round(share * weight_MN.numel())
    if count == 0:
        return
    magnitude = weight_MN.abs().float().flatten()
    threshold = magnitude.kthvalue(count).values
    zeroed = magnitude < threshold
    at_threshold = (magnitude == threshold).nonzero().squeeze(1)
    zeroed[at_threshold[: count - int(zeroed.sum())]] = True
    weight_MN.masked_fill_(zeroed.view(weight_MN.shape), 0)
