"""The inbox: what others wrote is believed byte by byte, and read only then."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.errors import NotEnoughDisk
from tasks import inbox, lines
from tasks.artifacts import canonical_json
from tasks.expansion import FLOOR_BYTES
from tasks.inbox import NotReady, arrivals, check, discard
from tasks.manifest import Manifest, Refused, content_hash, parse_manifest
from tasks.store import Store

ROWS = b'{"request_id":"r1","text":"Quxana"}\n{"request_id":"r2","text":"sings"}\n'
LOCALLY = pytest.mark.parametrize("store", ["local"], indirect=True)


def entry(name: str, data: bytes, rows: int) -> dict[str, Any]:
    """A file as a manifest lists it."""
    sha256 = hashlib.sha256(data).hexdigest()
    return {"name": name, "bytes": len(data), "sha256": sha256, "rows": rows}


def deliver(
    store: Store,
    files: dict[str, bytes],
    rows: int = 2,
    change: Callable[[dict[str, Any]], object] | None = None,
    marker: object = None,
) -> None:
    """A batch `b` as some producer writes it."""
    listed = [entry(name, data, rows) for name, data in files.items()]
    document: dict[str, Any] = {"files": listed, "rows": rows * len(files)}
    if change is not None:
        change(document)
    manifest = canonical_json(document)
    for name, data in files.items():
        assert store.create(f"inbox/b/{name}", data)
    assert store.create("inbox/b/manifest.json", manifest)
    pinned = {"manifest_sha256": hashlib.sha256(manifest).hexdigest()}
    assert store.create("inbox/b/_READY.json", canonical_json(pinned if marker is None else marker))


def overwrite(store: Store, name: str, data: bytes) -> None:
    """Another content under the same name."""
    store.delete(name)
    assert store.create(name, data)


def refusal(store: Store) -> str:
    """Why batch `b` is refused."""
    with pytest.raises(Refused) as caught:
        check("b", store)
    assert "Quxana" not in str(caught.value)
    assert not list((store.scratch / "inbox").glob("*"))
    assert not list((store.scratch / "drafts").glob("*"))
    return caught.value.reason


def test_a_batch_is_copied_verified_and_discarded(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    checked = check("b", store)
    assert checked.requests.read_bytes() == ROWS
    assert (checked.num_requests, checked.manifest.rows) == (2, 2)
    assert checked.idempotency_key == f"b-{checked.manifest_sha256}"
    assert abs(checked.received - store.now()) < 60
    assert checked.requests.parent.stat().st_mode & 0o077 == 0
    discard(checked)
    assert not checked.requests.exists()


def test_a_marker_may_pin_nothing_and_documents_may_say_more(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS}, change=lambda it: it.update(by="us"), marker={"x": 1})
    assert check("b", store).num_requests == 2


def test_a_checked_batch_does_not_change(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    checked = check("b", store)
    overwrite(store, "inbox/b/a.jsonl", ROWS.replace(b"sings", b"jumps"))
    assert check("b", store).requests.read_bytes() == ROWS
    discard(checked)
    assert refusal(store) == "a.jsonl: its sha256 is not the listed one"


def test_nothing_is_parsed_before_all_hashes_match(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "read_requests", lambda *_: pytest.fail("parsed"))
    deliver(store, {"a.jsonl": ROWS, "b.jsonl": ROWS})
    overwrite(store, "inbox/b/b.jsonl", ROWS.replace(b"sings", b"jumps"))
    assert refusal(store) == "b.jsonl: its sha256 is not the listed one"


def test_a_batch_without_marker_is_not_ready(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    store.delete("inbox/b/_READY.json")
    with pytest.raises(NotReady, match="not finished"):
        check("b", store)
    assert [(one.received, one.problem) for one in arrivals(store)] == [
        (None, "no _READY.json: still being uploaded, or the upload stopped")
    ]


def test_a_marker_without_manifest(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    store.delete("inbox/b/manifest.json")
    assert refusal(store) == "_READY.json without manifest.json"
    assert arrivals(store)[0].problem == "_READY.json without manifest.json"


def test_a_half_uploaded_file(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    overwrite(store, "inbox/b/a.jsonl", ROWS[:30])
    assert refusal(store) == f"a.jsonl: 30 of {len(ROWS)} bytes were uploaded"


def test_a_file_that_grew(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    overwrite(store, "inbox/b/a.jsonl", ROWS * 2)
    assert refusal(store) == f"a.jsonl: {2 * len(ROWS)} bytes, and {len(ROWS)} are listed"


def test_a_file_that_is_missing(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    store.delete("inbox/b/a.jsonl")
    assert refusal(store) == "a.jsonl is listed in manifest.json and is not there"


def test_a_file_that_is_not_listed_is_no_request_skipped(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    store.create("inbox/b/more.jsonl", ROWS)
    assert refusal(store) == "1 files are not in manifest.json"


def test_a_manifest_that_was_replaced(store: Store) -> None:
    deliver(store, {"a.jsonl": ROWS})
    changed = ROWS.replace(b"sings", b"jumps")
    overwrite(store, "inbox/b/a.jsonl", changed)
    document = {"files": [entry("a.jsonl", changed, 2)], "rows": 2}
    overwrite(store, "inbox/b/manifest.json", canonical_json(document))
    assert refusal(store) == "manifest.json is not the one that _READY.json pins"


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no files": (lambda it: it.update(files=[], rows=0), "the batch is empty"),
    "no rows": (lambda it: (it["files"][0].update(rows=0), it.update(rows=0)), "batch is empty"),
    "twice": (lambda it: it.update(files=it["files"] * 2, rows=4), "lists a file twice"),
    "sum": (lambda it: it.update(rows=3), "do not add up"),
    "count": (lambda it: (it["files"][0].update(rows=5), it.update(rows=5)), "2 rows, and 5"),
    "no size": (lambda it: it["files"][0].pop("bytes"), "files.0.bytes: field required"),
    "size": (lambda it: it["files"][0].update(bytes=-1), "files.0.bytes: "),
    "hash": (lambda it: it["files"][0].update(sha256="ABC"), "files.0.sha256: "),
    "key": (lambda it: it.pop("files"), "files: field required"),
}


@pytest.mark.parametrize("kind", CHANGES)
@LOCALLY
def test_manifests_that_break_the_schema(store: Store, kind: str) -> None:
    change, reason = CHANGES[kind]
    deliver(store, {"a.jsonl": ROWS}, change=change)
    assert reason in refusal(store)


@pytest.mark.parametrize(
    "name",
    [
        "../a.jsonl",
        "/etc/a.jsonl",
        "x/a.jsonl",
        "..",
        "a\\b.jsonl",
        "a.csv",
        ".a.jsonl",
        "",
        "a\n.jsonl",
        "manifest.json",
        "a\0.jsonl",
        "é.jsonl",
        "x" * 300 + ".jsonl",
    ],
)
@LOCALLY
def test_a_manifest_names_files_in_its_folder_only(store: Store, name: str) -> None:
    deliver(store, {"a.jsonl": ROWS}, change=lambda it: it["files"][0].update(name=name))
    assert "files.0.name: value error, not the plain name" in refusal(store)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
@LOCALLY
def test_documents_that_are_none(store: Store, data: bytes) -> None:
    deliver(store, {"a.jsonl": ROWS})
    overwrite(store, "inbox/b/_READY.json", data)
    assert refusal(store) == "_READY.json is not a JSON object"
    overwrite(store, "inbox/b/_READY.json", b"{}")
    overwrite(store, "inbox/b/manifest.json", data)
    assert refusal(store) == "manifest.json is not a JSON object"
    overwrite(store, "inbox/b/_READY.json", b'{"manifest_sha256":"x"}')
    assert refusal(store) == "_READY.json: `manifest_sha256` is not a sha256"


@LOCALLY
def test_documents_that_are_too_large(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(store, {"a.jsonl": ROWS})
    monkeypatch.setattr(inbox, "DOCUMENT_BYTES", 10)
    assert "is over 0 MiB" in refusal(store)


@LOCALLY
def test_a_file_that_expands_a_thousand_times(store: Store) -> None:
    row = b'{"request_id":"r","text":"' + b"a" * (20 * FLOOR_BYTES) + b'"}'
    bomb = gzip.compress(row)
    assert len(row) > 1000 * len(bomb)
    deliver(store, {"a.jsonl.gz": bomb}, rows=1)
    assert "holds over 400 times its size" in refusal(store)


@LOCALLY
def test_ordinary_repetition_is_no_bomb(store: Store) -> None:
    rows = b"".join(
        b'{"request_id":"r%d","text":"%s"}\n' % (number, b"the same words again. " * 50)
        for number in range(3000)
    )
    deliver(store, {"a.jsonl.gz": gzip.compress(rows)}, rows=3000)
    assert check("b", store).num_requests == 3000


@LOCALLY
def test_a_parquet_file_that_repeats_one_text(store: Store, tmp_path: Path) -> None:
    table = {"request_id": [f"r{i}" for i in range(2000)], "text": ["a" * 100_000] * 2000}
    pq.write_table(pa.table(table), tmp_path / "p", compression="zstd")
    deliver(store, {"a.parquet": (tmp_path / "p").read_bytes()}, rows=2000)
    assert "holds over 400 times its size" in refusal(store)


@LOCALLY
def test_a_line_without_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**20)
    deliver(store, {"a.jsonl": ROWS + b'{"request_id":"r","text":"' + b"Quxana" * 2**19}, rows=3)
    assert refusal(store) == "a.jsonl, line 3: longer than 1 MiB"


BAD_ROWS = {
    "a.jsonl": (
        b'{"request_id":"r","text":"Quxana","name":"x"}',
        "line 1: column 3 of 3 is none of",
    ),
    "b.jsonl": ("Quxana é".encode("latin-1"), "line 1: not UTF-8 at byte 7"),
    "c.jsonl": (ROWS + b'{"request_id":"r1","text":"Quxana else"}', "line 3: has the `request_id`"),
    "d.parquet": (b"PAR1 Quxana", "broken or cut short"),
    "e.jsonl.gz": (gzip.compress(ROWS)[:-9], "broken or cut short"),
    "f.jsonl": (ROWS[:-4], "line 2: not JSON"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@LOCALLY
def test_rows_that_break_the_schema(store: Store, name: str) -> None:
    data, reason = BAD_ROWS[name]
    deliver(store, {name: data})
    assert reason in refusal(store)
    assert name in refusal(store)


def test_the_oldest_comes_first_and_strange_names_are_not_taken(store: Store) -> None:
    for name in ("z", "a", "b c"):
        store.create(f"inbox/{name}/manifest.json", b"{}")
        store.create(f"inbox/{name}/_READY.json", b"{}")
        store.create(f"inbox/{name}/x.jsonl", b"12")
    store.create("inbox/stray", b"")
    found = arrivals(store)
    assert sorted(one.batch for one in found) == ["a", "b c", "z"]
    assert [one.batch for one in found if one.problem] == ["b c"]
    assert [(one.num_files, one.num_bytes) for one in found] == [(1, 2)] * 3
    assert [one.batch for one in arrivals(store, "a")] == ["a"]


@LOCALLY
def test_hidden_files_and_links_are_not_read(store: Store, tmp_path: Path) -> None:
    deliver(store, {"a.jsonl": ROWS})
    folder = Path(store.root, "inbox/b")
    (folder / ".DS_Store").touch()
    assert check("b", store).num_requests == 2
    shutil.rmtree(store.scratch)
    (folder / "a.jsonl").unlink()
    (tmp_path / "elsewhere.jsonl").write_bytes(ROWS)
    (folder / "a.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert "a link" in refusal(store)


@LOCALLY
def test_too_little_disk_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(store, {"a.jsonl": ROWS})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(NotEnoughDisk):
        check("b", store)


def test_the_content_hash_is_of_the_files_alone() -> None:
    files = [entry("a.jsonl", b"1", 1), entry("b.jsonl", b"2", 1)]
    one = Manifest.model_validate({"files": files, "rows": 2, "created": "x"})
    files = [entry("c.jsonl", b"2", 1), entry("d.jsonl", b"1", 1)]
    two = Manifest.model_validate({"files": files, "rows": 2})
    assert one.content == two.content != content_hash([])
    assert parse_manifest("b", one.to_bytes()) == one
    assert json.loads(one.to_bytes())["rows"] == 2
