"""`grom approve`: a person's yes or no, from the terminal instead of the form in Prefect."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from flows.inbox_commands import StoreOption
from flows.terminal import console, readable_errors
from grom.errors import DataError


def approve_batch(
    batch: Annotated[str, typer.Argument(help="A batch whose run waits for approval.")],
    store: StoreOption,
    by: Annotated[str, typer.Option(help="Who decides; is recorded in the ledger's record.")],
    refuse: Annotated[bool, typer.Option("--refuse", help="No: the batch fails.")] = False,
    reason: Annotated[str, typer.Option(help="Why; is recorded. No personal data.")] = "",
) -> None:
    """Approve or refuse the model that a suspended run made, at the server of PREFECT_API_URL."""
    from prefect.exceptions import NotPausedError, ObjectNotFound
    from prefect.flow_runs import resume_flow_run

    from tasks.bucket import Bucket
    from tasks.claims import look
    from tasks.retries import BRIEF

    with readable_errors():
        seen = look(batch, Bucket(store, patience=BRIEF))
        if seen is None or seen.record.expires_as is None or seen.record.outcome is not None:
            raise NotWaiting(batch, "no run of it waits for approval")
        decision = "refuse" if refuse else "approve"
        answer = {"decision": decision, "approver": by, "reason": reason}
        try:
            resume_flow_run(UUID(seen.record.owner), run_input=answer)
        except (NotPausedError, ObjectNotFound, ValueError) as error:
            why = "its run is not suspended at this server (PREFECT_API_URL)"
            raise NotWaiting(batch, why) from error
        console.print(f"{batch}: {decision}d by {by}; the worker goes on", highlight=False)


class NotWaiting(DataError):
    """There is nothing to approve."""

    def __init__(self, batch: str, why: str) -> None:
        super().__init__(f"batch {batch}: {why}. Check `grom status {batch}`.")
