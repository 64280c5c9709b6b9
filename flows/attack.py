"""Attack an edited checkpoint: is what it forgot removed, or only suppressed?"""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from grom.attack_config import AttackConfig
from grom.config import CollectConfig, Config, DataConfig, ModelConfig
from tasks.attack import Attacked, edited_parts, judge_attacks, log_attacks, probes_of
from tasks.load import load_data, load_model
from tasks.place import Place
from tasks.probe import probe
from tasks.register import tracked_run
from tasks.tracking import Tracking


class AttackRun(Config):
    """One round of attacks, whole."""

    edited: ModelConfig
    """The model that must have forgotten."""
    unedited: ModelConfig
    """The same model before the edit: what there is to bring back."""
    retrained: ModelConfig | None = None
    """A model trained without the forget set: what it gains by relearning is no recovery."""
    forget: DataConfig
    """What must be forgotten."""
    attack: AttackConfig = AttackConfig()
    collect: CollectConfig = CollectConfig()
    tracking: Tracking = Tracking()
    work: str = "grom-work"
    """Folder for scratch files and the embedded MLflow and Prefect."""
    store: str | None = None
    """Root of the artifacts.  Not given: `<work>/store`."""


class AttackOutcome(Config):
    """What a round of attacks gives."""

    run_id: str
    place: Place
    attacked: Attacked


@flow(name="attack")
def attack(cfg: AttackRun) -> AttackOutcome:
    """All attacks on one edited checkpoint, top to bottom."""
    place = Place(work=cfg.work, store=cfg.store or str(Path(cfg.work) / "store"))
    with tracked_run("attack", cfg.tracking, place, cfg.model_dump(mode="json")) as run:
        edited = load_model(cfg.edited, place, cfg.tracking)
        unedited = load_model(cfg.unedited, place, cfg.tracking)
        forget = load_data(cfg.forget, place, "forget")
        parts = edited_parts(unedited, edited, cfg.attack)
        models = {"unedited": unedited, "edited": edited}
        probes = {role: probes_of(cfg.attack, role) for role in (*models, "retrained")}
        if cfg.retrained is not None and probes["retrained"]:
            models["retrained"] = load_model(cfg.retrained, place, cfg.tracking)
        head = parts.quantise_head
        found = {
            role: probe(role, model, forget, probes[role], cfg.attack, cfg.collect, place, head)
            for role, model in models.items()
        }
        attacked = judge_attacks(
            unedited, edited, parts, found["unedited"], found["edited"],
            found.get("retrained", {}), cfg.attack, place,
        )  # fmt: skip
        log_attacks(run, attacked, place)
    return AttackOutcome(run_id=run.run_id, place=place, attacked=attacked)
