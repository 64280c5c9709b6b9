"""Stage collect: one forward pass over a set, its key moments into the store; and the moments of
the union of forget sets, from those of each."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from prefect import task

from grom.batches import Batch
from grom.collect import Collected, ForgetPlan, collect_moments
from grom.config import CollectConfig, TargetConfig
from grom.errors import ConfigError
from grom.merge import merged
from grom.moments import KeyMoments
from grom.sites import unembedding_VD
from tasks.artifacts import canonical_json
from tasks.codecs import read_json
from tasks.models import OpenModel, open_model
from tasks.place import CollectRef, CountRef, DataRef, ModelRef, Place, SitesRef
from tasks.progress import tracked
from tasks.request_keys import KeyWriter
from tasks.select import chosen_sites
from tasks.statistics import load_collected, load_moments, moment_names, save_collected
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
    facts = common_facts(model, sites, config) | config.facts
    facts |= {"data": retain.facts, "part": "seen"}
    total = counted.num_background if retain.role == "background" else counted.num_seen

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=config.text_window)
        stream = batch_stream(opened.rendering, retain, config, part="seen")
        stream = tracked(stream, f"collect {retain.role}", total)
        save_collected(folder, _collect(opened, sites, stream, None), facts)

    return _cached(facts, write, place)


@task(tags=["gpu"])
def collect_forget(
    model: ModelRef,
    forget: DataRef,
    sites: SitesRef,
    target: TargetConfig,
    config: CollectConfig,
    place: Place,
    reference: ModelRef | None = None,
) -> CollectRef:
    """Moments of a forget set, by token and replacement.  Returns their reference.

    They depend on the model, the sites and these examples, on nothing else: not on the retain set,
    nor on what is forgotten besides.  So examples go through the model one by one, for in a batch
    the neighbours of an example change the last digits of its keys.  With `keep_request_keys` the
    keys are kept beside the moments.
    """
    replace = target.kind == "replacement"
    facts = common_facts(model, sites, config) | {
        "data": [forget.facts],
        "replace": replace,
        "reference": reference.fingerprint if replace and reference else None,
    }
    if config.keep_request_keys:
        facts["request_keys"] = True

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=config.text_window)
        plan = forget_plan(opened, target, config, reference)
        stream = batch_stream(opened.rendering, forget, config, alone=True)
        stream = tracked(stream, "collect forget", forget.num_rows)
        with KeyWriter(folder) if config.keep_request_keys else nullcontext() as keep:
            collected = _collect(opened, sites, stream, dataclasses.replace(plan, keep=keep))
        save_collected(folder, collected, facts)

    return _cached(facts, write, place)


@task
def merge_forget(parts: tuple[CollectRef, ...], place: Place) -> CollectRef:
    """Moments of the union of forget sets from those of each.  Returns their reference.

    No text is read and no model run.  The order of the parts does not matter.

    Raises:
        ConfigError: there are no parts, they were collected from different models, sites or
            references, or one of them is there twice.
    """
    if not parts:
        raise ConfigError("no forget moments to merge: name at least one batch")
    if len(parts) == 1:
        return parts[0]
    ordered = sorted(parts, key=lambda part: part.artifact.key)
    facts = united_facts([read_facts(part, place) for part in ordered])
    facts["parts"] = [part.artifact.key for part in ordered]

    def write(folder: Path) -> None:
        for name in moment_names(place.fetch(ordered[0].artifact)):
            # One site at a time: the moments of all may not fit.
            stored = (load_collected(place.fetch(part.artifact), [name]) for part in ordered)
            save_collected(folder, merged(stored), facts)

    return _cached(facts, write, place)


def united_facts(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the union of forget sets depends on.

    Raises:
        ConfigError: see `merge_forget`.
    """
    data = [facts for part in parts for facts in part["data"]]
    if len({canonical_json(facts) for facts in data}) < len(data):
        raise ConfigError("a forget set is to be merged with itself; name each batch once")
    own = ("data", "parts", "request_keys")
    common, *others = ({k: v for k, v in part.items() if k not in own} for part in parts)
    for other in others:
        if changed := sorted(key for key in common if common[key] != other.get(key)):
            raise ConfigError(
                f"forget moments with different {' and '.join(changed)} do not add up. Merge what "
                "was collected with the same settings, or collect the batch again from its text."
            )
    return {**common, "data": sorted(data, key=canonical_json)}


def common_facts(model: ModelRef, sites: SitesRef, config: CollectConfig) -> dict[str, Any]:
    """What the moments of either set depend on."""
    return {
        "model": model.fingerprint,
        "kind": sites.kind,
        "layers": list(sites.layers),
        "joint": sites.joint,
        "text_window": config.text_window,
    }


def forget_plan(
    opened: OpenModel, target: TargetConfig, config: CollectConfig, reference: ModelRef | None
) -> ForgetPlan:
    """Whether replacements are wanted, and whom to ask for them.

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
    return ForgetPlan(replace, adviser)


def read_moments(ref: CollectRef, site_name: str, place: Place) -> KeyMoments:
    """Moments of one site."""
    return load_moments(place.fetch(ref.artifact), site_name)


def read_rms(ref: CollectRef, place: Place) -> float:
    """Mean root mean square of the final residual on the forget set."""
    found = read_json(place.fetch(ref.artifact) / "collected.json")
    return float(found["rms_sum"] / found["rms_tokens"])


def read_facts(ref: CollectRef, place: Place) -> dict[str, Any]:
    """What determined the moments."""
    facts: dict[str, Any] = read_json(place.fetch(ref.artifact) / "collected.json")["facts"]
    return facts


def _cached(facts: dict[str, Any], write: Any, place: Place) -> CollectRef:
    started = time.perf_counter()
    artifact, reused = place.cached("collect", facts, write)
    seconds = time.perf_counter() - started
    logger.info("collect: %s in %.1f s", "found in the store" if reused else "written", seconds)
    return CollectRef(artifact=artifact, reused=reused, seconds=seconds)


def _collect(
    opened: OpenModel, sites: SitesRef, stream: Iterable[Batch], plan: ForgetPlan | None
) -> Collected:
    chosen = chosen_sites(opened.model, sites)
    return collect_moments(opened.model, chosen, stream, plan, joint=sites.joint)
