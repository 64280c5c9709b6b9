"""Claims: one worker at a time, whoever is slow, killed or wrong about the time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grom.errors import DataError
from tasks import claims
from tasks.artifacts import CorruptArtifact
from tasks.bucket import Bucket
from tasks.claims import Claim, LeaseLost, claim, fail, finish, look, release, renew
from tasks.keeper import Keeper
from tasks.outcomes import Outcome, publish, read_outcome, reason_of
from tasks.store import Store
from tests.faulty import FAULTS, QUICK, faulty, once, storm

RACERS = 20
LATER_S = 10 * claims.LEASE_S


def take(store: Bucket, owner: str = "a", batch: str = "b") -> Claim:
    """A claim that must succeed."""
    held = claim(batch, owner, store)
    assert held is not None
    return held


@pytest.fixture
def later(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every lease run out, by the store's clock."""

    def advance() -> None:
        now = Bucket.now
        monkeypatch.setattr(Bucket, "now", lambda self: now(self) + LATER_S)

    return advance


def test_of_many_workers_one_gets_the_batch(store: Store) -> None:
    ready = threading.Barrier(RACERS)

    def race(number: int) -> Claim | None:
        mine = Store(store.root, store.scratch, store._options, QUICK)
        ready.wait()
        return claim("b", f"worker {number}", mine)

    with ThreadPoolExecutor(RACERS) as pool:
        won = [held for held in pool.map(race, range(RACERS)) if held]
    seen = look("b", store)
    assert len(won) == 1
    assert seen is not None
    assert seen.record.owner == won[0].record.owner
    assert won[0].token == seen.record.token == 1


def test_of_many_who_take_over_one_gets_the_batch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MARGIN_S", 0.0)
    assert claim("b", "a", store, lease_s=0.01) is not None
    while (seen := look("b", store)) is not None and not seen.has_run_out(store.now()):
        time.sleep(0.1)
    with ThreadPoolExecutor(RACERS) as pool:
        results = list(pool.map(lambda i: claim("b", f"worker {i}", store), range(RACERS)))
    assert [held.token for held in results if held] == [2]


RACE = """
import sys
from pathlib import Path
from tasks.claims import claim
from tasks.store import Store
store = Store(sys.argv[1], Path("."))
print("ready", flush=True)
sys.stdin.readline()
print("won" if claim("b", sys.argv[2], store) else "lost", flush=True)
"""


def test_of_many_processes_one_gets_the_batch(tmp_path: Path) -> None:
    """The lock of a local folder; on S3 the server decides, and threads are as good."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", RACE, str(tmp_path / "store")]
    workers = [
        subprocess.Popen(
            [*command, f"process {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
            cwd=tmp_path,
        )
        for number in range(4)
    ]
    streams = [(worker.stdin, worker.stdout) for worker in workers]
    for _, said in streams:
        assert said is not None
        assert said.readline() == "ready\n"
    for told, _ in streams:
        assert told is not None
        told.write("go\n")
        told.flush()
    results = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    assert sorted(results) == ["lost"] * 3 + ["won"]


def test_a_claim_is_held_until_its_lease_runs_out(store: Store, later: Callable[[], None]) -> None:
    held = take(store)
    assert claim("b", "other", store) is None
    later()
    taken = take(store, "other")
    assert (held.token, taken.token) == (1, 2)
    assert claim("b", "third", store) is not None  # `later` makes the new lease old, too


def test_who_was_overtaken_cannot_end_the_batch(store: Store, later: Callable[[], None]) -> None:
    held = take(store)
    later()
    taken = take(store, "other")
    for end in (
        lambda: finish(held, store, model_version="1"),
        lambda: fail(held, store, "no"),
        lambda: renew(held, store),
        lambda: release(held, store),
    ):
        with pytest.raises(LeaseLost, match="token 1 was taken over"):
            end()
    assert store.entries("done") == store.entries("failed") == []
    outcome = finish(taken, store, model_version="2", certificate="c" * 64)
    assert read_outcome("b", "done", store) == outcome
    assert (outcome.token, outcome.owner, outcome.model_version) == (2, "other", "2")


def test_clocks_of_workers_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"), tmp_path)
    take(store)
    real = time.time
    for skew in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        assert claim("b", f"worker {skew}", store) is None
    os.utime(tmp_path / "store/claims/b.json", (0, real() - claims.LEASE_S - 10))
    assert claim("b", "worker", store) is not None


def test_renewing_starts_the_lease_anew(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    held = renew(take(store), store, run="run 1")
    seen = look("b", store)
    assert seen is not None
    assert seen.record.run == "run 1"
    written = seen.modified
    assert not seen.has_run_out(written + claims.LEASE_S)
    assert seen.has_run_out(written + claims.LEASE_S + claims.MARGIN_S + 1)
    longer = renew(held, store, lease_s=1e6)
    assert longer.record.run == "run 1"
    monkeypatch.setattr(Bucket, "now", lambda _: written + LATER_S)
    assert claim("b", "other", store) is None
    with pytest.raises(LeaseLost):
        renew(held, store)  # an old version of its own claim


def test_a_released_batch_is_free_and_its_token_grows(store: Store) -> None:
    release(take(store), store)
    assert take(store, "other").token == 2


def test_an_owner_that_comes_back_takes_over_from_itself(store: Store) -> None:
    before = take(store, "run 1")
    resumed = take(store, "run 1")
    assert resumed.token == 2
    with pytest.raises(LeaseLost):
        finish(before, store)
    finish(resumed, store)


@pytest.mark.parametrize("state", ["done", "failed"])
def test_what_has_ended_is_not_claimed(store: Store, state: str) -> None:
    held = take(store)
    outcome = finish(held, store) if state == "done" else fail(held, store, "bad rows")
    assert claim("b", "other", store) is None
    assert claim("b", "a", store) is None
    assert read_outcome("b", state, store) == outcome
    store.delete("claims/b.json")
    assert claim("b", "other", store) is None


def test_an_outcome_that_was_not_published_is_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill between the two writes of `finish`."""
    with monkeypatch.context() as killed:
        killed.setattr(claims, "publish", lambda *_: None)
        outcome = finish(take(store), store, model_version="1")
    assert read_outcome("b", "done", store) is None
    assert claim("b", "other", store) is None
    assert read_outcome("b", "done", store) == outcome


