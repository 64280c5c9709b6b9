"""One edit of the base model for all batches: those accepted before by their moments, new ones by
their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.service import ServiceConfig
from flows.unlearn import examine_all, measured_sets, score_all
from grom.config import DataConfig
from tasks.accepted import Accepted, moments_of
from tasks.apply import apply
from tasks.audit import AuditRef, Moments, audit
from tasks.band import pin, pinned
from tasks.calibrate import calibrate
from tasks.collect import collect_forget, collect_retain, merge_forget
from tasks.count import count
from tasks.desk import Taken
from tasks.exam_log import log_exams
from tasks.load import load_data, load_model
from tasks.place import (
    CalibrationRef,
    CheckpointRef,
    CollectRef,
    DataRef,
    EditRef,
    ModelRef,
    Place,
    ScoreRef,
    SitesRef,
)
from tasks.reach import find_unreached
from tasks.register import Registered, TrackedRun, register
from tasks.select import select
from tasks.solve import solve


@dataclass(frozen=True, slots=True)
class Inputs:
    """What all batches are solved with."""

    model: ModelRef
    reference: ModelRef | None
    level: ModelRef | None
    """The model whose level of forgetting is the one to reach."""
    retain: DataRef
    background: DataRef | None


@dataclass(frozen=True, slots=True)
class Solved:
    """What came out."""

    moments: Mapping[str, CollectRef]
    """Of each new batch."""
    sites: SitesRef
    retain: tuple[CollectRef, ...]
    edit: EditRef
    strength: CalibrationRef
    registered: Registered
    unreached: tuple[str, ...]
    """Requests that no edit of this kind can honour."""
    edited: CheckpointRef
    scores: tuple[ScoreRef, ...]
    influence: AuditRef | None = None


def load_inputs(cfg: ServiceConfig, place: Place) -> Inputs:
    """Models and retain data."""
    reference = load_model(cfg.reference, place, cfg.tracking) if cfg.reference else None
    return Inputs(
        model=load_model(cfg.model, place, cfg.tracking),
        reference=reference,
        level=load_model(cfg.retrained, place, cfg.tracking) if cfg.retrained else reference,
        retain=load_data(cfg.retain, place, "retain", cfg.hold_out),
        background=load_data(cfg.background, place, "background") if cfg.background else None,
    )


def load_batches(cfg: ServiceConfig, fresh: Sequence[Taken], place: Place) -> list[DataRef]:
    """All new rows as one set, and after it those of each batch."""
    folder = str(fresh[0].rows.parent)
    inbox = f"{cfg.store.rstrip('/')}/inbox"
    uris = [folder] if len(fresh) > 1 else [str(fresh[0].rows)]
    uris += [str(one.rows) for one in fresh]
    origins = [inbox, *(f"{inbox}/{one.batch}" for one in fresh)]
    return [
        load_data(DataConfig(uri=uri), place, "forget").model_copy(update={"origin": origin})
        for uri, origin in zip(uris, origins, strict=True)
    ]


def solve_anew(
    cfg: ServiceConfig,
    run: TrackedRun,
    inputs: Inputs,
    fresh: Sequence[Taken],
    earlier: Sequence[Accepted],
    place: Place,
) -> Solved:
    """From the new batches' rows and the old ones' moments to a registered version."""
    model, retain, background = inputs.model, inputs.retain, inputs.background
    forget, *parts = load_batches(cfg, fresh, place)
    kept = (retain, background) if background else (retain,)
    sets = measured_sets(cfg, forget, retain, place)

    special = cfg.target.suppress_special
    counted = count(model, forget, retain, background, cfg.collect, special, place)
    band = pinned(model, cfg.select, place)
    sites = select(
        model, forget, retain, counted, band, cfg.collect, cfg.target, place, inputs.reference
    )
    pin(model, cfg.select, sites, place)
    retain_keys = tuple(
        collect_retain(model, data, sites, counted, cfg.collect, place) for data in kept
    )
    new = [
        collect_forget(model, part, sites, cfg.target, cfg.collect, place, inputs.reference)
        for part in parts
    ]
    forget_keys = merge_forget((*moments_of(earlier), *new), place)
    edit = solve(model, retain_keys, forget_keys, sites, cfg.ridge, cfg.target, place)
    unreached = find_unreached(model, forget, edit, cfg.collect, place)
    strength = calibrate(
        model, edit, forget, retain, sites, counted, cfg.strength, cfg.collect, place,
        inputs.level, max((one.nats for one in earlier), default=None),
    )  # fmt: skip
    influence = None
    if cfg.audit is not None:
        basis = Moments(
            retain=retain_keys,
            forget=forget_keys,
            fresh=tuple(new),
            earlier=tuple(moments_of(earlier)),
        )
        influence = audit(
            model, basis, edit, forget, retain, sites, counted, cfg.ridge, cfg.target,
            strength, cfg.collect, cfg.audit, place, inputs.reference,
        )  # fmt: skip
    edited = apply(model, edit, strength, place)
    scores = score_all(cfg, model, inputs.level, sites, edited, sets, place)
    exams = examine_all(cfg, model, inputs.level, edited, place)
    if exams is not None:
        log_exams(run, exams, place)
    about = about_batches(fresh, earlier)
    registered = register(
        run, model, sets, sites, edit, strength, edited, scores, cfg.gate, place, exams, about,
        influence,
    )  # fmt: skip
    moments = {one.batch: ref for one, ref in zip(fresh, new, strict=True)}
    return Solved(
        moments, sites, retain_keys, edit, strength, registered, unreached, edited, scores,
        influence,
    )  # fmt: skip


def about_batches(fresh: Sequence[Taken], earlier: Sequence[Accepted]) -> dict[str, str]:
    """Tags of the version: which batches it honours, and how many requests."""
    num_requests = sum(len(one.requests) for one in fresh)
    num_requests += sum(one.num_requests for one in earlier)
    names = [*(one.batch for one in earlier), *(one.batch for one in fresh)]
    return {"batches": ",".join(names), "requests": str(num_requests)}
