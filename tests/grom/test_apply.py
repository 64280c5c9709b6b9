"""An edit is W + P rounded once, it is undone bit for bit, and its losses are reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grom.apply import Edit, add_, edited
from grom.errors import ErasedByRounding
from grom.sites import Site, find_sites, is_tied, untie_
from grom.target import LowRank
from tests.reference import VOCAB, embedding_VD, random_matrix, tiny_model


def mlp_edit(model: PreTrainedModel, size: float = 0.1) -> Edit:
    """Updates of two MLP sites: factors of rank 2 and a whole matrix."""
    first, second = find_sites(model)[:2]
    factors = LowRank(random_matrix(0, 2, 24) * size, left_MK=random_matrix(1, 16, 2))
    return Edit({first: factors, second: LowRank(random_matrix(2, 16, 24) * size)})


def head_edit(model: PreTrainedModel, size: float = 0.1) -> Edit:
    """Updates of three rows of the head."""
    rows_K = torch.tensor([5, 2, 40])
    update = LowRank(random_matrix(0, 3, 16) * size, rows_K=rows_K, num_outputs=VOCAB)
    return Edit({find_sites(model)[-1]: update})


EDITS: dict[str, Callable[[], tuple[PreTrainedModel, Edit]]] = {
    "mlp": lambda: with_edit("llama", mlp_edit),
    "mlp, inputs first": lambda: with_edit("gpt2", mlp_edit),
    "mlp, bfloat16": lambda: with_edit("llama", mlp_edit, dtype=torch.bfloat16),
    "head": lambda: with_edit("llama", head_edit),
    "tied head": lambda: with_edit("llama", head_edit, tied=True),
    "tied head, gpt2": lambda: with_edit("gpt2", head_edit, tied=True),
}


def with_edit(
    family: str,
    make_edit: Callable[..., Edit],
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, Edit]:
    model = tiny_model(family, tied=tied, dtype=dtype)
    return model, make_edit(model)


def snapshot(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_untouched(model: PreTrainedModel, before: dict[str, Tensor], tied: bool) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert is_tied(model) == model.config.tie_word_embeddings == tied


@pytest.mark.parametrize("case", sorted(EDITS))
def test_after_the_context_the_model_is_the_same_bit_for_bit(case: str) -> None:
    model, edit = EDITS[case]()
    before, tied = snapshot(model), is_tied(model)
    with edited(model, edit):
        changed = [
            site
            for site in edit.updates
            if not torch.equal(site.weight_MN(model), site.oriented(before[f"{site.name}.weight"]))
        ]
        assert changed == list(edit.updates)
    assert_untouched(model, before, tied)


@pytest.mark.parametrize("case", sorted(EDITS))
def test_an_exception_in_the_context_is_passed_on_and_the_model_restored(case: str) -> None:
    model, edit = EDITS[case]()
    before, tied = snapshot(model), is_tied(model)
    with pytest.raises(KeyboardInterrupt), edited(model, edit):
        raise KeyboardInterrupt
    assert_untouched(model, before, tied)


@pytest.mark.parametrize("case", sorted(EDITS))
def test_inside_the_context_the_weight_is_the_rounded_sum(case: str) -> None:
    model, edit = EDITS[case]()
    old = {site: site.weight_MN(model).clone() for site in edit.updates}
    with edited(model, edit):
        for site, update in edit.updates.items():
            expected_MN = (old[site].double() + update.dense()).to(model.dtype)
            assert torch.equal(site.weight_MN(model), expected_MN)


@pytest.mark.parametrize("case", sorted(EDITS))
def test_nothing_but_the_edited_weights_changes(case: str) -> None:
    model, edit = EDITS[case]()
    before = snapshot(model)
    with edited(model, edit):
        after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{site.name}.weight" for site in edit.updates}


def test_edits_can_be_nested() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    site = find_sites(model)[0]
    with edited(model, mlp_edit(model)):
        once_MN = site.weight_MN(model).clone()
        with edited(model, mlp_edit(model, size=0.7)):
            assert not torch.equal(site.weight_MN(model), once_MN)
        assert torch.equal(site.weight_MN(model), once_MN)
    assert_untouched(model, before, tied=False)


def test_a_scaled_edit_is_that_many_times_the_edit() -> None:
    edit = mlp_edit(tiny_model("llama"))
    for site, update in edit.scaled(-2.5).updates.items():
        torch.testing.assert_close(update.dense(), -2.5 * edit.updates[site].dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_report_states_what_rounding_lost(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    edit = mlp_edit(model, size=1e-3)
    old = {site.name: site.weight_MN(model).clone() for site in edit.updates}
    with edited(model, edit) as roundings:
        new = {site.name: site.weight_MN(model).clone() for site in edit.updates}
    for rounding, (site, update) in zip(roundings, edit.updates.items(), strict=True):
        W_MN, P_MN, stored_MN = old[site.name].double(), update.dense(), new[site.name]
        lost = float((stored_MN.double() - (W_MN + P_MN)).norm() / P_MN.norm())
        assert rounding.site == site.name
        assert rounding.lost == pytest.approx(lost, rel=1e-9)
        assert rounding.update_norm == pytest.approx(float(P_MN.norm()), rel=1e-12)
        assert rounding.weight_norm == pytest.approx(float(W_MN.norm()), rel=1e-12)
        assert rounding.num_changed == int((stored_MN != old[site.name]).sum())
        assert rounding.num_weights == 16 * 24


def test_bfloat16_loses_much_of_a_small_edit_and_float32_little() -> None:
    lost = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = tiny_model("llama", dtype=dtype)
        with edited(model, mlp_edit(model, size=1e-3)) as roundings:
            lost[dtype] = roundings[0].lost
    # Half a unit in the last place of weights of .3: 2^-10 in bfloat16, 2^-26 in float32.
    assert lost[torch.bfloat16] > 0.1
    assert lost[torch.float32] < 1e-4


def test_the_report_of_edited_rows_is_about_the_whole_weight() -> None:
    model = tiny_model("llama")
    edit = head_edit(model)
    head = next(iter(edit.updates))
    norm = float(head.weight_MN(model).double().norm())
    with edited(model, edit) as (rounding,):
        assert rounding.num_changed == 3 * 16
    assert rounding.num_weights == VOCAB * 16
    assert rounding.weight_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize("make_edit", [mlp_edit, head_edit])
def test_an_edit_below_the_rounding_of_the_weights_is_refused(
    make_edit: Callable[..., Edit],
) -> None:
    model = tiny_model("llama", tied=True, dtype=torch.bfloat16)
    before = snapshot(model)
    edit = make_edit(model, size=1e-9)
    name = next(iter(edit.updates)).name
    with (
        pytest.raises(ErasedByRounding, match=f"{name}: 0 weights changed.*bfloat16"),
        edited(model, edit),
    ):
        pytest.fail("the context was entered")
    assert_untouched(model, before, tied=True)


def test_a_refused_site_takes_back_the_sites_before_it() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    before = snapshot(model)
    first, second = mlp_edit(model).updates.items()
    edit = Edit(dict([first, (second[0], second[1].scaled(1e-9))]))
    with pytest.raises(ErasedByRounding, match=second[0].name), edited(model, edit):
        pytest.fail("the context was entered")
    assert_untouched(model, before, tied=False)


def test_an_edited_tied_head_leaves_the_input_embedding_alone() -> None:
    model = tiny_model("llama", tied=True)
    before_VD = embedding_VD(model).clone()
    with edited(model, head_edit(model)):
        assert not is_tied(model)
        assert not model.config.tie_word_embeddings
        assert torch.equal(embedding_VD(model), before_VD)
    assert is_tied(model)


def test_an_untied_head_stays_untied() -> None:
    model = tiny_model("llama", tied=True)
    untie_(model)
    with edited(model, head_edit(model)):
        assert not is_tied(model)
    assert not is_tied(model)


def test_more_rows_than_a_block_are_all_edited() -> None:
    W_MN = random_matrix(0, 1100, 2)
    P_MN = random_matrix(1, 1100, 2)
    sum_MN = W_MN + P_MN
    rounding = add_(Site("W", "mlp", 0), W_MN, LowRank(P_MN))
    assert torch.equal(W_MN, sum_MN)
    assert rounding.num_changed == 2200


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, [3, 700]])
def test_the_sum_is_in_float64_and_the_update_stays_as_it_was(
    dtype: torch.dtype, rows: list[int] | None
) -> None:
    W_MN = random_matrix(0, 1100, 2).to(dtype)
    P_KN = random_matrix(1, 1100 if rows is None else len(rows), 2).float()
    update = LowRank(P_KN, rows_K=None if rows is None else torch.tensor(rows), num_outputs=1100)
    before_KN, exact_MN = P_KN.clone(), W_MN.double() + update.dense().double()
    rounding = add_(Site("W", "mlp", 0), W_MN, update)
    assert torch.equal(P_KN, before_KN)
    assert torch.equal(W_MN, exact_MN.to(dtype))
    lost = float((exact_MN - W_MN.double()).norm() / P_KN.double().norm())
    assert rounding.lost == pytest.approx(lost, rel=1e-6)
