"""The flow that goes back: an older version of the model serves again, and the ledger says so."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.service import ServiceConfig
from grom.config import Config
from tasks.bucket import Bucket
from tasks.restore import close_step, restore
from tasks.rollback import roll_back_ledger
from tasks.versions import model_of


class RolledBack(Config):
    """What a step back changed."""

    name: str
    """Of the registered model."""
    from_version: str
    to_version: str
    num_requests: int
    """Requests that the step changed in the ledger; 0 if it was entered before."""


@flow(name="rollback")
def rollback(cfg: ServiceConfig, reason: str, to: str | None = None) -> RolledBack:
    """Let the previous version of the model serve again, or version `to`, and enter it.

    The alias moves first, for a bad model must not serve until a store answers.  Killed anywhere,
    the same call again comes to the same end.

    Args:
        cfg: the service.
        reason: why; shown in MLflow and Prefect, so without personal data.
        to: number of a version that served before.
    """
    name, work = model_of(cfg.tracking, cfg.name), Path(cfg.work)
    step = restore(cfg.tracking, work, name, reason, to)
    entered = roll_back_ledger(
        Bucket(cfg.store), step.from_version, step.to_version, started=step.time
    )
    close_step(cfg.tracking, work, name, step, entered.versions)
    result = RolledBack(
        name=name,
        from_version=step.from_version,
        to_version=step.to_version,
        num_requests=entered.num_lines,
    )
    create_markdown_artifact(_report(result, step.reason), key="rollback", description="rollback")
    return result


def _report(result: RolledBack, reason: str) -> str:
    return "\n".join(
        [
            f"# {result.name}: version {result.to_version} serves again",
            "",
            f"It took the place of version {result.from_version}: {reason}",
            "",
            f"{result.num_requests} requests changed their state in the ledger.",
        ]
    )
