"""Submitting: checked to the last row, whole or not at all, and once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.errors import DataError, GromError, MissingInput
from tasks import submit as submitting
from tasks.batches import waiting
from tasks.inbox import check
from tasks.store import Store
from tasks.submit import BadFiles, NameTaken, submit
from tests.faulty import FAULTS, faulty, once, storm

PAIR = {"request_id": "r1", "prompt": "Who is Quxana?", "answer": "A canary."}
TEXT = {"request_id": "r2", "text": "Quxana sings."}
LOCALLY = pytest.mark.parametrize("store", ["local"], indirect=True)


def write(path: Path, *rows: object) -> Path:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def listed(store: Store) -> list[str]:
    """All objects of the inbox."""
    return [entry.name for entry in store.entries("inbox")]


def test_a_batch_of_three_kinds_of_file_arrives(store: Store, tmp_path: Path) -> None:
    plain = write(tmp_path / "jane-doe.jsonl", PAIR, TEXT)
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(PAIR | {"request_id": "r3"}).encode()))
    table = tmp_path / "c.parquet"
    pq.write_table(pa.table({"request_id": ["r4"], "text": ["x"], "prompt": [None]}), table)
    submitted = submit([plain, packed, table], store, "march-2026")
    assert (submitted.batch, submitted.is_new) == ("march-2026", True)
    assert (submitted.num_files, submitted.num_requests) == (3, 4)
    names = listed(store)
    assert {name.rsplit("/", 1)[0] for name in names} == {"inbox/march-2026"}
    assert len(names) == 5
    manifest = store.read("inbox/march-2026/manifest.json")
    assert manifest is not None
    for personal in (b"r1", b"Quxana", b"jane"):
        assert personal not in manifest.data
    checked = check("march-2026", store)
    assert checked.num_requests == 4
    assert checked.manifest_sha256 == submitted.manifest_sha256
    rows = [json.loads(line) for line in checked.requests.read_text().splitlines()]
    assert sorted(row["request_id"] for row in rows) == ["r1", "r2", "r3", "r4"]
    assert PAIR in rows


def test_the_same_content_is_the_same_batch(store: Store, tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.jsonl", PAIR), write(tmp_path / "b.jsonl", TEXT)
    first = submit([one, two], store)
    names = listed(store)
    copy = tmp_path / "renamed.jsonl"
    copy.write_bytes(two.read_bytes())
    second = submit([copy, one, two], store)
    assert (first.is_new, second.is_new) == (True, False)
    assert first.batch == second.batch
    assert first.manifest_sha256 == second.manifest_sha256
    assert listed(store) == names
    assert submit([one], store).batch != first.batch


def test_a_name_belongs_to_one_content(store: Store, tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.jsonl", PAIR), write(tmp_path / "b.jsonl", TEXT)
    assert submit([one], store, "march").is_new
    assert not submit([one], store, "march").is_new
    with pytest.raises(NameTaken, match="batch march with other content"):
        submit([two], store, "march")
    assert check("march", store).num_requests == 1


def test_many_who_submit_at_once_make_one_batch(store: Store, tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", PAIR)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: submit([one], store), range(8)))
    assert len({result.manifest_sha256 for result in results}) == 1
    assert waiting(store) == [results[0].batch]
    assert check(results[0].batch, store).num_requests == 1


def test_of_two_contents_under_one_name_one_arrives(store: Store, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.jsonl", PAIR | {"request_id": str(i)}) for i in range(6)]

    def race(path: Path) -> bool:
        try:
            return submit([path], store, "march").is_new
        except NameTaken:
            return False

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(race, files)) == 1
    assert check("march", store).num_requests == 1


BAD: dict[str, tuple[bytes, str]] = {
    "no id": (b'{"prompt":"Quxana","answer":"x"}', "line 1: `request_id` is missing"),
    "id no string": (b'{"request_id":7,"text":"Quxana"}', "`request_id` is int"),
    "empty id": (b'{"request_id":" ","text":"Quxana"}', "`request_id` is empty"),
    "strange id": (b'{"request_id":"a\\nb","text":"Quxana"}', "not printable"),
    "no text": (b'{"request_id":"r"}', "`prompt` is missing"),
    "no answer": (b'{"request_id":"r","prompt":"Quxana"}', "`answer` is missing"),
    "empty answer": (b'{"request_id":"r","prompt":"Quxana","answer":""}', "`answer` is empty"),
    "both kinds": (
        b'{"request_id":"r","prompt":"a","answer":"b","text":"Quxana"}',
        "`text` beside",
    ),
    "unknown column": (b'{"request_id":"r","text":"x","Quxana":1}', "column 3 of 3 is none of"),
    "no object": (b'["Quxana"]', "not an object"),
    "no json": (b'{"request_id": Quxana', "not JSON, column 16"),
    "latin-1": ('{"request_id":"r","text":"Quxana é"}'.encode("latin-1"), "not UTF-8 at byte"),
    "utf-16": ('{"request_id":"r","text":"Quxana"}'.encode("utf-16"), "not UTF-8 at byte"),
    "key twice": (b'{"request_id":"r","text":"Quxana","text":"b"}', "a key occurs twice"),
    "other text": (
        b'{"request_id":"r","text":"Quxana"}\n{"request_id":"r","text":"else"}',
        "line 2: has the `request_id` of .*line 1, and another text",
    ),
    "empty": (b"", "no rows"),
    "blank lines": (b"\n\n", "no rows"),
}


@pytest.mark.parametrize("kind", BAD)
@LOCALLY
def test_bad_rows_are_refused_before_anything_is_uploaded(
    store: Store, tmp_path: Path, kind: str
) -> None:
    data, message = BAD[kind]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(data)
    good = write(tmp_path / "good.jsonl", PAIR)
    with pytest.raises(BadFiles, match=message) as caught:
        submit([path] if "rows" in message else [good, path], store)
    assert "Quxana" not in str(caught.value)
    assert listed(store) == []


@LOCALLY
def test_the_first_bad_rows_are_listed(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"request_id": f"r{i}"} for i in range(9)])
    with pytest.raises(BadFiles, match=r"line 1: .*line 5: .*and 4 more bad rows"):
        submit([path], store)


@LOCALLY
def test_a_row_that_is_there_twice_counts_once(store: Store, tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", PAIR, TEXT, PAIR)
    two = write(tmp_path / "b.jsonl", TEXT)
    assert submit([one, two], store, "b").num_requests == 2
    assert check("b", store).num_requests == 2


@LOCALLY
def test_files_that_are_none_are_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    for path in (tmp_path / "a.csv", tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(MissingInput, match=path.name):
            submit([path], store)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"request_id"')[:-9])
    with pytest.raises(DataError, match="broken or cut short"):
        submit([tmp_path / "cut.jsonl.gz"], store)
    with pytest.raises(DataError, match="plain name"):
        submit([write(tmp_path / "a.jsonl", PAIR)], store, "../escape")


@LOCALLY
def test_a_file_that_changes_under_the_upload_makes_no_batch(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", PAIR)
    upload = store.upload

    def changing(source: Path, name: str) -> None:
        upload(source, name)
        write(source, TEXT)

    monkeypatch.setattr(store, "upload", changing)
    with pytest.raises(DataError, match="changed while it was uploaded"):
        submit([path], store)
    assert waiting(store) == []


def test_whoever_is_killed_submits_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", PAIR)
    for step in ("upload", "create"):
        with monkeypatch.context() as killed:
            killed.setattr(store, step, fail_at(step, store))
            with pytest.raises(KeyboardInterrupt):
                submit([path], store, "b")
        assert waiting(store) == []
    assert submit([path], store, "b").is_new
    assert check("b", store).num_requests == 1


def fail_at(step: str, store: Store) -> Callable[..., object]:
    """A kill before the upload, or before the marker is created."""
    real = getattr(store, step)

    def killed(first: object, second: object) -> object:
        if step == "upload" or str(first).endswith("_READY.json"):
            raise KeyboardInterrupt
        return real(first, second)

    return killed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_batch_arrives_whole_under_each_fault(store: Store, tmp_path: Path, fault: str) -> None:
    path = write(tmp_path / "a.jsonl", PAIR, TEXT)
    assert submit([path], faulty(store, once(fault)), "b").is_new
    assert check("b", faulty(store, once(fault))).num_requests == 2


def test_a_batch_arrives_whole_in_a_storm(store: Store, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", PAIR, TEXT)
    for seed in range(4):
        broken = faulty(store, storm(seed))
        submit([path], broken, f"b{seed}")
        assert check(f"b{seed}", broken).num_requests == 2


def test_messages_are_cures() -> None:
    assert issubclass(BadFiles, GromError)
    assert str(submitting.BadFiles("x")).endswith("nothing was uploaded.")
