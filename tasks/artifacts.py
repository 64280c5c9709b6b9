"""What an artifact is: its key, its digests, and how a local one appears all at once."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from grom.errors import DataError, NotEnoughDisk

SCHEMA = {
    "load": 2,
    "count": 2,
    "select": 1,
    "collect": 2,
    "factor": 1,
    "solve": 3,
    "calibrate": 1,
    "apply": 2,
    "evaluate": 3,
    "attack": 1,
    "audit": 1,
    "register": 1,
}
"""Version of the mathematics of each stage; raise it when the same facts give other bytes."""
GB = 1e9
FULL_DISK_WORDS = ("No space left", "requested and")
"""What safetensors and NumPy say of a full disk; they set no errno."""


class Artifact(BaseModel):
    """A reference to published files; small, and JSON, so that it can travel between tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    key: str
    """Hash of every fact that determines the bytes, 16 hex digits."""
    uri: str
    """Folder that holds the files."""


class CorruptArtifact(DataError):
    """The bytes of an artifact are not the ones that were published."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}. Delete the artifact's folder and run its stage again.")


def canonical_json(value: object) -> bytes:
    """The one spelling of a value: sorted keys, no blanks, UTF-8.

    Raises:
        ValueError: the value is not JSON; NaN and Inf are not.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except TypeError as error:
        raise ValueError(f"not JSON: {error}") from error
    return text.encode()


def artifact_key(stage: str, facts: Mapping[str, Any]) -> str:
    """`<stage>/<hash of all facts and of the stage's schema version>`.

    Raises:
        ValueError: an unknown stage, a fact called `schema`, or a fact that is not JSON.
    """
    if stage not in SCHEMA or "schema" in facts:
        raise ValueError(f"stage {stage!r} is not in {sorted(SCHEMA)}, or a fact is named `schema`")
    text = canonical_json({"schema": SCHEMA[stage], **facts})
    return f"{stage}/{hashlib.sha256(text).hexdigest()[:16]}"


def digests(folder: Path, reserved: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file below `folder`, by relative path.

    Raises:
        ValueError: a file has a reserved name.
    """
    entries = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name in reserved:
            raise ValueError(f"{name} is written by the store")
        entries[name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    return entries


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, in hex; computed once per process while the file is unchanged."""
    stat = path.stat()
    return _sha256(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _sha256(path: Path, *_identity: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that every file is there with the size and sha256 that `digests` found.

    Raises:
        CorruptArtifact: one is not.
    """
    for name, entry in expected.items():
        path = folder / name
        if not path.is_file():
            raise CorruptArtifact(str(path), "the file is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise CorruptArtifact(str(path), f"{size} bytes, and {entry['bytes']} were published")
        if sha256_of(path) != entry["sha256"]:
            raise CorruptArtifact(str(path), "its sha256 is not the published one")


def place(draft: Path, target: Path, marker: str) -> None:
    """Move a complete folder to its place: all of it appears at once, or nothing does.

    If `target` is there already, with its marker, it stays and the draft is dropped.

    Raises:
        CorruptArtifact: `target` holds files but no marker.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.{uuid4().hex}")
    try:
        shutil.move(draft, staging)  # a rename, where both lie on one filesystem
        for path in (*staging.rglob("*"), staging):
            flush(path)
        os.rename(staging, target)  # refuses a target that is not empty
        flush(target.parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not (target / marker).exists():
            raise CorruptArtifact(str(target), "files without a marker") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def create(path: Path, data: bytes) -> bool:
    """Write a file unless it exists; whether this call wrote it.  It appears with all its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        draft.write_bytes(data)
        flush(draft)
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def check_room(folder: Path, num_bytes: int) -> None:
    """Make the folder and check that so many bytes fit on its disk.

    Raises:
        NotEnoughDisk: they do not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise NotEnoughDisk(str(folder), num_bytes / GB, free / GB)


@contextmanager
def disk_full_named(folder: Path, expected_bytes: int = 0) -> Iterator[None]:
    """Turn every library's way of saying "disk full" into one error.

    Raises:
        NotEnoughDisk: the disk ran full inside the block.
    """
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or any(words in str(error) for words in FULL_DISK_WORDS):
            used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            free = shutil.disk_usage(folder).free
            needed = max(expected_bytes, used)
            raise NotEnoughDisk(str(folder), needed / GB, free / GB) from error
        raise


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's entries, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
