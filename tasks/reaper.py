"""Runs that nobody works on any more, in Prefect and MLflow, and versions that are over.

The claims decide.  A worker renews its claims while it lives, and the lease runs out by the store's
clock when it does not; neither server can tell the one from the other.  A run that waits for a
person is not running, and its claims have long leases.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import OrchestrationResult, SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from grom.errors import DataError, MissingInput
from tasks.bucket import Bucket
from tasks.desk import DESKS
from tasks.erase import remove_path
from tasks.folder import LocalBackend
from tasks.housekeep import Tidied, claims_seen, live_claims
from tasks.place import Place
from tasks.prefect_api import now_of
from tasks.store import MARKER
from tasks.tracking import Tracking
from tasks.versions import close_stale, purge

logger = logging.getLogger(__name__)
HOUR_S = 3600.0
SHORT_FLOWS = {"sweep": 6 * HOUR_S, "housekeeping": 6 * HOUR_S, "rollback": 6 * HOUR_S}
"""Flows that hold no claim, and how long none of them runs."""
BATCH_FLOW = "unlearn-batches"
OPEN_STATES = ["RUNNING", "PENDING", "CANCELLING"]
PAGE = 200
UUID_TEXT = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ARTIFACT = re.compile(r"(?P<key>[a-z]+/[0-9a-f]{16})(/[0-9a-f]*)?")


@task(cache_policy=NO_CACHE)
def mark_crashed(place: Place, dry_run: bool = False) -> Tidied:
    """Mark flow runs whose worker was killed as Crashed, so that they hold no slot any more.

    These are runs that took batches of this store and hold none alive, runs of short flows that
    take hours, and runs that have been about to start for an hour.  Runs of other stores are not
    looked at.  A run that ends by itself meanwhile keeps its own state.
    """
    bucket, marked = place.open(), []
    with get_client(sync_client=True) as client:
        suspects = [
            *_runs_of(dead_owners(bucket), client),
            *_stuck(place.store, client),
        ]
        for run in {run.id: run for run in suspects}.values():
            owners = {seen.record.owner for seen in live_claims(bucket)}
            if str(run.id) in owners:
                continue
            if dry_run or _crashed(run, client):
                marked.append(f"{run.name} ({run.id})")
    return Tidied(step="flow runs marked as crashed", places=tuple(marked))


@task(cache_policy=NO_CACHE)
def close_killed(tracking: Tracking, place: Place, dry_run: bool = False) -> Tidied:
    """End the MLflow runs on which nobody works any more."""
    bucket, killed = place.open(), []
    live = {key for seen in live_claims(bucket) for key in (seen.record.owner, seen.record.run)}
    with get_client(sync_client=True) as client:

        def is_alive(key: str) -> bool:
            named = UUID_TEXT.search(key)
            if named is None or key in live or named[0] in live or _is_open(named[0], client):
                return True
            killed.append(key)
            return dry_run

        close_stale(tracking, Path(place.work), tracking.experiment, is_alive)
    return Tidied(step="MLflow runs closed", places=tuple(killed))


@task(cache_policy=NO_CACHE)
def purge_versions(
    tracking: Tracking,
    name: str,
    place: Place,
    keep_versions: int,
    keep_days: float,
    dry_run: bool = False,
) -> Tidied:
    """Remove the files of versions that serve no longer, by the retention rule."""
    bucket, work = place.open(), Path(place.work)
    try:
        purged = purge(
            tracking,
            work,
            name,
            keep_versions=keep_versions,
            keep_days=keep_days,
            now=bucket.now(),
            remove=lambda uri: remove_artifact(uri, bucket, work),
            dry_run=dry_run,
        )
    except MissingInput:  # nothing was registered yet
        purged = []
    return Tidied(
        step="model versions purged",
        places=tuple(f"{one.name}, version {one.number}" for one in purged),
        num_bytes=sum(one.num_bytes or 0 for one in purged),
    )


def dead_owners(bucket: Bucket) -> list[str]:
    """Runs that took batches and hold none alive, by the claims and the notes of what they took.

    A run whose batches have all ended or went to others may still be at its last steps, so it
    counts as dead an hour after its last sign only.
    """
    now = bucket.now()
    signs = {
        entry.name.split("/", 1)[1].removesuffix(".json"): entry.modified
        for entry in bucket.entries(DESKS)
    }
    alive, lapsed = set(), set()
    for seen in claims_seen(bucket):
        owner = seen.record.owner
        if seen.record.released or seen.record.outcome:
            signs[owner] = max(seen.modified, signs.get(owner, 0.0))
        elif seen.has_run_out(now):
            lapsed.add(owner)
        else:
            alive.add(owner)
    silent = {owner for owner, when in signs.items() if now - when > HOUR_S}
    return sorted((lapsed | silent) - alive)


def remove_artifact(uri: str, bucket: Bucket, work: Path) -> None:
    """Remove an artifact and its download: the marker first, so that it is gone at once.

    Raises:
        DataError: the address is not that of an artifact of this store.
    """
    local = bucket.backend.root if isinstance(bucket.backend, LocalBackend) else None
    root = local.as_uri() if local else bucket.root.rstrip("/")
    found = ARTIFACT.fullmatch(uri.removeprefix(f"{root}/"))
    if found is None:
        raise DataError(
            f"{uri}: not an artifact of {bucket.root}. Remove it where it lies, or give "
            "housekeeping the store that it is in."
        )
    key = found["key"]
    bucket.delete(f"{key}/{MARKER}")
    for entry in bucket.entries(key):
        bucket.delete(entry.name)
    for folder in filter(None, (work / "scratch" / "fetched", local)):
        remove_path(folder / key)


def _runs_of(owners: list[str], client: SyncPrefectClient) -> Iterator[FlowRun]:
    for owner in owners:
        run = _flow_run(owner, client) if UUID_TEXT.fullmatch(owner) else None
        if run is not None and _type_of(run) in OPEN_STATES:
            yield run


def _crashed(run: FlowRun, client: SyncPrefectClient) -> bool:
    """Mark a run; False if it has ended by itself."""
    why = "its worker was killed: nothing renewed its claims, or it never went on"
    answer: OrchestrationResult[None] = client.set_flow_run_state(
        run.id, Crashed(message=why), force=False
    )
    if answer.status != SetStateStatus.ACCEPT:
        return False
    logger.info("flow run %s was killed, so it is marked as crashed", run.id)
    return True


def _stuck(store: str, client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Runs of this store without a claim that are open for longer than they can be."""
    now = now_of(client)
    names = FlowFilter.model_validate({"name": {"any_": [*SHORT_FLOWS, BATCH_FLOW]}})
    states = FlowRunFilter.model_validate({"state": {"type": {"any_": OPEN_STATES}}})
    flows: dict[UUID, str] = {}
    runs: list[FlowRun] = []
    while page := client.read_flow_runs(
        flow_filter=names, flow_run_filter=states, limit=PAGE, offset=len(runs)
    ):
        runs += page
    for run in runs:
        settings = run.parameters.get("cfg")
        if run.state is None or not isinstance(settings, dict) or settings.get("store") != store:
            continue
        if run.flow_id not in flows:
            flows[run.flow_id] = client.read_flow(run.flow_id).name
        limit = HOUR_S if _type_of(run) == "PENDING" else SHORT_FLOWS.get(flows[run.flow_id])
        if limit is not None and now - run.state.timestamp.timestamp() > limit:
            yield run


def _is_open(run_id: str, client: SyncPrefectClient) -> bool:
    run = _flow_run(run_id, client)
    return run is not None and run.state is not None and not run.state.is_final()


def _flow_run(run_id: str, client: SyncPrefectClient) -> FlowRun | None:
    try:
        return client.read_flow_run(UUID(run_id))
    except ObjectNotFound:
        return None


def _type_of(run: FlowRun) -> str:
    return run.state.type.value if run.state else ""
