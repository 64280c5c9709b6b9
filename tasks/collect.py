"""Stage collect: one forward pass over a set, its key moments into the store."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from prefect import task

from grom.collect import ExampleStatistics, ForgetPlan, collect_moments
from grom.config import CollectConfig, TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.sites import unembedding_VD
from tasks.codecs import load_moments, read_json, save_moments, write_json, write_table
from tasks.count import read_alpha
from tasks.models import OpenModel, open_model
from tasks.place import CollectRef, CountRef, DataRef, ModelRef, Place, SitesRef
from tasks.progress import tracked
from tasks.select import chosen_sites
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)


@task(tags=["gpu"])
def collect_retain(
    model: ModelRef,
    retain: DataRef,
    sites: SitesRef,
    counted: CountRef,
    config: CollectConfig,
    place: Place,
) -> CollectRef:
    """Moments of the retain examples that are not held out, or of the background.  Returns their
    reference."""
    facts = common_facts(model, sites, config) | {"data": retain.facts, "part": "seen"}
    total = counted.num_background if retain.role == "background" else counted.num_seen

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=config.text_window)
        stream = batch_stream(opened.rendering, retain, config, part="seen")
        _collect(opened, sites, tracked(stream, f"collect {retain.role}", total), None, folder)

    return _cached(facts, write, place)


@task(tags=["gpu"])
def collect_forget(
    model: ModelRef,
    forget: DataRef,
    sites: SitesRef,
    counted: CountRef,
    target: TargetConfig,
    config: CollectConfig,
    place: Place,
    reference: ModelRef | None = None,
) -> CollectRef:
    """Moments of the forget set, with the replacement of each token.  Returns their reference."""
    facts = common_facts(model, sites, config) | {
        "data": forget.facts,
        "count": counted.artifact.key,
        "replace": target.kind == "replacement",
        "reference": reference and reference.fingerprint,
    }

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=config.text_window)
        plan = forget_plan(opened, counted, target, config, place, reference)
        stream = batch_stream(opened.rendering, forget, config)
        _collect(opened, sites, tracked(stream, "collect forget", counted.num_forget), plan, folder)

    return _cached(facts, write, place)


def common_facts(model: ModelRef, sites: SitesRef, config: CollectConfig) -> dict[str, Any]:
    """What the moments of either set depend on."""
    return {
        "model": model.fingerprint,
        "kind": sites.kind,
        "layers": list(sites.layers),
        "joint": sites.joint,
        "text_window": config.text_window,
        **config.facts,
    }


def forget_plan(
    opened: OpenModel,
    counted: CountRef,
    target: TargetConfig,
    config: CollectConfig,
    place: Place,
    reference: ModelRef | None,
) -> ForgetPlan:
    """alpha, and whom to ask for replacements.

    Raises:
        ConfigError: the reference model has another vocabulary.
    """
    replace, adviser = target.kind == "replacement", None
    if replace and reference is not None:
        adviser = open_model(Path(reference.folder), text_window=config.text_window).model
        sizes = [len(unembedding_VD(model)) for model in (opened.model, adviser)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{reference.source}: vocabulary of {sizes[1]} tokens, the model has {sizes[0]}. "
                "Take a reference of the same series."
            )
    return ForgetPlan(read_alpha(counted, place), replace, adviser)


def read_moments(ref: CollectRef, site_name: str, place: Place) -> KeyMoments:
    """Moments of one site."""
    return load_moments(place.fetch(ref.artifact), site_name)


def read_rms(ref: CollectRef, place: Place) -> float:
    """Mean root mean square of the final residual on the forget set."""
    return float(read_json(place.fetch(ref.artifact) / "collected.json")["mean_rms"])


def _cached(facts: dict[str, Any], write: Any, place: Place) -> CollectRef:
    started = time.perf_counter()
    artifact, reused = place.cached("collect", facts, write)
    seconds = time.perf_counter() - started
    logger.info("collect: %s in %.1f s", "found in the store" if reused else "written", seconds)
    return CollectRef(artifact=artifact, reused=reused, seconds=seconds)


def _collect(
    opened: OpenModel, sites: SitesRef, stream: Any, plan: ForgetPlan | None, folder: Path
) -> None:
    chosen = chosen_sites(opened.model, sites)
    collected = collect_moments(opened.model, chosen, stream, plan, joint=sites.joint)
    for name, moments in collected.moments.items():
        save_moments(folder, name, moments)
    write_table(folder / "examples.parquet", collected.examples, ExampleStatistics)
    mean_rms = collected.mean_rms if collected.rms_tokens else None
    write_json(folder / "collected.json", {"mean_rms": mean_rms})
