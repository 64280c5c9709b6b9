"""Where batches stand, from objects alone, and the queue that goes on beside a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grom.errors import DataError, GromError, MissingInput
from tasks import claims
from tasks.batches import NotFailed, retry, settle, status, statuses, waiting
from tasks.bucket import Bucket
from tasks.claims import LEASE_S, claim, fail, finish, release, renew
from tasks.inbox import arrivals, check
from tasks.outcomes import read_outcome, reason_of
from tasks.store import Store
from tasks.submit import submit
from tests.faulty import FAULTS, faulty, once, storm


@pytest.fixture
def deliver(store: Store, tmp_path: Path) -> Callable[[str], str]:
    """Submit a batch of one request."""

    def submitted(batch: str) -> str:
        path = tmp_path / f"{batch}.jsonl"
        path.write_text(json.dumps({"request_id": batch, "text": "Quxana"}))
        return submit([path], store, batch).batch

    return submitted


def states(store: Bucket) -> dict[str, str]:
    """State by batch; the list and the single view must agree."""
    found = {one.batch: one.state for one in statuses(store)}
    assert found == {batch: status(batch, store).state for batch in found}
    return dict(found)


def test_the_states_of_a_life(
    store: Store, deliver: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(store) == []
    deliver("b")
    assert states(store) == {"b": "waiting"}
    assert waiting(store) == ["b"]
    held = claim("b", "host", store)
    assert held is not None
    assert states(store) == {"b": "claimed"}
    assert waiting(store) == []
    held = renew(held, store, run="run 7")
    running = status("b", store)
    assert (running.state, running.owner, running.token, running.run) == (
        "running",
        "host",
        1,
        "run 7",
    )
    with monkeypatch.context() as later:
        now = Bucket.now
        later.setattr(Bucket, "now", lambda self: now(self) + 2 * LEASE_S)
        assert states(store) == {"b": "waiting"}
        assert waiting(store) == ["b"]
        assert "the lease of host ran out" in (status("b", store).note or "")
    finish(held, store, model_version="3", certificate="c" * 64)
    done = status("b", store)
    assert states(store) == {"b": "done"}
    assert done.outcome is not None
    assert (done.outcome.model_version, done.run) == ("3", "run 7")
    assert waiting(store) == []
    for entry in store.entries("inbox"):
        store.delete(entry.name)
    store.delete("claims/b.json")
    assert states(store) == {"b": "done"}


def test_a_released_batch_waits(store: Store, deliver: Callable[[str], str]) -> None:
    deliver("b")
    held = claim("b", "host", store)
    assert held is not None
    release(held, store)
    assert states(store) == {"b": "waiting"}
    assert status("b", store).note is None


def test_a_failed_batch_says_why_and_can_be_retried(
    store: Store, deliver: Callable[[str], str]
) -> None:
    deliver("b")
    for token in (1, 3):
        held = claim("b", "host", store)
        assert held is not None
        assert held.token == token
        fail(held, store, "a.jsonl, line 3: `answer` is empty")
        found = status("b", store)
        assert (found.state, found.note) == ("failed", "a.jsonl, line 3: `answer` is empty")
        assert waiting(store) == []
        retry("b", store)
        assert states(store) == {"b": "waiting"}
        assert read_outcome("b", "failed", store) is None
    assert waiting(store) == ["b"]


def test_only_what_failed_is_retried(store: Store, deliver: Callable[[str], str]) -> None:
    deliver("b")
    with pytest.raises(NotFailed, match="is waiting, not failed"):
        retry("b", store)
    held = claim("b", "host", store)
    assert held is not None
    with pytest.raises(NotFailed, match="is claimed"):
        retry("b", store)
    finish(held, store)
    with pytest.raises(NotFailed, match="is done"):
        retry("b", store)
    for name in ("nobody", "../b"):
        with pytest.raises(GromError):
            retry(name, store)


def test_a_kill_in_the_middle_of_a_retry_is_one_after_it(
    store: Store, deliver: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver("b")
    held = claim("b", "host", store)
    assert held is not None
    fail(held, store, "no")
    with monkeypatch.context() as killed:
        killed.setattr(store, "delete", lambda _: None)
        retry("b", store)
    assert read_outcome("b", "failed", store) is not None
    assert states(store) == {"b": "waiting"}
    held = claim("b", "host", store)
    assert held is not None
    fail(held, store, "again")
    assert status("b", store).note == "again"
    assert status("b", store).token == held.token


def test_outcomes_that_killed_workers_left_are_published(
    store: Store, deliver: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in ("good", "bad", "open"):
        deliver(batch)
    with monkeypatch.context() as killed:
        killed.setattr(claims, "publish", lambda *_: None)
        for batch in ("good", "bad", "open"):
            held = claim(batch, "host", store)
            assert held is not None
            if batch == "good":
                finish(held, store)
            if batch == "bad":
                fail(held, store, "no")
    assert states(store) == {"good": "done", "bad": "failed", "open": "claimed"}
    assert sorted(settle(store)) == ["bad", "good"]
    assert settle(store) == []
    assert read_outcome("good", "done", store) is not None
    assert read_outcome("bad", "failed", store) is not None


def test_bad_batches_are_shown_and_the_queue_goes_on(
    store: Store, deliver: Callable[[str], str]
) -> None:
    """Every kind of broken batch, and one good one that comes last."""
    store.create("inbox/unfinished/a.jsonl", b"{}")
    store.create("inbox/no-manifest/_READY.json", b"{}")
    store.create("inbox/no json/_READY.json", b"{}")
    store.create("inbox/empty/manifest.json", b'{"files":[],"rows":0}')
    store.create("inbox/empty/_READY.json", b"{}")
    deliver("half")
    store.delete("inbox/half/forget-00001.jsonl")
    store.create("inbox/half/forget-00001.jsonl", b'{"requ')
    store.create("claims/odd.json", b"nonsense")
    deliver("good")
    for batch in waiting(store):
        held = claim(batch, "host", store)
        assert held is not None
        try:
            check(batch, store)
        except DataError as error:
            fail(held, store, reason_of(error))
        else:
            finish(held, store)
    found = {one.batch: (one.state, one.note or "") for one in statuses(store)}
    expected = {
        "unfinished": ("waiting", "still being uploaded"),
        "no-manifest": ("waiting", "_READY.json without manifest.json"),
        "no json": ("waiting", "plain name"),
        "empty": ("failed", "the batch is empty"),
        "half": ("failed", "6 of "),
        "odd": ("waiting", "not a claim"),
        "good": ("done", ""),
    }
    assert {batch: state for batch, (state, _) in found.items()} == {
        batch: state for batch, (state, _) in expected.items()
    }
    for batch, (_, words) in expected.items():
        assert words in found[batch][1]
        assert "Quxana" not in found[batch][1]
    assert waiting(store) == []


def test_a_single_status_says_what_a_worker_would_refuse(store: Store) -> None:
    store.create("inbox/empty/manifest.json", b'{"files":[],"rows":0}')
    store.create("inbox/empty/_READY.json", b"{}")
    found = status("empty", store)
    assert (found.state, found.is_ready) == ("waiting", True)
    assert "the batch is empty" in (found.note or "")


def test_a_batch_without_a_trace_is_named(store: Store) -> None:
    with pytest.raises(MissingInput, match="there is no batch nobody"):
        status("nobody", store)
    with pytest.raises(DataError, match="plain name"):
        status("../b", store)


def test_the_oldest_batch_comes_first(store: Store, deliver: Callable[[str], str]) -> None:
    for batch in ("z", "a", "m"):
        deliver(batch)
    found = arrivals(store)
    assert waiting(store) == [one.batch for one in found]
    received = [one.received for one in found if one.received is not None]
    assert received == sorted(received)
    assert len(received) == 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_whole_life_under_each_fault(
    store: Store, deliver: Callable[[str], str], fault: str
) -> None:
    deliver("b")
    broken = faulty(store, once(fault))
    if fault == "lag":
        assert waiting(broken) == []  # the next sweep sees it
    assert waiting(broken) == ["b"]
    held = claim("b", "host", broken)
    assert held is not None
    check("b", broken)
    fail(held, broken, "no")
    retry("b", faulty(store, once("twice" if fault == "lag" else fault)))
    assert states(store) == {"b": "waiting"}


def test_batches_are_worked_off_in_a_storm(store: Store, deliver: Callable[[str], str]) -> None:
    for batch in ("one", "two", "three"):
        deliver(batch)
    broken = faulty(store, storm(5))
    for _ in range(20):
        for batch in waiting(broken):
            held = claim(batch, "host", broken)
            if held is not None:
                assert check(batch, broken).num_requests == 1
                finish(held, broken)
    assert states(store) == {"one": "done", "two": "done", "three": "done"}
