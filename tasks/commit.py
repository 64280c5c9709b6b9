"""The end of a run: its batches are accepted, all of them in one step, and the model is promoted.

    accepted.json of each batch ─ ledger, one segment ─ alias `champion` ─ done/ of each batch

The ledger's segment is the step that counts.  Killed before it, the run never happened; killed
after it, its batches are not done yet, so a worker takes them up and finishes what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from grom.config import Config
from grom.ledger import LedgerLine
from tasks.accepted import HONOURED, REFUSED, Accepted, standing, write_accepted
from tasks.artifacts import Artifact
from tasks.bucket import Bucket
from tasks.claims import iso
from tasks.desk import Taken
from tasks.ledger import Ledger
from tasks.place import CollectRef, SitesRef
from tasks.tracking import KEY_TAG, Tracking, client_of
from tasks.versions import promote

logger = logging.getLogger(__name__)
GATE = "gate"


class Verdict(Config):
    """What a run found, as far as the ledger is concerned."""

    run: str
    model_name: str
    model_version: str
    edit: str
    """Key of the edit."""
    nats: float
    sites: SitesRef
    retain: tuple[CollectRef, ...]
    """Retain moments."""
    unreached: tuple[str, ...]
    """Requests that the edit cannot honour."""
    approver: str
    head: str
    """Hash of the ledger's last line when the run read what was accepted."""
    certificates: dict[str, str] = Field(default_factory=dict)
    """sha256 of the certificate, by batch."""

    @classmethod
    def of_latest(cls, earlier: Sequence[Accepted], run: str, head: str) -> Verdict:
        """For batches that bring nothing new: the latest version honours them already."""
        last = max(earlier, key=lambda one: int(one.model_version))
        return cls(
            run=run,
            model_name=last.model_name,
            model_version=last.model_version,
            edit=last.edit,
            nats=last.nats,
            sites=last.sites,
            retain=last.retain,
            unreached=(),
            approver=last.approver,
            head=head,
        )


def commit(
    taken: Sequence[Taken], moments: Sequence[CollectRef | None], verdict: Verdict, bucket: Bucket
) -> None:
    """Enter the batches into the ledger.

    Args:
        taken: the batches.
        moments: forget moments of each; None for one without new rows.
        verdict: what the run found.
        bucket: the store.

    Raises:
        LedgerMoved: other batches were accepted meanwhile; nothing was entered.
        LeaseLost: another run has a batch; nothing was entered.
    """
    for one, ref in zip(taken, moments, strict=True):
        write_accepted(_record(one, None if ref is None else ref.artifact, verdict), bucket)
    for one in taken:
        one.keeper.renew()
    Ledger(bucket).append(_lines(taken, verdict, iso(bucket.now())), after=verdict.head)


def _record(one: Taken, moments: Artifact | None, verdict: Verdict) -> Accepted:
    return Accepted(
        batch=one.batch,
        run=verdict.run,
        manifest_sha256=one.checked.manifest_sha256,
        forget=moments,
        num_requests=len(one.requests),
        model_name=verdict.model_name,
        model_version=verdict.model_version,
        edit=verdict.edit,
        nats=verdict.nats,
        sites=verdict.sites,
        retain=verdict.retain,
        approver=verdict.approver,
    )


def _lines(taken: Sequence[Taken], verdict: Verdict, finished: str) -> list[LedgerLine]:
    unreached = set(verdict.unreached)
    return [
        LedgerLine(
            request=request,
            batch=one.batch,
            received=iso(one.checked.received),
            run=verdict.run,
            model_version=None if request in unreached else verdict.model_version,
            certificate=verdict.certificates.get(one.batch),
            state=REFUSED if request in unreached else HONOURED,
            started=one.started,
            finished=finished,
        )
        for one in taken
        for request in one.requests
    ]


@task
def finish_runs(tracking: Tracking, work: str, run_keys: Sequence[str]) -> None:
    """End the MLflow runs of killed runs whose batches are in the ledger."""
    client = client_of(tracking, Path(work))
    found = client.get_experiment_by_name(tracking.experiment)
    experiments = [] if found is None else [found.experiment_id]
    for key in run_keys:
        for run in client.search_runs(experiments, f"tags.`{KEY_TAG}` = '{key}'"):
            client.set_terminated(run.info.run_id, "FINISHED")


@task(cache_policy=NO_CACHE)  # the ledger is no argument
def promote_honoured(bucket_root: str, tracking: Tracking, work: str, name: str) -> str | None:
    """Give the alias `champion` to the newest version that a request in the ledger counts on.

    A function of the ledger alone, so it can be repeated at any time, and completes what a killed
    run left.

    Returns:
        the version, or None if no request is honoured.
    """
    lines = standing(Ledger(Bucket(bucket_root)).read()).values()
    honoured = [int(line.model_version) for line in lines if line.model_version is not None]
    if not honoured:
        return None
    version = str(max(honoured))
    if (before := promote(tracking, Path(work), name, version)) != version:
        logger.info("register: version %s of %s is champion, before it %s", version, name, before)
    return version
