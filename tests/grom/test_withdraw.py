"""A request that is subtracted was never there, down to the last one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import grom.collect
from grom.collect import Collected, ForgetPlan, RequestKeys, collect_moments, each_batch
from grom.examples import Rendered
from grom.merge import merged, without
from grom.moments import KeyMoments
from grom.sites import find_sites
from grom.withdraw import moments_of_keys
from tests.influenced import CASES, EXACT, FORGET, FORMS, Problem, problem, sites_of
from tests.reference import VOCAB, in_batches, tiny_model

GROUPS = list(dict.fromkeys(rendered.group for rendered in FORGET))


def examples_of(groups: list[str]) -> list[Rendered]:
    return [rendered for rendered in FORGET if rendered.group in groups]


@cache
def collected(form: str, *groups: str) -> Collected:
    """Statistics of these requests, from the model."""
    model, sites = tiny_model("llama"), sites_of("llama", form)
    stream = in_batches(examples_of(list(groups)), 1)
    return collect_moments(model, sites, stream, ForgetPlan(True), joint=form == "joint")


def keys_of(form: str, group: str) -> list[RequestKeys]:
    model, sites = tiny_model("llama"), sites_of("llama", form)
    stream = in_batches(examples_of([group]), 1)
    return list(each_batch(model, sites, stream, ForgetPlan(True), joint=form == "joint"))


def from_keys(form: str, group: str) -> Collected:
    sizes = {name: len(m.gram_NN) for name, m in collected(form, group).moments.items()}
    return moments_of_keys(keys_of(form, group), sizes, VOCAB)


def assert_same(one: Collected, other: Collected) -> None:
    """Equal to the bit."""
    assert one.examples == other.examples
    assert (one.rms_sum, one.rms_tokens) == (other.rms_sum, other.rms_tokens)
    assert one.moments.keys() == other.moments.keys()
    for name, moments in one.moments.items():
        theirs = other.moments[name]
        assert torch.equal(moments.gram_NN, theirs.gram_NN)
        assert torch.equal(moments.sums_dense(), theirs.sums_dense())
        assert list(moments.pair_sums) == list(theirs.pair_sums)
        assert torch.equal(moments.pair_sums.rows_KN, theirs.pair_sums.rows_KN)
        assert torch.equal(moments.pair_sums.counts_K, theirs.pair_sums.counts_K)
        assert torch.equal(moments.counts_V, theirs.counts_V)
        assert moments.num_tokens == theirs.num_tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [4096, 3])
def test_moments_of_kept_keys_are_those_of_collecting_the_request_alone(
    form: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grom.collect, "BLOCK_TOKENS", block)
    collected.cache_clear()
    for group in GROUPS:
        assert_same(from_keys(form, group), collected(form, group))
    collected.cache_clear()


def test_no_keys_have_moments_of_nothing() -> None:
    nothing = moments_of_keys([], {"W": 3}, VOCAB)
    assert nothing.moments["W"].num_tokens == 0
    assert nothing.examples == []


def update_of(given: Problem, forget: KeyMoments) -> Tensor:
    """P of these forget moments, whole rows of the head included."""
    update = given.system.solved(forget).update
    return update.dense()


def apart(one_MN: Tensor, other_MN: Tensor) -> float:
    return float((one_MN - other_MN).norm() / other_MN.norm())


@pytest.mark.parametrize(
    ("kind", "form"), sorted({(kind, form) for family, kind, form in CASES if family == "llama"})
)
def test_each_request_that_is_subtracted_was_never_there(kind: str, form: str) -> None:
    given = problem("llama", kind, form)
    whole = merged(collected(form, group) for group in GROUPS)
    for group in GROUPS:
        left = without(whole, from_keys(form, group))
        never = collected(form, *(other for other in GROUPS if other != group))
        (found,), (expected,) = left.moments.values(), never.moments.values()
        assert apart(update_of(given, found), update_of(given, expected)) <= EXACT
        assert sorted(left.examples, key=str) == sorted(never.examples, key=str)


@pytest.mark.parametrize("form", FORMS)
def test_requests_can_go_one_after_the_other_until_nothing_is_left(form: str) -> None:
    given = problem("llama", "replacement", form)
    left = merged(collected(form, group) for group in GROUPS)
    for number, group in enumerate(GROUPS[:-1], 1):
        left = without(left, from_keys(form, group))
        (found,), (expected,) = (
            statistics.moments.values() for statistics in (left, collected(form, *GROUPS[number:]))
        )
        assert apart(update_of(given, found), update_of(given, expected)) <= EXACT
    (last,) = (
        found - from_keys(form, GROUPS[-1]).moments[name] for name, found in left.moments.items()
    )
    assert last.num_tokens == 0
    assert not bool(last.counts_V.any())
    assert (len(last.sums), len(last.pair_sums)) == (0, 0)


def test_what_is_left_without_the_last_request_is_the_base_model() -> None:
    given = problem("llama", "replacement", "alone")
    solved = given.system.solved()
    (norm,) = given.system.norms_without(solved, given.system.forget)
    assert norm == pytest.approx(solved.update.norm(), rel=EXACT)


def test_the_system_of_a_model_knows_where_its_sites_are() -> None:
    given = problem("gpt2", "replacement", "joint")
    assert given.system.sites == tuple(site.name for site in find_sites(tiny_model("gpt2"))[1:3])
    assert given.system.columns == [slice(0, 24), slice(24, 48)]
    assert given.system.centred
    assert not given.system.head
    assert problem("llama", "replacement", "head").system.head
