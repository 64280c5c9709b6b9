"""The primitives in a local folder: renames, links and one lock per folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from grom.errors import DataError
from tasks import artifacts
from tasks.backends import Entry, Found, TooLarge, copy_blocks


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
        with (path.parent / ".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
