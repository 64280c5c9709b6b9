"""Door 3, versions: what became of each version of the registered model, and what comes next.

    candidate ─ champion ─ previous ─ superseded ─ purged
        │          └─ superseded, after it was rolled back
        `─ failed, which its gate keeps from the alias

MLflow has no compare and swap.  So each change is a series of steps in an order that can be
repeated: what it replaces is written down first, the alias that serves moves last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.aliases import (
    CHAMPION,
    CHECKPOINT_TAG,
    GONE,
    PREVIOUS,
    PROMOTED,
    PURGED,
    PURGING,
    REPLACES,
    ROLLED_BACK,
    aliases_of,
    check_fit,
    iso_now,
    point_alias,
    replaced_by,
    version_of,
)
from tasks.tracking import KEY_TAG, Tracking, client_of
from tasks.version_info import COPY, VersionInfo, info_of, remove_files

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Purged:
    """A version whose files are gone, or would be."""

    name: str
    number: str
    num_bytes: int | None
    uris: tuple[str, ...]
    """Where they were."""


def model_of(tracking: Tracking, name: str) -> str:
    """Name of the registered model of a job with this name."""
    return tracking.model_name or f"grom-{name}"


def promote(tracking: Tracking, work: Path, name: str, version: str) -> str | None:
    """Make a version the champion, and the champion the previous one.  Can be repeated.

    Nothing happens, except for a line in the log, if a newer version serves already or if this one
    was rolled back meanwhile: somebody is late.

    Args:
        tracking, work: where the registry is.
        name: of the registered model.
        version: its number; its gate passed.

    Returns:
        number of the version that was champion before, if any.

    Raises:
        MissingInput: no such version.
        PurgedVersion: its files are gone.
        ConfigError: its gate did not pass.
    """
    client = client_of(tracking, work)
    chosen, champion = version_of(client, name, version), aliases_of(client, name).get(CHAMPION)
    is_older = champion is not None and int(version) < int(champion)
    if is_older or (ROLLED_BACK in chosen.tags and champion != version):
        logger.warning("%s: version %s is late, %s serves", name, version, champion)
        return champion
    check_fit(chosen)
    if champion == version and PROMOTED in chosen.tags:
        return replaced_by(chosen)
    before = replaced_by(chosen) if champion == version else champion
    if champion != version:
        if champion is not None:
            client.set_model_version_tag(name, version, REPLACES, champion)
            client.set_registered_model_alias(name, PREVIOUS, champion)
        if not point_alias(client, name, CHAMPION, version, GONE | {ROLLED_BACK}):
            logger.warning("%s: version %s was taken back while it was promoted", name, version)
            return champion
    client.set_model_version_tag(name, version, PROMOTED, iso_now())
    logger.info("%s: version %s serves, before it %s", name, version, before)
    return before


def versions(tracking: Tracking, work: Path, name: str | None = None) -> list[VersionInfo]:
    """All versions of a registered model, or of all, newest first.

    Raises:
        MissingInput: there is no such model.
    """
    client = client_of(tracking, work)
    names = [name] if name else sorted(model.name for model in client.search_registered_models())
    found = []
    for model in names:
        aliases = aliases_of(client, model)
        listed = client.search_model_versions(f"name = '{model}'")
        listed.sort(key=lambda version: int(version.version), reverse=True)
        found += [info_of(version, aliases) for version in listed]
    return found


def superseded(
    tracking: Tracking, work: Path, name: str, *, keep_versions: int, keep_days: float, now: float
) -> list[VersionInfo]:
    """Versions whose files the retention rule takes away, newest first.

    They failed or serve no longer, have no alias, are not among the newest `keep_versions` that
    have files, and are older than `keep_days`.

    Args:
        tracking, work: where the registry is.
        name: of the registered model.
        keep_versions: how many stay whatever their age.
        keep_days: how long the others stay.
        now: seconds since 1970.
    """
    kept = [info for info in versions(tracking, work, name) if info.state != "purged"]
    return [
        info
        for info in kept[keep_versions:]
        if info.state in ("superseded", "failed")
        and not info.aliases
        and info.checkpoint is not None
        and now - info.created > keep_days * DAY_S
    ]


def purge(
    tracking: Tracking,
    work: Path,
    name: str,
    *,
    keep_versions: int,
    keep_days: float,
    now: float,
    remove: Callable[[str], None],
    dry_run: bool = False,
) -> list[Purged]:
    """Remove the files of superseded versions; the versions stay as a record, tagged `purged`.

    MLflow's copies are removed here, the artifacts of the store by `remove`, unless another
    version is made of the same.  In a bucket with versioning, a lifecycle rule must take away what
    is no longer current.  Killed, it goes on at the next call.

    Args:
        tracking, work, name, keep_versions, keep_days, now: see `superseded`.
        remove: takes the address of an artifact in the store, which may be gone already.
        dry_run: only say what would be removed.

    Raises:
        GromError: files could not be removed.
    """
    client, purged = client_of(tracking, work), []
    for info in superseded(
        tracking, work, name, keep_versions=keep_versions, keep_days=keep_days, now=now
    ):
        uris = [info.source] if COPY.search(info.source) else []
        if info.checkpoint is not None and not _shared(client, info):
            uris.append(info.checkpoint)
        if dry_run or _purged(tracking, work, info, uris, remove):
            purged.append(Purged(info.name, info.number, info.num_bytes, tuple(uris)))
    return purged


def close_stale(
    tracking: Tracking, work: Path, experiment: str, is_alive: Callable[[str], bool]
) -> list[str]:
    """End the runs that say they are running though nobody works on them; their ids.

    Args:
        tracking, work: where runs are recorded.
        experiment: name of the experiment.
        is_alive: whether somebody works under a run key.  Runs without one stay as they are.
    """
    client = client_of(tracking, work)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    running, token = [], None
    while True:
        page = client.search_runs(
            [found.experiment_id], "attributes.status = 'RUNNING'", page_token=token
        )
        running += [(run.info.run_id, run.data.tags.get(KEY_TAG)) for run in page]
        token = page.token
        if not token:
            break
    stale = [run_id for run_id, key in running if key is not None and not is_alive(key)]
    for run_id in stale:
        client.set_terminated(run_id, "KILLED")
        logger.info("run %s of MLflow was killed, so it is closed", run_id)
    return stale


def _shared(client: MlflowClient, info: VersionInfo) -> bool:
    """Whether another version that has files is made of the same artifact."""
    found = client.search_model_versions(f"tags.{CHECKPOINT_TAG} = '{info.checkpoint}'")
    others = [v for v in found if (v.name, str(v.version)) != (info.name, info.number)]
    return any(PURGED not in other.tags for other in others)


def _purged(
    tracking: Tracking,
    work: Path,
    info: VersionInfo,
    uris: Sequence[str],
    remove: Callable[[str], None],
) -> bool:
    """Remove the files of a version; False if an alias points to it now."""
    client = client_of(tracking, work)
    client.set_model_version_tag(info.name, info.number, PURGING, iso_now())
    if info.number in aliases_of(client, info.name).values():
        client.delete_model_version_tag(info.name, info.number, PURGING)
        logger.info("%s: version %s has an alias now and stays", info.name, info.number)
        return False
    remove_files(tracking, work, client.get_model_version(info.name, info.number))
    if info.checkpoint is not None and info.checkpoint in uris:
        remove(info.checkpoint)
    client.set_model_version_tag(info.name, info.number, PURGED, iso_now())
    client.delete_model_version_tag(info.name, info.number, PURGING)
    logger.info("%s: the files of version %s are gone", info.name, info.number)
    return True
