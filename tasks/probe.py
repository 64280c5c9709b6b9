"""Stage attack, first half: what one checkpoint still knows of the forget set, way by way.

A probe is a way to attack, or none.  Each has its own artifact, so a killed run goes on with the
next one, and the unedited model is probed once for all edits of it.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import Field

from grom.attack_config import AttackConfig
from grom.config import CollectConfig, Config
from grom.evaluate import ExampleScore
from grom.prompts import PREFIXES
from tasks.artifacts import Artifact
from tasks.codecs import read_json, write_json, write_table
from tasks.place import DataRef, ModelRef, Place
from tasks.subject import QUANTISED, CannotProbe, Probe, Subject

logger = logging.getLogger(__name__)


class Reading(Config):
    """What a probe found."""

    artifact: Artifact | None = None
    probability: float = math.nan
    extraction_strength: float = math.nan
    num_examples: int = 0
    details: dict[str, Any] = Field(default_factory=dict)
    missing: str = ""
    """Why there are no numbers; empty if there are."""


@task(tags=["gpu"])
def probe(
    label: str,
    model: ModelRef,
    forget: DataRef,
    probes: tuple[Probe, ...],
    config: AttackConfig,
    collect: CollectConfig,
    place: Place,
    quantise_head: bool = False,
) -> dict[str, Reading]:
    """Measure a checkpoint under each probe.  Returns the readings by the probes' names.

    The checkpoint is opened once for all probes but the quantised loads, which open it afresh.
    """
    subject = Subject(label, model, forget, config, collect, quantise_head=quantise_head)
    # Quantised loads first, before the plain model takes memory beside them.
    ordered = sorted(probes, key=lambda one: one.kind not in QUANTISED)
    return {one.name: _reading(subject, one, _facts(subject, model, one), place) for one in ordered}


def _facts(subject: Subject, model: ModelRef, one: Probe) -> dict[str, Any]:
    relearn = subject.config.relearn.model_dump(mode="json")
    settings: dict[str, Any] = {
        "prefix": PREFIXES.get(one.variant),
        "relearn": relearn,
        "rest": relearn["slice_share"],
        **dict.fromkeys(QUANTISED, subject.quantise_head),
    }
    return {
        "probe": one.kind,
        "variant": one.variant,
        "settings": settings.get(one.kind),
        "model": model.fingerprint,
        "data": subject.forget.facts,
        "max_examples": subject.config.max_examples,
        "text_window": subject.collect.text_window,
    }


def _reading(subject: Subject, one: Probe, facts: dict[str, Any], place: Place) -> Reading:
    started = time.monotonic()

    def write(out: Path) -> None:
        found = subject.measure(one)
        write_table(out / "scores.parquet", found.scores, ExampleScore)
        write_json(out / "reading.json", {**found.summary, "details": found.details})

    try:
        artifact, reused = place.cached("attack", facts, write)
    except (CannotProbe, ImportError) as error:
        # What could not be tried is said, and not kept: the next run tries again.
        logger.warning("attack %s: %s not measured: %s", subject.label, one.name, error)
        return Reading(missing=str(error))
    reading = Reading(artifact=artifact, **read_json(place.fetch(artifact) / "reading.json"))
    how = "in the store" if reused else f"{time.monotonic() - started:.0f} s"
    logger.info(
        "attack %s: %s probability %.3f (%s)", subject.label, one.name, reading.probability, how
    )
    return reading
