"""The door to object storage: artifacts that are named by what determined their bytes.

    <root>/<stage>/<hash>/_SUCCESS.json     facts, and size and sha256 of each file; written last
    <root>/<stage>/<hash>/...               the files (local root: all appear in one rename)
    <root>/<stage>/<hash>/<attempt>/...     the files (remote root: one folder per writer)

Only the marker counts.  It is created if absent, never overwritten, so of two writers one wins and
the other uses the winner's files; a remote loser cannot touch them, since its own lie in another
folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem

from grom.errors import ConfigError, MissingInput
from tasks import artifacts
from tasks.artifacts import SCHEMA, Artifact, CorruptArtifact, artifact_key, canonical_json

__all__ = ["SCHEMA", "Artifact", "CorruptArtifact", "Store", "UnsafeStore", "artifact_key"]

RESERVED = MARKER, FACTS = "_SUCCESS.json", "facts.json"


class UnsafeStore(ConfigError):
    """The store cannot be written to safely."""

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(
            f"{root}: {reason}. Use a store that honours `If-None-Match: *` on PUT (S3, SeaweedFS, "
            "MinIO), or a local folder, and check bucket, endpoint and credentials."
        )


class Store:
    """Artifacts under one root: `s3://bucket/prefix`, `file:///folder` or a plain path.

    Args:
        root: where artifacts lie.
        scratch: local folder for drafts and downloads.
        storage_options: for fsspec, `endpoint_url` say.  Leave credentials to the provider's chain,
            which renews them; nothing is opened before the first use.
    """

    def __init__(
        self, root: str, scratch: Path, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.root, self.scratch = root, scratch
        self._options = dict(storage_options or {})

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        options = {"use_listings_cache": False, "skip_instance_cache": True} | self._options
        fs, base = fsspec.core.url_to_fs(self.root, **options)
        return fs, base.rstrip("/")

    @property
    def _local(self) -> Path | None:
        fs, base = self._opened
        return Path(base) if isinstance(fs, LocalFileSystem) else None

    def find(self, stage: str, facts: Mapping[str, Any]) -> Artifact | None:
        """The finished artifact of these facts, or None.

        Raises:
            ValueError: see `artifact_key`.
            CorruptArtifact: its marker cannot be read.
        """
        key = artifact_key(stage, facts)
        marker = self._marker(key)
        if marker is None:
            return None
        fs, base = self._opened
        folder = str(PurePosixPath(base, key, marker["folder"]))
        uri = Path(folder).as_uri() if self._local else fs.unstrip_protocol(folder)
        return Artifact(stage=stage, key=key.split("/")[1], uri=uri)

    @contextmanager
    def publish(
        self, stage: str, facts: Mapping[str, Any], expected_bytes: int = 0
    ) -> Iterator[Path]:
        """An empty local folder whose files become the artifact when the block ends without error.

        After an error nothing is visible and the folder is gone.  If another writer was first, its
        files are the artifact and these are dropped.

        Raises:
            NotEnoughDisk: `expected_bytes` are not free, or the disk ran full.
            ValueError: see `artifact_key`.
            CorruptArtifact: the target has files but no marker, or an upload was cut short.
        """
        key = artifact_key(stage, facts)
        local, draft = self._local, self.scratch / "drafts" / uuid4().hex
        for folder in filter(None, (self.scratch, local)):
            artifacts.check_room(folder, expected_bytes)
        draft.mkdir(parents=True)
        try:
            with artifacts.disk_full_named(self.scratch, expected_bytes):
                yield draft
                marker = {"facts": dict(facts), "files": artifacts.digests(draft, RESERVED)}
                (draft / FACTS).write_bytes(canonical_json(dict(facts)))
                if local is None:
                    self._upload(draft, key, marker)
                else:
                    (draft / MARKER).write_bytes(canonical_json(marker | {"folder": ""}))
                    artifacts.place(draft, local / key, MARKER)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def fetch(self, artifact: Artifact) -> Path:
        """A local folder with the artifact's files: its own for a local root, else a download.

        Every file's sha256 is checked, once per process while the file is unchanged.

        Raises:
            MissingInput: the artifact is not, or no longer, in this store.
            CorruptArtifact: a file is missing or has other bytes than were published.
            NotEnoughDisk: the download does not fit into `scratch`.
        """
        key = f"{artifact.stage}/{artifact.key}"
        marker = self._marker(key)
        if marker is None:
            raise MissingInput(artifact.uri, "no finished artifact")
        local = self._local
        folder = local / key / marker["folder"] if local else self.scratch / "fetched" / key
        if local is None:
            self._download(key, marker, folder)
        artifacts.verify(folder, marker["files"])
        return folder

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists; whether this call wrote it.  Atomic."""
        fs, base = self._opened
        path = f"{base}/{name}"
        if self._local:
            return artifacts.create(Path(path), data)
        try:
            fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            # SeaweedFS: errno 22 "pre-conditions"; S3: 409 "conditional request" while another
            # writer is at it.
            if "condition" in str(error):
                return False
            raise
        return True

    def probe(self) -> None:
        """Check that the store can be written to and refuses the second of two creations.

        Raises:
            UnsafeStore: it cannot, or does not.
        """
        fs, base = self._opened
        name = f".probe-{uuid4().hex}"
        # fsspec's own `pipe_file` looks first and writes then, which is no guarantee.
        plain = type(fs).pipe_file is fsspec.AbstractFileSystem.pipe_file
        if plain and not fs.async_impl and not self._local:
            raise UnsafeStore(self.root, f"{type(fs).__name__} cannot create a file if absent")
        try:
            written = self.create(name, b"1"), self.create(name, b"2")
        except Exception as error:  # botocore has errors of its own
            raise UnsafeStore(self.root, f"cannot write ({error})") from error
        finally:
            with suppress(Exception):
                fs.rm_file(f"{base}/{name}")
        if written != (True, False):
            raise UnsafeStore(self.root, "a second writer may overwrite the first")

    def _marker(self, key: str) -> dict[str, Any] | None:
        fs, base = self._opened
        path = f"{base}/{key}/{MARKER}"
        try:
            marker: dict[str, Any] = json.loads(fs.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise CorruptArtifact(path, "the marker is not JSON") from error
        names = [PurePosixPath(name) for name in (*marker["files"], marker["folder"])]
        if any(".." in name.parts or name.is_absolute() for name in names):
            raise CorruptArtifact(path, "the marker names a file outside the artifact")
        return marker

    def _upload(self, draft: Path, key: str, marker: dict[str, Any]) -> None:
        """Put the files into a folder of this writer's own, check their sizes, set the marker."""
        fs, base = self._opened
        marker["folder"] = uuid4().hex[:8]
        remote = f"{base}/{key}/{marker['folder']}"
        won = False
        try:
            for name in (*marker["files"], FACTS):
                size = (draft / name).stat().st_size
                fs.put_file(str(draft / name), f"{remote}/{name}")
                if fs.info(f"{remote}/{name}")["size"] != size:
                    raise CorruptArtifact(f"{remote}/{name}", f"not all {size} bytes were uploaded")
            won = self.create(f"{key}/{MARKER}", canonical_json(marker))
        finally:
            if not won:
                with suppress(OSError):
                    fs.rm(remote, recursive=True)
        fetched = self.scratch / "fetched" / key
        fetched.parent.mkdir(parents=True, exist_ok=True)
        if won and not fetched.exists():
            draft.rename(fetched)

    def _download(self, key: str, marker: dict[str, Any], target: Path) -> None:
        """Make `target` hold the files, unless it does already."""
        try:
            artifacts.verify(target, marker["files"])
            return
        except CorruptArtifact:
            shutil.rmtree(target, ignore_errors=True)
        fs, base = self._opened
        artifacts.check_room(
            self.scratch, sum(entry["bytes"] for entry in marker["files"].values())
        )
        draft = self.scratch / "drafts" / uuid4().hex
        try:
            with artifacts.disk_full_named(self.scratch):
                for name in marker["files"]:
                    (draft / name).parent.mkdir(parents=True, exist_ok=True)
                    with suppress(FileNotFoundError):  # `verify` says it better
                        fs.get_file(f"{base}/{key}/{marker['folder']}/{name}", str(draft / name))
            artifacts.verify(draft, marker["files"])
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
