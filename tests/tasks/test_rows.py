"""Rows are read from every kind of file, in order, and as they were when the set was loaded."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from grom.config import DataConfig, HoldOutConfig
from grom.errors import DataError
from tasks.load import load_data
from tasks.place import DataRef, Place
from tasks.rows import digest, read_examples

ROWS = [{"prompt": f"question {number}", "answer": f"answer {number}"} for number in range(6)]


def lines(rows: list[Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def packed(compression: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as file:
        file.write(lines(ROWS))
    found: bytes = sink.getvalue().to_pybytes()
    return found


def parquet(rows: list[Any], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    found: bytes = sink.getvalue().to_pybytes()
    return found


FILES: dict[str, bytes] = {
    "rows.jsonl": lines(ROWS),
    "rows.json": lines(ROWS),
    "array.json": json.dumps(ROWS, indent=2).encode(),
    "no-last-newline.jsonl": lines(ROWS).rstrip(),
    "blank-lines.jsonl": lines(ROWS).replace(b"\n", b"\r\n \r\n"),
    "byte-order-mark.jsonl": b"\xef\xbb\xbf" + lines(ROWS),
    "rows.jsonl.gz": gzip.compress(lines(ROWS)),
    "two-members.jsonl.gz": gzip.compress(lines(ROWS[:2])) + gzip.compress(lines(ROWS[2:])),
    "rows.jsonl.zst": packed("zstd"),
    "rows.jsonl.bz2": packed("bz2"),
    "rows.parquet": parquet(ROWS),
    "row-groups.parquet": parquet(ROWS, row_group_size=2),
}


def read(uri: object, **settings: Any) -> list[str]:
    """Answers of the set at an address."""
    config = DataConfig(uri=str(uri), **settings)
    return [str(example.answer or example.text) for example in read_examples(config)]


def answers(*numbers: int) -> list[str]:
    return [f"answer {number}" for number in numbers]


def write_part(path: Path, *numbers: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines([ROWS[number] for number in numbers]))


def loaded(path: object, tmp_path: Path, every: int | None = None, **settings: Any) -> DataRef:
    place = Place(work=str(tmp_path / "work"), store=str(tmp_path / "store"))
    hold_out = None if every is None else HoldOutConfig(every=every)
    return load_data.fn(DataConfig(uri=str(path), **settings), place, "retain", hold_out)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of an S3 server in this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket that the environment leads to, as it does in production."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    storage = fsspec.get_filesystem_class("s3")
    storage.clear_instance_cache()
    name = f"inbox-{abs(hash(tmp_path))}"
    storage().mkdir(name)
    yield f"s3://{name}/batch-7"
    storage.clear_instance_cache()


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    found = list(read_examples(DataConfig(uri=str(tmp_path / name))))
    assert [example.prompt for example in found] == [row["prompt"] for row in ROWS]
    assert [example.answer for example in found] == [row["answer"] for row in ROWS]
    assert found[0].place.startswith(name)


def test_a_folder_is_read_in_natural_order_and_other_files_are_passed_over(tmp_path: Path) -> None:
    write_part(tmp_path / "part-10.jsonl", 3, 4)
    write_part(tmp_path / "part-2.jsonl", 1, 2)
    write_part(tmp_path / "a" / "part-1.json", 0)
    (tmp_path / "README.md").write_text("not rows")
    (tmp_path / "_SUCCESS").write_text("")
    assert read(tmp_path) == answers(0, 1, 2, 3, 4)


def test_a_glob_takes_what_it_names(tmp_path: Path) -> None:
    write_part(tmp_path / "keep-9.jsonl", 0)
    write_part(tmp_path / "keep-11.jsonl", 1)
    write_part(tmp_path / "drop-1.jsonl", 2)
    assert read(tmp_path / "keep-*.jsonl") == answers(0, 1)


def test_object_storage_is_read_like_a_folder(bucket: str) -> None:
    storage = fsspec.filesystem("s3")
    storage.pipe_file(f"{bucket}/part-10.jsonl.gz", gzip.compress(lines(ROWS[4:])))
    storage.pipe_file(f"{bucket}/part-2.jsonl", lines(ROWS[:2]))
    storage.pipe_file(f"{bucket}/part-3.parquet", parquet(ROWS[2:4]))
    assert read(bucket) == answers(*range(6))
    assert read(f"{bucket}/part-*.jsonl") == answers(0, 1)


def test_an_object_that_changes_during_the_run_ends_it(bucket: str, tmp_path: Path) -> None:
    storage = fsspec.filesystem("s3")
    storage.pipe_file(f"{bucket}/rows.jsonl", lines(ROWS))
    reference = loaded(bucket, tmp_path)
    assert len(list(reference.examples())) == 6
    storage.pipe_file(f"{bucket}/rows.jsonl", lines(ROWS[::-1]))
    with pytest.raises(DataError, match=r"batch-7/rows.jsonl: changed while the run"):
        list(reference.examples())


@pytest.mark.parametrize("change", ["content", "size", "gone", "another file"])
def test_a_file_that_changes_during_the_run_ends_it(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    write_part(folder / "rows.jsonl", 0, 1)
    write_part(folder / "more.jsonl", 4)
    reference = loaded(folder, tmp_path)
    if change == "content":
        write_part(folder / "rows.jsonl", 1, 0)
    elif change == "size":
        write_part(folder / "rows.jsonl", 0, 1, 2)
    elif change == "gone":
        (folder / "rows.jsonl").unlink()
    else:
        write_part(folder / "rows-2.jsonl", 3)
    with pytest.raises(DataError, match=r"rows(-2)?.jsonl: changed while .* Start the run again"):
        list(reference.examples())


def test_columns_go_by_the_names_that_the_settings_give(tmp_path: Path) -> None:
    row = {"question": "q", "paraphrased": "a", "author": "A", "prompt": None}
    (tmp_path / "qa.parquet").write_bytes(parquet([row]))
    config = DataConfig(
        uri=str(tmp_path / "qa.parquet"), prompt="question", answer="paraphrased", group="author"
    )
    (example,) = read_examples(config)
    assert (example.prompt, example.answer, example.group) == ("q", "a", "A")


def test_a_row_of_running_text_needs_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_bytes(lines([{"text": "once"}, {"body": "twice"}]))
    assert read(tmp_path / "text.jsonl", limit=1) == ["once"]
    assert read(tmp_path / "text.jsonl", text="body", skip=1) == ["twice"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"skip": 2}, (2, 3, 4, 5)),
        ({"limit": 2}, (0, 1)),
        ({"skip": 1, "limit": 3}, (1, 2, 3)),
        ({"skip": 1, "every": 2}, (1, 3, 5)),
        ({"every": 2, "limit": 2}, (0, 2)),
        ({"only": ("b",)}, (2, 3)),
        ({"without": ("b",)}, (0, 1, 4, 5)),
        ({"only": ("a", "b"), "without": ("a",)}, (2, 3)),
        ({"without": ("a",), "limit": 3}, (2, 3, 4)),
        ({"only": ("nobody",)}, ()),
    ],
)
def test_rows_are_chosen_by_place_and_by_group(
    settings: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    grouped = [row | {"who": "aabbcc"[number]} for number, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_bytes(lines(grouped))
    assert read(tmp_path / "rows.jsonl", group="who", **settings) == answers(*expected)


def test_without_a_group_column_consecutive_rows_make_a_group(tmp_path: Path) -> None:
    write_part(tmp_path / "rows.jsonl", *range(6))
    config = DataConfig(uri=str(tmp_path / "rows.jsonl"), group_rows=4)
    groups = [example.group for example in read_examples(config)]
    assert groups == 4 * ["group-000000"] + 2 * ["group-000001"]
    alone = DataConfig(uri=str(tmp_path / "rows.jsonl"))
    assert len({example.group for example in read_examples(alone)}) == 6


def test_a_group_is_held_out_whole_and_every_row_is_on_one_side(tmp_path: Path) -> None:
    rows = [row | {"request_id": f"r{index % 40}"} for index, row in enumerate(ROWS * 40)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    reference = loaded(tmp_path / "rows.jsonl", tmp_path, every=3)
    seen = {example.group for example in reference.examples("seen")}
    held = {example.group for example in reference.examples("held out")}
    assert 0 < len(held) < 40
    assert seen.isdisjoint(held)
    assert len(seen | held) == 40
    assert len(list(reference.examples())) == reference.num_rows == 240


def test_the_split_by_name_does_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [row | {"request_id": f"r{index}"} for index, row in enumerate(ROWS * 4)]
    (tmp_path / "one.jsonl").write_bytes(lines(rows))
    (tmp_path / "two.jsonl").write_bytes(lines(rows[::-1]))
    one, two = (loaded(tmp_path / f"{name}.jsonl", tmp_path, every=3) for name in ("one", "two"))
    held = {example.group for example in one.examples("held out")}
    assert held == {example.group for example in two.examples("held out")}


def test_a_set_is_known_by_its_content_and_not_by_where_it_lies(tmp_path: Path) -> None:
    write_part(tmp_path / "a.jsonl", 0, 1)
    write_part(tmp_path / "elsewhere" / "b.jsonl", 0, 1)
    write_part(tmp_path / "c.jsonl", 1, 0)
    one, same, other = (
        loaded(tmp_path / name, tmp_path) for name in ("a.jsonl", "elsewhere/b.jsonl", "c.jsonl")
    )
    assert one.facts == same.facts != other.facts
    assert digest(one.config) == one.digest
