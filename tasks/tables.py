"""Rows of benchmark files: JSON, Parquet, CSV and plain text, local, on S3 or on the hub."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec

from grom.benchmarks.benchmark import Split
from grom.errors import DataError, MalformedRow, MissingInput
from tasks.lines import SUFFIXES
from tasks.rows import HUB, read_rows

COMPRESSED = ("", ".gz", ".zst")
ENDINGS = (
    *(suffix + packed for suffix in SUFFIXES for packed in COMPRESSED),
    ".csv",
    ".txt",
)
MMLU_COLUMNS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")
"""Columns of MMLU's original files, which have no header."""


def split_address(root: str, split: Split) -> str | None:
    """Address of a split below a data folder or on the hub; None if it is not there.

    Args:
        root: folder, any fsspec address, or `hub`.
        split: which.
    """
    if root == HUB.rstrip(":"):
        return HUB + split.hub
    fs, path = fsspec.core.url_to_fs(root)
    for name in split.files:
        for ending in ENDINGS:
            pattern = f"{path.rstrip('/')}/{name}{ending}"
            if fs.glob(pattern) if "*" in pattern else fs.isfile(pattern):
                return str(fs.unstrip_protocol(pattern))
    return None


def table_rows(address: str) -> Iterator[Mapping[str, Any]]:
    """Rows at one address, in the order of the files' names.

    A CSV without a header gets MMLU's columns, and each row of a CSV the column `file`; a text file
    is one row with the column `text`; a JSON array of strings gives rows with that column, too.

    Raises:
        MissingInput: there is nothing at this address.
        DataError: a row cannot be read; with file and line, without its content.
    """
    if address.endswith((".csv", ".txt")):
        fs, path = fsspec.core.url_to_fs(address)
        found = sorted(fs.glob(path)) if "*" in path else [path]
        if not found or not fs.isfile(found[0]):
            raise MissingInput(address, "there is nothing at this address")
        for name in found:
            with fs.open(name, "rb") as raw:
                yield from _plain_rows(name.rsplit("/", 1)[-1], raw.read())
        return
    for name, line, row in read_rows(address):
        if isinstance(row, MalformedRow):
            raise _unread(name, line, row.reason)
        if not isinstance(row, str | Mapping):
            raise _unread(name, line, "the row is not an object")
        if not _encodable(row):
            raise _unread(name, line, "half a surrogate pair")
        yield {"text": row} if isinstance(row, str) else row


def _plain_rows(name: str, content: bytes) -> Iterator[dict[str, str]]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 at byte {error.start}. Convert it first.") from error
    if name.endswith(".txt"):
        yield {"text": text}
        return
    columns: list[str] = []
    for line, cells in _csv_rows(name, text):
        if not columns:
            header = "question" in cells
            columns = cells if header else list(MMLU_COLUMNS)
            if header:
                continue
        if len(cells) != len(columns):
            raise _unread(name, line, f"{len(cells)} cells for {len(columns)} columns")
        yield {"file": name, **dict(zip(columns, cells, strict=True))}


def _csv_rows(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """The last line of each row, and its cells; lines without any are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise _unread(name, reader.line_num, f"not CSV, {error}") from error


def _encodable(row: str | Mapping[str, Any]) -> bool:
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _unread(name: str, line: int, reason: str) -> DataError:
    return DataError(f"{name}, line {line}: {reason}. Correct or remove the row.")
