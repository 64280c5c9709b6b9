"""Housekeeping of a store: what killed work left goes, what somebody may need stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from tasks import housekeep
from tasks.artifacts import Artifact, canonical_json
from tasks.batches import status
from tasks.bucket import Bucket
from tasks.claims import claim, fail, finish, release, renew
from tasks.housekeep import (
    Tidied,
    erase_due,
    live_claims,
    orphans,
    remove_orphans,
    remove_strays,
    settle_outcomes,
)
from tasks.ledger import Ledger
from tasks.place import Place
from tasks.store import Store
from tasks.submit import submit
from tests.tasks.test_ledger import line
from tests.tiny import CANARY

DAY_S = 86400.0
ON_S3 = pytest.mark.parametrize("store", ["s3"], indirect=True)
LOCALLY = pytest.mark.parametrize("store", ["local"], indirect=True)


@pytest.fixture
def place(store: Store, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The store, as a flow names it."""
    if endpoint := store._options.get("endpoint_url"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    return Place(work=str(store.scratch.parent / "work"), store=store.root)


@pytest.fixture
def later(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let two days pass by the store's clock."""

    def pass_by() -> None:
        now = Bucket.now
        monkeypatch.setattr(Bucket, "now", lambda self: now(self) + 2 * DAY_S)

    return pass_by


def submitted(store: Store, tmp_path: Path, *batches: str) -> None:
    """Batches of one request each."""
    for batch in batches:
        path = tmp_path / f"{batch}.jsonl"
        path.write_text(json.dumps({"request_id": batch, "text": f"{CANARY} {batch}"}))
        submit([path], store, batch)


def made(store: Store, number: int = 1) -> Artifact:
    """An artifact."""
    with store.publish("count", {"number": number}) as folder:
        (folder / "inner").mkdir()
        (folder / "inner/file").write_text(str(number))
        (folder / "other").write_text(str(number))
    found = store.find("count", {"number": number})
    assert found is not None
    return found


def names(store: Bucket) -> list[str]:
    """Everything in the store."""
    return [entry.name for entry in store.entries(None)]


def twice(do: Callable[[bool], Tidied], store: Store) -> Tidied:
    """A step first dry, then in earnest, then again."""
    before = store.entries(None), store.leftovers()
    would = do(True)
    assert (store.entries(None), store.leftovers()) == before
    done = do(False)
    assert done == would
    assert do(False).places == ()
    return done


def test_outcomes_of_killed_workers_are_published(
    store: Store, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(store, tmp_path, "a", "b", "c")
    with monkeypatch.context() as killed:
        killed.setattr("tasks.claims.publish", lambda *_: None)
        for batch in ("a", "b"):
            held = claim(batch, "worker", store)
            assert held is not None
            finish(held, store) if batch == "a" else fail(held, store, "no")
    assert twice(lambda dry: settle_outcomes.fn(place, dry), store).places == ("a", "b")
    assert "done/a.json" in names(store)
    assert "failed/b.json" in names(store)
    assert status("c", store).state == "waiting"


def test_what_is_due_is_erased_with_its_copies(
    store: Store, place: Place, tmp_path: Path, later: Callable[[], None]
) -> None:
    submitted(store, tmp_path, "a", "b", "c")
    for batch in ("a", "b"):
        held = claim(batch, "worker", store)
        assert held is not None
        finish(held, store) if batch == "a" else fail(held, store, "no")
    copy = Path(place.work, "scratch/forget/r/a.jsonl")
    copy.parent.mkdir(parents=True)
    copy.write_text(CANARY)
    assert erase_due.fn(place, 1.0).places == ()
    later()
    done = twice(lambda dry: erase_due.fn(place, 1.0, None, dry), store)
    assert done.places == ("inbox/a/forget-00001.jsonl", str(copy))
    assert not copy.exists()
    done = twice(lambda dry: erase_due.fn(place, 1.0, 1.0, dry), store)
    assert "inbox/b/forget-00001.jsonl" in done.places
    assert "inbox/c/forget-00001.jsonl" in names(store)


@LOCALLY
def test_drafts_and_probes_go_after_a_day(
    store: Store, place: Place, later: Callable[[], None]
) -> None:
    made(store)
    root, number = Path(store.root), uuid4().hex
    (root / f"count/.abc.{number}").mkdir()
    (root / f"count/.abc.{number}/file").write_text("1234")
    (root / f".probe-{number}").write_text("1")
    (root / ".mine").write_text("x")
    assert remove_strays.fn(place).places == ()
    later()
    done = twice(lambda dry: remove_strays.fn(place, dry), store)
    assert done.places == (
        f".probe-{number} (draft .probe-{number})",
        f"count/abc (draft .abc.{number})",
    )
    assert done.num_bytes == 5
    assert (root / ".mine").exists()


@ON_S3
def test_uploads_and_probes_go_after_a_day(
    store: Store, place: Place, later: Callable[[], None]
) -> None:
    made(store)
    probe = f".probe-{uuid4().hex}"
    store.create(probe, b"1")
    store.create("inbox/.probe-x", b"1")
    assert remove_strays.fn(place).places == ()
    later()
    bucket, _, prefix = store.root.removeprefix("s3://").partition("/")
    fs = fsspec.filesystem("s3", key="testing", secret="testing", **store._options)
    fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/inbox/b/f")
    done = twice(lambda dry: remove_strays.fn(place, dry), store)
    assert [one.split(" (")[0] for one in done.places] == ["inbox/b/f", probe]
    assert "inbox/.probe-x" in names(store)


@ON_S3
def test_files_of_losers_go_after_a_day_and_the_winner_s_stay(
    store: Store, place: Place, tmp_path: Path, later: Callable[[], None]
) -> None:
    won, lonely = made(store), made(store, 2)
    key = f"{won.stage}/{won.key}"
    (tmp_path / "f").write_text("lost")
    store.upload(tmp_path / "f", f"{key}/0lost/inner/file")
    store.upload(tmp_path / "f", "solve/0123456789abcdef/killed/edit")
    store.upload(tmp_path / "f", "solve/0123456789abcdef/killed/facts.json")
    store.upload(tmp_path / "f", "runs/b/r/accepted.json")
    store.upload(tmp_path / "f", "salt/ledger.json")
    assert remove_orphans.fn(place).places == ()
    later()
    done = twice(lambda dry: remove_orphans.fn(place, dry), store)
    assert set(done.places) == {
        f"{key}/0lost/inner/file",
        "solve/0123456789abcdef/killed/edit",
        "solve/0123456789abcdef/killed/facts.json",
    }
    assert done.num_bytes == 12
    fresh = Store(store.root, tmp_path / "fresh", store._options)
    assert (fresh.fetch(won) / "inner/file").read_text() == "1"
    assert (fresh.fetch(lonely) / "inner/file").read_text() == "2"


@ON_S3
@pytest.mark.parametrize(
    "marker", [b"{", b"{}", b"[]", b'{"folder": "elsewhere"}', b'{"folder": ""}']
)
def test_what_a_strange_marker_names_is_not_guessed(
    store: Store, later: Callable[[], None], marker: bytes
) -> None:
    for name in ("count/0123456789abcdef/a/f", "count/0123456789abcdef/b/f"):
        store.create(name, b"")
    store.create("count/0123456789abcdef/_SUCCESS.json", marker)
    later()
    assert orphans(store) == []


def test_a_writer_at_work_keeps_its_files(
    store: Store, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file of a folder counts, not the oldest."""
    store.create("count/0123456789abcdef/a/first", b"")
    store.create("count/0123456789abcdef/a/second", b"")
    entries, now = store.entries(None), store.now()
    aged = [type(one)(one.name, one.num_bytes, now - 3 * DAY_S) for one in entries[:1]]
    monkeypatch.setattr(Store, "entries", lambda *_: [*aged, *entries[1:]])
    assert orphans(store) == []
    later()
    assert len(orphans(store)) == 2


@LOCALLY
def test_artifacts_of_a_local_store_stay(store: Store, later: Callable[[], None]) -> None:
    made(store)
    with store.publish("count", {"number": 9}) as folder:
        for name in ("a", "b"):
            (folder / name).mkdir()
            (folder / name / "file").write_text("1")
    later()
    assert orphans(store) == []
    (Path(store.root) / "count" / made(store).key / "_SUCCESS.json").unlink()
    assert len(orphans(store)) == 3  # half removed by somebody who was killed


def test_ledger_files_that_are_no_segment_go(store: Store, place: Place) -> None:
    Ledger(store).append([line(1)])
    orphan = "ledger/00000001-0123456789abcdef.parquet"
    store.create(orphan, b"")
    assert twice(lambda dry: remove_orphans.fn(place, dry), store).places == (orphan,)
    assert len(Ledger(store).read()) == 1


def test_notes_of_runs_go_when_all_their_batches_have_ended(
    store: Store, place: Place, tmp_path: Path, later: Callable[[], None]
) -> None:
    submitted(store, tmp_path, "a", "b")
    held = claim("a", "worker", store)
    assert held is not None
    finish(held, store)
    for run, batches in {"1": ["a"], "2": ["a", "b"], "3": []}.items():
        store.create(f"desks/{run}.json", canonical_json(batches))
    store.create("desks/4.json", b"{")
    assert remove_orphans.fn(place).places == ()
    later()
    done = twice(lambda dry: remove_orphans.fn(place, dry), store)
    assert done.places == ("desks/1.json", "desks/3.json")


def test_claims_that_are_alive(store: Store, tmp_path: Path, later: Callable[[], None]) -> None:
    submitted(store, tmp_path, "a", "b", "c", "d")
    for batch in ("a", "b", "c", "d"):
        held = claim(batch, f"worker-{batch}", store)
        assert held is not None
        if batch == "b":
            release(held, store)
        elif batch == "c":
            finish(held, store)
        elif batch == "d":
            renew(held, store, lease_s=1e6)
    assert [seen.record.batch for seen in live_claims(store)] == ["a", "d"]
    later()
    assert [seen.record.batch for seen in live_claims(store)] == ["d"]


def test_an_onlooker_changes_nothing(store: Store, tmp_path: Path) -> None:
    store.create("a", b"1")
    (tmp_path / "f").write_text("x")
    onlooker = housekeep.Onlooker(store.root, store.scratch, store._options)
    assert onlooker.create("b", b"2")
    assert onlooker.swap("a", b"2", "any") is not None
    onlooker.upload(tmp_path / "f", "c")
    onlooker.delete("a")
    for leftover in onlooker.leftovers():
        onlooker.drop(leftover)
    assert names(store) == ["a"]
    found = store.read("a")
    assert found is not None
    assert found.data == b"1"
