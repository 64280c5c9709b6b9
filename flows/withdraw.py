"""The flow that takes a deletion request back, as if it had never been made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prefect import flow

from flows.anew import Inputs, load_inputs
from flows.service import ServiceConfig
from grom.config import Config, DataConfig, StrengthConfig
from grom.errors import DataError
from grom.ledger import ChainedLine
from grom.pictures import EDITED, UNEDITED
from tasks.accepted import HONOURED, WITHDRAWN, Accepted, accepted, moments_of, standing
from tasks.apply import apply
from tasks.certificates import signing_key
from tasks.certified import Made
from tasks.certify import asked_again, certify
from tasks.collect import collect_forget, merge_forget
from tasks.evaluate import evaluate
from tasks.ledger import Ledger
from tasks.load import load_data
from tasks.place import CalibrationRef, CheckpointRef, CollectRef, EditRef, Place, ScoreRef
from tasks.register import Registered, Sets, tracked_run
from tasks.reregister import reregister
from tasks.solve import solve
from tasks.store import Store
from tasks.versions import model_of, promote
from tasks.withdraw import copy_base, set_strength, take_out
from tasks.withdrawal import Withdrawal, enter_withdrawal, entered_with

APPROVER = "the person who withdrew a request"


class NotHonoured(DataError):
    """There is no such request to take back."""

    def __init__(self, last: ChainedLine | None = None) -> None:
        reason = "no honoured request has this id"
        if last is not None:
            when = f"on {last.finished[:10]} by line {last.number} of the ledger"
            reason = f"this request was {last.state} {when}"
        super().__init__(
            f"{reason}, so there is nothing to withdraw. Check the id, and what `grom certificate` "
            "says of it."
        )


class Rest(NamedTuple):
    """The model for what remains."""

    edited: CheckpointRef
    edit: EditRef | None = None
    """None: nothing remains, and the model is the base."""
    strength: CalibrationRef | None = None


class Withdrawn(Config):
    """What became of it."""

    batches: tuple[str, ...]
    """Where the request had been made."""
    version: str
    """The model that serves now."""
    num_left: int
    """Requests that are still honoured."""


@flow(name="withdraw")
def withdraw(
    cfg: ServiceConfig, request: str, reason: str, rows: tuple[str, ...] = ()
) -> Withdrawn:
    """Take one request out of what was accepted, solve anew from the base model, and promote.

    No old text is read.  The strength is that of the latest version; what was forgotten stays
    forgotten, and cannot be measured again without its text, so the gate asks for utility alone.
    Killed anywhere, the same call again comes to the same end.

    Args:
        cfg: the service.
        request: salted hash of the request's id.
        reason: why; recorded in MLflow, so without personal data.
        rows: files with the request's rows under that hash, if its keys were not kept; one for
            each batch that has it.

    Raises:
        NotHonoured: no honoured request has this hash; what a withdrawal that was killed after it
            had entered the ledger left to do is done first.
        TextNeeded, DataError: see `take_out`.
        UtilityLost: the new model is not good enough; nothing was changed.
        LedgerMoved: another run was entered meanwhile; nothing was changed.
        ConfigError: the signing key is none.
    """
    signing_key()  # a bad one must be found before the work
    place = Place(work=cfg.work, store=cfg.store)
    store = place.open()
    ledger = Ledger(store)
    head, lines = ledger.head(), ledger.read()
    stand = [line for line in standing(lines).values() if line.state == HONOURED]
    batches = {line.batch for line in stand if line.request == request}
    if not batches:
        raise NotHonoured(finish(cfg, request, lines, store))
    records = accepted(lines, store)
    run_key = f"withdraw-{request[:12]}-{head[:12]}"
    inputs = load_inputs(cfg, place)
    with tracked_run(cfg.name, cfg.tracking, place, {"withdraw": reason}, run_key) as run:
        left = without_request(cfg, inputs, records, batches, request, rows, place)
        latest = max(records, key=lambda one: int(one.model_version))
        rest = solve_rest(cfg, inputs, latest, list(left.values()), place)
        scores = measured(cfg, inputs, rest.edited, place)
        num_left = len({(line.request, line.batch) for line in stand if line.request != request})
        about = {
            "batches": ",".join(name for name, ref in left.items() if ref is not None),
            "requests": str(num_left),
            "withdrawn": request[:12],
        }
        registered = reregister(run, inputs.model, rest.edited, scores, cfg.gate, about, place)
        changed = [one for one in records if one.batch in batches]
        entry = Withdrawal(
            run=run_key,
            request=request,
            model_version=registered.version,
            edit="" if rest.edit is None else rest.edit.artifact.key,
            nats=0.0 if rest.strength is None else rest.strength.nats,
            head=head,
        )
        made = made_of(entry, rest, inputs, scores, registered, left, records, batches)
        if made is not None:
            asked = asked_again(changed, request, run_key, lines, store)
            hashes = certify(asked, made, cfg.model_dump(mode="json"), place)
            entry = entry.model_copy(update={"certificates": hashes})
        enter_withdrawal(changed, left, entry, lines, store)
    version = registered.version
    promote(cfg.tracking, Path(cfg.work), model_of(cfg.tracking, cfg.name), version)
    return Withdrawn(batches=tuple(sorted(batches)), version=version, num_left=num_left)


def finish(
    cfg: ServiceConfig, request: str, lines: Sequence[ChainedLine], store: Store
) -> ChainedLine | None:
    """Promote what a withdrawal made that was killed before it did so.  Returns the last line of
    the request, if there is one."""
    last = next((line for line in reversed(lines) if line.request == request), None)
    if last is not None and last.state == WITHDRAWN and (record := entered_with(last, store)):
        name = model_of(cfg.tracking, cfg.name)
        promote(cfg.tracking, Path(cfg.work), name, record.model_version)
    return last


def without_request(
    cfg: ServiceConfig,
    inputs: Inputs,
    records: Sequence[Accepted],
    batches: set[str],
    request: str,
    rows: tuple[str, ...],
    place: Place,
) -> dict[str, CollectRef | None]:
    """Moments of each accepted batch, the request taken out; None for a batch without any."""
    texts = []
    for uri in rows:
        data = load_data(DataConfig(uri=uri), place, "forget")
        found = collect_forget(
            inputs.model, data, records[0].sites, cfg.target, cfg.collect, place, inputs.reference
        )
        texts.append(found)
    left: dict[str, CollectRef | None] = {}
    for one in records:
        ref = next(iter(moments_of([one])), None)
        if ref is not None and one.batch in batches:
            ref = take_out(one.batch, ref, (request,), place, tuple(texts))
        left[one.batch] = ref
    return left


def solve_rest(
    cfg: ServiceConfig,
    inputs: Inputs,
    latest: Accepted,
    parts: Sequence[CollectRef | None],
    place: Place,
) -> Rest:
    """The edit for what remains."""
    remaining = {ref.artifact.key: ref for ref in parts if ref is not None}
    if not remaining:
        return Rest(copy_base(inputs.model, place))
    merged = merge_forget(tuple(remaining.values()), place)
    edit = solve(inputs.model, latest.retain, merged, latest.sites, cfg.ridge, cfg.target, place)
    given = cfg.strength if cfg.strength.search is None else StrengthConfig(nats=latest.nats)
    strength = set_strength(edit, given, place)
    return Rest(apply(inputs.model, edit, strength, place), edit, strength)


def made_of(
    entry: Withdrawal,
    rest: Rest,
    inputs: Inputs,
    scores: tuple[ScoreRef, ScoreRef],
    registered: Registered,
    left: Mapping[str, CollectRef | None],
    records: Sequence[Accepted],
    batches: set[str],
) -> Made | None:
    """What is certified; nothing if the model is the base."""
    if rest.edit is None or rest.strength is None:
        return None
    return Made(
        run=entry.run,
        base=inputs.model,
        edit=rest.edit,
        strength=rest.strength,
        edited=rest.edited,
        scores=scores,
        registered=registered,
        approver=APPROVER,
        head=entry.head,
        moments={batch: ref for batch, ref in left.items() if ref and batch in batches},
        earlier=tuple(one for one in records if one.batch not in batches),
    )


def measured(
    cfg: ServiceConfig, inputs: Inputs, edited: CheckpointRef, place: Place
) -> tuple[ScoreRef, ScoreRef]:
    """Scores of the base and of the edited model on what was not forgotten."""
    sets, model = kept_sets(cfg, inputs, place), inputs.model
    before = evaluate(
        UNEDITED, model.folder, model.fingerprint, sets, cfg.evaluate, cfg.collect, place
    )
    folder, key = str(place.fetch(edited.artifact)), edited.fingerprint
    return before, evaluate(EDITED, folder, key, sets, cfg.evaluate, cfg.collect, place)


def kept_sets(cfg: ServiceConfig, inputs: Inputs, place: Place) -> Sets:
    """The sets that are measured without text that was forgotten."""
    sets: Sets = {
        "retain, seen": (inputs.retain, "seen"),
        "retain, held out": (inputs.retain, "held out"),
    }
    for name, data in cfg.also.items():
        sets[name] = (load_data(data, place, name), "all")
    return sets
