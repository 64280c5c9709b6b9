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
        model = load_model(cfg.model, place)
        reference = load_model(cfg.reference, place) if cfg.reference else None
        level = load_model(cfg.retrained, place) if cfg.retrained else reference
        forget = load_data(cfg.forget, place, "forget")
        retain = load_data(cfg.retain, place, "retain", cfg.hold_out)
        background = load_data(cfg.background, place, "background") if cfg.background else None
        also = {name: load_data(data, place, name) for name, data in cfg.also.items()}
        sets: Sets = {
            "forget": (forget, "all"),
            "retain, seen": (retain, "seen"),
            "retain, held out": (retain, "held out"),
            **{name: (data, "all") for name, data in also.items()},
        }

        counted = count(
            model, forget, retain, background, cfg.collect, cfg.target.suppress_special, place
        )
        sites = select(model, forget, retain, counted, cfg.select, cfg.collect, place, reference)
        kept = [collect_retain(model, retain, sites, counted.num_seen, cfg.collect, place)]
        if background:
            kept.append(
                collect_retain(model, background, sites, counted.num_background, cfg.collect, place)
            )
        moved = collect_forget(
            model, forget, sites, counted, cfg.target, cfg.collect, place, reference
        )
        edit = solve(model, tuple(kept), moved, sites, counted, cfg.ridge, cfg.target, place)
        calibrated = calibrate(
            model, edit, forget, retain, sites, counted, cfg.strength, cfg.collect, place, level
        )
        if cfg.collect.order == "sequential":
            edit = sweep_sequential(
                model, retain, forget, moved, calibrated, sites, counted, cfg.ridge,
                cfg.target, cfg.collect, place, reference,
            )  # fmt: skip
        edited = apply(model, edit, calibrated, place)
        folder = place.fetch(edited.artifact)

        checkpoints = [
            ("unedited", model.folder, model.fingerprint, None),
            ("edited", str(folder), edited.fingerprint, None),
            *(
                (f"edited {bits}", str(folder), edited.fingerprint, bits)
                for bits in cfg.evaluate.quantisations
            ),
        ]
        scores = tuple(
            evaluate(label, where, key, sets, cfg.evaluate, cfg.collect, place, bits)
            for label, where, key, bits in checkpoints
        )
        registered = register(
            run, model, sets, sites, edit, calibrated, edited, scores, cfg.gate, place
        )
    return Outcome(
        place=place,
        before=model,
        counted=counted,
        layers=sites.layers,
        edit=edit,
        calibrated=calibrated,
        edited=edited,
        scores=scores,
        registered=registered,
        reused_retain=kept[0].reused,
    )
