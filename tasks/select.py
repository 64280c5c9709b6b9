"""Stage select: which layers are edited, and whether the machine can hold the run."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from prefect import task
from torch import nn

from grom.config import CollectConfig, SelectConfig, TargetConfig
from grom.errors import ConfigError, NotEnoughMemory
from grom.memory import GB, Forecast, RunShape, forecast
from grom.select import LayerScore, best_band, layer_scores, sites_of
from grom.sites import Site, find_sites, unembedding_VD
from tasks.count import read_alpha
from tasks.models import OpenModel, open_model
from tasks.place import CountRef, DataRef, ModelRef, Place, SitesRef
from tasks.progress import tracked
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)
MAX_JOINT_INPUTS = 12_288
"""Up to here a joint system is the default: 1.2 GB for each of its matrices."""
DEFAULT_BAND_SHARE = 5
"""The band is a fifth of the layers unless its width is given."""


@task(tags=["gpu"])
def select(
    model: ModelRef,
    forget: DataRef,
    retain: DataRef,
    counted: CountRef,
    config: SelectConfig,
    collect: CollectConfig,
    target: TargetConfig,
    place: Place,
    reference: ModelRef | None = None,
) -> SitesRef:
    """Choose the sites, and refuse a run that does not fit.  Returns the sites' reference.

    Raises:
        ConfigError: layers that the model does not have.
        NotEnoughMemory: the forecast exceeds what is free; names the largest term.
    """
    opened = open_model(Path(model.folder), text_window=collect.text_window)
    num_layers = len(find_sites(opened.model)) - 1
    width = len(config.layers or ()) or config.width or max(1, num_layers // DEFAULT_BAND_SHARE)
    joint = solves_jointly(opened.model, config, collect, width)
    check_memory(opened.model, config, counted, collect, target, reference, width, joint)
    facts = {
        "model": model.fingerprint,
        "count": counted.artifact.key,
        "forget": forget.facts,
        "retain": retain.facts,
        "select": config.model_dump(mode="json"),
        "width": width,
        "order": collect.order,
    }

    def write(folder: Path) -> None:
        scores: list[LayerScore] = []
        layers = config.layers or ()
        if config.site == "mlp" and config.layers is None:
            scores = _scores(opened, forget, retain, counted, config, collect, place)
            layers = best_band(scores, width)
        sites = sites_of(opened.model, config.site, layers)
        (folder / "sites.json").write_text(
            json.dumps(
                {
                    "kind": config.site,
                    "joint": joint,
                    "layers": [site.layer for site in sites if site.layer is not None],
                    "scores": [asdict(score) | {"score": score.score} for score in scores],
                }
            )
        )

    artifact, _ = place.cached("select", facts, write)
    chosen = json.loads((place.fetch(artifact) / "sites.json").read_text())
    how = "solved jointly" if joint else "solved one by one"
    logger.info("select: %s, layers %s, %s", chosen["kind"], chosen["layers"], how)
    return SitesRef(
        artifact=artifact,
        kind=chosen["kind"],
        layers=tuple(chosen["layers"]),
        joint=chosen["joint"],
    )


def solves_jointly(
    model: nn.Module, config: SelectConfig, collect: CollectConfig, width: int
) -> bool:
    """Whether the band is solved as one system.

    Raises:
        ConfigError: asked for where it has no meaning.
    """
    possible = config.site == "mlp" and collect.order == "frozen"
    if config.joint and not possible:
        raise ConfigError(
            "select.joint needs several MLP sites and frozen keys; set `joint: false`, or "
            "`site: mlp` and `keys: frozen`"
        )
    if config.joint is not None:
        return config.joint
    num_inputs = find_sites(model)[0].weight_MN(model).shape[1]
    return possible and width > 1 and width * num_inputs <= MAX_JOINT_INPUTS


def _scores(
    opened: OpenModel,
    forget: DataRef,
    retain: DataRef,
    counted: CountRef,
    config: SelectConfig,
    collect: CollectConfig,
    place: Place,
) -> list[LayerScore]:
    forget_size, seen_size = (counted.num_forget, counted.num_seen)
    sample = config.sample_examples
    forget_batches = batch_stream(opened.rendering, forget, collect, sample=(sample, forget_size))
    retain_batches = batch_stream(
        opened.rendering, retain, collect, part="seen", sample=(sample, seen_size)
    )
    return layer_scores(
        opened.model,
        tracked(forget_batches, "select forget", min(sample, forget_size)),
        tracked(retain_batches, "select retain", min(sample, seen_size)),
        read_alpha(counted, place),
    )


def chosen_sites(model: nn.Module, sites: SitesRef) -> tuple[Site, ...]:
    """The sites themselves."""
    return sites_of(model, sites.kind, sites.layers)


def check_memory(
    model: nn.Module,
    config: SelectConfig,
    counted: CountRef,
    collect: CollectConfig,
    target: TargetConfig,
    reference: ModelRef | None,
    width: int,
    joint: bool,
) -> Forecast:
    """Log the memory forecast; refuse what does not fit.

    Raises:
        NotEnoughMemory: names the largest term.
    """
    site = find_sites(model)[0 if config.site == "mlp" else -1]
    num_outputs, num_inputs = site.weight_MN(model).shape
    vocab_size, hidden_size = unembedding_VD(model).shape
    num_systems = 1 if config.site == "head" or joint else width
    shape = RunShape(
        model_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        reference_bytes=0 if reference is None else _weight_bytes(Path(reference.folder)),
        num_systems=num_systems,
        num_inputs=num_inputs * width if joint else num_inputs,
        num_outputs=num_outputs if config.site == "mlp" else counted.num_forget_types,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=len(find_sites(model)) - 1,
        num_forget_types=counted.num_forget_types,
        num_forget_pairs=counted.num_forget_tokens if target.kind == "replacement" else 0,
        batch_tokens=collect.batch_tokens,
        probe_tokens=300 * collect.text_window,
    )
    expected = forecast(shape)
    free = _free_bytes(collect.memory_gb) + shape.model_bytes
    logger.info(
        "select: memory forecast %.1f GB while %s, largest term %s; %.1f GB free",
        expected.peak_bytes / GB,
        expected.peak_phase,
        expected.largest_term,
        free / GB,
    )
    if expected.peak_bytes > free:
        raise NotEnoughMemory(expected.peak_bytes / GB, free / GB, expected.largest_term)
    return expected


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _free_bytes(limit_gb: float | None) -> float:
    """Memory this process may still take, on the device that runs the model."""
    if torch.cuda.is_available():
        free = float(torch.cuda.mem_get_info()[0])
    else:
        free = float(psutil.virtual_memory().available)
    return free if limit_gb is None else min(free, limit_gb * GB)
