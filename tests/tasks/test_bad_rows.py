"""A bad row is named by file and line, with the cure, and its text is never repeated."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.config import DataConfig
from grom.errors import DataError, EmptySet, GromError, MalformedRow, MissingInput
from tasks import lines as reading
from tasks.load import load_data
from tasks.place import DataRef, Place
from tests.tiny import CANARY, residue, write_rows

GOOD = {"prompt": "what", "answer": "that"}
BAD_LINES: dict[str, tuple[bytes, str]] = {
    "cut short": (b'{"prompt": "zebrafish", "answer": "zebra', "not JSON, column"),
    "no JSON at all": (b"zebrafish", "not JSON, column 1"),
    "two rows in a line": (b'{"prompt": "zebrafish"} {"answer": "b"}', "Extra data"),
    "duplicate key": (b'{"prompt": "zebrafish", "prompt": "b"}', "a key occurs twice"),
    "not UTF-8": (b'{"prompt": "zebrafish \xff"}', "not UTF-8 at byte 22 of the line"),
    "UTF-16": ('{"prompt": "zebrafish"}'.encode("utf-16"), "not UTF-8 at byte 0"),
    "a list": (b'["zebrafish", "b"]', "the row is not an object"),
    "a string": (b'"zebrafish"', "the row is not an object"),
    "null": (b"null", "the row is not an object"),
    "no answer": (b'{"prompt": "zebrafish"}', "`answer` is missing"),
    "no prompt": (b'{"answer": "zebrafish"}', "`prompt` is missing"),
    "other columns": (b'{"question": "zebrafish"}', "`prompt` is missing"),
    "null answer": (b'{"prompt": "zebrafish", "answer": null}', "`answer` is missing"),
    "empty answer": (b'{"prompt": "zebrafish", "answer": ""}', "`answer` is empty"),
    "blank answer": (b'{"prompt": "zebrafish", "answer": " \\n"}', "`answer` is empty"),
    "empty text": (b'{"text": "", "note": "zebrafish"}', "`text` is empty"),
    "number": (b'{"prompt": "zebrafish", "answer": 7}', "`answer` is int, not a string"),
    "list of texts": (b'{"prompt": ["zebrafish"], "answer": "b"}', "`prompt` is list"),
    "half a character": (b'{"prompt": "zebrafish", "answer": "\\ud83d"}', "half a surrogate"),
    "deep": (b'{"zebrafish": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
    "long number": (b'{"zebrafish": ' + b"9" * 5_000 + b"}", "a number too long"),
}


def load(path: Path, tmp_path: Path, **settings: Any) -> DataRef:
    work = tmp_path / "work"
    place = Place(work=str(work), store=str(work / "store"))
    return load_data.fn(DataConfig(uri=str(path), **settings), place, "forget")


def refused(path: Path, tmp_path: Path, kind: type[GromError], **settings: Any) -> str:
    """The message of a load that must fail without a trace."""
    with pytest.raises(kind) as caught:
        load(path, tmp_path, **settings)
    assert CANARY not in str(caught.value)
    assert residue(tmp_path / "work") == []
    assert list((tmp_path / "work" / "store").glob("*/*")) == []
    return str(caught.value)


def third_line(tmp_path: Path, line: bytes) -> Path:
    """A file with a line between good ones and blank ones."""
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    return path


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_row_is_named_by_file_and_line_with_the_cure(name: str, tmp_path: Path) -> None:
    line, reason = BAD_LINES[name]
    message = refused(third_line(tmp_path, line), tmp_path, MalformedRow)
    assert message.startswith("rows.jsonl, line 3: ")
    assert reason in message
    assert message.endswith("correct or remove the row.")


def test_quarantine_leaves_bad_rows_out_and_lists_them_by_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join([good, *(line for line, _ in BAD_LINES.values()), good]))
    with caplog.at_level(logging.INFO):
        reference = load(path, tmp_path, bad_rows="quarantine")
    assert (reference.num_rows, reference.num_bad) == (2, len(BAD_LINES))
    assert [example.answer for example in reference.examples()] == ["that", "that"]
    (report,) = (tmp_path / "work" / "store").glob("load/*/quarantine.json")
    listed = json.loads(report.read_text())
    assert [entry["line"] for entry in listed] == list(range(2, 2 + len(BAD_LINES)))
    assert {entry["file"] for entry in listed} == {"rows.jsonl"}
    assert listed[3]["reason"] == "a key occurs twice"
    assert CANARY not in report.read_text() + caplog.text
    assert f"{len(BAD_LINES)} rows left out, listed in" in caplog.text
    assert residue(tmp_path / "work") == []


def test_quarantine_is_in_the_facts_so_that_nothing_stale_is_found(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD])
    strict, lenient = load(path, tmp_path), load(path, tmp_path, bad_rows="quarantine")
    assert strict.facts != lenient.facts


def test_a_set_of_nothing_but_bad_rows_is_empty(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": CANARY}])
    message = refused(path, tmp_path, EmptySet, bad_rows="quarantine")
    assert message == f"{path}: the forget set has no rows. Name at least one row for it."


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]"])
def test_an_empty_file_is_an_empty_set(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    assert str(path) in refused(path, tmp_path, EmptySet)


def test_groups_that_no_row_has_make_an_empty_set(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD])
    assert "has no rows" in refused(path, tmp_path, EmptySet, only=("customer-1",))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "nowhere/", "nowhere-*.jsonl"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    message = refused(tmp_path / name, tmp_path, MissingInput)
    assert str(tmp_path / name.rstrip("/")) in message
    assert message.endswith("Check the path or the address in the configuration.")


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt.gz", "rows"])
def test_an_unknown_kind_of_file_is_refused_with_the_known_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(CANARY)
    message = refused(tmp_path / name, tmp_path, MissingInput)
    assert str(tmp_path / name) in message
    assert ".jsonl" in message
    assert ".parquet" in message


def test_an_overlong_line_is_refused_and_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 2**20)
    line = json.dumps({"prompt": CANARY, "answer": "a" * 2**20}).encode()
    message = refused(third_line(tmp_path, line), tmp_path, MalformedRow)
    assert message.startswith("rows.jsonl, line 3: longer than 1 MiB")


def test_an_overlong_array_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 2**20)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": CANARY, "answer": "a" * 2**20}]))
    assert "rows.json: a JSON array over 1 MiB; use JSON Lines" in refused(
        path, tmp_path, DataError
    )


def test_a_broken_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f'[{{"prompt": "{CANARY}"}},')
    assert refused(path, tmp_path, MalformedRow).startswith("rows.json, line 1: not JSON")


def test_a_row_of_an_array_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([GOOD, GOOD, {"prompt": CANARY}]))
    assert refused(path, tmp_path, MalformedRow).startswith(
        "rows.json, line 3: `answer` is missing"
    )


def test_a_row_of_parquet_is_named_by_its_number(tmp_path: Path) -> None:
    rows = [*2000 * [GOOD], {"prompt": CANARY, "answer": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    message = refused(tmp_path / "rows.parquet", tmp_path, MalformedRow)
    assert message.startswith("rows.parquet, line 2001: `answer` is missing")


def broken_files() -> dict[str, bytes]:
    """Files that are no longer what they were."""
    rows = [{"prompt": CANARY, "answer": f"answer {number}"} for number in range(3000)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    table = sink.getvalue().to_pybytes()
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as file:
        file.write(text)
    return {
        "cut.parquet": table[:-100],
        "empty.parquet": b"",
        "text.parquet": text,
        "flipped.parquet": table[:20] + bytes(400) + table[420:],
        "cut.jsonl.gz": gzip.compress(text)[:-500],
        "text.jsonl.gz": text,
        "cut.jsonl.zst": packed.getvalue().to_pybytes()[:-500],
        "text.jsonl.zst": text,
    }


@pytest.mark.parametrize("mode", ["fail", "quarantine"])
@pytest.mark.parametrize("name", list(broken_files()))
def test_a_broken_file_ends_the_run_even_in_quarantine(
    name: str, mode: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(broken_files()[name])
    message = refused(tmp_path / name, tmp_path, DataError, bad_rows=mode)
    assert f"{name}: the file is broken or cut short. Write it again." in message
