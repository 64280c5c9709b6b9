"""Rows of one open file: JSON Lines, plain or compressed, and Parquet; one line or batch at a time.

A row that cannot be read is handed on as a `MalformedRow`, which names the place and never the
content.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from grom.errors import DataError, MalformedRow, MissingInput
from tasks.expansion import RECORD_ROWS, Unpacked, wary_parquet

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is taken for a broken file."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    # Unlike `zstandard`, Arrow does not take a file that was cut short for a whole one.
    ".zst": lambda file: pa.CompressedInputStream(pa.PythonFile(file), "zstd"),
}
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowInvalid)


def known_kind(path: str) -> str | None:
    """`.parquet` or a suffix of JSON, whatever compresses it; None for any other file."""
    stem = path.lower()
    for suffix in OPENERS:
        stem = stem.removesuffix(suffix)
    return next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)


def own_rows(name: str, raw: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Line and content of each row of an open file; `name` says its kind.

    Raises:
        MissingInput: a kind that is not known.
        DataError: the file is broken, cut short, or holds far more than its size.
        MalformedRow: a line that is too long to go on after it.
    """
    yield from _rows(name, raw, _parquet)


def foreign_rows(name: str, raw: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The same of a file that somebody else sent: also Parquet is watched for its expansion."""
    yield from _rows(name, raw, lambda file: wary_parquet(name, file))


def checked_text(value: object, column: str, place: str, line: int) -> str:
    """The same value, if it is a string that says something.

    Raises:
        MalformedRow: it is not.
    """
    if value is None:
        raise MalformedRow(place, line, f"`{column}` is missing")
    if not isinstance(value, str):
        raise MalformedRow(place, line, f"`{column}` is {type(value).__name__}, not a string")
    if not value.strip():
        raise MalformedRow(place, line, f"`{column}` is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedRow(place, line, f"`{column}` holds half a surrogate pair") from None
    return value


def _rows(
    name: str, raw: BinaryIO, parquet: Callable[[BinaryIO], Iterator[Any]]
) -> Iterator[tuple[int, Any]]:
    kind = known_kind(name)
    if kind is None:
        raise MissingInput(name, f"the name does not end in {', '.join(SUFFIXES)}")
    with broken_named(name):
        if kind == ".parquet":
            yield from enumerate(parquet(raw), start=1)
        else:
            yield from _lines(name, raw)


def _parquet(raw: BinaryIO) -> Iterator[dict[str, Any]]:
    for record_batch in pq.ParquetFile(raw).iter_batches(batch_size=RECORD_ROWS):
        yield from record_batch.to_pylist()


def _lines(name: str, raw: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Rows of a JSON Lines file; a JSON array of objects is taken, too."""
    opener = OPENERS.get("." + name.lower().rsplit(".", 1)[-1])
    unpacked: Any = raw if opener is None else Unpacked(name, raw, opener(raw))
    stream = io.BufferedReader(unpacked)
    if stream.peek(1)[:1] == b"[":
        yield from _array_rows(name, stream)
        return
    line_number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        if len(line) > MAX_LINE_BYTES:
            raise MalformedRow(name, line_number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
        if line.strip():
            yield line_number, _parsed(name, line_number, line)


def _array_rows(name: str, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    content = stream.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise DataError(f"{name}: a JSON array over {MAX_LINE_BYTES >> 20} MiB; use JSON Lines")
    rows = _parsed(name, 1, content)
    if isinstance(rows, MalformedRow):
        raise rows
    yield from enumerate(rows, start=1)


def _parsed(name: str, line_number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        return MalformedRow(name, line_number, f"not UTF-8 at byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return MalformedRow(name, line_number, f"not JSON, column {error.colno}: {error.msg}")
    except KeyError:
        return MalformedRow(name, line_number, "a key occurs twice")
    except (ValueError, RecursionError):
        return MalformedRow(name, line_number, "a number too long, or brackets nested too deep")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise KeyError(key)
        row[key] = value
    return row


@contextmanager
def broken_named(path: str) -> Iterator[None]:
    """Name the file that a decompressor or Parquet finds broken; an errno means the disk or the
    network instead."""
    try:
        yield
    except BROKEN as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise DataError(f"{path}: the file is broken or cut short. Write it again.") from error
