"""Looking for texts: in every form and packing, across blocks, and nowhere that they are not."""

from __future__ import annotations

import bz2
import gzip
import html
import json
import lzma
import random
import sqlite3
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from grom.errors import DataError
from tasks.needles import BLOCK_BYTES, MAX_BYTES, MIN_BYTES, Needles, spellings

TEXT = 'Ärger & "Quxana"\nlives at 5 <Main> Street'
NEEDLES = Needles([TEXT])


def found(data: bytes, needles: Needles = NEEDLES) -> bool:
    """Whether they are in these bytes."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        return needles.found_in(file)


@pytest.mark.parametrize(
    "form",
    [
        TEXT,
        json.dumps({"a": TEXT}),
        json.dumps({"a": TEXT}, ensure_ascii=False),
        json.dumps({"a": json.dumps({"b": TEXT})}),
        json.dumps({"a": json.dumps({"b": TEXT}, ensure_ascii=False)}),
        html.escape(TEXT),
    ],
)
def test_every_form_is_found(form: str) -> None:
    data = form.encode()
    for packed in (
        data,
        gzip.compress(data),
        zstandard.compress(data),
        bz2.compress(data),
        lzma.compress(data),
    ):
        assert found(packed)
    assert not found(data.replace(b"Quxana", b"Quxane"))
    assert not found(gzip.compress(data.replace(b"Quxana", b"Quxane")))


@given(st.integers(0, 2 * MAX_BYTES), st.integers(0, 20))
def test_found_wherever_it_lies(before: int, after: int) -> None:
    """Also across the border of two blocks."""
    noise = random.Random(before).randbytes(BLOCK_BYTES - MAX_BYTES + before)
    assert found(noise + TEXT.encode() + bytes(after))


@given(st.lists(st.text(min_size=4, max_size=40), max_size=20), st.text(max_size=300))
def test_as_plain_search_finds(texts: list[str], content: str) -> None:
    data = content.encode()
    kept = [text for text in texts if len(text.encode()) >= MIN_BYTES]
    needles = Needles(texts)
    assert needles.num_texts == len(set(kept))
    assert needles.num_short == len(set(texts) - set(kept))
    assert bool(needles) == bool(kept)
    expected = any(spelling in data for text in kept for spelling in spellings(text))
    assert found(data, needles) == expected
    for text in kept:
        assert found(data + text.encode() + data, needles)


def test_texts_with_the_same_middle_are_told_apart() -> None:
    needles = Needles(["first 12345678 first", "other 12345678 other"])
    assert found(b"an other 12345678 other one", needles)
    assert not found(b"an other 12345678 first one", needles)


def test_the_start_of_a_long_text_is_enough() -> None:
    long = "".join(f"{number} " for number in range(1000))
    needles = Needles([long])
    assert found(long[: MAX_BYTES + 10].encode(), needles)
    assert not found(long[: MAX_BYTES - 10].encode(), needles)


def test_short_texts_are_counted_only() -> None:
    needles = Needles(["yes", "yes", "no"])
    assert (needles.num_texts, needles.num_short, bool(needles)) == (0, 2, False)
    assert not found(b"yes and no", needles)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_tables_are_looked_into(tmp_path: Path, compression: str) -> None:
    plain = pa.array(["x", None, TEXT])
    columns = {
        "plain": plain,
        "large": plain.cast(pa.large_string()),
        "bytes": plain.cast(pa.binary()),
        "coded": plain.dictionary_encode(),
        "list": pa.array([[], ["x", TEXT], None]),
        "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": 2, "b": TEXT}]),
        "map": pa.array([[("k", TEXT)], [], None], pa.map_(pa.string(), pa.string())),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"n": [1, 2, 3], name: column}), path, compression=compression)
        assert found(path.read_bytes()), name
    pq.write_table(pa.table({"n": [1.0], "s": ["x"]}), tmp_path / "other.parquet")
    assert not found((tmp_path / "other.parquet").read_bytes())


def test_databases_are_looked_into(tmp_path: Path) -> None:
    """Also where a value is split over pages, and in the log that a writer has not taken over."""
    path = tmp_path / "data.db"
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA page_size = 512")
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute('CREATE TABLE "a ""b" (n INTEGER, s TEXT)')
    splits = ["x" * number + TEXT for number in range(400, 520, 3)]
    writer.executemany('INSERT INTO "a ""b" VALUES (1, ?)', [(text,) for text in splits])
    writer.commit()
    assert found((tmp_path / "data.db-wal").read_bytes())
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    for number, text in enumerate(splits):
        assert found(data, Needles([text[100:]])), number
    writer.close()
    assert not found(data, Needles(["nowhere to be found"]))


def test_archives_are_looked_into(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("empty", "")
        archive.writestr("rows", TEXT)
    assert found((tmp_path / "a.zip").read_bytes())


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(TEXT.encode())[:-9],
        gzip.compress(bytes(10**7)),
        b"PAR1 is not enough",
        b"PK\3\4 neither",
        b"SQLite format 3\0" + bytes(2000),
    ],
)
def test_what_cannot_be_read_is_said(data: bytes) -> None:
    with pytest.raises(DataError):
        found(data, Needles(["nowhere to be found"]))
    assert found(data + TEXT.encode())
