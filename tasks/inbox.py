"""Deletion batches as they arrive: what is there, whether it is whole, and its rows.

Nothing is parsed before every byte of the batch has the size and sha256 that its manifest pins, and
what is parsed is a copy: a batch that changes afterwards changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from grom.errors import DataError
from tasks import artifacts
from tasks.backends import Entry, Found, TooLarge
from tasks.bucket import Bucket
from tasks.manifest import (
    DOCUMENT_BYTES,
    INBOX,
    MANIFEST,
    READY,
    FileEntry,
    Manifest,
    Refused,
    parse_manifest,
    parse_marker,
    plain_batch,
)
from tasks.requests import Reading, read_requests
from tasks.store import Store

logger = logging.getLogger(__name__)
REQUESTS = "requests.jsonl"


class NotReady(DataError):
    """The batch has no marker, so nobody said that it is complete."""

    def __init__(self, batch: str) -> None:
        super().__init__(
            f"batch {batch}: no {READY}, so its upload is not finished. Check the producer, or "
            "submit the batch again."
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch in the inbox, as a listing shows it."""

    batch: str
    received: float | None
    """When its marker was written, by the store's clock; None: it has none."""
    num_files: int
    num_bytes: int
    problem: str | None
    """Why it cannot be taken up."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A batch that is whole."""

    batch: str
    manifest: Manifest
    manifest_sha256: str
    received: float
    """When its marker was written, by the store's clock."""
    requests: Path
    """Local JSON Lines file of its distinct requests, in scratch.  Personal data."""
    num_requests: int

    @property
    def idempotency_key(self) -> str:
        """The same for the same batch with the same content, however often it is announced."""
        return f"{self.batch}-{self.manifest_sha256}"


def arrivals(bucket: Bucket, batch: str | None = None) -> list[Arrival]:
    """Every batch in the inbox, or one, oldest first; those without marker last.  One listing."""
    folders: dict[str, list[Entry]] = {}
    for entry in bucket.entries(INBOX if batch is None else f"{INBOX}/{batch}"):
        _, folder, *rest = entry.name.split("/")
        if rest:
            folders.setdefault(folder, []).append(entry)
    found = [_arrival(folder, entries) for folder, entries in folders.items()]
    return sorted(found, key=lambda one: (one.received is None, one.received or 0.0, one.batch))


def _arrival(batch: str, entries: Iterable[Entry]) -> Arrival:
    by_name = {entry.name.split("/", 2)[2]: entry for entry in entries}
    marker, manifest = by_name.pop(READY, None), by_name.pop(MANIFEST, None)
    problem = None
    try:
        plain_batch(batch)
    except DataError as error:
        problem = str(error)
    if marker is None:
        problem = problem or f"no {READY}: still being uploaded, or the upload stopped"
    elif manifest is None:
        problem = problem or f"{READY} without {MANIFEST}"
    return Arrival(
        batch=batch,
        received=None if marker is None else marker.modified,
        num_files=len(by_name),
        num_bytes=sum(entry.num_bytes for entry in by_name.values()),
        problem=problem,
    )


def documents(batch: str, bucket: Bucket) -> tuple[Manifest, str, float]:
    """Manifest, its sha256, and when the batch was received.

    Raises:
        NotReady: no marker.
        Refused: no manifest, or marker and manifest do not fit together, or a file is not listed.
    """
    marker = _document(batch, READY, bucket)
    if marker is None:
        raise NotReady(batch)
    found = _document(batch, MANIFEST, bucket)
    if found is None:
        raise Refused(batch, f"{READY} without {MANIFEST}")
    sha256 = hashlib.sha256(found.data).hexdigest()
    if parse_marker(batch, marker.data) not in (None, sha256):
        raise Refused(batch, f"{MANIFEST} is not the one that {READY} pins")
    manifest = parse_manifest(batch, found.data)
    listed = {MANIFEST, READY, *(file.name for file in manifest.files)}
    names = [entry.name.split("/", 2)[2] for entry in bucket.entries(f"{INBOX}/{batch}")]
    if extra := [name for name in names if name not in listed and not _hidden(name)]:
        raise Refused(batch, f"{len(extra)} files are not in {MANIFEST}")
    return manifest, sha256, marker.modified


