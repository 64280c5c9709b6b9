"""The main flow.  It reads as the table of contents."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.config import JobConfig, UnlearnConfig
from flows.evaluate import find_benchmark
from grom.config import Config
from grom.pictures import EDITED, RETRAINED, UNEDITED
from tasks.apply import apply
from tasks.audit import Moments, audit
from tasks.calibrate import calibrate
from tasks.collect import collect_forget, collect_retain
from tasks.count import count
from tasks.evaluate import evaluate
from tasks.exam import Exams, examine
from tasks.exam_log import log_exams
from tasks.judge import REFERENCE
from tasks.load import load_data, load_model
from tasks.place import (
    CalibrationRef,
    CheckpointRef,
    CountRef,
    DataRef,
    EditRef,
    ModelRef,
    Place,
    ScoreRef,
    SitesRef,
)
from tasks.register import Registered, Sets, register, tracked_run
from tasks.select import select
from tasks.solve import solve
from tasks.sweep import sweep_sequential


class Outcome(Config):
    """What a run gives: references and numbers, never tensors."""

    place: Place
    before: ModelRef
    counted: CountRef
    layers: tuple[int, ...]
    edit: EditRef
    calibrated: CalibrationRef
    edited: CheckpointRef
    scores: tuple[ScoreRef, ...]
    registered: Registered
    reused_retain: bool
    """The retain moments were in the store already."""


@flow(name="unlearn")
def unlearn(cfg: UnlearnConfig) -> Outcome:
    """One unlearning run, top to bottom.  Returns references to everything it made."""
    place = Place(work=cfg.work, store=cfg.store or str(Path(cfg.work) / "store"))
    with tracked_run(cfg.name, cfg.tracking, place, cfg.model_dump(mode="json")) as run:
        model = load_model(cfg.model, place, cfg.tracking)
        reference = load_model(cfg.reference, place, cfg.tracking) if cfg.reference else None
        level = load_model(cfg.retrained, place, cfg.tracking) if cfg.retrained else reference
        forget = load_data(cfg.forget, place, "forget")
        retain = load_data(cfg.retain, place, "retain", cfg.hold_out)
        background = load_data(cfg.background, place, "background") if cfg.background else None
        kept = (retain, background) if background else (retain,)
        sets = measured_sets(cfg, forget, retain, place)

        counted = count(
            model, forget, retain, background, cfg.collect, cfg.target.suppress_special, place
        )
        sites = select(
            model, forget, retain, counted, cfg.select, cfg.collect, cfg.target, place, reference
        )
        retain_keys = tuple(
            collect_retain(model, data, sites, counted, cfg.collect, place) for data in kept
        )
        forget_keys = collect_forget(
            model, forget, sites, cfg.target, cfg.collect, place, reference
        )
        edit = solve(model, retain_keys, forget_keys, sites, cfg.ridge, cfg.target, place)
        strength = calibrate(
            model, edit, forget, retain, sites, counted, cfg.strength, cfg.collect, place, level
        )
        if cfg.collect.order == "sequential":
            edit = sweep_sequential(
                model, kept, forget, forget_keys, strength, sites, counted, cfg.ridge,
                cfg.target, cfg.collect, place, reference,
            )  # fmt: skip
            strength = of_sweep(strength, edit)
        influence = None
        if cfg.audit is not None:
            moments = Moments(retain=retain_keys, forget=forget_keys, fresh=(forget_keys,))
            influence = audit(
                model, moments, edit, forget, retain, sites, counted, cfg.ridge, cfg.target,
                strength, cfg.collect, cfg.audit, place, reference,
            )  # fmt: skip
        edited = apply(model, edit, strength, place)
        scores = score_all(cfg, model, level, sites, edited, sets, place)
        exams = examine_all(cfg, model, level, edited, place)
        if exams is not None:
            log_exams(run, exams, place)
        registered = register(
            run, model, sets, sites, edit, strength, edited, scores, cfg.gate, place, exams,
            influence=influence,
        )  # fmt: skip
    return Outcome(
        place=place,
        before=model,
        counted=counted,
        layers=sites.layers,
        edit=edit,
        calibrated=strength,
        edited=edited,
        scores=scores,
        registered=registered,
        reused_retain=retain_keys[0].reused,
    )


def of_sweep(frozen: CalibrationRef, edit: EditRef) -> CalibrationRef:
    """What a sweep at a calibrated beta came to: its own nats, and where beta is from."""
    stopped_by = frozen.stopped_by
    if stopped_by != "given":
        stopped_by += " (of the frozen edit)"
    nats = frozen.beta * edit.nats_per_beta
    return frozen.model_copy(update={"nats": nats, "stopped_by": stopped_by})


def measured_sets(cfg: JobConfig, forget: DataRef, retain: DataRef, place: Place) -> Sets:
    """The sets that are measured, by name: what is forgotten, what is kept, and further ones."""
    sets: Sets = {
        "forget": (forget, "all"),
        "retain, seen": (retain, "seen"),
        "retain, held out": (retain, "held out"),
    }
    if (paraphrased := forget.paraphrased()) is not None:
        sets["forget, paraphrased"] = (paraphrased, "all")
    for name, data in cfg.also.items():
        sets[name] = (load_data(data, place, name), "all")
    return sets


def score_all(
    cfg: JobConfig,
    model: ModelRef,
    level: ModelRef | None,
    sites: SitesRef,
    edited: CheckpointRef,
    sets: Sets,
    place: Place,
) -> tuple[ScoreRef, ...]:
    """Scores of the unedited model, of the edited one, of each quantised load of it, and of the
    retrained model, or of the reference where the gate compares with it."""
    folder = str(place.fetch(edited.artifact))
    head = cfg.evaluate.quantise_head
    head = sites.kind == "head" if head is None else head
    checkpoints: list[tuple[str, str, str, str | None]] = [
        (UNEDITED, model.folder, model.fingerprint, None),
        (EDITED, folder, edited.fingerprint, None),
    ]
    for scheme in cfg.evaluate.quantisations:
        checkpoints.append((f"{EDITED} {scheme}", folder, edited.fingerprint, scheme))
    if level is not None and (cfg.retrained or cfg.gate.reference_bands):
        name = RETRAINED if cfg.retrained else REFERENCE
        checkpoints.append((name, level.folder, level.fingerprint, None))
    return tuple(
        evaluate(
            label, where, key, sets, cfg.evaluate, cfg.collect, place, scheme,
            head and scheme is not None,
        )
        for label, where, key, scheme in checkpoints
    )  # fmt: skip


def examine_all(
    cfg: JobConfig, model: ModelRef, level: ModelRef | None, edited: CheckpointRef, place: Place
) -> Exams | None:
    """The configured benchmark on the unedited, the edited and the retrained model, if any."""
    if cfg.benchmark is None:
        return None
    benchmark = find_benchmark(cfg.benchmark)
    folder = str(place.fetch(edited.artifact))
    changed = ModelRef(folder=folder, fingerprint=edited.fingerprint, source=EDITED)
    asked = [
        examine(UNEDITED, model, benchmark, cfg.collect, place),
        examine(EDITED, changed, benchmark, cfg.collect, place),
    ]
    reference = None
    if cfg.retrained is not None and level is not None:
        reference = examine(RETRAINED, level, benchmark, cfg.collect, place)
        asked.append(reference)
    return Exams(benchmark=benchmark, exams=tuple(asked), reference=reference)
