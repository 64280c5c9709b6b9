"""The primitives in a local folder: renames, links and one lock per folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from grom.errors import DataError
from tasks import artifacts
from tasks.backends import Entry, Found, Leftover, TooLarge, copy_blocks

LOCK = ".lock"
DRAFT_NAME = re.compile(r"\.(?P<target>.+)\.[0-9a-f]{32}|\.probe-[0-9a-f]{32}")


class LocalBackend:
    """Files below a folder.  A file's version is its sha256."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, name: str, limit: int) -> Found | None:
        """See `Backend`."""
        with self._opened(name) as file:
            if file is None:
                return None
            stat = os.fstat(file.fileno())
            if stat.st_size > limit:
                raise TooLarge(name, limit)
            data = file.read()
        return Found(data, hashlib.sha256(data).hexdigest(), stat.st_mtime, stat.st_size)

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        """See `Backend`."""
        with self._opened(name) as file:
            if file is None:
                return None
            copy_blocks(file, target, limit)
            return os.fstat(file.fileno()).st_size

    def upload(self, source: Path, name: str) -> int:
        """See `Backend`."""
        path = self._path(name)
        with self._draft(path) as draft:
            shutil.copyfile(source, draft)
            artifacts.flush(draft)
            draft.replace(path)
        return path.stat().st_size

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """See `Backend`."""
        path = self._path(name)
        if version is None:
            return hashlib.sha256(data).hexdigest() if artifacts.create(path, data) else None
        with self._locked(path), self._draft(path) as draft:
            found = self.read(name, limit=2**62)
            if found is None or found.version != version:
                return None
            draft.write_bytes(data)
            artifacts.flush(draft)
            draft.replace(path)
        return hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        """See `Backend`."""
        with contextlib.suppress(NotADirectoryError):
            self._path(name).unlink(missing_ok=True)

    def entries(self, folder: str) -> list[Entry]:
        """See `Backend`.  Hidden files are drafts and locks; links could lead anywhere."""
        entries = []
        for place, _, names in os.walk(self.root / folder):
            for path in (Path(place, name) for name in names if not name.startswith(".")):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.lstat()
                    if not path.is_symlink():
                        name = path.relative_to(self.root).as_posix()
                        entries.append(Entry(name, stat.st_size, stat.st_mtime))
        return entries

    def now(self) -> float:
        """See `Backend`.  The clock of the file system, which may be another machine's."""
        if not self.root.is_dir():
            return time.time()  # nothing is there yet whose age could matter
        with self._draft(self.root / "clock") as draft:
            draft.touch()
            return draft.stat().st_mtime

    def reopen(self) -> None:
        """See `Backend`."""

    def leftovers(self, folder: str) -> list[Leftover]:
        """See `KeepsLeftovers`.  Everything hidden but locks: drafts of files and of artifacts."""
        found = []
        for place, folders, files in os.walk(self.root / folder):
            hidden = [name for name in (*folders, *files) if name.startswith(".")]
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(place, name) for name in hidden if name != LOCK):
                with contextlib.suppress(FileNotFoundError):
                    found.append(self._leftover(path))
        return found

    def drop(self, leftover: Leftover) -> None:
        """See `KeepsLeftovers`."""
        path = self._path(leftover.name).with_name(leftover.key)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _leftover(self, path: Path) -> Leftover:
        drafted = DRAFT_NAME.fullmatch(path.name)
        target = path.with_name((drafted and drafted["target"]) or path.name)
        return Leftover(
            name=target.relative_to(self.root).as_posix(),
            kind="draft" if drafted else "hidden",
            key=path.name,
            num_bytes=size_of(path),
            modified=last_change(path),
        )

    def _path(self, name: str) -> Path:
        path = self.root / name
        if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(self.root)):
            raise DataError(f"{name}: leads out of the store by a link. Remove the link.")
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[BinaryIO | None]:
        try:
            handle = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise DataError(f"{name}: a link, not a file. Put the file itself there.") from error
        with os.fdopen(handle, "rb") as file:
            yield file

    @contextlib.contextmanager
    def _draft(self, path: Path) -> Iterator[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """One writer at a time in a folder; the kernel frees the lock of one that is killed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def files_below(path: Path) -> Iterator[Path]:
    """A file itself, or every regular file below a folder; no links, which lead elsewhere."""
    if not path.is_dir():
        candidates = [path]
    else:
        candidates = [Path(place, name) for place, _, names in os.walk(path) for name in names]
    yield from (found for found in candidates if found.is_file() and not found.is_symlink())


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    total = 0
    for found in files_below(path):
        with contextlib.suppress(FileNotFoundError):
            total += found.stat().st_size
    return total


def last_change(path: Path) -> float:
    """When anything in a file or folder was last written, in seconds since 1970.

    Raises:
        FileNotFoundError: it is gone.
    """
    latest = path.lstat().st_mtime
    for place, folders, names in os.walk(path):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                latest = max(latest, Path(place, name).lstat().st_mtime)
    return latest


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Say that a folder is in use while the block runs; the kernel ends it for who is killed."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether somebody, in whatever process, holds a folder, or that cannot be told."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
