"""A person's yes or no to a version that passed the gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from flows.service import ServiceConfig
from grom.errors import ConfigError, GromError
from tasks.commit import GATE
from tasks.desk import Taken
from tasks.register import Registered

GRACE_S = 600
"""By so much the claims outlast the wait."""


class Approval(RunInput):
    """The form."""

    decision: Literal["approve", "refuse"]
    approver: str = Field(min_length=1, max_length=200, description="Who decides; is recorded.")
    reason: str = Field(default="", max_length=1000, description="Is recorded; no personal data.")


class NotApproved(GromError):
    """A person refused the version."""

    def __init__(self, approver: str, reason: str) -> None:
        why = f": {reason}" if reason else ""
        super().__init__(f"refused by {approver}{why}. Put it right, then `grom retry` the batch.")


def refuse_without_worker(cfg: ServiceConfig) -> None:
    """Raise unless the run can wait for a person, which takes a worker to start it again.

    Raises:
        ConfigError: it cannot.
    """
    context = FlowRunContext.get()
    deployed = context and context.flow_run and context.flow_run.deployment_id
    if cfg.approval == "required" and not deployed:
        raise ConfigError(
            "approval: required lets a run wait without a process, so it needs a deployment and a "
            "worker. Use `grom deploy` and a worker or `grom up`, or set `approval: auto`."
        )


def approve(cfg: ServiceConfig, registered: Registered, taken: Sequence[Taken]) -> str:
    """Who promotes the version: `gate` if the gate alone decides, else the person who approved.

    The run is suspended meanwhile, its process ends, and its batches stay claimed.  Resumed, it
    comes here again and finds the answer.

    Raises:
        NotApproved: refused.
    """
    if cfg.approval == "auto":
        return GATE
    wait_s = cfg.approval_hours * 3600
    for one in taken:
        one.keeper.renew(
            lease_s=wait_s + GRACE_S,
            expires_as=f"nobody approved it within {cfg.approval_hours:g} hours",
        )
    form = Approval.with_initial_data(description=_description(registered, taken))
    given = suspend_flow_run(
        wait_for_input=form,
        timeout=int(wait_s),
        key=f"{registered.model_name}-{registered.version}",
    )
    for one in taken:
        one.keeper.renew(lease_s=cfg.lease_s)
    if given.decision == "refuse":
        raise NotApproved(given.approver, given.reason)
    return given.approver


def _description(registered: Registered, taken: Sequence[Taken]) -> str:
    """The gate's table as Markdown."""
    num_requests = sum(len(one.requests) for one in taken)
    lines = [
        f"**{registered.uri}**: {num_requests} requests in {', '.join(one.batch for one in taken)}",
        "",
        "| condition | value | limit | margin | passed |",
        "| --- | --- | --- | --- | --- |",
        *(_row(condition) for condition in registered.conditions),
        "",
        f"MLflow run {registered.run_id}. Figures: the artifact `report.html` there.",
    ]
    return "\n".join(lines)


def _row(condition: dict[str, Any]) -> str:
    numbers = " | ".join(f"{condition[key]:.4g}" for key in ("value", "limit", "margin"))
    return f"| {condition['name']} | {numbers} | {'yes' if condition['passed'] else 'NO'} |"
