"""Key moments of a set of examples, from one forward pass of the unedited model.

Shapes: T answer tokens of a batch, N inputs of W, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from grom.errors import NonFiniteKeys
from grom.examples import Batch
from grom.forward import best_other_T, recorded_inputs, run
from grom.moments import KeyMoments
from grom.sites import Site, final_norm, unembedding_VD


@dataclass(frozen=True, slots=True)
class ExampleStatistics:
    """What is kept about one example: numbers, and the digest that names it."""

    digest: str
    group: str
    num_tokens: int
    """Answer tokens."""
    num_suppressed: int
    """Those with alpha > 0."""


@dataclass(slots=True)
class Collected:
    """Moments of a set at each site, and sums over the set beside them."""

    moments: dict[str, KeyMoments]
    """Site name -> moments."""
    examples: list[ExampleStatistics] = field(default_factory=list)
    rms_sum: float = 0.0
    """Sum over tokens of the final residual's root mean square."""
    rms_tokens: int = 0
    """Tokens in that sum; 0 where the pass stopped before the final norm."""

    @property
    def mean_rms(self) -> float:
        """Mean root mean square of the final residual over the set's answer positions."""
        return self.rms_sum / self.rms_tokens


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """What collecting a forget set needs beyond the keys."""

    alpha_V: Tensor
    """Specificity of each token."""
    replace: bool
    """Also find what should be said instead of each gold token."""
    reference: nn.Module | None = None
    """The model that is asked for it; None: the model itself, for its runner-up."""


def collect_moments(
    model: nn.Module,
    sites: Sequence[Site],
    stream: Iterable[Batch],
    plan: ForgetPlan | None = None,
) -> Collected:
    """Run the model once over a set and sum its keys at every site.

    Keys are the site's inputs at the positions that predict answer tokens.  For a retain set
    (no plan) only gram and counts are kept and the pass stops at the last site; for a forget set
    it goes on to the final hidden state, for the residual's size and the replacements.

    Memory: the moments and one batch, however many tokens there are.

    Raises:
        NonFiniteKeys: NaN or Inf in the keys; names the site and an example.
    """
    device = unembedding_VD(model).device
    collected = empty(model, sites, keeps_sums=plan is not None)
    for batch in stream:
        on_device = batch.to(device)
        keys, rms_T, final_TD = batch_keys(model, sites, on_device, to_the_end=plan is not None)
        alt_T = None if plan is None else _alternatives(model, on_device, plan, final_TD)
        add_batch_(collected, sites, on_device, keys, plan, alt_T)
        if rms_T is not None:
            collected.rms_sum += float(rms_T.double().sum())
            collected.rms_tokens += len(rms_T)
    return collected


def empty(model: nn.Module, sites: Sequence[Site], *, keeps_sums: bool) -> Collected:
    """Moments of nothing, on the model's device."""
    unembedding_VM = unembedding_VD(model)
    return Collected(
        {
            site.name: KeyMoments.zeros(
                site.weight_MN(model).shape[1],
                len(unembedding_VM),
                device=unembedding_VM.device,
                keeps_sums=keeps_sums,
            )
            for site in sites
        }
    )


def batch_keys(
    model: nn.Module, sites: Sequence[Site], batch: Batch, *, to_the_end: bool
) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    """Keys (T, N) of one batch by site; with `to_the_end` also the final residual's root mean
    square (T,) and the final hidden state (T, D)."""
    mlp_sites = sorted(
        (site for site in sites if site.kind == "mlp"), key=lambda site: site.layer or 0
    )
    modules = [site.module(model) for site in mlp_sites]
    to_the_end = to_the_end or len(mlp_sites) < len(sites)
    watched = [*modules, final_norm(model)] if to_the_end else modules
    with recorded_inputs(watched, stop=not to_the_end) as inputs:
        hidden_BLD = run(model, batch)
    at = batch.predicts_BL
    keys = {site.name: inputs[module][at] for site, module in zip(mlp_sites, modules, strict=True)}
    if hidden_BLD is None:
        return keys, None, None
    final_TD = hidden_BLD[at]
    keys |= {site.name: final_TD for site in sites if site.kind == "head"}
    residual_TD = inputs[final_norm(model)][at].float()
    return keys, _spread_T(model, residual_TD), final_TD


def add_batch_(
    collected: Collected,
    sites: Sequence[Site],
    batch: Batch,
    keys: dict[str, Tensor],
    plan: ForgetPlan | None,
    alt_T: Tensor | None,
) -> None:
    """Add one batch's keys and example statistics.

    Raises:
        NonFiniteKeys: NaN or Inf in the keys.
    """
    weight_T = None if plan is None else plan.alpha_V.to(batch.gold_T.device)[batch.gold_T]
    for site in sites:
        keys_TN = keys[site.name]
        if not bool(torch.isfinite(keys_TN).all()):
            raise NonFiniteKeys(site.name, f"a batch with example {batch.examples[0].digest}")
        alt_weight_T = None if alt_T is None else weight_T
        collected.moments[site.name].update_(keys_TN, batch.gold_T, alt_T, alt_weight_T)
    suppressed_B = torch.zeros(len(batch.examples), dtype=torch.int64)
    if weight_T is not None:
        suppressed_B.index_add_(0, batch.example_T.cpu(), (weight_T > 0).long().cpu())
    collected.examples += [
        ExampleStatistics(example.digest, example.group, example.num_answer_tokens, int(count))
        for example, count in zip(batch.examples, suppressed_B, strict=True)
    ]


def _alternatives(
    model: nn.Module, batch: Batch, plan: ForgetPlan, final_TD: Tensor | None
) -> Tensor | None:
    if not plan.replace:
        return None
    if plan.reference is None:
        assert final_TD is not None
        return best_other_T(model, final_TD, batch.gold_T)
    hidden_BLD = run(plan.reference, batch)
    assert hidden_BLD is not None
    return best_other_T(plan.reference, hidden_BLD[batch.predicts_BL], batch.gold_T)


def _spread_T(model: nn.Module, residual_TD: Tensor) -> Tensor:
    """What the final norm divides by: root mean square, in LayerNorm of the centred residual."""
    if isinstance(final_norm(model), nn.LayerNorm):
        residual_TD = residual_TD - residual_TD.mean(1, keepdim=True)
    return residual_TD.square().mean(1).sqrt()
