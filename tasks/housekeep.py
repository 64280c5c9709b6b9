"""What killed and outdated work leaves behind: found, and removed when nobody can need it.

Each step can be repeated and interrupted at any point.  A dry run goes the same way with a store
whose writes do nothing.

In the store a thing is removed when it is of nobody's and the store last wrote it over a day ago
by its own clock: an upload or a publication takes less from one of its writes to the next.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from grom.config import Config
from tasks import claims
from tasks.artifacts import SCHEMA
from tasks.backends import Entry, Leftover
from tasks.batches import settle
from tasks.bucket import Bucket
from tasks.claims import CLAIMS, Seen
from tasks.desk import DESKS
from tasks.erase import DAY_S, due, erase, erase_copies, place_of
from tasks.ledger import Ledger
from tasks.outcomes import DONE, FAILED
from tasks.place import Place
from tasks.store import MARKER, Store

logger = logging.getLogger(__name__)
PROBES = (".probe-", ".clock-")
"""Objects of a store's probe and of its clock."""


class Tidied(Config):
    """What one step removed or put right, or would."""

    step: str
    places: tuple[str, ...] = ()
    num_bytes: int = 0


class Onlooker(Store):
    """A store whose writes do nothing and say that they worked."""

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """Nothing."""
        return "not written"

    def upload(self, source: Path, name: str) -> None:
        """Nothing."""

    def delete(self, name: str) -> None:
        """Nothing."""

    def drop(self, leftover: Leftover) -> None:
        """Nothing."""


def opened(place: Place, dry_run: bool) -> Store:
    """The store, to change or only to look at."""
    return (Onlooker if dry_run else Store)(place.store, Path(place.work) / "scratch")


def claims_seen(bucket: Bucket) -> list[Seen]:
    """All claims."""
    names = [entry.name for entry in bucket.entries(CLAIMS)]
    batches = [name.split("/", 1)[1].removesuffix(".json") for name in names]
    return [seen for batch in batches if (seen := claims.look(batch, bucket)) is not None]


def live_claims(bucket: Bucket) -> list[Seen]:
    """Claims that a worker holds now."""
    now = bucket.now()
    return [
        seen
        for seen in claims_seen(bucket)
        if not (seen.record.released or seen.record.outcome or seen.has_run_out(now))
    ]


@task(cache_policy=NO_CACHE)
def settle_outcomes(place: Place, dry_run: bool = False) -> Tidied:
    """Publish outcomes that killed workers left in their claims."""
    return Tidied(step="outcomes published", places=tuple(settle(opened(place, dry_run))))


@task(cache_policy=NO_CACHE)
def erase_due(
    place: Place,
    after_days: float = 0.0,
    failed_after_days: float | None = None,
    dry_run: bool = False,
) -> Tidied:
    """Erase the raw rows of batches whose time has come, and their copies on this machine."""
    bucket, work = place.open(), Path(place.work)
    places, num_bytes = [], 0
    for batch in due(bucket, after_days, failed_after_days, work):
        erased = erase(batch, bucket, failed=failed_after_days is not None, dry_run=dry_run)
        places += [*erased.places, *erase_copies(batch, work, dry_run=dry_run)]
        num_bytes += erased.num_bytes
    return Tidied(step="raw requests erased", places=tuple(places), num_bytes=num_bytes)


@task(cache_policy=NO_CACHE)
def remove_strays(place: Place, dry_run: bool = False) -> Tidied:
    """Remove unfinished uploads and drafts of killed writers, and objects of probes."""
    bucket = opened(place, dry_run)
    before = bucket.now() - DAY_S
    left = [
        one
        for one in bucket.leftovers()
        if one.kind in ("upload", "draft") and one.modified < before
    ]
    probes = [
        entry
        for entry in bucket.entries(None)
        if entry.name.startswith(PROBES) and entry.modified < before
    ]
    for leftover in left:
        bucket.drop(leftover)
    _delete(probes, bucket)
    return Tidied(
        step="unfinished uploads removed",
        places=(*map(place_of, left), *(entry.name for entry in probes)),
        num_bytes=sum(one.num_bytes for one in left) + sum(one.num_bytes for one in probes),
    )


@task(cache_policy=NO_CACHE)
def remove_orphans(place: Place, dry_run: bool = False) -> Tidied:
    """Remove files of artifacts that no marker names, ledger files that are no segment, and notes
    of runs whose batches have all ended."""
    bucket = opened(place, dry_run)
    lines = Ledger(bucket).remove_orphans()
    found = [*orphans(bucket), *_old_notes(bucket)]
    _delete(found, bucket)
    places = (*lines, *(entry.name for entry in found))
    num_bytes = sum(entry.num_bytes for entry in found)
    return Tidied(step="orphans removed", places=places, num_bytes=num_bytes)


def orphans(bucket: Bucket) -> list[Entry]:
    """Files of artifacts that no marker names and whose folder was not written to for a day.

    They are of writers that lost, or were killed before the marker; a local root has them only if
    somebody was killed while removing an artifact.
    """
    before = bucket.now() - DAY_S
    artifacts: dict[str, list[Entry]] = {}
    for entry in bucket.entries(None):
        stage, *rest = entry.name.split("/")
        if stage in SCHEMA and len(rest) > 1:
            artifacts.setdefault(f"{stage}/{rest[0]}", []).append(entry)
    found = []
    for key, entries in artifacts.items():
        for files in _unnamed(key, entries, bucket):
            if max(entry.modified for entry in files) < before:
                found += files
    return found


def _unnamed(key: str, entries: list[Entry], bucket: Bucket) -> Iterator[list[Entry]]:
    """Files of an artifact that its marker does not name, by folder."""
    marker = f"{key}/{MARKER}"
    folders: dict[str, list[Entry]] = {}
    for entry in entries:
        first, _, rest = entry.name.removeprefix(f"{key}/").partition("/")
        folders.setdefault(first if rest else "", []).append(entry)
    if not any(entry.name == marker for entry in entries):
        yield entries
    elif len(folders) > 2 and (found := bucket.read(marker)) is not None:
        # The marker lies beside the folders.  One folder is the winner's, whatever it says.
        with suppress(ValueError, KeyError, TypeError):
            named = json.loads(found.data)["folder"]
            if named in folders and named:
                yield from (files for name, files in folders.items() if name not in ("", named))


def _old_notes(bucket: Bucket) -> list[Entry]:
    """Notes of what a run took, a day old, of batches that have all ended."""
    ended = {
        entry.name.split("/", 1)[1] for state in (DONE, FAILED) for entry in bucket.entries(state)
    }
    before, found = bucket.now() - DAY_S, []
    for entry in bucket.entries(DESKS):
        note = bucket.read(entry.name) if entry.modified < before else None
        with suppress(ValueError, TypeError):
            if note and all(f"{batch}.json" in ended for batch in json.loads(note.data)):
                found.append(entry)
    return found


def _delete(entries: Iterable[Entry], bucket: Bucket) -> None:
    for entry in entries:
        bucket.delete(entry.name)
