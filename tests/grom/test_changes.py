"""Factors of changes: how requests are cut into chunks, and what reads a drop off an update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import grom.changes
from grom.changes import DOWNDATE, SOLVED_AGAIN, Changes, Request
from grom.target import LowRank
from tests.influenced import BETA, CASES, EXACT, FAMILIES, Problem, problem
from tests.reference import VOCAB


def changes_of(given: Problem) -> Changes:
    return Changes(given.system, given.rms, BETA)


@pytest.mark.parametrize(("family", "kind", "form"), CASES)
def test_the_parts_of_all_requests_add_up_to_the_update(family: str, kind: str, form: str) -> None:
    given = problem(family, kind, form)
    changes = changes_of(given)
    total_CN = torch.zeros_like(changes.update.dense())
    for chunk in changes.of(given.requests):
        total_CN += chunk.part_left_TC.mT @ chunk.part_right_TN
    whole_CN = changes.update.dense()
    assert float((total_CN - whole_CN).norm() / whole_CN.norm()) <= EXACT


def test_rows_of_a_chunk_belong_to_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem("llama", "replacement", "alone")
    num_inputs = sum(given.system.widths)
    monkeypatch.setattr(grom.changes, "CHUNK_BYTES", 8 * num_inputs * 20)
    chunks = list(changes_of(given).of(given.requests))
    assert len(chunks) > 1
    names = [request.name for chunk in chunks for request in chunk.requests]
    assert names == [request.name for request in given.requests]
    for chunk in chunks:
        assert sum(len(request.gold_T) for request in chunk.requests) <= 20
        for request, own in zip(chunk.requests, chunk.rows, strict=True):
            assert torch.equal(chunk.key_TN[own], request.keys_TN.double())


def test_only_requests_that_would_lose_digits_are_solved_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = problem("llama", "suppression", "alone")
    (chunk,) = changes_of(given).of(given.requests)
    order = sorted(chunk.leverages)
    monkeypatch.setattr(grom.changes, "MIN_GAP", 1 - (order[-2] + order[-1]) / 2)
    first, second = changes_of(given).of(given.requests)
    assert (first.method, second.method) == (DOWNDATE, SOLVED_AGAIN)
    assert second.requests[0].name == chunk.requests[chunk.leverages.index(order[-1])].name
    assert len(first.requests) == len(given.requests) - 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["alone", "head"])
def test_readers_give_the_drop_of_each_suppressed_token(family: str, form: str) -> None:
    given = problem(family, "suppression", form)
    changes = changes_of(given)
    readers_VC = changes.reader_TC(torch.arange(VOCAB))
    columns = slice(None) if changes.rows_C is None else changes.rows_C
    alpha_V = changes.solved.alpha_V
    expected_VC = -given.reader_VM[:, columns] * (alpha_V > 0).unsqueeze(1)
    assert torch.allclose(readers_VC, expected_VC, rtol=1e-12, atol=1e-12)


def test_an_edit_of_no_token_changes_nothing() -> None:
    given = problem("llama", "suppression", "head")
    special = replace(given.system, special=range(VOCAB))
    (chunk,) = Changes(special, given.rms).of(given.requests)
    assert chunk.left_TC.shape[1] == 0
    (same,) = Changes(replace(special, head=False), given.rms).of(given.requests)
    assert not bool(same.left_TC.any())


def test_retain_keys_of_no_weight_change_nothing() -> None:
    given = problem("llama", "suppression", "alone")
    ridge = given.system.ridge.model_copy(update={"w_retain": 0.0})
    changes = Changes(replace(given.system, ridge=ridge), given.rms)
    keys_TN = given.retain_RN[:3]
    change, leverage = changes.without_retain(Request("g", keys_TN, torch.zeros(3).long()))
    assert isinstance(change, LowRank)
    assert (change.norm(), leverage) == (0, 0)
