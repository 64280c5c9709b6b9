"""Every number of the audit is what solving again, with explicit inverses, gives."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import grom.changes
from grom.auditor import TOP_TOKENS, Auditor
from grom.calibrate import band_drop
from grom.changes import DOWNDATE, SOLVED_AGAIN, ForeignKeys, Request
from grom.influence import WHOLE, Influence
from grom.moments import KeyMoments
from grom.solve import split_columns
from tests.influenced import (
    BETA,
    CASES,
    EXACT,
    FAMILIES,
    FORMS,
    Problem,
    audited,
    joined,
    problem,
    sites_of,
)
from tests.reference import VOCAB, tiny_model

every_case = pytest.mark.parametrize(("family", "kind", "form"), CASES)


def check(found: Influence, given: Problem, request: Request, own: slice) -> None:
    """One row against brute force, at the columns of its site."""
    P_MN, others = given.whole(), given.others(request)
    change_MN = torch.zeros_like(P_MN)
    change_MN[:, own] = (P_MN - given.frozen(others))[:, own]
    norm = float(P_MN[:, own].norm())
    assert found.update_norm == pytest.approx(norm, rel=EXACT, abs=EXACT)
    assert found.frozen == pytest.approx(float(change_MN.norm()) / norm, rel=EXACT, abs=EXACT)
    total, num = given.drop(change_MN, request)
    assert found.num_suppressed == num
    assert found.own_effect_nats == pytest.approx(
        total / num if num else math.nan, rel=EXACT, abs=EXACT, nan_ok=True
    )
    drops = [given.drop(change_MN, other) for other in others]
    num_others = sum(count for _, count in drops)
    expected = sum(drop for drop, _ in drops) / num_others if num_others else math.nan
    assert found.others_effect_nats == pytest.approx(expected, rel=EXACT, abs=EXACT, nan_ok=True)
    moved = (given.retain_RN @ change_MN.mT).square().sum(1).mean()
    assert found.retain_effect == pytest.approx(float(moved), rel=EXACT, abs=EXACT)
    num_forget, alpha_V = len(given.forget_SN), given.alpha_V(given.requests)
    alone_MN = given.shifts(request, alpha_V).mT @ request.keys_TN.double()
    part_MN = alone_MN / num_forget @ torch.linalg.inv(given.matrix())
    assert found.part_norm == pytest.approx(
        float(part_MN[:, own].norm()) / norm, rel=EXACT, abs=EXACT
    )
    share = float((part_MN * P_MN)[:, own].sum()) / norm**2
    assert found.share == pytest.approx(share, rel=EXACT, abs=EXACT)


@every_case
def test_each_influence_is_what_solving_again_gives(family: str, kind: str, form: str) -> None:
    given = problem(family, kind, form)
    found = audited(given)
    assert set(found) == {request.name for request in given.requests}
    for request in given.requests:
        one = found[request.name]
        assert [site.site for site in one.sites] == list(given.system.sites)
        for site, own in zip(one.sites, given.system.columns, strict=True):
            check(site, given, request, own)
        check(one.whole, given, request, slice(None))
        assert one.whole.site == WHOLE
        assert one.whole.num_tokens == len(request.gold_T)


@every_case
def test_shares_add_up_to_one_at_each_site(family: str, kind: str, form: str) -> None:
    found = audited(problem(family, kind, form)).values()
    for number in range(len(next(iter(found)).sites)):
        assert sum(one.sites[number].share for one in found) == pytest.approx(1, abs=EXACT)
    assert sum(one.whole.share for one in found) == pytest.approx(1, abs=EXACT)


@every_case
def test_refit_is_a_run_that_never_had_the_request(family: str, kind: str, form: str) -> None:
    given = problem(family, kind, form)
    auditor, P_MN = given.auditor(), given.whole()
    for request in given.requests:
        change_MN = P_MN - given.refit(given.others(request))
        parts = [*given.system.columns, slice(None)]
        expected = [float(change_MN[:, own].norm() / P_MN[:, own].norm()) for own in parts]
        assert auditor.refits(request) == pytest.approx(expected, rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_without_the_only_request_nothing_is_left(form: str) -> None:
    given = problem("llama", "suppression", form)
    only = joined(list(given.requests))
    assert given.auditor().refits(only) == pytest.approx([1.0] * (len(given.system.sites) + 1))
    (one,) = given.auditor().influences([only])
    assert one.whole.frozen == pytest.approx(1, abs=EXACT)
    assert one.whole.share == pytest.approx(1, abs=EXACT)
    assert math.isnan(one.whole.others_effect_nats)


@every_case
def test_what_is_solved_again_equals_the_downdate(
    family: str, kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem(family, kind, form)
    downdated = audited(given)
    monkeypatch.setattr(grom.changes, "MIN_GAP", 2.0)
    again = audited(given)
    for name, one in downdated.items():
        rows = zip([*one.sites, one.whole], [*again[name].sites, again[name].whole], strict=True)
        for row, other in rows:
            assert (row.method, other.method) == (DOWNDATE, SOLVED_AGAIN)
            assert 0.9 * row.leverage < other.leverage < (1 + EXACT) * row.leverage
            same = replace(other, method=DOWNDATE, leverage=row.leverage)
            for value, expected in zip(numbers(same), numbers(row), strict=True):
                assert value == pytest.approx(expected, rel=EXACT, abs=EXACT, nan_ok=True)


def numbers(row: Influence) -> list[float]:
    values = (getattr(row, name) for name in Influence.__slots__)
    return [value for value in values if isinstance(value, float)]


def test_a_request_with_more_keys_than_inputs_is_solved_again() -> None:
    given = problem("llama", "replacement", "alone")
    large = joined(list(given.requests[1:]))
    assert len(large.gold_T) > sum(given.system.widths)
    grouped = replace(given, requests=(given.requests[0], large))
    for one, request in zip(
        grouped.auditor().influences(grouped.requests), grouped.requests, strict=True
    ):
        check(one.whole, grouped, request, slice(None))
        assert one.whole.method == (SOLVED_AGAIN if request is large else DOWNDATE)


def test_how_requests_are_gathered_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("gpt2", "replacement", "joint")
    together = audited(given)
    monkeypatch.setattr(grom.changes, "CHUNK_BYTES", 1)
    for name, one in audited(given).items():
        assert numbers(one.whole) == pytest.approx(numbers(together[name].whole), rel=EXACT)


def test_leverage_is_the_largest_eigenvalue_and_warns_of_lost_digits() -> None:
    given = problem("llama", "suppression", "alone")
    found = audited(given)
    for request in given.requests:
        keys_TN = request.keys_TN.double()
        H_TT = keys_TN @ torch.linalg.inv(given.matrix()) @ keys_TN.mT / len(given.forget_SN)
        expected = float(torch.linalg.eigvalsh((H_TT + H_TT.mT) / 2)[-1])
        assert found[request.name].whole.leverage == pytest.approx(expected, rel=EXACT)
        assert 0 < expected < 1


def test_keys_that_were_never_in_the_system_are_refused() -> None:
    given = problem("llama", "suppression", "alone")
    stranger = replace(given.requests[0], keys_TN=1e4 * given.requests[0].keys_TN)
    with pytest.raises(ForeignKeys, match=r"down_proj: keys of a request are not part"):
        list(given.auditor().influences([stranger]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_update_without_a_request_is_the_one_that_is_added_to_the_weights(
    family: str, form: str
) -> None:
    given = problem(family, "replacement", form)
    for request in given.requests:
        parts = given.auditor().update_without(request)
        found_MN = torch.cat([part.dense() for part in parts], dim=1)
        expected_MN = given.frozen(given.others(request))
        assert float((found_MN - expected_MN).norm() / expected_MN.norm()) <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_own_effects_are_differences_of_the_drop_that_is_calibrated(family: str, form: str) -> None:
    given = problem(family, "replacement", form)
    model, sites = tiny_model(family), sites_of(family, form)
    alpha_V = given.alpha_V(given.requests)
    auditor = given.auditor()
    whole = split_columns(auditor.changes.solved.update.scaled(BETA), given.system.widths)
    found = audited(given)
    for request in given.requests:
        keys, widths = request.keys_TN.double(), list(given.system.widths)
        own = {
            site.name: KeyMoments.zeros(width, VOCAB).update_(part_TN, request.gold_T)
            for site, width, part_TN in zip(
                sites, widths, torch.split(keys, widths, 1), strict=True
            )
        }
        drops = [
            sum(
                band_drop(
                    {site.name: part for site, part in zip(sites, update, strict=True)},
                    own,
                    alpha_V,
                    model,
                    given.rms,
                ).values()
            )
            for update in (whole, auditor.update_without(request))
        ]
        expected = drops[0] - drops[1]
        assert found[request.name].whole.own_effect_nats == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_retain_keys_are_taken_out_by_the_same_identity_without_a_shift(
    family: str, form: str
) -> None:
    given, group = problem(family, "replacement", form), slice(3, 11)
    keys_TN = given.retain_RN[group]
    auditor = given.auditor()
    kept = auditor.without_retain(Request("g", keys_TN, torch.zeros(len(keys_TN)).long()))
    left_RN = torch.cat([given.retain_RN[: group.start], given.retain_RN[group.stop :]])
    change_MN = given.whole() - given.frozen(given.requests, left_RN)
    parts = [*given.system.columns, slice(None)]
    expected = [float(change_MN[:, own].norm() / given.whole()[:, own].norm()) for own in parts]
    assert kept.norms == pytest.approx(expected, rel=EXACT, abs=EXACT)
    for one in auditor.influences(given.requests, [kept]):
        request = next(r for r in given.requests if r.name == one.whole.request)
        total, num = given.drop(-change_MN, request)
        assert one.growth_nats["g"] == pytest.approx(total / num, rel=EXACT, abs=EXACT)


def test_the_most_suppressed_tokens_come_first_and_kept_ones_not_at_all() -> None:
    given = problem("llama", "suppression", "head")
    alpha_V = given.alpha_V(given.requests)
    for name, one in audited(given).items():
        request = next(request for request in given.requests if request.name == name)
        gold = request.gold_T.tolist()
        weights = [token.alpha * token.count for token in one.tokens]
        assert weights == sorted(weights, reverse=True)
        assert [token.rank for token in one.tokens] == list(range(1, len(weights) + 1))
        for token in one.tokens:
            assert token.token is not None
            assert token.count == gold.count(token.token)
            assert token.alpha == float(alpha_V[token.token]) > 0
        known = {token for token in gold if alpha_V[token] > 0}
        assert len(one.tokens) == min(TOP_TOKENS, len(known))


def test_strength_scales_nats_but_no_ratio() -> None:
    given = problem("llama", "replacement", "joint")
    weak = {
        one.whole.request: one.whole
        for one in Auditor(given.system, given.rms).influences(given.requests)
    }
    for name, one in audited(given).items():
        for attribute in ("frozen", "share", "part_norm", "leverage"):
            assert getattr(one.whole, attribute) == pytest.approx(getattr(weak[name], attribute))
        assert one.whole.own_effect_nats == pytest.approx(BETA * weak[name].own_effect_nats)
        effect = weak[name].retain_effect
        assert effect is not None
        assert one.whole.retain_effect == pytest.approx(BETA**2 * effect)


def test_sums_in_which_alpha_is_fixed_are_refused() -> None:
    given = problem("llama", "replacement", "alone")
    fixed = replace(given.system.forget, alt_sums={3: torch.ones(24).double()})
    with pytest.raises(ValueError, match="alpha is fixed"):
        Auditor(replace(given.system, forget=fixed), given.rms)
