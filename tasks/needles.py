"""Looking for many texts at once in files of any kind: as they are, escaped, packed, in tables.

Each text is known by eight of its bytes.  A window of eight bytes of a file is first looked up in
a table of hashes, which rules out nearly all windows at the speed of memory; what is left is
compared with the texts themselves.
"""

from __future__ import annotations

import html
import io
import json
import sqlite3
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grom.errors import DataError
from tasks.expansion import Unpacked
from tasks.lines import BROKEN, OPENERS

MIN_BYTES, MAX_BYTES = 16, 256
"""Shorter texts are found anywhere by chance, so they are not looked for; of longer ones the start
is, so that what was cut short is found, too."""
BLOCK_BYTES = 2**20
WINDOW_BYTES = 8
HASH_BITS = 22
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
SQLITE_BYTES = 2**31
"""Larger databases are read as bytes only: a value that is split over pages is not found there."""
PACKED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
PARQUET, ZIP, SQLITE = b"PAR1", b"PK\x03\x04", b"SQLite format 3\0"
SQLITE_MODES = slice(18, 20)
"""Bytes of the header that say whether there is a journal of its own, which a copy has not."""
UNREADABLE = (*BROKEN, pa.ArrowException, sqlite3.Error, zipfile.BadZipFile, NotImplementedError)


class Needles:
    """Texts to look for."""

    def __init__(self, texts: Iterable[str]) -> None:
        """texts: whatever must not be found."""
        self.num_texts = 0
        """Distinct texts that are looked for."""
        self.num_short = 0
        """Distinct texts that are too short to be told from chance."""
        self._anchors: dict[int, list[tuple[int, bytes]]] = {}
        needles: set[bytes] = set()
        for text in set(texts):
            if len(text.encode(errors="replace")) < MIN_BYTES:
                self.num_short += 1
            else:
                self.num_texts += 1
                needles |= {spelling[:MAX_BYTES] for spelling in spellings(text)}
        for needle in needles:
            offset = (len(needle) - WINDOW_BYTES) // 2  # starts are often the same
            anchor = int.from_bytes(needle[offset : offset + WINDOW_BYTES], "little")
            self._anchors.setdefault(anchor, []).append((offset, needle))
        self._table = np.zeros(2**HASH_BITS, dtype=bool)
        self._table[_hashed(np.array(list(self._anchors), dtype=np.uint64))] = True

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._anchors)

    def found_in(self, file: BinaryIO) -> bool:
        """Whether a file has one of the texts, in its bytes or in what it holds.

        Raises:
            DataError: what it holds cannot be read; the bytes themselves have none.
        """
        if self._found(_blocks(file)):
            return True
        try:
            return self._found(_contents(file))
        except UNREADABLE as error:
            raise DataError("the content of a file cannot be read, see where it lies") from error

    def _found(self, blocks: Iterable[bytes]) -> bool:
        tail = b""
        for block in blocks:
            data = tail + block
            if any(self._matches(data)):
                return True
            tail = data[-MAX_BYTES + 1 :]
        return False

    def _matches(self, data: bytes) -> Iterator[bool]:
        for shift in range(WINDOW_BYTES):
            count = (len(data) - shift) // WINDOW_BYTES
            if count <= 0:
                return
            windows = np.frombuffer(data, dtype="<u8", count=count, offset=shift)
            for index in np.flatnonzero(self._table[_hashed(windows)]).tolist():
                at = shift + WINDOW_BYTES * index
                for offset, needle in self._anchors.get(int(windows[index]), ()):
                    yield at >= offset and data.startswith(needle, at - offset)


def spellings(text: str) -> set[bytes]:
    """The forms in which a text may lie in a file: plain, in JSON, in JSON within JSON, in HTML."""
    once = _in_json({text})
    return {
        one.encode(errors="replace") for one in {text, html.escape(text)} | once | _in_json(once)
    }


def _in_json(texts: set[str]) -> set[str]:
    return {json.dumps(one, ensure_ascii=plain)[1:-1] for one in texts for plain in (True, False)}


def _hashed(windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return (windows * MULTIPLIER) >> np.uint64(64 - HASH_BITS)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        yield block


def _contents(file: BinaryIO) -> Iterator[bytes]:
    """What a packed file or a table holds; nothing for a plain file."""
    file.seek(0)
    start = file.read(len(SQLITE))
    file.seek(0)
    for magic, suffix in PACKED.items():
        if start.startswith(magic):
            unpacked: Any = Unpacked("a packed file", file, OPENERS[suffix](file))
            yield from _blocks_of(io.BufferedReader(unpacked))
    if start.startswith(PARQUET):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1024):
            for column in batch.columns:
                yield from _strings(column)
    elif start.startswith(ZIP):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    yield from _blocks_of(member)
    elif start == SQLITE:
        yield from _values(file)


def _blocks_of(stream: Any) -> Iterator[bytes]:
    while block := stream.read(BLOCK_BYTES):
        yield block


def _strings(values: Any) -> Iterator[bytes]:
    """Texts of an Arrow array, whatever it is nested in."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        yield from _strings(values.dictionary)
    elif pa.types.is_map(kind):
        yield from _strings(values.keys)
        yield from _strings(values.items)
    elif pa.types.is_nested(kind):
        inner = values.flatten()
        for part in inner if isinstance(inner, list) else [inner]:
            yield from _strings(part)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind):
        texts = values.drop_null().cast(pa.large_binary()).to_pylist()
        yield b"\0".join(texts) + b"\0"


def _values(file: BinaryIO) -> Iterator[bytes]:
    """Texts of an SQLite database, of a copy: its own file is not opened as a database."""
    image = bytearray(file.read(SQLITE_BYTES))
    if len(image) == SQLITE_BYTES:
        return
    image[SQLITE_MODES] = b"\1\1"
    database = sqlite3.connect(":memory:")
    try:
        database.deserialize(bytes(image))
        database.text_factory = bytes
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            name = table.decode().replace('"', '""')
            for row in database.execute(f'SELECT * FROM "{name}"'):
                yield b"\0".join(value for value in row if isinstance(value, bytes)) + b"\0"
    finally:
        database.close()
