"""Stage evaluate: how well a checkpoint knows each set, at a given precision."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task

from grom.config import CollectConfig, EvaluateConfig
from grom.evaluate import ExampleScore, mean_score, score_examples
from tasks.codecs import read_json, write_json, write_table
from tasks.models import OpenModel, open_model
from tasks.place import DataRef, Part, Place, ScoreRef
from tasks.progress import tracked
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)


@task(tags=["gpu"])
def evaluate(
    label: str,
    folder: str,
    fingerprint: str,
    sets: dict[str, tuple[DataRef, Part]],
    config: EvaluateConfig,
    collect: CollectConfig,
    place: Place,
    quantisation: str | None = None,
) -> ScoreRef:
    """Score a checkpoint that is loaded afresh from disk.  Returns the scores' reference.

    Args:
        label: unedited, edited, edited nf4.
        folder: checkpoint.
        fingerprint: hash of its bytes.
        sets: name -> data set and the part of it.
        config: how many examples.
        collect: batches.
        place: store.
        quantisation: None, or `nf4`.
    """
    facts = {
        "model": fingerprint,
        "quantisation": quantisation,
        "max_examples": config.max_examples,
        "sets": {name: [data.facts, part] for name, (data, part) in sets.items()},
        "text_window": collect.text_window,
    }

    def write(out: Path) -> None:
        opened = open_model(
            Path(folder), text_window=collect.text_window, quantisation=quantisation
        )
        summary: dict[str, Any] = {}
        for name, (data, part) in sets.items():
            scores = _score(opened, data, part, config, collect, f"evaluate {label}: {name}")
            write_table(out / f"{name.replace(' ', '_')}.parquet", scores, ExampleScore)
            summary[name] = asdict(mean_score(name, scores))
        write_json(
            out / "scores.json",
            {"sets": summary, "quantised_modules": list(opened.quantised_modules)},
        )

    artifact, _ = place.cached("evaluate", facts, write)
    found = read_json(place.fetch(artifact) / "scores.json")
    measured = {
        name: {key: value for key, value in score.items() if key != "name"}
        for name, score in found["sets"].items()
    }
    for name, score in measured.items():
        logger.info("evaluate %s: %s probability %.3f", label, name, score["probability"])
    return ScoreRef(
        artifact=artifact,
        label=label,
        sets=measured,
        quantised_modules=len(found["quantised_modules"]),
    )


def _score(
    opened: OpenModel,
    data: DataRef,
    part: Part,
    config: EvaluateConfig,
    collect: CollectConfig,
    phase: str,
) -> Any:
    rendering = opened.rendering
    total = sum(1 for _ in rendering.render_all(data.examples(part)))
    sample = (config.max_examples, total)
    stream = batch_stream(rendering, data, collect, part=part, sample=sample)
    return score_examples(opened.model, tracked(stream, phase, min(*sample)))