def test_a_later_failure_replaces_an_earlier_one_and_done_stays(store: Store) -> None:
    def outcome(state: str, token: int) -> Outcome:
        return Outcome.model_validate(
            {"state": state, "batch": "b", "token": token, "owner": "a", "reason": str(token)}
        )

    for token in (1, 3, 2):
        publish(outcome("failed", token), store)
        publish(outcome("done", token), store)
    failed, done = (read_outcome("b", state, store) for state in ("failed", "done"))
    assert failed == outcome("failed", 3)
    assert done == outcome("done", 1)


def test_only_plain_names_are_claimed(store: Store) -> None:
    for name in ("../x", "a/b", "", "x" * 200, "a b"):
        with pytest.raises(DataError, match="plain name"):
            claim(name, "a", store)


def test_a_claim_that_is_no_claim_is_named(store: Store) -> None:
    store.create("claims/b.json", b"{}")
    with pytest.raises(CorruptArtifact, match=r"claims/b\.json"):
        claim("b", "a", store)


def test_reasons_quote_no_row() -> None:
    assert reason_of(ValueError("a person's text")) == "ValueError"
    assert reason_of(DataError("file, line 3: empty")) == "file, line 3: empty"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_life_under_each_fault(store: Store, fault: str) -> None:
    broken = faulty(store, once(fault))
    held = renew(take(broken), broken, run="r")
    assert claim("b", "other", faulty(store, once(fault))) is None
    finish(held, broken)
    done = read_outcome("b", "done", store)
    assert done is not None
    assert done.token == 1


@pytest.mark.parametrize("seed", range(3))
def test_workers_in_a_storm_end_a_batch_once(store: Store, seed: int) -> None:
    """Nobody ever believes to hold what another holds, and one outcome comes out."""
    ended: list[Outcome] = []

    def work(number: int) -> None:
        mine = faulty(store, storm(seed * 10 + number))
        while read_outcome("b", "done", mine) is None:
            held = claim("b", f"worker {number}", mine)
            if held is not None:
                ended.append(finish(renew(held, mine, run=str(number)), mine))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert ended == [read_outcome("b", "done", store)]


def test_a_keeper_renews_until_the_end(store: Store) -> None:
    held = claim("b", "a", store, lease_s=0.3)
    assert held is not None
    with Keeper(held, store) as keeper:
        keeper.renew(run="run 1")
        first = look("b", store)
        time.sleep(1.0)
        keeper.check()
        kept = look("b", store)
        assert keeper.finish(model_version="1").run == "run 1"
    assert first is not None
    assert kept is not None
    assert kept.version != first.version
    assert kept.record.token == keeper.token == 1


def test_a_keeper_says_when_the_claim_is_lost(store: Store) -> None:
    held = claim("b", "a", store, lease_s=0.3)
    assert held is not None
    with Keeper(held, store) as keeper:
        while (seen := look("b", store)) is None or not store.swap(
            "claims/b.json",
            seen.record.model_copy(update={"owner": "other", "token": 2}).to_bytes(),
            seen.version,
        ):
            pass
        time.sleep(1.0)
        with pytest.raises(LeaseLost):
            keeper.check()
        with pytest.raises(LeaseLost):
            keeper.fail("no")
    assert store.entries("failed") == []


def test_a_keeper_whose_run_fails_leaves_the_claim(store: Store) -> None:
    with pytest.raises(KeyError), Keeper(take(store), store):
        raise KeyError
    seen = look("b", store)
    assert seen is not None
    assert seen.record.outcome is None
