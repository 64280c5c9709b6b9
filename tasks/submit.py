"""Putting a deletion batch into the inbox for someone who has files.

The manifest is created first, if absent: it reserves the name.  The marker comes last and makes the
batch valid.  Whoever is killed in between submits the same files again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from grom.errors import DataError, MissingInput
from tasks.artifacts import canonical_json, sha256_of
from tasks.bucket import Bucket
from tasks.lines import OPENERS, SUFFIXES, known_kind
from tasks.manifest import (
    INBOX,
    MANIFEST,
    READY,
    FileEntry,
    Manifest,
    content_hash,
    parse_manifest,
    plain_batch,
)
from tasks.outcomes import DONE
from tasks.requests import Reading, read_requests

logger = logging.getLogger(__name__)


class BadFiles(DataError):
    """Files that cannot be submitted; nothing was uploaded."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}. Every row needs a `request_id` and either `prompt` and `answer` or `text`, "
            "non-empty strings all, and nothing else. Correct the rows; nothing was uploaded."
        )


class NameTaken(DataError):
    """Another batch has this name."""

    def __init__(self, batch: str, where: str) -> None:
        super().__init__(
            f"{where}: there is, or was, a batch {batch} with other content. Give another "
            "`--batch`, or none: then the content names it."
        )


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch in the inbox."""

    batch: str
    is_new: bool
    """Whether it was not there before."""
    num_files: int
    num_requests: int
    manifest_sha256: str


def submit(files: Sequence[Path], bucket: Bucket, batch: str | None = None) -> Submitted:
    """Check files from the first row to the last, then upload them as one batch.

    The same content is the same batch: submitting it twice changes nothing.  Files are renamed by
    their order, since a name may be personal data.

    Args:
        files: JSON Lines or Parquet, compressed or not.
        bucket: where the inbox is.
        batch: name; not given: a hash of the content names it.

    Raises:
        MissingInput: a file is not there or of no known kind.
        BadFiles: a row breaks the schema, or there is none.
        NameTaken: the name belongs to other content.
        DataError: not a usable name, or a file changed meanwhile.
    """
    if batch is not None:
        plain_batch(batch)
    sources, num_requests = _checked(files)
    name = batch or f"batch-{content_hash(list(sources))}"
    manifest, sha256 = _reserve(name, sources, bucket)
    marker = f"{INBOX}/{name}/{READY}"
    is_new = bucket.read(marker) is None
    submitted = Submitted(name, is_new, len(manifest.files), num_requests, sha256)
    if not is_new:
        return submitted
    for file in manifest.files:
        path, _ = sources[file.sha256]
        bucket.upload(path, f"{INBOX}/{name}/{file.name}")
        if sha256_of(path) != file.sha256:
            raise DataError(f"{path}: changed while it was uploaded. Submit it again.")
    bucket.create(marker, canonical_json({"manifest_sha256": sha256}))
    logger.info("inbox %s: %d requests submitted", name, num_requests)
    return submitted


def _checked(files: Sequence[Path]) -> tuple[dict[str, tuple[Path, int]], int]:
    """Place and rows of each distinct file, by sha256 in order, and the number of requests."""
    by_digest: dict[str, Path] = {}
    for path in files:
        if not path.is_file():
            raise MissingInput(str(path), "no such file")
        if known_kind(path.name) is None:
            known = ", ".join(SUFFIXES)
            raise MissingInput(str(path), f"the name does not end in {known} (or with .gz, .zst)")
        by_digest.setdefault(sha256_of(path), path)
    reading = Reading()
    for _ in read_requests([(str(path), path) for path in by_digest.values()], reading):
        pass
    if reason := reading.reason():
        raise BadFiles(reason)
    if reading.num_requests == 0:
        raise BadFiles(f"{', '.join(map(str, files)) or 'no file'}: no rows")
    sources = {
        digest: (path, reading.rows[str(path)])
        for digest, path in sorted(by_digest.items())
        if reading.rows[str(path)]
    }
    return sources, reading.num_requests


def _reserve(
    name: str, sources: dict[str, tuple[Path, int]], bucket: Bucket
) -> tuple[Manifest, str]:
    """The batch's manifest, written now unless it was, and its sha256."""
    entries = [
        FileEntry(
            name=f"forget-{number:05d}{_suffix(path.name)}",
            bytes=path.stat().st_size,
            sha256=digest,
            rows=rows,
        )
        for number, (digest, (path, rows)) in enumerate(sources.items(), start=1)
    ]
    place = f"{INBOX}/{name}/{MANIFEST}"
    if bucket.read(place) is None and bucket.read(f"{DONE}/{name}.json") is not None:
        raise NameTaken(name, bucket.where)
    created = datetime.fromtimestamp(bucket.now(), UTC).isoformat(timespec="seconds")
    rows = sum(entry.rows for entry in entries)
    data = Manifest(files=tuple(entries), rows=rows, created=created).to_bytes()
    if not bucket.create(place, data):
        found = bucket.read(place)
        data = found.data if found else b""
    manifest = parse_manifest(name, data)
    if manifest.files != tuple(entries):
        raise NameTaken(name, bucket.where)
    return manifest, hashlib.sha256(data).hexdigest()


def _suffix(name: str) -> str:
    packed = next((suffix for suffix in OPENERS if name.lower().endswith(suffix)), "")
    return f"{known_kind(name)}{packed}"
