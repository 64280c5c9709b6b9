"""Looking for the text of rows where it must not be: in every object and every file.

Raw rows and their copies, which `traces` lists, are left out, and so are checkpoints: what a model
still knows is the business of `grom models`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from grom.errors import DataError, MalformedRow
from tasks.bucket import Bucket
from tasks.erase import copies, is_raw
from tasks.folder import LocalBackend, files_below
from tasks.lines import foreign_rows
from tasks.manifest import INBOX
from tasks.needles import Needles
from tasks.requests import COLUMNS
from tasks.traces import Trace, TraceState, data_set_caches

PRIVATE = ("inbox", "forget", "drafts")
"""Folders of scratch that may hold rows."""
CHECKPOINTS = (".safetensors",)


def texts_of(bucket: Bucket, work: Path, batch: str | None = None) -> Iterator[str]:
    """Texts and ids of the raw rows that still exist, of one batch or of all, as far as they can be
    read."""
    for entry in bucket.entries(f"{INBOX}/{batch}" if batch else INBOX):
        name = entry.name.rsplit("/", 1)[-1]
        if is_raw(entry.name):
            with _downloaded(bucket, entry.name, entry.num_bytes, work) as file:
                yield from _readable(name, file)
    for path, owner in copies(work):
        for rows in files_below(path) if batch in (None, owner) else ():
            with rows.open("rb") as file:
                yield from _readable(rows.name, file)


def texts_of_file(path: Path) -> Iterator[str]:
    """Texts and ids of the rows of a local file.

    Raises:
        MissingInput: its name is of no known kind.
        DataError: a row cannot be read, or the whole file.
    """
    with path.open("rb") as file:
        yield from _texts(path.name, file)


def _readable(name: str, file: BinaryIO) -> Iterator[str]:
    """A sender's file may be broken; the rows before the break are looked for."""
    with suppress(DataError):
        yield from _texts(name, file, skip_bad=True)


def _texts(name: str, file: BinaryIO, skip_bad: bool = False) -> Iterator[str]:
    for _, row in foreign_rows(name, file):
        if isinstance(row, MalformedRow) and not skip_bad:
            raise row
        if isinstance(row, dict):
            yield from (row[key] for key in COLUMNS if isinstance(row.get(key), str))


def search(bucket: Bucket, work: Path, needles: Needles, skip: Iterable[Path] = ()) -> list[Trace]:
    """Every object of the store and every file of work folder and caches that has one of the texts.

    Args:
        bucket: the store.
        work: this machine's work folder.
        needles: what to look for.
        skip: files that are known to have it.
    """
    if not needles:
        return []
    root = bucket.backend.root if isinstance(bucket.backend, LocalBackend) else None
    private = [work / "scratch" / name for name in PRIVATE]
    known = {path.resolve() for path in (*skip, *private, *([root] if root else []))}
    found = list(_in_folder(root, needles) if root else _in_objects(bucket, work, needles))
    for folder in (work, *data_set_caches(work)):
        for path in files_below(folder):
            if known.isdisjoint([path.resolve(), *path.resolve().parents]):
                found += _looked_into(path, str(path), needles)
    return found


def _in_folder(root: Path, needles: Needles) -> Iterator[Trace]:
    """Places in a local store, hidden files as well."""
    for path in files_below(root):
        name = path.relative_to(root).as_posix()
        if not _is_raw(name):
            yield from _looked_into(path, name, needles)


def _in_objects(bucket: Bucket, work: Path, needles: Needles) -> Iterator[Trace]:
    now = bucket.now()
    for entry in bucket.entries(None):
        if not _is_raw(entry.name) and not entry.name.endswith(CHECKPOINTS):
            with _downloaded(bucket, entry.name, entry.num_bytes, work) as file:
                if (state := _state(file, needles)) is not None:
                    age = now - entry.modified
                    yield Trace(entry.name, state, "object", age, entry.num_bytes)


def _looked_into(path: Path, place: str, needles: Needles) -> Iterator[Trace]:
    if place.endswith(CHECKPOINTS):
        return
    try:
        with path.open("rb") as file:
            stat, state = path.stat(), _state(file, needles)
    except FileNotFoundError:
        return
    except OSError:
        yield Trace(place, "unread", "file", 0.0, 0)
        return
    if state is not None:
        yield Trace(place, state, "file", time.time() - stat.st_mtime, stat.st_size)


def _state(file: BinaryIO, needles: Needles) -> TraceState | None:
    try:
        return "found" if needles.found_in(file) else None
    except DataError:
        return "unread"


def _is_raw(name: str) -> bool:
    return name.startswith(f"{INBOX}/") and is_raw(name)


@contextmanager
def _downloaded(bucket: Bucket, name: str, num_bytes: int, work: Path) -> Iterator[BinaryIO]:
    """An object as a file that has no name and is gone afterwards, even after a kill."""
    scratch = work / "scratch"
    with tempfile.TemporaryFile(dir=scratch if scratch.is_dir() else None) as file:
        bucket.download(name, file, num_bytes)
        file.seek(0)
        yield file
