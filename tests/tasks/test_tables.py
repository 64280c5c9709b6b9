"""Benchmark files of every layout become rows; what is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grom.benchmarks.benchmark import Split
from grom.errors import DataError, MissingInput
from tasks.tables import split_address, table_rows
from tests.tiny import CANARY

SPLIT = Split("test", ("test/*_test", "questions"), "hub/name:config:test")
ROWS = [{"question": "one, two", "answer": 1}, {"question": "line\nbreak", "answer": 0}]


def test_a_split_is_found_in_any_layout_and_the_first_name_wins(tmp_path: Path) -> None:
    assert split_address(str(tmp_path), SPLIT) is None
    for ending in (".csv", ".parquet", ".jsonl.gz", ".json"):
        (tmp_path / f"questions{ending}").touch()
        assert (split_address(str(tmp_path), SPLIT) or "").endswith(f"questions{ending}")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "anatomy_test.csv").touch()
    assert (split_address(str(tmp_path), SPLIT) or "").endswith("test/*_test.csv")
    assert split_address("hub", SPLIT) == "hub:hub/name:config:test"


def test_rows_of_json_parquet_and_an_array_are_the_same(tmp_path: Path) -> None:
    lines, array, packed = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.jsonl.gz"
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    lines.write_text(text)
    array.write_text(json.dumps(ROWS))
    packed.write_bytes(gzip.compress(text.encode()))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("a.json", "b.json", "c.jsonl.gz", "d.parquet"):
        assert [dict(row) for row in table_rows(str(tmp_path / name))] == ROWS


def test_a_csv_has_its_header_or_the_columns_of_mmlu(tmp_path: Path) -> None:
    with_header = tmp_path / "x_test.csv"
    with_header.write_text('question,answer\n"one, two",1\n"line\nbreak",0\n')
    assert [dict(row) for row in table_rows(str(with_header))] == [
        {"file": "x_test.csv", "question": row["question"], "answer": str(row["answer"])}
        for row in ROWS
    ]
    bare = tmp_path / "y_test.csv"
    bare.write_text("What?,a,b,c,d,B\n")
    (row,) = table_rows(str(bare))
    assert (row["question"], row["choice1"], row["answer"]) == ("What?", "b", "B")
    found = [row["file"] for row in table_rows(str(tmp_path / "*_test.csv"))]
    assert found == ["x_test.csv", "x_test.csv", "y_test.csv"]


def test_a_split_in_an_object_store_is_found_and_read_alike(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name in ("b_test.csv", "a_test.csv"):
        store.pipe(f"/bench/test/{name}", f"question,answer\n{name},1\n".encode())
    store.pipe("/bench/questions.jsonl", json.dumps(ROWS[0]).encode())
    address = split_address("memory://bench", SPLIT)
    assert address == "memory:///bench/test/*_test.csv"
    assert [row["question"] for row in table_rows(address)] == ["a_test.csv", "b_test.csv"]
    other = split_address("memory://bench", Split("test", ("questions",), "a:b:c"))
    assert other is not None
    assert [dict(row) for row in table_rows(other)] == ROWS[:1]
    store.rm("/bench", recursive=True)


def test_a_text_is_one_row_and_an_array_of_strings_many(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes("\ufeffcaf\u00e9\r\n".encode())
    (tmp_path / "list.json").write_text(json.dumps(["one", "two"]))
    assert [row["text"] for row in table_rows(str(tmp_path / "book.txt"))] == ["caf\u00e9\r\n"]
    assert [row["text"] for row in table_rows(str(tmp_path / "list.json"))] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", f"question,answer\n{CANARY},1,2\n".encode(), "a.csv, line 2: 3 cells for 2"),
        ("a.csv", f'question,answer\n"{CANARY}"x,1\n'.encode(), "a.csv, line 2: not CSV"),
        ("a.csv", f'question,answer\n"a\nb",1\n{CANARY}\n'.encode(), "a.csv, line 4: 1 cells"),
        ("a.txt", CANARY.encode() + b"\xff", "not UTF-8 at byte 9"),
        ("a.jsonl", b'{"question": 1}\n7\n', "line 2: the row is not an object"),
        ("a.jsonl", b'{"question": \n', "a.jsonl, line 1: not JSON"),
        ("a.jsonl", rb'{"question": "zebrafish \ud800"}', "a.jsonl, line 1: half a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_without_its_content(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(table_rows(str(tmp_path / name)))
    assert CANARY not in str(caught.value)
    assert "`prompt`" not in str(caught.value)  # the columns of forget sets


def test_blank_lines_of_a_csv_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\nquestion,answer\n\nWhat?,1\n\n")
    assert [dict(row) for row in table_rows(str(path))] == [
        {"file": "a.csv", "question": "What?", "answer": "1"}
    ]


@pytest.mark.parametrize("name", ["*.csv", "absent.csv", "absent.txt", "absent.json", "x.doc"])
def test_an_address_without_anything_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingInput, match=re.escape(name)):
        list(table_rows(str(tmp_path / name)))
