"""Compressed files that hold far more than their size: refused before they fill memory or disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grom.errors import DataError

MAX_RATIO = 400
"""Bytes of content per byte of file.  JSON Lines compress 3 to 30 times, rows that differ in their
id alone about 100 times; gzip ends at 1,030."""
FLOOR_BYTES = 2**20
"""Less is harmless whatever the ratio."""
SLICE_BYTES = 64 * 2**20
"""Text of a Parquet batch that becomes Python strings at once."""
RECORD_ROWS = 1024


class Expanding(DataError):
    """A file holds far more than its size."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name}: holds over {MAX_RATIO} times its size, as no list of examples does. Write it "
            "again without compression if it is meant."
        )


class Unpacked(io.RawIOBase):
    """The content of a compressed file, while it stays in proportion.

    Args:
        name: of the file, for messages.
        raw: the file as it lies there.
        content: what a decompressor makes of it.
    """

    def __init__(self, name: str, raw: BinaryIO, content: Any) -> None:
        super().__init__()
        self._name, self._raw, self._content, self._num_bytes = name, raw, content, 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; how many bytes, 0 at the end.

        Raises:
            Expanding: the content so far is out of proportion.
        """
        block = self._content.read(len(buffer))
        buffer[: len(block)] = block
        self._num_bytes += len(block)
        check_ratio(self._name, self._num_bytes, self._raw.tell())
        return len(block)


def check_ratio(name: str, num_bytes: int, file_bytes: int) -> None:
    """Check that a content is in proportion to its file.

    Raises:
        Expanding: it is not.
    """
    if num_bytes > max(FLOOR_BYTES, MAX_RATIO * file_bytes):
        raise Expanding(name)


def wary_parquet(name: str, raw: BinaryIO) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file that somebody else wrote.

    A repeated text is stored once there, so its length is counted before it is repeated here.

    Raises:
        Expanding: the content is out of proportion.
    """
    parquet, file_bytes = pq.ParquetFile(raw), raw.seek(0, io.SEEK_END)
    metadata, total = parquet.metadata, 0
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    check_ratio(name, sum(group.total_byte_size for group in groups), file_bytes)
    texts = [
        column.name
        for column in (parquet.schema.column(index) for index in range(metadata.num_columns))
        if column.physical_type == "BYTE_ARRAY" and column.path == column.name
    ]
    wary = pq.ParquetFile(raw, read_dictionary=texts)
    for batch in wary.iter_batches(batch_size=RECORD_ROWS):
        num_bytes = sum(_text_bytes(column) for column in batch.columns)
        total += num_bytes
        check_ratio(name, total, file_bytes)
        step = 1 if num_bytes > SLICE_BYTES else max(1, batch.num_rows)
        for start in range(0, batch.num_rows, step):
            yield from batch.slice(start, step).to_pylist()


def _text_bytes(column: Any) -> int:
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pc.binary_length(column.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)
