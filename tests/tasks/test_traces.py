"""What is still personal, and where: nothing is missed, nothing that should be there is accused."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from uuid import uuid4

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.errors import MalformedRow, MissingInput
from tasks.claims import claim, fail, finish, look, renew
from tasks.erase import erase
from tasks.folder import held
from tasks.inbox import check
from tasks.needles import Needles
from tasks.search import search, texts_of, texts_of_file
from tasks.store import Store
from tasks.submit import submit
from tasks.traces import Rule, Trace, data_set_caches, traces
from tests.faulty import QUICK
from tests.tiny import CANARY

DAY_S = 86400.0
TEXT = f"{CANARY} lives at number"
OLD = time.time() - 2 * DAY_S


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of who runs the tests do not count."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of two requests."""
    return write_rows(tmp_path / "rows.jsonl", TEXT)


def write_rows(path: Path, text: str) -> Path:
    """Two requests, as a file."""
    rows = [{"request_id": f"id-{i}", "text": f"{text} {i}"} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def work_of(store: Store) -> Path:
    """The work folder that a store's scratch is in."""
    return store.scratch.parent


def seen(store: Store, rule: Rule | None = None) -> dict[str, tuple[str, bool]]:
    """State of each place, and whether it should not be there."""
    found = traces(store, work_of(store), rule)
    return {short(one, store): (one.state, one.is_alarm) for one in found}


def short(one: Trace, store: Store) -> str:
    """A place without what differs between runs."""
    return one.place.replace(str(work_of(store)) + "/", "").split(" (")[0]


def write(path: Path, data: bytes | str, modified: float | None = None) -> Path:
    """A file with these bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    if modified is not None:
        for place in (path, path.parent):
            os.utime(place, (modified, modified))
    return path


def test_rows_from_upload_to_erasure(store: Store, rows: Path, tmp_path: Path) -> None:
    place = "inbox/b/forget-00001.jsonl"
    assert seen(store) == {}
    store.upload(rows, place)
    assert seen(store) == {place: ("uploading", False)}
    submit([rows], store, "b")
    assert seen(store) == {place: ("waiting", False)}
    held_claim = claim("b", "worker", store)
    assert held_claim is not None
    assert seen(store) == {place: ("in use", False)}
    finish(renew(held_claim, store, run="r"), store)
    assert seen(store) == {place: ("overdue", True)}
    assert seen(store, Rule(after_days=1)) == {place: ("kept", False)}
    (one,) = traces(store, tmp_path)
    assert (one.batch, one.num_bytes, one.what) == ("b", rows.stat().st_size, "raw file")
    assert 0 <= one.age_s < 60
    erase("b", store)
    assert seen(store) == {}


def test_rows_of_a_failed_batch_are_kept_unless_asked(store: Store, rows: Path) -> None:
    submit([rows], store, "b")
    held_claim = claim("b", "worker", store)
    assert held_claim is not None
    fail(held_claim, store, "no")
    place = "inbox/b/forget-00001.jsonl"
    assert seen(store) == {place: ("kept", False)}
    assert seen(store, Rule(failed_after_days=0)) == {place: ("overdue", True)}
    assert seen(store, Rule(failed_after_days=1)) == {place: ("kept", False)}


def test_an_upload_without_marker_is_abandoned_after_a_day(
    store: Store, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.upload(rows, "inbox/b/forget-00001.jsonl")
    now = store.now()
    monkeypatch.setattr(Store, "now", lambda _: now + DAY_S + 10)
    assert seen(store) == {"inbox/b/forget-00001.jsonl": ("abandoned", True)}
    assert traces(store, work_of(store))[0].age_s >= DAY_S


def test_copies_and_drafts_in_scratch(store: Store, rows: Path) -> None:
    for batch in ("a", "b", "c"):
        submit([rows], store, batch)
    scratch, sha = store.scratch, "0123456789abcdef"
    copied = [str(check(batch, store).requests.parent.name) for batch in ("a", "b")]
    assert claim("a", "worker", store) is not None
    held_claim = claim("b", "worker", store)
    assert held_claim is not None
    finish(held_claim, store)
    write(scratch / f"inbox/c-{sha}/requests.jsonl", TEXT, OLD)
    write(scratch / f"inbox/gone-{sha}/requests.jsonl", TEXT, OLD)
    write(scratch / "forget/run/a.jsonl", TEXT, OLD)
    write(scratch / "forget/other/file", TEXT, OLD)
    write(scratch / "drafts/young/raw-a.jsonl", TEXT)
    write(scratch / "drafts/old/raw-a.jsonl", TEXT, OLD)
    write(scratch / "drafts/held/raw-a.jsonl", TEXT, OLD)
    with held(scratch / "drafts/held"):
        found = {place: state for place, state in seen(store).items() if "scratch" in place}
    assert found == {
        f"scratch/inbox/{copied[0]}": ("in use", False),
        f"scratch/inbox/{copied[1]}": ("overdue", True),
        f"scratch/inbox/c-{sha}": ("abandoned", True),
        f"scratch/inbox/gone-{sha}": ("abandoned", True),
        "scratch/forget/run/a.jsonl": ("in use", False),
        "scratch/forget/other": ("abandoned", True),
        "scratch/drafts/young": ("in use", False),
        "scratch/drafts/old": ("abandoned", True),
        "scratch/drafts/held": ("in use", False),
    }


def test_old_versions_and_unfinished_uploads_are_seen(
    endpoint: str, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    name = f"versions-{uuid4().hex}"
    s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    s3.create_bucket(Bucket=name)
    s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    store = Store(f"s3://{name}/p", tmp_path / "scratch", {"endpoint_url": endpoint}, QUICK)
    submit([rows], store, "b")
    submit([rows], store, "w")
    held_claim = claim("b", "worker", store)
    assert held_claim is not None
    finish(held_claim, store)
    store.delete("inbox/b/forget-00001.jsonl")
    s3.create_multipart_upload(Bucket=name, Key="p/inbox/w/forget-00002.jsonl")
    s3.create_multipart_upload(Bucket=name, Key="p/inbox/n/forget-00001.jsonl")
    found = {(one.place.split(" (")[0], one.what): one.state for one in traces(store, tmp_path)}
    assert found == {
        ("inbox/b/forget-00001.jsonl", "old version"): "overdue",
        ("inbox/w/forget-00001.jsonl", "raw file"): "waiting",
        # The server of the tests says of every upload that it began in 2010.
        ("inbox/w/forget-00002.jsonl", "unfinished upload"): "abandoned",
        ("inbox/n/forget-00001.jsonl", "unfinished upload"): "abandoned",
    }


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_drafts_in_a_local_inbox_are_seen(store: Store, rows: Path) -> None:
    submit([rows], store, "b")
    held_claim = claim("b", "worker", store)
    assert held_claim is not None
    finish(held_claim, store)
    erase("b", store)
    write(Path(store.root, f"inbox/b/.forget-00001.jsonl.{uuid4().hex}"), TEXT)
    assert [(one.what, one.state) for one in traces(store, work_of(store))] == [
        ("unfinished file", "overdue")
    ]


def test_caches_are_named_and_not_accused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(store)
    assert data_set_caches(work / "work") == []
    home = write(tmp_path / "home/datasets/json/cache-1.arrow", TEXT).parents[2]
    write(work / "some/where/train.arrow", TEXT)
    write(work / "prefect/storage/1", TEXT)
    monkeypatch.setenv("HF_HOME", str(home))
    assert data_set_caches(Path("elsewhere")) == [home / "datasets"]
    assert data_set_caches(work) == []  # inside: found anyway
    assert seen(store) == {
        "home/datasets/json": ("unknown", False),
        "some/where": ("unknown", False),
        "prefect/storage": ("unknown", False),
    }
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    assert data_set_caches(Path("elsewhere")) == [tmp_path / "cache"]


def test_texts_of_rows_that_still_exist(store: Store, tmp_path: Path) -> None:
    for batch in ("a", "b"):
        submit([write_rows(tmp_path / f"{batch}.jsonl", f"{batch} {TEXT}")], store, batch)
    store.upload(write(tmp_path / "broken", b"\xff{"), "inbox/c/forget-00001.jsonl.gz")
    write(store.scratch / "forget/run/c.jsonl", json.dumps({"prompt": "p", "answer": "q", "n": 1}))
    expected = {f"{batch} {TEXT} {i}" for batch in ("a", "b") for i in range(2)}
    found = set(texts_of(store, work_of(store)))
    assert found == expected | {"id-0", "id-1", "p", "q"}
    assert set(texts_of(store, work_of(store), "a")) == {
        f"a {TEXT} 0",
        f"a {TEXT} 1",
        "id-0",
        "id-1",
    }
    assert len(list(texts_of_file(tmp_path / "a.jsonl"))) == 4
    broken = write(tmp_path / "broken.jsonl", '{"text": "t"}\n{\n')
    with pytest.raises(MalformedRow, match="line 2"):
        list(texts_of_file(broken))
    with pytest.raises(MissingInput):
        list(texts_of_file(tmp_path / "broken"))


def test_a_search_finds_every_copy_and_accuses_nothing_else(
    store: Store, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of(store)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "arrow"))
    submit([rows], store, "b")
    check("b", store)
    needles = Needles(texts_of(store, work))
    assert needles.num_texts == 2
    known = [rows]
    assert search(store, work, needles, known) == []
    leak = f"so {TEXT} 1 it is"
    store.create("runs/b/r/note.json", json.dumps(leak).encode())
    store.create("runs/b/r/fine.json", json.dumps(TEXT).encode())
    pq.write_table(pa.table({"a": [leak]}), tmp_path / "t.parquet")
    store.upload(tmp_path / "t.parquet", "evaluate/x/t.parquet")
    (tmp_path / "t.parquet").unlink()
    store.create("apply/x/model.safetensors", leak.encode())
    write(work / "reports/r/report.html", leak)
    write(work / "logs/today.gz", gzip.compress(leak.encode()))
    write(work / "logs/cut.gz", gzip.compress(os.urandom(99))[:-9])
    write(tmp_path / "arrow/x.arrow", leak)
    write(store.scratch / "forget/r/b.jsonl", leak)
    found = {
        short(one, store): (one.state, one.is_alarm) for one in search(store, work, needles, known)
    }
    assert found == {
        "runs/b/r/note.json": ("found", True),
        "evaluate/x/t.parquet": ("found", True),
        "reports/r/report.html": ("found", True),
        "logs/today.gz": ("found", True),
        "logs/cut.gz": ("unread", False),
        "arrow/x.arrow": ("found", True),
    }
    assert all(TEXT not in repr(one) for one in search(store, work, needles))
    assert search(store, work, Needles([])) == []
    assert set(texts_of_file(rows)) == {"id-0", "id-1", f"{TEXT} 0", f"{TEXT} 1"}


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_a_search_of_a_local_store_sees_hidden_files(store: Store) -> None:
    write(Path(store.root, f"solve/.abc.{uuid4().hex}/file"), TEXT)
    write(Path(store.root, "inbox/b/.hidden"), TEXT)  # traces has it
    (found,) = search(store, work_of(store), Needles([TEXT]))
    assert found.place.startswith("solve/.abc.")


def test_looking_changes_nothing(store: Store, rows: Path) -> None:
    submit([rows], store, "b")
    assert claim("b", "worker", store) is not None
    check("b", store)
    before = store.entries(None), look("b", store), sorted(work_of(store).rglob("*"))
    traces(store, work_of(store))
    search(store, work_of(store), Needles([TEXT]))
    assert (store.entries(None), look("b", store), sorted(work_of(store).rglob("*"))) == before
