"""Reading rows: JSON Lines and Parquet from any fsspec address, or a hub data set, as a stream.

Constant memory: one line or one record batch at a time.  A bad row is named by file and line; its
content never enters a message.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from grom.config import DataConfig
from grom.errors import DataError, MalformedRow, MissingInput
from grom.examples import Example

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is taken for a broken file."""
RECORD_ROWS = 1024
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    # Unlike `zstandard`, Arrow does not take a file that was cut short for a whole one.
    ".zst": lambda file: pa.CompressedInputStream(pa.PythonFile(file), "zstd"),
}
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowInvalid)
HUB = "hub:"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a data set, pinned as it was found."""

    path: str
    version: str
    """Changes when the file does: the store's version or entity tag, or size and time."""


def source_files(uri: str) -> list[SourceFile]:
    """The data files at an address: a file, a glob, or all under a folder, in natural order.

    Raises:
        MissingInput: nothing there, or no file of a known kind.
    """
    fs, path = fsspec.core.url_to_fs(uri)
    fs.invalidate_cache()
    if "*" in path:
        paths = fs.glob(path)
    elif fs.isfile(path):
        paths = [path]
    elif fs.isdir(path):
        paths = fs.find(path)
    else:
        raise MissingInput(uri, "there is nothing at this address")
    known = [found for found in paths if _kind(found) is not None]
    if not known:
        raise MissingInput(uri, f"no file there ends in {', '.join(SUFFIXES)} (or with .gz, .zst)")
    return [
        SourceFile(fs.unstrip_protocol(found), str(fs.ukey(found)))
        for found in sorted(known, key=_natural)
    ]


def read_examples(
    config: DataConfig, on_bad: Callable[[MalformedRow], None] | None = None
) -> Iterator[Example]:
    """Stream the examples of a data set in order.

    Args:
        config: address, columns and which rows.
        on_bad: told of each bad row, which is then left out; not given: the first one raises.

    Raises:
        MissingInput: nothing at the address.
        MalformedRow: a row that breaks the schema, if `on_bad` is not given.
    """
    taken = 0
    for number, (place, line, row) in enumerate(read_rows(config.uri)):
        if number < config.skip or (number - config.skip) % config.every:
            continue
        try:
            if isinstance(row, MalformedRow):
                raise row
            example = _example(config, row, number, place, line)
        except MalformedRow as bad:
            if on_bad is None:
                raise
            on_bad(bad)
            continue
        if _wanted(config, example.group):
            yield example
            taken += 1
            if taken == config.limit:
                return


def digest(config: DataConfig) -> str:
    """SHA-256 over the content of all files of a data set, or over the rows of a hub set."""
    sha = hashlib.sha256()
    if config.uri.startswith(HUB):
        for _, _, row in read_rows(config.uri):
            sha.update(json.dumps(row, sort_keys=True, default=str).encode())
        return sha.hexdigest()
    for file in source_files(config.uri):
        with fsspec.open(file.path, "rb") as opened:
            while block := opened.read(2**20):
                sha.update(block)
        sha.update(b"\0")
    return sha.hexdigest()


def read_rows(uri: str) -> Iterator[tuple[str, int, Any]]:
    """File name, line and content of each row at an address; a bad row is a MalformedRow."""
    if uri.startswith(HUB):
        yield from _hub_rows(uri)
        return
    for file in source_files(uri):
        if _kind(file.path) == ".parquet":
            yield from _parquet_rows(file.path)
        else:
            yield from _json_rows(file.path)


def _json_rows(path: str) -> Iterator[tuple[str, int, Any]]:
    """Rows of a JSON Lines file; a JSON array of objects is taken, too."""
    name = path.rsplit("/", 1)[-1]
    with fsspec.open(path, "rb") as raw, _broken_named(path):
        opener = OPENERS.get("." + name.rsplit(".", 1)[-1])
        stream = io.BufferedReader(raw if opener is None else opener(raw))
        if stream.peek(1)[:1] == b"[":
            yield from _array_rows(name, stream)
            return
        line_number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            line_number += 1
            if len(line) > MAX_LINE_BYTES:
                raise MalformedRow(name, line_number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                yield name, line_number, _parsed(name, line_number, line)


def _array_rows(name: str, stream: BinaryIO) -> Iterator[tuple[str, int, Any]]:
    content = stream.read(MAX_LINE_BYTES + 1)
    if len(content) > MAX_LINE_BYTES:
        raise DataError(f"{name}: a JSON array over {MAX_LINE_BYTES >> 20} MiB; use JSON Lines")
    rows = _parsed(name, 1, content)
    if isinstance(rows, MalformedRow):
        raise rows
    for number, row in enumerate(rows, start=1):
        yield name, number, row


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


def _parquet_rows(path: str) -> Iterator[tuple[str, int, Any]]:
    name, number = path.rsplit("/", 1)[-1], 0
    with fsspec.open(path, "rb") as raw, _broken_named(path):
        for record_batch in pq.ParquetFile(raw).iter_batches(batch_size=RECORD_ROWS):
            for row in record_batch.to_pylist():
                number += 1
                yield name, number, row


@contextmanager
def _broken_named(path: str) -> Iterator[None]:
    """Name the file that a decompressor or Parquet finds broken; an errno means the disk or the
    network instead."""
    try:
        yield
    except BROKEN as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise DataError(f"{path}: the file is broken or cut short. Write it again.") from error


def _hub_rows(address: str) -> Iterator[tuple[str, int, Any]]:
    from datasets import load_dataset

    name, config, split = [*address.removeprefix(HUB).split(":"), "", ""][:3]
    try:
        rows = load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:
        raise MissingInput(
            address, f"the hub data set did not open ({type(error).__name__})"
        ) from (error)
    for number, row in enumerate(cast(Any, rows), start=1):
        yield name, number, dict(row)


def _example(config: DataConfig, row: object, number: int, place: str, line: int) -> Example:
    if not isinstance(row, Mapping):
        raise MalformedRow(place, line, "the row is not an object")
    named = row.get(config.group)
    group_number = number // (config.group_rows or 1) if named is None else _hashed(str(named))
    group = f"group-{group_number:06d}" if named is None else str(named)
    where = f"{place}, line {line}"
    prompt, answer, text = (row.get(key) for key in (config.prompt, config.answer, config.text))
    if prompt is None and answer is None and text is not None:
        whole = _string(text, config.text, place, line)
        return Example(where, group, group_number, text=whole)
    return Example(
        where,
        group,
        group_number,
        prompt=_string(prompt, config.prompt, place, line),
        answer=_string(answer, config.answer, place, line),
    )


def _string(value: object, column: str, place: str, line: int) -> str:
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


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def _wanted(config: DataConfig, group: str) -> bool:
    return group not in config.without and (config.only is None or group in config.only)


def _kind(path: str) -> str | None:
    stem = path.lower()
    for suffix in OPENERS:
        stem = stem.removesuffix(suffix)
    return next((suffix for suffix in SUFFIXES if stem.endswith(suffix)), None)


def _natural(path: str) -> list[tuple[int, str]]:
    """part-2 before part-10."""
    parts, digits = [], ""
    for character in [*path, ""]:
        if character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, character))
    return parts
