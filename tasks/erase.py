"""Erasing the raw rows of batches that have ended.

    inbox/<batch>/manifest.json    stays: sizes and hashes only
    inbox/<batch>/_READY.json      stays when done: the same content is known again
    inbox/<batch>/...              goes, with old versions, deletion marks, unfinished uploads
    scratch/inbox, scratch/forget  copies on this machine go with it

A store that keeps versions hides what is deleted, so every version is deleted by its id.  Copies
that the store itself makes elsewhere (replication, backups) are beyond its reach, and so are old
versions in stores other than S3 and local folders: switch versions off there.

Whoever is killed in between erases again.  A failed batch loses its marker first: half erased it
is a batch whose upload is not finished, and submitting the same rows again completes it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from grom.errors import DataError, ResourceError
from tasks.backends import Leftover
from tasks.batches import BatchStatus, status, statuses
from tasks.bucket import Bucket
from tasks.manifest import DOCUMENT_BYTES, INBOX, MANIFEST, READY, parse_manifest
from tasks.outcomes import DONE, FAILED, publish

logger = logging.getLogger(__name__)
DAY_S = 86400.0
COPY = re.compile(r"(?P<batch>.+)-[0-9a-f]{16}")
PASSES = 3
"""How often what is still listed is deleted again."""


class NotErasable(DataError):
    """A batch whose rows are still needed."""

    def __init__(self, batch: str, state: str) -> None:
        cure = "Add `--failed` to give up the retry." if state == FAILED else "Let it end first."
        super().__init__(
            f"batch {batch}: is {state}, and rows are erased when a batch is done. {cure}"
        )


class NotErased(ResourceError):
    """The store keeps what was deleted."""

    def __init__(self, batch: str, where: str, num_left: int) -> None:
        super().__init__(
            f"batch {batch}: {num_left} objects or versions are still listed in {where} after "
            "they were deleted. Check object locks, retention rules and who else writes there, "
            "then erase again."
        )


@dataclass(frozen=True, slots=True)
class Erased:
    """What was erased of a batch, or would be."""

    batch: str
    state: str
    places: tuple[str, ...]
    """Objects, leftovers and local copies, each once."""
    num_bytes: int


def due(
    bucket: Bucket,
    after_days: float = 0.0,
    failed_after_days: float | None = None,
    work: Path | None = None,
) -> list[str]:
    """Batches that ended so long ago by the store's clock and have something to erase, by name.

    Args:
        bucket: the store.
        after_days: days since a batch was done.
        failed_after_days: days since a batch failed; None: kept for ever.
        work: also look for copies in this work folder.
    """
    raw = {entry.name.split("/")[1] for entry in bucket.entries(INBOX) if is_raw(entry.name)}
    raw |= {one.name.split("/")[1] for one in bucket.leftovers(INBOX) if "/" in one.name}
    raw |= {batch for _, batch in copies(work)} if work else set()
    if not raw:
        return []
    days = {DONE: after_days, FAILED: failed_after_days}
    found = []
    for one in statuses(bucket):
        wanted = days.get(one.state)
        if one.batch in raw and wanted is not None and age_s(one, bucket) >= wanted * DAY_S:
            found.append(one.batch)
    return sorted(found)


def age_s(ended: BatchStatus, bucket: Bucket) -> float:
    """Seconds by the store's clock since a batch was done or failed; 0 if that is not known."""
    since = ended.since
    if since is None:
        outcome = bucket.read(f"{ended.state}/{ended.batch}.json")
        since = outcome.modified if outcome else None
    return 0.0 if since is None else max(0.0, bucket.now() - since)


