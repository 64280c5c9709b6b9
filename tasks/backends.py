"""What a store can do: the primitives, and how any fsspec file system does them.

`s3.py` and `folder.py` are the ones for S3 and local folders, which can also compare and swap.

Each does one thing once and lets errors through; `bucket.py` tries again and names them.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, runtime_checkable
from uuid import uuid4

import fsspec

from grom.errors import DataError

BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Found:
    """A small object as it was at one moment."""

    data: bytes
    version: str
    """Differs when the bytes do."""
    modified: float
    """When it was written, by the store's clock, in seconds since 1970."""
    num_bytes: int
    """Size that the store announced."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing."""

    name: str
    num_bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Leftover:
    """Bytes that a store keeps and no listing of objects shows."""

    name: str
    """The object that it was, or was to become."""
    kind: Literal["version", "marker", "upload", "draft", "hidden"]
    """An old version, the mark of a deletion, an upload in parts that was not ended, a file of a
    writer that was killed, a hidden file of somebody else."""
    key: str
    """What names it in the store beside the object."""
    num_bytes: int
    """0 if the store does not say."""
    modified: float


class TooLarge(DataError):
    """An object is larger than anything that belongs there."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__(
            f"{name}: more than {limit} bytes. Check what wrote it; nothing of it was used."
        )


class Backend(Protocol):
    """The primitives.  Names are relative to the root."""

    def read(self, name: str, limit: int) -> Found | None:
        """The object, or None."""

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        """Write the object's bytes, at most `limit` and one block; its announced size, or None."""

    def upload(self, source: Path, name: str) -> int:
        """Write an object of any size, which appears when it is whole; its size in the store."""

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write if the object has this version (None: if there is none); the new version, or None
        if it has not."""

    def delete(self, name: str) -> None:
        """Remove the object if it is there."""

    def entries(self, folder: str) -> list[Entry]:
        """All objects below a folder, or below the root if it is empty, never from a cache."""

    def now(self) -> float:
        """The store's clock, in seconds since 1970."""

    def reopen(self) -> None:
        """Forget sessions and credentials."""


@runtime_checkable
class KeepsLeftovers(Protocol):
    """A backend whose store may hold more than its listings show."""

    def leftovers(self, folder: str) -> list[Leftover]:
        """All of them below a folder, or below the root if it is empty."""

    def drop(self, leftover: Leftover) -> None:
        """Remove it for ever, if it is there."""


class PlainBackend:
    """Any fsspec file system, through its generic calls.  It cannot compare and swap."""

    def __init__(self, fs: Any, base: str) -> None:
        self.fs, self.base = fs, base

    def read(self, name: str, limit: int) -> Found | None:
        """See `Backend`."""
        try:
            info = self.fs.info(f"{self.base}/{name}")
            if info["size"] > limit:
                raise TooLarge(name, limit)
            data = self.fs.cat_file(f"{self.base}/{name}")
            modified = self.fs.modified(f"{self.base}/{name}").timestamp()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Found(data, hashlib.sha256(data).hexdigest(), modified, info["size"])

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        """See `Backend`."""
        try:
            with self.fs.open(f"{self.base}/{name}", "rb") as file:
                copy_blocks(file, target, limit)
            return int(self.fs.info(f"{self.base}/{name}")["size"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def upload(self, source: Path, name: str) -> int:
        """See `Backend`."""
        self.fs.put_file(str(source), f"{self.base}/{name}")
        return int(self.fs.info(f"{self.base}/{name}")["size"])

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """See `Backend`."""
        if version is not None:
            raise NotImplementedError(f"{type(self.fs).__name__} cannot compare and swap")
        # fsspec's own `pipe_file` looks first and writes then, which is no guarantee.
        plain = type(self.fs).pipe_file is fsspec.AbstractFileSystem.pipe_file
        if plain and not self.fs.async_impl:
            raise NotImplementedError(f"{type(self.fs).__name__} cannot create a file if absent")
        try:
            self.fs.pipe_file(f"{self.base}/{name}", data, mode="create")
        except FileExistsError:
            return None
        except OSError as error:
            if "pre-condition" in str(error):
                return None
            raise
        return hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        """See `Backend`."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.base}/{name}")

    def entries(self, folder: str) -> list[Entry]:
        """See `Backend`."""
        self.fs.invalidate_cache()
        found = self.fs.find(f"{self.base}/{folder}", detail=True)
        return [
            Entry(path.removeprefix(f"{self.base}/"), info["size"], _time_of(info))
            for path, info in found.items()
        ]

    def now(self) -> float:
        """See `Backend`."""
        path = f"{self.base}/.clock-{uuid4().hex}"
        self.fs.pipe_file(path, b"")
        try:
            return float(self.fs.modified(path).timestamp())
        finally:
            self.fs.rm_file(path)

    def reopen(self) -> None:
        """See `Backend`."""


def _time_of(info: dict[str, Any]) -> float:
    when = info.get("LastModified") or info.get("mtime") or info.get("created") or 0.0
    return float(when.timestamp() if hasattr(when, "timestamp") else when)


def copy_blocks(file: BinaryIO, target: BinaryIO, limit: int) -> None:
    """Copy the rest of a file, at most `limit` bytes and one block."""
    copied = 0
    while copied <= limit and (block := file.read(BLOCK_BYTES)):
        copied += len(block)
        target.write(block)
