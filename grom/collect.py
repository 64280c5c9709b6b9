"""Key moments of a set of examples, from one forward pass of the unedited model.

Shapes: T answer tokens of a batch, N inputs of W, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from grom.batches import Batch
from grom.errors import NonFiniteKeys
from grom.forward import best_other_T, recorded_inputs, run
from grom.moments import BLOCK_TOKENS, KeyMoments
from grom.sites import Site, final_norm, norm_centres, unembedding_VD

JOINT = "joint"
"""Name of the moments of all sites side by side."""


@dataclass(frozen=True, slots=True)
class ExampleStatistics:
    """What is kept about one example: numbers, and the digest that names it."""

    digest: str
    group: str
    num_tokens: int
    """Answer tokens."""


@dataclass(slots=True)
class Collected:
    """Moments of a set at each site, and sums over the set beside them.

    All of it adds up over sets (`grom.merge`), and none of it depends on alpha.
    """

    moments: dict[str, KeyMoments]
    """Site name -> moments."""
    examples: list[ExampleStatistics] = field(default_factory=list)
    """Of a forget set; of a retain set, which may be of any size, nothing is kept by example."""
    rms_sum: float = 0.0
    """Sum over tokens of the final residual's root mean square."""
    rms_tokens: int = 0
    """Tokens in that sum; 0 where the pass stopped before the final norm."""

    @property
    def mean_rms(self) -> float:
        """Mean root mean square of the final residual over the set's answer positions."""
        return self.rms_sum / self.rms_tokens


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Every key of some examples, exactly as the model gave them, with what belongs to it.

    Far more than their moments say: of a set of any size only one batch is held at a time.
    """

    keys: Mapping[str, Tensor]
    """Name of the moments -> keys (T, N), in the dtype of the model."""
    gold_T: Tensor
    """The token that each position has to predict."""
    alt_T: Tensor | None
    """What the model should say there instead; None: nobody asked."""
    rms_T: Tensor | None
    """Root mean square of the final residual, float32; None: the pass stopped before it."""
    examples: tuple[ExampleStatistics, ...]
    """In the order of the positions."""


@dataclass(frozen=True, slots=True)
class ForgetPlan:
    """What collecting a forget set needs beyond the keys."""

    replace: bool
    """Also find what should be said instead of each gold token."""
    reference: nn.Module | None = None
    """The model that is asked for it; None: the model itself, for its runner-up."""
    keep: Callable[[RequestKeys], None] | None = None
    """Is handed the keys of each batch, to keep them beside their moments."""


def collect_moments(
    model: nn.Module,
    sites: Sequence[Site],
    stream: Iterable[Batch],
    plan: ForgetPlan | None = None,
    *,
    joint: bool = False,
) -> Collected:
    """Run the model once over a set and sum its keys at every site.

    Keys are the site's inputs at the positions that predict answer tokens.  For a retain set
    (no plan) only gram and counts are kept and the pass stops at the last site; for a forget set
    it goes on to the final hidden state, for the residual's size and the replacements.

    Memory: the moments, one batch and one block of keys, however many tokens there are.

    Args:
        model: the unedited model.
        sites: where to collect.
        stream: batches of the set.
        plan: what a forget set needs beyond the keys; None for a retain set.
        joint: put the keys of all sites side by side, in the order of `sites`, as one set of
            moments under the name `joint`.

    Raises:
        NonFiniteKeys: NaN or Inf in the keys; names the site and an example.
    """
    collector = Collector(model, sites, plan, joint=joint)
    for found in each_batch(model, sites, stream, plan, joint=joint):
        collector.take(found)
        if plan is not None and plan.keep is not None:
            plan.keep(found)
    return collector.finish()


def each_batch(
    model: nn.Module,
    sites: Sequence[Site],
    stream: Iterable[Batch],
    plan: ForgetPlan | None = None,
    *,
    joint: bool = False,
) -> Iterator[RequestKeys]:
    """The keys of one batch after the other, under the names of the moments; arguments and errors
    as `collect_moments`."""
    device = unembedding_VD(model).device
    for batch in stream:
        on_device = batch.to(device)
        keys, rms_T, final_TD = batch_keys(model, sites, on_device, to_the_end=plan is not None)
        alt_T = None if plan is None else _alternatives(model, on_device, plan, final_TD)
        yield _named(on_device, keys, alt_T, rms_T, sites if joint else None)


def _named(
    batch: Batch,
    keys: Mapping[str, Tensor],
    alt_T: Tensor | None,
    rms_T: Tensor | None,
    joined: Sequence[Site] | None,
) -> RequestKeys:
    """The keys of a batch, those of `joined` sites side by side.

    Raises:
        NonFiniteKeys: NaN or Inf in the keys.
    """
    for name, keys_TN in keys.items():
        if not bool(torch.isfinite(keys_TN).all()):
            raise NonFiniteKeys(name, f"a batch with example {batch.examples[0].digest}")
    if joined is not None:
        keys = {JOINT: torch.cat([keys[site.name] for site in joined], dim=1)}
    examples = tuple(
        ExampleStatistics(example.digest, example.group, example.num_answer_tokens)
        for example in batch.examples
    )
    return RequestKeys(keys, batch.gold_T, alt_T, rms_T, examples)


class Collector:
    """Adds up keys batch by batch, a block of tokens at a time."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        plan: ForgetPlan | None,
        *,
        joint: bool = False,
    ) -> None:
        unembedding_VM = unembedding_VD(model)
        widths = {site.name: site.weight_MN(model).shape[1] for site in sites}
        self.sites, self.plan, self.joint = sites, plan, joint
        sizes = {JOINT: sum(widths.values())} if joint else widths
        self.collected = Collected(
            {
                name: KeyMoments.zeros(
                    size,
                    len(unembedding_VM),
                    device=unembedding_VM.device,
                    keeps_sums=plan is not None,
                )
                for name, size in sizes.items()
            }
        )
        self._blocks = Blocks(self.collected)

    def add(self, batch: Batch, keys: dict[str, Tensor], alt_T: Tensor | None) -> None:
        """Add one batch's keys, by site, and its example statistics.

        Raises:
            NonFiniteKeys: NaN or Inf in the keys.
        """
        self.take(_named(batch, keys, alt_T, None, self.sites if self.joint else None))

    def take(self, found: RequestKeys) -> None:
        """Add one batch's keys, by name of the moments, and its example statistics."""
        self._blocks.add(found)
        if self.plan is not None:
            self.collected.examples += found.examples

    def finish(self) -> Collected:
        """All that was added."""
        self._blocks.flush()
        return self.collected


