"""One address in object storage, and what can be done there safely by several writers at once.

A write whose answer was lost is done again, and the store then refuses it, since the first one
worked.  So a refused writer looks whether what lies there is what it wrote: bytes that must tell
writers apart carry something of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem

from grom.errors import ConfigError, GromError
from tasks.backends import Backend, Entry, Found, KeepsLeftovers, Leftover, PlainBackend, TooLarge
from tasks.folder import LocalBackend
from tasks.retries import Patience, kind_of, patiently
from tasks.s3 import S3Backend

Answer = TypeVar("Answer")
SMALL_BYTES = 64 * 2**20
"""Manifests, markers, claims and ledger segments are far smaller."""
ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"


class UnsafeStore(ConfigError):
    """The store cannot be written to safely."""

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"{root}: {reason}. Use a store that honours `If-None-Match: *` on PUT (S3, SeaweedFS, "
            "MinIO), or a local folder, and check bucket, endpoint and credentials."
        )


class CutShort(ConnectionError):
    """Fewer bytes arrived than were announced."""


class Bucket:
    """A root: `s3://bucket/prefix`, `file:///folder`, a plain path or another fsspec address.

    Args:
        root: where everything lies.
        storage_options: for fsspec, `endpoint_url` say.  Leave credentials to the provider's chain,
            which renews them; nothing is opened before the first use.
        patience: how often a store that fails is asked again.
    """

    def __init__(
        self,
        root: str,
        storage_options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.root = root
        self.patience = patience or Patience()
        self._options = dict(storage_options or {})

    @cached_property
    def backend(self) -> Backend:
        """What does the work."""
        if self._on_s3:
            return S3Backend(self.root.partition("://")[2].strip("/"), self._options)
        try:
            options = {"use_listings_cache": False, "skip_instance_cache": True} | self._options
            fs, base = fsspec.core.url_to_fs(self.root, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{self.root}: this kind of address does not open ({error}). Use s3://, file:// or "
                "a folder, or install the fsspec package of that scheme."
            ) from error
        if isinstance(fs, LocalFileSystem):
            return LocalBackend(Path(base))
        return PlainBackend(fs, base.rstrip("/"))

    @property
    def _on_s3(self) -> bool:
        return self.root.startswith(("s3://", "s3a://"))

    @property
    def where(self) -> str:
        """The store in messages: address and, for S3, endpoint."""
        if not self._on_s3:
            return self.root
        endpoints = [self._options.get("endpoint_url"), *map(os.environ.get, ENDPOINTS)]
        return f"{self.root} at {next(filter(None, endpoints), 'AWS')}"

    def read(self, name: str, limit: int = SMALL_BYTES) -> Found | None:
        """A small object with its version, or None.

        Raises:
            TooLarge: over `limit` bytes.
            ValueError: the name leads outside.
            BucketMissing, AccessRefused, StoreUnreachable: as they say; so for every method.
        """

        def once() -> Found | None:
            found = self.backend.read(_inside(name), limit)
            if found is not None and len(found.data) != found.num_bytes:
                raise CutShort(name)
            return found

        return self._patiently(once)

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        """Write an object of any size into an empty file; how many bytes, or None if not there.

        Stops after `limit` bytes and one block, and says how many bytes the store announced.
        """

        def once() -> int | None:
            target.seek(0)
            target.truncate()
            announced = self.backend.download(_inside(name), target, limit)
            if announced is not None and target.tell() < min(announced, limit):
                raise CutShort(name)
            return announced

        return self._patiently(once)

    def upload(self, source: Path, name: str) -> None:
        """Write an object from a file, whole or not at all.

        Raises:
            CutShort: the store kept fewer bytes.
        """

        def once() -> None:
            if self.backend.upload(source, _inside(name)) != source.stat().st_size:
                raise CutShort(f"{name}: not all bytes were uploaded")

        self._patiently(once)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object unless there is one; whether it now has these bytes.  Atomic."""
        return self.swap(name, data, version=None) is not None

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write a small object if it has a version: compare and swap.  Atomic.

        Args:
            name: of the object.
            data: new bytes.  To tell two writers apart, let each put something of its own in.
            version: as `read` found it; None: only if there is no object.

        Returns:
            the new version, or None if the object had another one and has other bytes.

        Raises:
            UnsafeStore: the store can create but not swap.
        """

        def once() -> str | None:
            made = self.backend.swap(_inside(name), data, version)
            if made is not None:
                return made
            with suppress(TooLarge):
                found = self.backend.read(name, limit=max(len(data), SMALL_BYTES))
                if found is not None and found.data == data:
                    return found.version
            return None

        try:
            return self._patiently(once)
        except NotImplementedError as error:
            raise UnsafeStore(self.root, str(error)) from error

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._patiently(lambda: self.backend.delete(_inside(name)))

    def entries(self, folder: str | None) -> list[Entry]:
        """All objects below a folder, or anywhere, by name, never from a cache."""
        below = "" if folder is None else _inside(folder)
        found = self._patiently(lambda: self.backend.entries(below))
        return sorted(found, key=lambda entry: entry.name)

    def leftovers(self, folder: str | None = None) -> list[Leftover]:
        """What the store keeps below a folder, or anywhere, and `entries` does not show, by name.

        Only S3 and local folders can say.
        """
        below, backend = "" if folder is None else _inside(folder), self.backend
        if not isinstance(backend, KeepsLeftovers):
            return []
        return sorted(self._patiently(lambda: backend.leftovers(below)), key=lambda one: one.name)

    def drop(self, leftover: Leftover) -> None:
        """Remove a leftover for ever; one that is not there is no error."""
        backend = self.backend
        if isinstance(backend, KeepsLeftovers):
            self._patiently(lambda: backend.drop(leftover))

    def now(self) -> float:
        """The store's own clock, in seconds since 1970."""
        return self._patiently(lambda: self.backend.now())

    def probe(self, swaps: bool = False) -> None:
        """Check that the store refuses the second of two creations.

        Args:
            swaps: also that it refuses to replace a version that is no longer there.

        Raises:
            UnsafeStore: it does not, or it cannot be written to.
        """
        name = f".probe-{uuid4().hex}"
        try:
            written = self.create(name, b"1"), self.create(name, b"2")
            if swaps and written == (True, False):
                self._probe_swap(name)
        except GromError:
            raise
        except Exception as error:
            raise UnsafeStore(self.root, f"cannot write ({kind_of(error)})") from error
        finally:
            with suppress(Exception):
                self.delete(name)
        if written != (True, False):
            raise UnsafeStore(self.root, "a second writer may overwrite the first")

    def _probe_swap(self, name: str) -> None:
        first = self.read(name)
        assert first is not None
        swapped = [self.swap(name, data, first.version) is not None for data in (b"3", b"4")]
        if swapped != [True, False]:
            raise UnsafeStore(self.root, "`If-Match` is not honoured")

    def _patiently(self, do: Callable[[], Answer]) -> Answer:
        return patiently(do, self.where, self.patience, lambda: self.backend.reopen())


def _inside(name: str) -> str:
    """The same name, if it stays below the root."""
    parts = name.split("/")
    if not name or {"", ".", ".."} & set(parts) or "\\" in name or "\0" in name:
        raise ValueError(f"{PurePosixPath(name).name!r} is not the name of an object")
    return name
