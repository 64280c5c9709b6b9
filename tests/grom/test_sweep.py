"""The sweep gives the edit of the published algorithm in one pass and one repeat of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from grom.apply import Edit, edited
from grom.batches import Batch
from grom.collect import ForgetPlan, collect_moments
from grom.config import RidgeConfig
from grom.moments import KeyMoments
from grom.sites import Site, find_sites, mlp_modules, unembedding_VD
from grom.solve import solve_edit
from grom.sweep import Held, sweep
from grom.target import LowRank, replacement_cross, suppression_cross
from tests.reference import (
    MODELS,
    VOCAB,
    Tolerance,
    dense_VVN,
    in_batches,
    random_rendered,
    reference_sequential_edit,
    tiny_model,
)

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
FORGET, RETAIN = in_batches(random_rendered(11, 6)), in_batches(random_rendered(12, 12))
ALPHA_V = (torch.arange(VOCAB) % 4 / 3).double()
RIDGE, BETA = RidgeConfig(), 2.0
FLOAT64: Tolerance = {"rtol": 1e-4, "atol": 1e-5}
"""Models in float64, but norms and rotations inside them are float32."""


@dataclass(slots=True)
class Sweep:
    """A sweep over both sets, and all that it leaves behind."""

    model: PreTrainedModel
    sites: Sequence[Site]
    replace: bool = False
    reference: PreTrainedModel | None = None
    hidden: tuple[dict[int, Tensor], dict[int, Tensor]] = field(default_factory=lambda: ({}, {}))
    alternatives: dict[int, Tensor] = field(default_factory=dict)

    def run(self) -> tuple[dict[Site, LowRank], dict[str, KeyMoments], dict[str, KeyMoments]]:
        plan = ForgetPlan(self.replace, self.reference)
        retain = self.held(RETAIN, self.hidden[0], None)
        return sweep(
            self.model, self.sites, retain, self.held(FORGET, self.hidden[1], plan), self.solve
        )

    def held(
        self, stream: Sequence[Batch], hidden: MutableMapping[int, Tensor], plan: ForgetPlan | None
    ) -> Held:
        return Held(lambda: stream, hidden, plan, self.alternatives if plan else {})

    def solve(self, site: Site, retain: KeyMoments, forget: KeyMoments) -> LowRank:
        cross = replacement_cross if self.replace else suppression_cross
        cross_MN = BETA * cross(forget, ALPHA_V, unembedding_VD(self.model))
        return LowRank(solve_edit(retain, forget, cross_MN, RIDGE, site=site.name))


@every_model
def test_the_sequential_sweep_gives_the_edit_of_the_published_algorithm(
    family: str, tied: bool
) -> None:
    model = tiny_model(family, tied=tied, dtype=torch.float64)
    sites, unembedding_VM = find_sites(model)[:3], unembedding_VD(model).clone()
    updates, *_ = Sweep(model, sites).run()
    expected = reference_sequential_edit(
        model, FORGET, RETAIN, sites, ALPHA_V, unembedding_VM, RIDGE, BETA
    )
    for site in sites:
        assert_close(updates[site].dense(), expected[site], **FLOAT64)


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("asked", ["itself", "a reference"])
def test_moments_are_those_of_the_model_with_the_layers_below_edited(
    layers: tuple[int, ...], asked: str
) -> None:
    """With replacements, which the unedited model or the reference chooses once and for all."""
    model, other = tiny_model("llama"), tiny_model("qwen3", seed=9)
    sites = [find_sites(model)[layer] for layer in layers]
    adviser = other if asked == "a reference" else tiny_model("llama")
    run = Sweep(model, sites, True, other if asked == "a reference" else None)
    updates, retain, forget = run.run()
    for number, site in enumerate(sites):
        with ExitStack() as stack:
            for below in sites[:number]:
                stack.enter_context(edited(model, Edit({below: updates[below]})))
            plan = ForgetPlan(True, adviser)
            expected = collect_moments(model, [site], FORGET, plan).moments[site.name]
            kept = collect_moments(model, [site], RETAIN).moments[site.name]
        # float32 keys, a layer's own block sums in float32.
        assert_close(forget[site.name].gram_NN, expected.gram_NN, rtol=1e-4, atol=1e-4)
        assert_close(dense_VVN(forget[site.name].pair_sums), dense_VVN(expected.pair_sums))
        assert_close(forget[site.name].sums_dense(), expected.sums_dense())
        assert_close(retain[site.name].gram_NN, kept.gram_NN, rtol=1e-4, atol=1e-4)
        assert len(expected.pair_sums) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_bit_for_bit_as_before(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    updates, *_ = Sweep(model, find_sites(model)[:3], True, tiny_model("qwen3")).run()
    assert all(update.norm() > 0 for update in updates.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_failed_solve_leaves_the_model_as_before() -> None:
    class Failing(Sweep):
        def solve(self, site: Site, retain: KeyMoments, forget: KeyMoments) -> LowRank:
            if site.layer == 2:
                raise KeyboardInterrupt
            return super().solve(site, retain, forget)

    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        Failing(model, find_sites(model)[:3]).run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("replace", [False, True])
def test_hidden_states_and_alternatives_have_one_entry_for_each_batch(replace: bool) -> None:
    model = tiny_model("llama")
    run = Sweep(model, find_sites(model)[:3], replace)
    run.run()
    for hidden, stream in zip(run.hidden, (RETAIN, FORGET), strict=True):
        assert set(hidden) == set(range(len(stream)))
        assert all(hidden[n].shape == (*b.ids_BL.shape, 16) for n, b in enumerate(stream))
    expected = {number: len(batch.gold_T) for number, batch in enumerate(FORGET) if replace}
    assert {number: len(alt_T) for number, alt_T in run.alternatives.items()} == expected


@pytest.mark.parametrize(
    ("layers", "calls"),
    [((0, 1, 2), [2, 2, 1]), ((1, 2), [1, 2, 1]), ((0, 2), [2, 1, 1]), ((1,), [1, 1, 0])],
)
@pytest.mark.parametrize("replace", [False, True])
def test_each_layer_runs_once_and_those_that_were_edited_once_more(
    layers: tuple[int, ...], calls: list[int], replace: bool
) -> None:
    """But for the last, which nothing follows; replacements take a full pass of the forget set."""
    model, counted = tiny_model("llama"), Counter[int]()
    for layer, mlp in enumerate(mlp_modules(model)):
        mlp.register_forward_pre_hook(lambda *_, layer=layer: counted.update([layer]))
    Sweep(model, [find_sites(model)[layer] for layer in layers], replace).run()
    num_batches = len(FORGET) + len(RETAIN)
    extra = len(FORGET) if replace else 0
    assert [counted[layer] for layer in range(3)] == [n * num_batches + extra for n in calls]


def test_a_frozen_collection_differs_from_a_sequential_one() -> None:
    model, stream = tiny_model("llama"), RETAIN
    first, second = find_sites(model)[:2]
    frozen = collect_moments(model, [first, second], stream).moments
    with edited(model, Edit({first: LowRank(torch.ones(16, 24).double())})):
        sequential = collect_moments(model, [first, second], stream).moments
    assert torch.equal(frozen[first.name].gram_NN, sequential[first.name].gram_NN)
    assert not torch.allclose(frozen[second.name].gram_NN, sequential[second.name].gram_NN)
