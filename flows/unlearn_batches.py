"""The flow of a service: whatever waits in the inbox becomes one edit, from the base model anew."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.anew import Inputs, Solved, load_inputs, solve_anew
from flows.approval import NotApproved, approve, refuse_without_worker
from flows.service import ServiceConfig
from grom.config import Config
from grom.errors import DataError, GromError, SolveError
from tasks.accepted import Accepted, accepted
from tasks.certificates import signing_key
from tasks.certified import Made
from tasks.certify import asked_of, certify, certify_repeated
from tasks.claims import LeaseLost
from tasks.commit import Verdict, commit, finish_runs, promote_honoured
from tasks.desk import Desk, Taken, at_desk, own_run
from tasks.erase import due, erase, erase_copies
from tasks.ledger import Ledger, LedgerMoved
from tasks.outcomes import reason_of
from tasks.place import Place
from tasks.register import Registered, tracked_run
from tasks.versions import model_of

logger = logging.getLogger(__name__)


class GateFailed(GromError):
    """The edited model is not good enough."""

    def __init__(self, registered: Registered) -> None:
        failed = [one["name"] for one in registered.conditions if not one["passed"]]
        super().__init__(
            f"version {registered.version} failed the gate: {', '.join(failed)}. See its report in "
            "MLflow; change strength, retain data or gate, then `grom retry` the batch."
        )


OF_THE_BATCH = (DataError, SolveError, GateFailed, NotApproved)
"""What fails a batch.  Anything else is the service's trouble, and the batch waits."""


class AllFailed(GromError):
    """No batch of the run was honoured."""

    def __init__(self, batches: Sequence[str]) -> None:
        super().__init__(f"no batch was honoured: {', '.join(batches)}. `grom status` says why.")


class Summary(Config):
    """What became of the batches that a run took."""

    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    """Nothing was to be done: another run has them, or had."""
    version: str | None = None
    """The model's champion afterwards."""


@flow(name="unlearn-batches")
def unlearn_batches(cfg: ServiceConfig, batch: str | None = None) -> Summary:
    """Honour the batches that wait, `batch` first, and promote the model that no longer knows them.

    Several batches become one edit.  If that fails for a reason of theirs, each is tried alone, so
    that a bad one does not hold up the others.
    """
    refuse_without_worker(cfg)
    signing_key()  # a bad one must be found before hours of work
    place = Place(work=cfg.work, store=cfg.store)
    owner = str(flow_run.get_id())
    done: list[str] = []
    failed: list[str] = []
    with at_desk(place, owner, batch, cfg.max_batches, cfg.lease_s) as desk:
        todo = [desk.taken] if desk.taken else []
        inputs = load_inputs(cfg, place) if todo else None
        while todo and inputs is not None:
            taken = todo.pop(0)
            try:
                honour(cfg, desk, taken, inputs, place)
                done += [one.batch for one in taken]
            except LedgerMoved:
                todo.insert(0, taken)
            except LeaseLost as lost:
                logger.warning("%s", lost)
            except OF_THE_BATCH as error:
                if len(taken) > 1:
                    todo = [[one] for one in taken] + todo
                else:
                    taken[0].keeper.fail(reason_of(error))
                    failed.append(taken[0].batch)
        settled = tuple(desk.settled)
        version = serve(cfg, desk)
    if cfg.erase_after_days == 0:
        for one in dict.fromkeys([*done, *due(place.open(), work=Path(cfg.work))]):
            erase(one, place.open())
            erase_copies(one, Path(cfg.work))
    if failed and not done:
        raise AllFailed(failed)
    return Summary(done=tuple(done), failed=tuple(failed), settled=settled, version=version)


def serve(cfg: ServiceConfig, desk: Desk) -> str | None:
    """Promote what the ledger has, by this run or a killed one; then the batches are done."""
    if desk.interrupted:
        finish_runs(cfg.tracking, cfg.work, desk.interrupted)
    name = model_of(cfg.tracking, cfg.name)
    version = promote_honoured(cfg.store, cfg.tracking, cfg.work, name)
    desk.end()
    return version


def honour(
    cfg: ServiceConfig, desk: Desk, taken: Sequence[Taken], inputs: Inputs, place: Place
) -> None:
    """One edit for the batches that were accepted before and for these; then these are, too."""
    ledger = Ledger(desk.store)
    head = ledger.head()
    earlier = accepted(ledger.read(), desk.store)
    run_key = desk.run if len(taken) == len(desk.taken) else own_run(desk.run, taken[0].batch)
    taken = desk.copied(taken)
    fresh = [one for one in taken if one.rows.stat().st_size]
    if not fresh:
        nothing_new = Verdict.of_latest(earlier, run_key, head)
        latest = max(earlier, key=lambda one: int(one.model_version))
        certificates = certify_repeated(asked_of(taken), latest, run_key, head, place)
        nothing_new = nothing_new.model_copy(update={"certificates": certificates})
        commit(taken, [None] * len(taken), nothing_new, desk.store)
        return
    settings = cfg.model_dump(mode="json")
    with tracked_run(cfg.name, cfg.tracking, place, settings, run_key) as run:
        solved = solve_anew(cfg, run, inputs, fresh, earlier, place)
        if not solved.registered.passed:
            raise GateFailed(solved.registered)
        verdict = Verdict(
            run=run_key,
            model_name=solved.registered.model_name,
            model_version=solved.registered.version,
            edit=solved.edit.artifact.key,
            nats=solved.strength.nats,
            sites=solved.sites,
            retain=solved.retain,
            unreached=solved.unreached,
            approver=approve(cfg, solved.registered, taken),
            head=head,
        )
        certificates = certify(
            asked_of(taken), _made(solved, inputs, earlier, verdict), settings, place
        )
        verdict = verdict.model_copy(update={"certificates": certificates})
        commit(taken, [solved.moments.get(one.batch) for one in taken], verdict, desk.store)


def _made(solved: Solved, inputs: Inputs, earlier: Sequence[Accepted], verdict: Verdict) -> Made:
    return Made(
        run=verdict.run,
        base=inputs.model,
        edit=solved.edit,
        strength=solved.strength,
        edited=solved.edited,
        scores=solved.scores,
        registered=solved.registered,
        unreached=solved.unreached,
        approver=verdict.approver,
        head=verdict.head,
        moments=dict(solved.moments),
        earlier=tuple(earlier),
        influence=solved.influence,
    )
