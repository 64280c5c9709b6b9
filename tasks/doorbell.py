"""One door for every doorbell: a flow run of the deployment that takes what waits in the inbox.

The bucket says which batch is where; a run only says that someone looks.  So a run too many finds
nothing to take, and a run too few is made up for by the next sweep.

The idempotency key is `<batch>-<sha256 of its manifest>-<service>`, with the service since all
deployments of a flow share their keys.  The server keeps a key for ever, also that of a run that
crashed before it took anything.  While its batch waits, the next run names the last one:

    <key>   <key>-after-<run 1>   <key>-after-<run 2> ...

After n runs that ended so, the next one begins 2**n minutes after the last, 60 at most: what is
down is not asked ever more often, and nobody gives up.

A producer that has no Python announces a batch with (-u only if the server has an auth string)

    curl --fail -u "$PREFECT_API_AUTH_STRING" -H 'Content-Type: application/json' \\
      -d '[{"id": "'$(uuidgen)'", "occurred": "'$(date -u +%FT%TZ)'",
            "event": "grom.deletion-batch.landed",
            "resource": {"prefect.resource.id": "grom.deletions.<name>"},
            "payload": {"batch": "<batch>"}}]' "$PREFECT_API_URL/events"
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import Event
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Scheduled

from grom.errors import ConfigError
from tasks.batches import status
from tasks.bucket import Bucket
from tasks.claims import LEASE_S
from tasks.inbox import NotReady
from tasks.manifest import DOCUMENT_BYTES, INBOX, MANIFEST, READY, Refused
from tasks.prefect_api import now_of, server

logger = logging.getLogger(__name__)
Clock = Callable[[], float]
LANDED, RESOURCE = "grom.deletion-batch.landed", "grom.deletions"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0


class DeploymentMissing(ConfigError):
    """Nothing is deployed under that name."""

    def __init__(self, where: str, deployment: str) -> None:
        super().__init__(
            f"{where}: there is no deployment {deployment}. Check `name` in the service's "
            "configuration, then `grom deploy`."
        )


class RunRefused(ConfigError):
    """The server makes no run of the deployment."""

    def __init__(self, where: str, deployment: str, status_code: int) -> None:
        super().__init__(
            f"{where}: the server refuses a run of {deployment} (HTTP {status_code}). Its "
            "parameters are those of another version; `grom deploy` again."
        )


@dataclass(frozen=True, slots=True)
class Rung:
    """What ringing for a batch came to."""

    flow_run_id: str
    """The run that takes the batch, or with `wait_s` the last one that ended without."""
    is_new: bool
    """This call made the run."""
    wait_s: float = 0.0
    """Above 0: nothing was started, ring again after this time."""


def answer(
    batch: str,
    bucket: Bucket,
    deployment: str,
    clock: Clock | None = None,
    stuck_s: float = LEASE_S,
) -> Rung | None:
    """Ring for a batch if it waits; what a doorbell calls.

    A batch that breaks the schema is rung for as well: the run refuses it for all to see.

    Args:
        batch: its name.
        bucket: the store.
        deployment: see `ring`, as for `clock` and `stuck_s`.

    Returns:
        None if somebody has it, or it is done or failed.

    Raises:
        MissingInput: there is no trace of it.
        NotReady, Refused: its marker or manifest is not there yet, or is too large.
        ServerUnreachable, ServerRefused, DeploymentMissing, RunRefused: see `ring`.
    """
    if status(batch, bucket).state != "waiting":
        return None
    if bucket.read(f"{INBOX}/{batch}/{READY}", DOCUMENT_BYTES) is None:
        raise NotReady(batch)
    manifest = bucket.read(f"{INBOX}/{batch}/{MANIFEST}", DOCUMENT_BYTES)
    if manifest is None:
        raise Refused(batch, f"{READY} without {MANIFEST}")
    sha256 = hashlib.sha256(manifest.data).hexdigest()
    return ring(batch, sha256, deployment, clock, stuck_s)


def ring(
    batch: str,
    manifest_sha256: str,
    deployment: str,
    clock: Clock | None = None,
    stuck_s: float = LEASE_S,
) -> Rung:
    """Start a run for a batch that waits, unless one is under way.  Of many who ring, one starts.

    A run that has left the queue `stuck_s` ago counts as ended: had it been alive, the batch would
    not wait.

    Args:
        batch: its name, a parameter of the run.
        manifest_sha256: part of the idempotency key.
        deployment: `<flow>/<name>`.
        clock: seconds since 1970; not given: the server's, by which runs begin and end.
        stuck_s: the lease of a claim.

    Raises:
        ServerUnreachable, ServerRefused: as they say.
        DeploymentMissing: nothing has that name.
        RunRefused: it takes no parameter `batch`.
    """
    key = f"{batch}-{manifest_sha256}-{deployment.rpartition('/')[2]}"
    tag = f"{batch}-{manifest_sha256[:12]}"
    with server() as (client, where):
        now = clock() if clock else now_of(client)
        deployed = _deployed(client, where, deployment)
        last = _latest(client, deployed, tag)
        while True:
            attempt = 0
            if last is not None:
                if (ended := _ended(last, stuck_s, now)) is None:
                    return Rung(str(last.id), is_new=False)
                attempt = int(last.context.get("attempt", 0)) + 1
                if (wait_s := ended + _pause_s(attempt) - now) > 0:
                    return Rung(str(last.id), is_new=False, wait_s=wait_s)
            nonce = uuid4().hex
            try:
                made = client.create_flow_run_from_deployment(
                    deployed.id,
                    parameters={"batch": batch},
                    idempotency_key=key if last is None else f"{key}-after-{last.id}",
                    context={"attempt": attempt, "nonce": nonce},
                    tags=[tag],
                    state=Scheduled(scheduled_time=datetime.fromtimestamp(now, UTC)),
                )
            except PrefectHTTPStatusError as error:
                if error.response.status_code in (400, 409, 422):
                    raise RunRefused(where, deployment, error.response.status_code) from None
                raise
            if made.context.get("nonce") == nonce:
                logger.info("batch %s: run %s, attempt %d", batch, made.id, attempt + 1)
                return Rung(str(made.id), is_new=True)
            last = made  # somebody else's: under way, or the list of runs did not show it


def announce(batch: str, name: str) -> None:
    """Tell the server that a batch has landed; what it triggers depends on the deployments.

    Returns when the server has the event.

    Args:
        batch: its name.
        name: of the service.

    Raises:
        ServerUnreachable, ServerRefused: as they say; the event did not arrive.
    """
    with server() as (client, _):
        event = Event(
            event=LANDED,
            occurred=datetime.fromtimestamp(now_of(client), UTC),
            resource={"prefect.resource.id": f"{RESOURCE}.{name}"},
            payload={"batch": batch},
        )
        # `emit_event` returns before anything was sent, server or not.
        client.request("POST", "/events", json=[event.model_dump(mode="json")])


def _deployed(client: SyncPrefectClient, where: str, deployment: str) -> DeploymentResponse:
    try:
        return client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        raise DeploymentMissing(where, deployment) from None


def _latest(client: SyncPrefectClient, deployed: DeploymentResponse, tag: str) -> FlowRun | None:
    runs = client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[deployed.id]),
            tags=FlowRunFilterTags(all_=[tag]),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=1,
    )
    return runs[0] if runs else None


def _ended(run: FlowRun, stuck_s: float, now: float) -> float | None:
    """When a run ended or was given up, in seconds since 1970; None: it is under way."""
    if run.state is None or run.state.is_scheduled():
        return None
    entered = run.state.timestamp.timestamp()
    if run.state.is_final():
        return entered
    return entered + stuck_s if entered + stuck_s <= now else None


def _pause_s(attempt: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** min(attempt, 10), LONGEST_PAUSE_S)
