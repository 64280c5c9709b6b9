"""Sequential keys: edit a layer, collect the next one from the edited model.

The published algorithm makes one full pass over both sets for each layer.  Here the hidden states
of every batch are held at the current layer: run it with its edit, store what it gives, run the
next one up to its MLP output matrix, collect.  One pass in total, and each band layer once more.

Shapes: B examples, L positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack

from torch import Tensor, nn

from grom.apply import Edit, edited
from grom.batches import Batch
from grom.collect import Collected, Collector, ForgetPlan
from grom.forward import best_other_T, recorded_inputs, run, starting_at
from grom.moments import KeyMoments
from grom.sites import Site, decoder_layers, unembedding_VD
from grom.target import LowRank

Hidden = MutableMapping[int, Tensor]
"""Hidden states (B, L, D) by batch number; a mapping onto files keeps memory constant."""
Solve = Callable[[Site, KeyMoments, KeyMoments], LowRank]
"""Update of one site from its retain and forget moments, at the strength to apply."""


class Held:
    """One set's batches, its moments at the current site, and its hidden states there."""

    def __init__(
        self,
        stream: Callable[[], Iterable[Batch]],
        hidden: Hidden,
        plan: ForgetPlan | None,
        alternatives: MutableMapping[int, Tensor],
    ) -> None:
        self.stream, self.hidden, self.plan = stream, hidden, plan
        self.alternatives = alternatives

    def numbered(self, model: nn.Module) -> Iterator[tuple[int, Batch]]:
        """Batches on the model's device with their numbers."""
        device = unembedding_VD(model).device
        for number, batch in enumerate(self.stream()):
            yield number, batch.to(device)


def sweep(
    model: nn.Module, sites: Sequence[Site], retain: Held, forget: Held, solve: Solve
) -> tuple[dict[Site, LowRank], dict[str, KeyMoments], dict[str, KeyMoments]]:
    """Collect, solve and edit layer by layer.  The model is as before afterwards.

    Args:
        model: the unedited model.
        sites: MLP sites in ascending order of layer.
        retain: the retain set.
        forget: the forget set, with its plan.
        solve: update of a site from its moments.

    Returns:
        updates by site, then retain and forget moments by site name.
    """
    updates: dict[Site, LowRank] = {}
    moments: tuple[dict[str, KeyMoments], dict[str, KeyMoments]] = ({}, {})
    _find_alternatives(model, forget)
    with ExitStack() as edits:
        previous: Site | None = None
        for site in sites:
            for held, by_name in zip((retain, forget), moments, strict=True):
                collected = _collect_at(model, previous, site, held)
                by_name[site.name] = collected.moments[site.name]
            updates[site] = solve(site, moments[0][site.name], moments[1][site.name])
            edits.enter_context(edited(model, Edit({site: updates[site]})))
            previous = site
    return updates, *moments


def _collect_at(model: nn.Module, previous: Site | None, site: Site, held: Held) -> Collected:
    """Moments at `site`; hidden states move from the layer of `previous` to that of `site`."""
    assert site.layer is not None
    layers = decoder_layers(model)
    here, module = layers[site.layer], site.module(model)
    collector = Collector(model, [site], held.plan)
    for number, batch in held.numbered(model):
        with ExitStack() as stack:
            if previous is not None:
                assert previous.layer is not None
                start = held.hidden[number].to(batch.ids_BL.device)
                stack.enter_context(starting_at(model, previous.layer, start))
            inputs = stack.enter_context(recorded_inputs([here, module], stop=True))
            run(model, batch)
        held.hidden[number] = inputs[here]
        keys = {site.name: inputs[module][batch.predicts_BL]}
        alt_T = held.alternatives.get(number)
        if alt_T is not None:
            alt_T = alt_T.to(batch.gold_T.device)
        collector.add(batch, keys, alt_T)
    return collector.finish()


def _find_alternatives(model: nn.Module, forget: Held) -> None:
    """Ask the reference, or the unedited model, once what should be said instead."""
    if forget.plan is None or not forget.plan.replace:
        return
    adviser = forget.plan.reference or model
    for number, batch in forget.numbered(model):
        hidden_BLD = run(adviser, batch)
        assert hidden_BLD is not None
        answers_TD = hidden_BLD[batch.predicts_BL]
        forget.alternatives[number] = best_other_T(adviser, answers_TD, batch.gold_T)
