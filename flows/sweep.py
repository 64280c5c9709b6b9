"""The doorbell that is always on: look into the inbox, and start a run if a batch waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prefect import flow
from pydantic import Field

from flows.service import ServiceConfig
from grom.config import Config
from grom.errors import DataError
from tasks.artifacts import CorruptArtifact
from tasks.batches import settle, waiting
from tasks.bucket import Bucket
from tasks.commit import promote_honoured
from tasks.doorbell import answer
from tasks.versions import model_of

logger = logging.getLogger(__name__)


class Swept(Config):
    """What a look into the inbox came to."""

    settled: tuple[str, ...] = ()
    """Batches whose outcome a killed worker had left unpublished."""
    waiting: tuple[str, ...] = ()
    """Batches that wait, oldest first."""
    rung_for: str | None = None
    """The batch whose run takes all that wait."""
    flow_run_id: str | None = None
    is_new: bool = False
    """The run was started by this sweep, not before."""
    wait_s: dict[str, float] = Field(default_factory=dict)
    """Seconds until a run may start again, of batches whose last run ended without taking them."""
    problems: dict[str, str] = Field(default_factory=dict)
    """Batches that cannot be rung for, and why."""


@flow(name="sweep")
def sweep(cfg: ServiceConfig) -> Swept:
    """Settle what killed workers left, then start a run if a batch waits."""
    swept = look(cfg)
    promote_honoured(cfg.store, cfg.tracking, cfg.work, model_of(cfg.tracking, cfg.name))
    return swept


def look(cfg: ServiceConfig, clock: Callable[[], float] | None = None) -> Swept:
    """One sweep, without a flow run of its own.

    The oldest batch is rung for, since its run takes all that wait; the next one if a run for the
    oldest may not start yet, or it cannot be read.

    Args:
        cfg: the service.
        clock: see `ring`.

    Raises:
        BucketMissing, AccessRefused, StoreUnreachable: as they say.
        ServerUnreachable, ServerRefused, DeploymentMissing, RunRefused: as they say.
    """
    bucket = Bucket(cfg.store)
    problems: dict[str, str] = {}
    settled: list[str] = []
    try:
        settled = settle(bucket)
    except CorruptArtifact as error:
        problems["claims"] = str(error)
    found = Swept(settled=tuple(settled), waiting=tuple(waiting(bucket)), problems=problems)
    swept = _rung(found, cfg, bucket, clock)
    log = logger.warning if swept.problems else logger.info
    log("sweep %s: %s", cfg.name, described(swept))
    return swept


def described(swept: Swept) -> str:
    """One line."""
    parts = [f"{len(swept.waiting)} batches wait"]
    if swept.rung_for is not None:
        state = "started" if swept.is_new else "is under way"
        parts.append(f"run {swept.flow_run_id} {state} for {swept.rung_for}")
    parts += [f"{batch} not again for {wait:.0f} s" for batch, wait in swept.wait_s.items()]
    if swept.settled:
        parts.append(f"outcomes published: {', '.join(swept.settled)}")
    return "; ".join([*parts, *swept.problems.values()])


def _rung(
    found: Swept, cfg: ServiceConfig, bucket: Bucket, clock: Callable[[], float] | None
) -> Swept:
    deployment = f"unlearn-batches/{cfg.name}"
    wait_s: dict[str, float] = {}
    problems = dict(found.problems)
    changes: dict[str, object] = {"wait_s": wait_s, "problems": problems}
    for batch in found.waiting:
        try:
            rung = answer(batch, bucket, deployment, clock, cfg.lease_s)
        except DataError as error:  # of this batch; the others go on
            problems[batch] = str(error)
            continue
        if rung is None:
            continue
        if rung.wait_s > 0:
            wait_s[batch] = rung.wait_s
            continue
        changes |= {"rung_for": batch, "flow_run_id": rung.flow_run_id, "is_new": rung.is_new}
        break
    return found.model_copy(update=changes)
