"""The main flow.  It reads as the table of contents."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.config import UnlearnConfig
from grom.config import Config
from tasks.apply import apply
from tasks.calibrate import calibrate
from tasks.collect import collect_forget, collect_retain
from tasks.count import count
from tasks.evaluate import evaluate
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
        sites = select(model, forget, retain, counted, cfg.select, cfg.collect, place, reference)
        retain_keys = tuple(
            collect_retain(model, data, sites, counted, cfg.collect, place) for data in kept
        )
        forget_keys = collect_forget(
            model, forget, sites, counted, cfg.target, cfg.collect, place, reference
        )
        edit = solve(model, retain_keys, forget_keys, sites, counted, cfg.ridge, cfg.target, place)
        strength = calibrate(
            model, edit, forget, retain, sites, counted, cfg.strength, cfg.collect, place, level
        )
        if cfg.collect.order == "sequential":
            edit = sweep_sequential(
                model, kept, forget, forget_keys, strength, sites, counted, cfg.ridge,
                cfg.target, cfg.collect, place, reference,
            )  # fmt: skip
            strength = of_sweep(strength, edit)
        edited = apply(model, edit, strength, place)
        scores = score_all(cfg, model, edited, sets, place)
        registered = register(
            run, model, sets, sites, edit, strength, edited, scores, cfg.gate, place
        )
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


def measured_sets(cfg: UnlearnConfig, forget: DataRef, retain: DataRef, place: Place) -> Sets:
    """The sets that are measured, by name: what is forgotten, what is kept, and further ones."""
    sets: Sets = {
        "forget": (forget, "all"),
        "retain, seen": (retain, "seen"),
        "retain, held out": (retain, "held out"),
    }
    for name, data in cfg.also.items():
        sets[name] = (load_data(data, place, name), "all")
    return sets


def score_all(
    cfg: UnlearnConfig, model: ModelRef, edited: CheckpointRef, sets: Sets, place: Place
) -> tuple[ScoreRef, ...]:
    """Scores of the unedited model, of the edited one, and of each quantised load of it."""
    folder = str(place.fetch(edited.artifact))
    checkpoints: list[tuple[str, str, str, str | None]] = [
        ("unedited", model.folder, model.fingerprint, None),
        ("edited", folder, edited.fingerprint, None),
    ]
    for bits in cfg.evaluate.quantisations:
        checkpoints.append((f"edited {bits}", folder, edited.fingerprint, bits))
    return tuple(
        evaluate(label, where, key, sets, cfg.evaluate, cfg.collect, place, bits)
        for label, where, key, bits in checkpoints
    )
