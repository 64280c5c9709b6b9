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
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from grom.errors import MissingInput
from tasks import artifacts
from tasks.artifacts import SCHEMA, Artifact, CorruptArtifact, artifact_key, canonical_json
from tasks.bucket import Bucket, UnsafeStore
from tasks.folder import LocalBackend
from tasks.retries import Patience

__all__ = ["SCHEMA", "Artifact", "CorruptArtifact", "Store", "UnsafeStore", "artifact_key"]

RESERVED = MARKER, FACTS = "_SUCCESS.json", "facts.json"


class Store(Bucket):
    """A bucket that holds artifacts.

    Args:
        root: where artifacts lie.
        scratch: local folder for drafts and downloads.
        storage_options: see `Bucket`.
        patience: see `Bucket`.
    """

    def __init__(
        self,
        root: str,
        scratch: Path,
        storage_options: Mapping[str, Any] | None = None,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(root, storage_options, patience)
        self.scratch = scratch

    @property
    def _local(self) -> Path | None:
        return self.backend.root if isinstance(self.backend, LocalBackend) else None

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
        root = self._local.as_uri() if self._local else self.root.rstrip("/")
        uri = f"{root}/{key}/{marker['folder']}".rstrip("/")
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
            CorruptArtifact: the target has files but no marker.
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

    def _marker(self, key: str) -> dict[str, Any] | None:
        path = f"{key}/{MARKER}"
        if (found := self.read(path)) is None:
            return None
        try:
            marker: dict[str, Any] = json.loads(found.data)
        except ValueError as error:
            raise CorruptArtifact(path, "the marker is not JSON") from error
        names = [PurePosixPath(name) for name in (*marker["files"], marker["folder"])]
        if any(".." in name.parts or name.is_absolute() for name in names):
            raise CorruptArtifact(path, "the marker names a file outside the artifact")
        return marker

    def _upload(self, draft: Path, key: str, marker: dict[str, Any]) -> None:
        """Put the files into a folder of this writer's own, check their sizes, set the marker."""
        marker["folder"] = uuid4().hex[:8]
        remote = f"{key}/{marker['folder']}"
        won = False
        try:
            for name in (*marker["files"], FACTS):
                self.upload(draft / name, f"{remote}/{name}")
            won = self.create(f"{key}/{MARKER}", canonical_json(marker))
        finally:
            if not won:
                with suppress(Exception):
                    for entry in self.entries(remote):
                        self.delete(entry.name)
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
        sizes = {name: entry["bytes"] for name, entry in marker["files"].items()}
        artifacts.check_room(self.scratch, sum(sizes.values()))
        draft = self.scratch / "drafts" / uuid4().hex
        try:
            with artifacts.disk_full_named(self.scratch):
                for name, size in sizes.items():
                    (draft / name).parent.mkdir(parents=True, exist_ok=True)
                    with (draft / name).open("wb") as file:
                        there = self.download(f"{key}/{marker['folder']}/{name}", file, size)
                    if there is None:
                        raise CorruptArtifact(name, "the file is missing")
            artifacts.verify(draft, marker["files"])
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
