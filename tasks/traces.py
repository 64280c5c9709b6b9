"""Everything personal that still exists in a store and a work folder: places, never content.

    waiting      rows of a batch that is not done yet
    in use       rows, or a copy of them, that a worker has now
    uploading    rows without a marker, younger than a day
    kept         rows of a batch that failed, for a retry, or whose time has not come
    unknown      caches and stored results: only a search can tell what is in them
    unread       a file that a search could not look into
    overdue      rows or copies of a batch that has ended
    abandoned    rows, uploads or drafts that nobody has touched for a day
    found        another place that has the text of a row

The last three should not be there.  `unread` and `found` come from `search.py`.  What else the
pipeline keeps holds hashes, numbers and places of rows: manifests, claims, outcomes, the ledger,
lists of bad rows, artifacts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.batches import BatchStatus, statuses
from tasks.bucket import Bucket
from tasks.erase import DAY_S, age_s, copies, is_raw, place_of
from tasks.folder import files_below, is_held, last_change, size_of
from tasks.manifest import INBOX
from tasks.outcomes import DONE, FAILED

TraceState = Literal[
    "waiting", "in use", "uploading", "kept", "unknown", "unread", "overdue", "abandoned", "found"
]
ALARMS = ("overdue", "abandoned", "found")
WHAT = {
    "version": "old version",
    "upload": "unfinished upload",
    "draft": "unfinished file",
    "hidden": "hidden file",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """One place with something personal."""

    place: str
    state: TraceState
    what: str
    age_s: float
    num_bytes: int
    batch: str | None = None

    @property
    def is_alarm(self) -> bool:
        """Whether it should not be there."""
        return self.state in ALARMS


@dataclass(frozen=True, slots=True)
class Rule:
    """How long rows may stay."""

    after_days: float = 0.0
    """After their batch was done."""
    failed_after_days: float | None = None
    """After it failed; None: for ever."""

    def state(self, found: BatchStatus | None, age: float, ended_s: float) -> TraceState:
        """What rows are, given their batch, their age and how long ago it ended, in seconds."""
        if found is not None and found.state in (DONE, FAILED):
            days = self.after_days if found.state == DONE else self.failed_after_days
            return "kept" if days is None or ended_s < days * DAY_S else "overdue"
        if found is not None and found.state != "waiting":
            return "in use"
        if found is not None and found.received is not None:
            return "waiting"
        return "uploading" if age < DAY_S else "abandoned"


def traces(bucket: Bucket, work: Path, rule: Rule | None = None) -> list[Trace]:
    """All places that hold rows, or may.

    Args:
        bucket: the store.
        work: this machine's work folder.
        rule: how long rows may stay; not given: until their batch is done, or for ever if it
            failed.
    """
    by_batch = {found.batch: found for found in statuses(bucket)}
    rule = rule or Rule()
    return [
        *_in_the_inbox(bucket, by_batch, rule),
        *_in_scratch(work, by_batch),
        *_in_caches(work),
    ]


def data_set_caches(work: Path) -> list[Path]:
    """Where the library `datasets` keeps rows that it has read, by its own rules, if elsewhere."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    hub = Path(os.environ.get("HF_HOME") or home)
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or hub / "datasets").expanduser()
    is_inside = folder.resolve().is_relative_to(work.resolve())
    return [folder] if folder.is_dir() and not is_inside else []


def _in_the_inbox(bucket: Bucket, by_batch: dict[str, BatchStatus], rule: Rule) -> Iterator[Trace]:
    now = bucket.now()
    raw = [
        (entry.name, "raw file", entry.num_bytes, entry.modified, entry.name)
        for entry in bucket.entries(INBOX)
    ] + [
        (one.name, WHAT[one.kind], one.num_bytes, one.modified, place_of(one))
        for one in bucket.leftovers(INBOX)
        if one.kind != "marker"
    ]
    newest: dict[str, float] = {}
    for name, _, _, modified, _ in raw:
        batch = name.split("/")[1]
        newest[batch] = max(modified, newest.get(batch, 0.0))
    ended: dict[str, float] = {}
    for name, what, num_bytes, modified, place in raw:
        batch = name.split("/")[1]
        if not is_raw(name):
            continue
        found = by_batch.get(batch)
        if found is not None and batch not in ended:
            ended[batch] = age_s(found, bucket) if found.state in (DONE, FAILED) else 0.0
        state = rule.state(found, now - newest[batch], ended.get(batch, 0.0))
        if what == WHAT["upload"] and state == "waiting":
            state = "abandoned" if now - modified >= DAY_S else "uploading"
        yield Trace(place, state, what, now - modified, num_bytes, batch)


def _in_scratch(work: Path, by_batch: dict[str, BatchStatus]) -> Iterator[Trace]:
    """Copies and drafts.  A copy is of use only while a worker has its batch."""
    owned = {path: batch for path, batch in copies(work)}
    others = [path for path in (work / "scratch").glob("forget/*") if path.is_dir()]
    others = [path for path in others if not any(path in owner.parents for owner in owned)]
    for path in (*owned, *others, *(work / "scratch").glob("drafts/*")):
        with suppress(FileNotFoundError):
            age = time.time() - last_change(path)
            batch = owned.get(path)
            state: TraceState = "abandoned" if age >= DAY_S and not is_held(path) else "in use"
            found = by_batch.get(batch) if batch else None
            if found is not None and found.state in (DONE, FAILED):
                state = "overdue"
            elif found is not None and found.state != "waiting":
                state = "in use"
            what = "copy" if batch else "draft"
            yield Trace(str(path), state, what, age, size_of(path), batch)


def _in_caches(work: Path) -> Iterator[Trace]:
    """Folders whose content only a search can tell."""
    arrow: dict[Path, None] = {}
    for folder in (work, *data_set_caches(work)):
        arrow |= {path.parent: None for path in folder.rglob("*.arrow")}
    kinds = [(folder, "cache of data sets") for folder in arrow]
    kinds += [(work / "prefect" / "storage", "results of tasks")]
    for folder, what in kinds:
        if any(files_below(folder)):
            age = time.time() - last_change(folder)
            yield Trace(str(folder), "unknown", what, age, size_of(folder))