def erase(batch: str, bucket: Bucket, *, failed: bool = False, dry_run: bool = False) -> Erased:
    """Remove the raw rows of a batch from the store, whatever their age.

    Args:
        batch: its name.
        bucket: the store.
        failed: also if it failed, which gives up the retry without submitting again.
        dry_run: only say what would be removed.

    Raises:
        MissingInput: there is no trace of the batch.
        NotErasable: it has not ended, or failed and `failed` is not set; nothing was removed.
        NotErased: something is still there.
    """
    found = status(batch, bucket)
    if found.state not in ((DONE, FAILED) if failed else (DONE,)):
        raise NotErasable(batch, found.state)
    if found.state == DONE and found.outcome is not None and not dry_run:
        publish(found.outcome, bucket)  # what is known of it must not hang on its claim alone
    places: dict[str, int] = {}
    for _ in range(1 if dry_run else PASSES):
        objects, leftovers = _remaining(found, bucket)
        places |= objects | {place_of(one): one.num_bytes for one in leftovers}
        if dry_run or not (objects or leftovers):
            break
        _remove(found, objects, bucket)
    else:
        objects, leftovers = _remaining(found, bucket)
        if num_left := len(objects) + len(leftovers):
            raise NotErased(batch, bucket.where, num_left)
    if places and not dry_run:
        logger.info("inbox %s: %d objects erased", batch, len(places))
    return Erased(batch, found.state, tuple(sorted(places)), sum(places.values()))


def copies(work: Path) -> list[tuple[Path, str]]:
    """Copies of rows in a work folder's scratch, and the batch of each."""
    scratch = work / "scratch"
    found = [
        (path, named["batch"])
        for path in sorted(scratch.glob(f"{INBOX}/*"))
        if (named := COPY.fullmatch(path.name))
    ]
    return found + [(path, path.stem) for path in sorted(scratch.glob("forget/*/*.jsonl"))]


def erase_copies(batch: str, work: Path, *, dry_run: bool = False) -> list[str]:
    """Remove the copies of a batch's rows in a work folder; their paths."""
    own = [path for path, owner in copies(work) if owner == batch]
    for path in own if not dry_run else ():
        remove_path(path)
        with suppress(OSError):  # other batches of the run are still in its folder
            if path.suffix == ".jsonl":
                path.parent.rmdir()
    return [str(path) for path in own]


def remove_path(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_raw(name: str) -> bool:
    """Whether an object of the inbox may hold rows: all do but `manifest.json` and the marker."""
    parts = name.split("/")
    return len(parts) > 2 and (len(parts) > 3 or parts[2] not in (MANIFEST, READY))


def place_of(leftover: Leftover) -> str:
    """A leftover as it is shown."""
    return f"{leftover.name} ({leftover.kind} {leftover.key})"


def _remaining(found: BatchStatus, bucket: Bucket) -> tuple[dict[str, int], list[Leftover]]:
    """What is there of a batch's rows: objects with their sizes, and leftovers."""
    folder = f"{INBOX}/{found.batch}"
    objects = {
        entry.name: entry.num_bytes for entry in bucket.entries(folder) if is_raw(entry.name)
    }
    wanted = [*_listed(found.batch, bucket), *([f"{folder}/{READY}"] * (found.state == FAILED))]
    for name in wanted:  # a listing may lag behind, so these are asked for
        if name not in objects and (size := bucket.download(name, BytesIO(), 0)) is not None:
            objects[name] = size
    return objects, bucket.leftovers(folder)


def _remove(found: BatchStatus, objects: Iterable[str], bucket: Bucket) -> None:
    """Delete objects, the marker first, then what the store kept of them."""
    for name in sorted(objects, key=_marker_first):
        bucket.delete(name)
    for leftover in bucket.leftovers(f"{INBOX}/{found.batch}"):
        bucket.drop(leftover)


def _listed(batch: str, bucket: Bucket) -> list[str]:
    """Files that the manifest lists, if it can be read."""
    try:
        found = bucket.read(f"{INBOX}/{batch}/{MANIFEST}", DOCUMENT_BYTES)
        files = parse_manifest(batch, found.data).files if found else ()
    except DataError:
        return []
    return [f"{INBOX}/{batch}/{file.name}" for file in files]


def _marker_first(name: str) -> tuple[bool, str]:
    return not name.endswith(f"/{READY}"), name
