"""A step to another version, in the ledger: the requests that it honours, each line once."""

from __future__ import annotations

from pathlib import Path

import pytest

from grom.ledger import LedgerLine, request_hash
from tasks.accepted import Accepted, accepted, standing, write_accepted
from tasks.artifacts import Artifact, CorruptArtifact
from tasks.ledger import Ledger, LedgerMoved
from tasks.place import SitesRef
from tasks.rollback import TakenBack, roll_back_ledger
from tasks.store import Store
from tests.faulty import FAULTS, QUICK, faulty, once

THEN = "2026-12-01T10:00:00+00:00"
SALT = b"0123456789abcdef"
SITES = SitesRef(
    artifact=Artifact(stage="select", uri="s3://bucket/s", key="s"),
    kind="mlp",
    layers=(1,),
    joint=False,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(str(tmp_path / "store"), tmp_path / "scratch", patience=QUICK)


def enter(store: Store, batch: str, version: str, count: int = 2, state: str = "honoured") -> None:
    """What a run does that accepts a batch."""
    record = Accepted(
        batch=batch,
        run=f"run-{batch}",
        manifest_sha256="0" * 64,
        forget=Artifact(stage="collect", uri=f"s3://bucket/{batch}", key=batch),
        num_requests=count,
        model_name="m",
        model_version=version,
        edit="edit",
        nats=1.0,
        sites=SITES,
        retain=(),
        approver="gate",
    )
    write_accepted(record, store)
    lines = [
        LedgerLine(
            request=request_hash(f"{batch}-{number}", SALT),
            batch=batch,
            received=THEN,
            run=record.run,
            model_version=version if state == "honoured" else None,
            certificate="c" * 64 if state == "honoured" else None,
            state=state,
            started=THEN,
            finished=THEN,
        )
        for number in range(count)
    ]
    Ledger(store).append(lines)


def step(store: Store, before: str, after: str) -> TakenBack:
    """A step from one version to another."""
    return roll_back_ledger(store, before, after, THEN)


def honoured(store: Store) -> str:
    """The batches whose requests are honoured now."""
    lines = standing(Ledger(store).read()).values()
    return "".join(sorted({line.batch for line in lines if line.state == "honoured"}))


def test_what_a_version_does_not_honour_is_rolled_back(store: Store) -> None:
    for batch, version in (("a", "2"), ("b", "9"), ("c", "10")):
        enter(store, batch, version)
    assert step(store, "10", "9") == TakenBack(2, frozenset({"10"}))  # as numbers: 10 > 9
    assert honoured(store) == "ab"
    assert step(store, "9", "2") == TakenBack(2, frozenset({"9", "10"}))
    last = Ledger(store).read()[-1]
    assert (last.batch, last.run, last.state) == ("b", "rollback-9-2", "rolled back")
    assert (last.model_version, last.certificate) == (None, None)
    assert (last.received, last.started) == (THEN, THEN)
    assert [record.batch for record in accepted(Ledger(store).read(), store)] == ["a"]


def test_a_step_is_entered_once(store: Store) -> None:
    enter(store, "a", "1")
    enter(store, "b", "2")
    assert step(store, "2", "1").num_lines == 2
    assert step(store, "2", "1") == TakenBack(0, frozenset({"2"}))
    assert len(Ledger(store).read()) == 6
    assert len(store.entries("ledger")) == 6  # one segment each


def test_refused_requests_stay_refused(store: Store) -> None:
    enter(store, "a", "1")
    enter(store, "b", "2", state="refused")
    assert step(store, "2", "1").num_lines == 0
    assert step(store, "1", "2").num_lines == 0


def test_a_step_back_that_is_taken_back_honours_again(store: Store) -> None:
    for batch, version in (("a", "1"), ("b", "2"), ("c", "3")):
        enter(store, batch, version)
    step(store, "3", "1")
    assert honoured(store) == "a"
    assert step(store, "1", "3") == TakenBack(4, frozenset())
    assert honoured(store) == "abc"
    lines = standing(Ledger(store).read()).values()
    assert [line.model_version for line in lines] == ["1", "1", "2", "2", "3", "3"]
    assert {line.certificate for line in lines} == {"c" * 64}
    moments = [record.forget for record in accepted(Ledger(store).read(), store)]
    assert [one and one.key for one in moments] == ["a", "b", "c"]
    # The same step a second time has lines of its own.
    assert step(store, "3", "1").num_lines == 4
    assert honoured(store) == "a"
    assert Ledger(store).read()[-1].run == "rollback-3-1-2"
    assert step(store, "3", "1").num_lines == 0
    step(store, "1", "2")
    assert honoured(store) == "ab"


def test_a_version_honours_what_counted_when_it_was_made(store: Store) -> None:
    """Version 3 was made after `b` had been rolled back."""
    enter(store, "a", "1")
    enter(store, "b", "2")
    step(store, "2", "1")
    enter(store, "c", "3")
    assert step(store, "3", "2").num_lines == 4
    assert honoured(store) == "ab"
    assert step(store, "2", "3").num_lines == 4
    assert honoured(store) == "ac"


def test_a_version_without_requests_of_its_own_honours_those_before_it(store: Store) -> None:
    enter(store, "a", "2")
    enter(store, "b", "4")
    step(store, "4", "3")
    assert honoured(store) == "a"
    step(store, "3", "1")
    assert honoured(store) == ""


def test_what_was_accepted_and_is_gone_is_named(store: Store) -> None:
    enter(store, "a", "1")
    enter(store, "b", "2")
    step(store, "2", "1")
    store.delete("runs/b/run-b/accepted.json")
    with pytest.raises(CorruptArtifact, match="runs/b/run-b"):
        step(store, "1", "2")
    assert honoured(store) == "a"


def test_a_batch_that_is_accepted_meanwhile_is_part_of_the_step(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(store, "a", "1")
    enter(store, "b", "2")
    append, late = Ledger.append, ["c"]

    def beaten(self: Ledger, lines: list[LedgerLine], after: str | None = None) -> int:
        if after is not None and late:
            enter(store, late.pop(), "3")
            with pytest.raises(LedgerMoved):
                append(self, lines, after)
        return append(self, lines, after)

    monkeypatch.setattr(Ledger, "append", beaten)
    assert step(store, "2", "1") == TakenBack(4, frozenset({"2", "3"}))
    assert honoured(store) == "a"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_under_each_fault(store: Store, fault: str) -> None:
    enter(store, "a", "1")
    enter(store, "b", "2")
    broken = faulty(store, once(fault))
    step(broken, "2", "1")
    step(broken, "1", "2")
    assert honoured(store) == "ab"
    assert len(Ledger(store).read()) == 8
