"""What killed and outdated work leaves behind in a work folder.

Three signs protect a folder: something in it was written within a day by the file system's clock; a
process holds its lock (`folder.held`), which the kernel frees for who is killed; a live claim names
its run or batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.erase import DAY_S, copies, remove_path
from tasks.folder import LocalBackend, is_held, last_change, size_of
from tasks.housekeep import Tidied, live_claims
from tasks.manifest import INBOX
from tasks.place import Place

JOURNAL_DAYS, REPORT_DAYS = 30.0, 90.0
CACHE_DAYS, CACHE_BYTES = 30.0, 100e9
"""Downloaded artifacts go when nobody read them for so long; and before that, those that were not
read for the longest time, when all together are larger."""
UNREAD_DAYS, UNREAD_DAYS_LIVE = 1.0, 7.0
"""What was read within this time stays even so; the second while a run is under way."""


@task(cache_policy=NO_CACHE)
def clean_scratch(place: Place, dry_run: bool = False) -> Tidied:
    """Remove drafts, copies and temporary folders of runs that were killed, stale journals, and
    old local reports, which MLflow has, too."""
    work, found = Path(place.work), []
    now, live = _clock(work), live_claims(place.open())
    named = {
        key for seen in live for key in (seen.record.owner, seen.record.run, seen.record.batch)
    }
    owners = dict(copies(work))
    for path, days in _temporary(work):
        with suppress(FileNotFoundError):
            in_use = owners.get(path, path.name) in named or is_held(path)
            if not in_use and now - last_change(path) > days * DAY_S:
                found.append((str(path), size_of(path)))
                _remove(path, dry_run)
    num_bytes = sum(size for _, size in found)
    return Tidied(
        step="scratch removed", places=tuple(name for name, _ in found), num_bytes=num_bytes
    )


@task(cache_policy=NO_CACHE)
def trim_cache(
    place: Place, max_bytes: float = CACHE_BYTES, days: float = CACHE_DAYS, dry_run: bool = False
) -> Tidied:
    """Remove downloaded artifacts that were not read for long, and more if all are too large.

    They are copies; a run that wants one again downloads it.
    """
    work = Path(place.work)
    now, is_live = _clock(work), bool(live_claims(place.open()))
    least_s = (UNREAD_DAYS_LIVE if is_live else UNREAD_DAYS) * DAY_S
    cached = sorted((_last_use(path), path) for path in work.glob("scratch/fetched/*/*"))
    sizes = {path: size_of(path) for _, path in cached}
    total, gone = sum(sizes.values()), []
    for used, path in cached:
        unread_s = now - used
        if unread_s > max(days * DAY_S, least_s) or (total > max_bytes and unread_s > least_s):
            total -= sizes[path]
            gone.append(path)
            _remove(path, dry_run)
    return Tidied(
        step="downloads removed",
        places=tuple(map(str, gone)),
        num_bytes=sum(sizes[path] for path in gone),
    )


def _temporary(work: Path) -> Iterator[tuple[Path, float]]:
    """What lies in scratch only while a run works, and how many days it may be quiet."""
    scratch = work / "scratch"
    shared = {"fetched", "journals", "drafts", "forget", INBOX}
    for pattern in ("drafts/*", "forget/*", f"{INBOX}/*"):
        yield from ((path, 1.0) for path in sorted(scratch.glob(pattern)))
    for path in sorted(scratch.glob("*")):
        if path.name not in shared:
            yield path, 1.0
    yield from ((path, JOURNAL_DAYS) for path in sorted(scratch.glob("journals/*")))
    yield from ((path, REPORT_DAYS) for path in sorted(work.glob("reports/*")))


def _last_use(folder: Path) -> float:
    """When a file of a folder was last read or written, as far as the file system notes it."""
    last = 0.0
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            stat = path.stat()
            last = max(last, stat.st_mtime, stat.st_atime if path.is_file() else 0.0)
    return last


def _clock(work: Path) -> float:
    """The clock of the work folder's file system, which may be another machine's."""
    return LocalBackend(work / "scratch").now()


def _remove(path: Path, dry_run: bool) -> None:
    if not dry_run:
        remove_path(path)
