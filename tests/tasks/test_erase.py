"""Erasing raw rows: all of them, old versions too, and only when nobody needs them any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import pytest

from grom.errors import MissingInput
from tasks import erase as erasing
from tasks.batches import retry, status, waiting
from tasks.bucket import Bucket
from tasks.claims import claim, fail, finish, renew
from tasks.erase import NotErasable, NotErased, copies, due, erase, erase_copies
from tasks.inbox import check
from tasks.store import Store
from tasks.submit import submit
from tests.faulty import FAULTS, QUICK, faulty, once, storm
from tests.tiny import CANARY

VERSIONED = "grom-versioned"
DAY_S = 86400.0


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of two requests."""
    path = tmp_path / "rows.jsonl"
    rows = [{"request_id": f"{CANARY}-{i}", "text": f"{CANARY} lives at {i}"} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def versioned(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in a bucket that keeps every version."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    s3 = s3_client(endpoint)
    s3.create_bucket(Bucket=VERSIONED)
    s3.put_bucket_versioning(Bucket=VERSIONED, VersioningConfiguration={"Status": "Enabled"})
    options = {"endpoint_url": endpoint}
    return Store(f"s3://{VERSIONED}/{uuid4().hex}/root", tmp_path / "scratch", options, QUICK)


def s3_client(endpoint: str) -> Any:
    """A client that is not ours, to see what a store really holds."""
    account = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **account)


def ended(store: Bucket, rows: Path, batch: str = "b", state: str = "done") -> None:
    """A batch that has come to its end."""
    submit([rows], store, batch)
    held = claim(batch, "worker", store)
    assert held is not None
    finish(held, store) if state == "done" else fail(held, store, "no")


def later(store: Bucket, days: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store's clock be so many days ahead."""
    now = store.now() + days * DAY_S
    monkeypatch.setattr(type(store), "now", lambda _: now)


def names(store: Bucket) -> list[str]:
    """What is in the inbox."""
    return [entry.name.removeprefix("inbox/") for entry in store.entries("inbox")]


def test_rows_go_and_the_batch_stays_known(store: Store, rows: Path) -> None:
    ended(store, rows)
    erased = erase("b", store)
    assert erased.places == ("inbox/b/forget-00001.jsonl",)
    assert erased.num_bytes == rows.stat().st_size
    assert names(store) == ["b/_READY.json", "b/manifest.json"]
    for name in names(store):
        found = store.read(f"inbox/{name}")
        assert found is not None
        assert CANARY.encode() not in found.data
    assert status("b", store).state == "done"
    assert not submit([rows], store, "b").is_new
    assert names(store) == ["b/_READY.json", "b/manifest.json"]
    assert waiting(store) == []
    assert erase("b", store).places == ()


def test_a_batch_that_has_not_ended_keeps_its_rows(store: Store, rows: Path) -> None:
    submit([rows], store, "b")
    before = names(store)
    with pytest.raises(NotErasable, match="is waiting"):
        erase("b", store, failed=True)
    held = claim("b", "worker", store)
    assert held is not None
    with pytest.raises(NotErasable, match="is claimed"):
        erase("b", store, failed=True)
    held = renew(held, store, run="r")
    with pytest.raises(NotErasable, match="is running"):
        erase("b", store)
    fail(held, store, "no")
    with pytest.raises(NotErasable, match="--failed"):
        erase("b", store)
    with pytest.raises(MissingInput, match="no batch c"):
        erase("c", store)
    assert names(store) == before


def test_an_outcome_that_hangs_on_a_claim_is_published_first(
    store: Store, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit([rows], store, "b")
    held = claim("b", "worker", store)
    assert held is not None
    with monkeypatch.context() as killed:
        killed.setattr("tasks.claims.publish", lambda *_: None)
        finish(held, store)
    erase("b", store)
    store.delete("claims/b.json")
    assert status("b", store).state == "done"


def test_a_failed_batch_comes_back_by_submitting_again(store: Store, rows: Path) -> None:
    ended(store, rows, state="failed")
    erase("b", store, failed=True)
    assert names(store) == ["b/manifest.json"]
    assert status("b", store).state == "failed"
    retry("b", store)
    assert waiting(store) == []
    assert "_READY.json" in (status("b", store).note or "")
    assert submit([rows], store, "b").is_new
    assert waiting(store) == ["b"]
    assert check("b", store).num_requests == 2


def test_a_dry_run_says_the_same_and_changes_nothing(store: Store, rows: Path) -> None:
    ended(store, rows)
    before = store.entries(None)
    assert erase("b", store, dry_run=True).places == ("inbox/b/forget-00001.jsonl",)
    assert store.entries(None) == before


def test_due_counts_from_the_outcome_by_the_store_s_clock(
    store: Store, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(store, rows, "done-1")
    ended(store, rows, "failed-1", "failed")
    submit([rows], store, "waiting-1")
    assert due(store) == ["done-1"]
    assert due(store, 0, 0) == ["done-1", "failed-1"]
    assert due(store, 2, 3) == []
    later(store, 2.5, monkeypatch)
    assert due(store, 2, 3) == ["done-1"]
    assert due(store, 2, 2) == ["done-1", "failed-1"]
    erase("done-1", store)
    assert due(store, 2, 3) == []


def test_whoever_was_killed_erases_again(
    store: Store, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace(CANARY, "other"))
    submit([rows, other], store, "b")
    held = claim("b", "worker", store)
    assert held is not None
    finish(held, store)
    delete = Store.delete

    def killed(self: Store, name: str) -> None:
        delete(self, name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Store, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            erase("b", store)
    assert len(names(store)) == 3
    assert due(store) == ["b"]
    erase("b", store)
    assert names(store) == ["b/_READY.json", "b/manifest.json"]


def test_every_version_goes(
    versioned: Store, rows: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(versioned, rows)
    prefix = versioned.root.split("/", 3)[3]
    s3, key = s3_client(endpoint), f"{prefix}/inbox/b/forget-00001.jsonl"
    s3.put_object(Bucket=VERSIONED, Key=key, Body=CANARY)
    s3.delete_object(Bucket=VERSIONED, Key=key)
    s3.create_multipart_upload(Bucket=VERSIONED, Key=f"{prefix}/inbox/b/forget-00002.jsonl")
    assert names(versioned) == ["b/_READY.json", "b/manifest.json"]
    assert due(versioned) == ["b"]
    erased = erase("b", versioned)
    assert len(erased.places) == 4  # two versions, one mark of a deletion, one upload
    listed = s3.list_object_versions(Bucket=VERSIONED, Prefix=f"{prefix}/inbox/")
    kept = [one["Key"].rsplit("/", 1)[1] for one in listed["Versions"]]
    assert kept == ["_READY.json", "manifest.json"]
    assert "DeleteMarkers" not in listed
    assert not s3.list_multipart_uploads(Bucket=VERSIONED, Prefix=prefix).get("Uploads")
    assert due(versioned) == []
    monkeypatch.setattr(Store, "drop", lambda *_: None)
    s3.put_object(Bucket=VERSIONED, Key=key, Body=CANARY)
    with pytest.raises(NotErased, match="2 objects or versions are still listed"):
        erase("b", versioned)


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_drafts_of_a_killed_submitter_go(store: Store, rows: Path) -> None:
    ended(store, rows)
    folder = Path(store.root, "inbox/b")
    (folder / f".forget-00001.jsonl.{uuid4().hex}").write_text(CANARY)
    (folder / ".forget-00001.jsonl.Xa81zq").write_text(CANARY)  # of another program
    erase("b", store)
    assert sorted(path.name for path in folder.iterdir()) == ["_READY.json", "manifest.json"]


@pytest.mark.parametrize("fault", FAULTS)
def test_erasing_survives_every_fault(store: Store, rows: Path, fault: str) -> None:
    ended(store, rows)
    erase("b", faulty(store, once(fault)))
    assert names(store) == ["b/_READY.json", "b/manifest.json"]


def test_erasing_in_a_storm(store: Store, rows: Path) -> None:
    ended(store, rows)
    for seed in range(3):
        try:
            erase("b", faulty(store, storm(seed)))
        except NotErased:  # a listing lagged three times
            continue
    assert names(store) == ["b/_READY.json", "b/manifest.json"]


def test_copies_on_this_machine_go_with_their_batch(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in (
        "inbox/b-0123456789abcdef",
        "inbox/b-b-0123456789abcdef",
        "forget/r1",
        "forget/r2",
    ):
        (work / "scratch" / name).mkdir(parents=True)
    for name in (
        "inbox/b-0123456789abcdef/requests.jsonl",
        "forget/r1/b.jsonl",
        "forget/r1/c.jsonl",
    ):
        (work / "scratch" / name).write_text(CANARY)
    (work / "scratch/forget/r2/b.jsonl").write_text(CANARY)
    assert [batch for _, batch in copies(work)] == ["b", "b-b", "b", "c", "b"]
    would = erase_copies("b", work, dry_run=True)
    assert len(copies(work)) == 5
    assert erase_copies("b", work) == would
    assert [batch for _, batch in copies(work)] == ["b-b", "c"]
    assert not (work / "scratch/forget/r2").exists()
    assert (work / "scratch/forget/r1/c.jsonl").exists()


def test_copies_make_a_batch_due(store: Store, rows: Path, tmp_path: Path) -> None:
    ended(store, rows)
    erase("b", store)
    (tmp_path / "scratch/forget/r").mkdir(parents=True)
    (tmp_path / "scratch/forget/r/b.jsonl").write_text(CANARY)
    assert due(store, work=tmp_path) == ["b"]


def test_what_may_hold_rows() -> None:
    assert not erasing.is_raw("inbox/b/manifest.json")
    assert not erasing.is_raw("inbox/b/_READY.json")
    assert not erasing.is_raw("inbox/file")
    assert erasing.is_raw("inbox/b/forget.jsonl")
    assert erasing.is_raw("inbox/b/more/manifest.json")