class Blocks:
    """Gathers keys and adds them to moments in blocks of at least `BLOCK_TOKENS`."""

    def __init__(self, collected: Collected) -> None:
        self.collected = collected
        self._held: list[RequestKeys] = []
        self._num_held = 0

    def add(self, found: RequestKeys) -> None:
        """Add one batch's keys and the size of its residual."""
        if found.rms_T is not None:
            self.collected.rms_sum += float(found.rms_T.double().sum())
            self.collected.rms_tokens += len(found.rms_T)
        self._held.append(found)
        self._num_held += len(found.gold_T)
        if self._num_held >= BLOCK_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Add what is held to the moments."""
        if not self._held:
            return
        gold_T = torch.cat([found.gold_T for found in self._held])
        alts = [found.alt_T for found in self._held if found.alt_T is not None]
        alt_T = torch.cat(alts) if alts else None
        for name, moments in self.collected.moments.items():
            keys_TN = torch.cat([found.keys[name] for found in self._held])
            moments.update_(keys_TN, gold_T, alt_T)
        self._held, self._num_held = [], 0


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
    return keys, spread_T(model, residual_TD), final_TD


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


def spread_T(model: nn.Module, residual_TD: Tensor) -> Tensor:
    """What the final norm divides by: root mean square, in LayerNorm of the centred residual."""
    if norm_centres(model):
        residual_TD = residual_TD - residual_TD.mean(1, keepdim=True)
    return residual_TD.square().mean(1).sqrt()