def check(batch: str, store: Store) -> Checked:
    """Fetch a batch, verify every byte, then every row.

    Returns:
        the manifest and a local copy of the rows, each distinct request once.

    Raises:
        NotReady: no marker yet.
        Refused: anything is missing, cut short, changed, empty, or breaks the schema.
        NotEnoughDisk: the copy does not fit into scratch.
    """
    manifest, sha256, received = documents(plain_batch(batch), store)
    folder = store.scratch / INBOX / f"{batch}-{sha256[:16]}"
    if not folder.is_dir():
        draft = store.scratch / "drafts" / uuid4().hex
        artifacts.check_room(store.scratch, sum(file.bytes for file in manifest.files))
        draft.mkdir(parents=True, mode=0o700)
        try:
            with artifacts.disk_full_named(store.scratch):
                for file in manifest.files:
                    _fetch(batch, file, store, draft)
                _keep_requests(batch, manifest, draft)
            folder.parent.mkdir(parents=True, exist_ok=True)
            if not folder.is_dir():  # two checks at once make the same
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    with (folder / REQUESTS).open("rb") as lines:
        num_requests = sum(1 for _ in lines)
    logger.info("inbox %s: %d requests, verified", batch, num_requests)
    return Checked(batch, manifest, sha256, received, folder / REQUESTS, num_requests)


def discard(checked: Checked) -> None:
    """Remove the local copy of a batch's rows."""
    shutil.rmtree(checked.requests.parent, ignore_errors=True)


def _document(batch: str, name: str, bucket: Bucket) -> Found | None:
    try:
        return bucket.read(f"{INBOX}/{batch}/{name}", DOCUMENT_BYTES)
    except TooLarge:
        raise Refused(batch, f"{name} is over {DOCUMENT_BYTES >> 20} MiB") from None
    except DataError as error:
        raise Refused(batch, str(error)) from error


def _hidden(name: str) -> bool:
    return name.startswith(".")


def _fetch(batch: str, file: FileEntry, store: Store, folder: Path) -> None:
    with (folder / f"raw-{file.name}").open("w+b") as target:
        try:
            num_bytes = store.download(f"{INBOX}/{batch}/{file.name}", target, file.bytes)
        except DataError as error:
            raise Refused(batch, str(error)) from error
        if num_bytes is None:
            raise Refused(batch, f"{file.name} is listed in {MANIFEST} and is not there")
        if num_bytes < file.bytes:
            raise Refused(batch, f"{file.name}: {num_bytes} of {file.bytes} bytes were uploaded")
        if num_bytes > file.bytes:
            raise Refused(batch, f"{file.name}: {num_bytes} bytes, and {file.bytes} are listed")
        target.seek(0)
        if hashlib.file_digest(target, "sha256").hexdigest() != file.sha256:
            raise Refused(batch, f"{file.name}: its sha256 is not the listed one")


def _keep_requests(batch: str, manifest: Manifest, folder: Path) -> None:
    """Check the rows of the raw files, write them as one file, remove the raw ones."""
    reading = Reading()
    raw = [(file.name, folder / f"raw-{file.name}") for file in manifest.files]
    with (folder / REQUESTS).open("wb") as lines:
        try:
            for request in read_requests(raw, reading):
                lines.write(request.to_bytes() + b"\n")
        except DataError as error:
            raise Refused(batch, str(error)) from error
    if reason := reading.reason():
        raise Refused(batch, reason)
    for file in manifest.files:
        if (rows := reading.rows[file.name]) != file.rows:
            raise Refused(batch, f"{file.name}: {rows} rows, and {file.rows} are listed")
    for _, path in raw:
        path.unlink()
