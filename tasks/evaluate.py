"""Stage evaluate: how well a checkpoint knows each set, at a given precision."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefect import task

from grom.config import CollectConfig, EvaluateConfig
from grom.evaluate import ExampleScore, mean_score, score_examples
from grom.examples import Example
from grom.gate import FORGET
from grom.generate import generate
from grom.metrics.health import generation_health
from tasks.artifacts import Artifact
from tasks.codecs import read_json, write_json, write_table
from tasks.count import counts_of
from tasks.models import OpenModel, open_model
from tasks.place import DataRef, Part, Place, ScoreRef
from tasks.progress import tracked
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)
TEXT_CHARACTERS = 800
"""Of running text, for a free answer: the first half is the prompt."""


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
    quantise_head: bool = False,
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
        quantisation: None, or `nf4`, `fp4`, `int8`, `int4`.
        quantise_head: also quantise the LM head.
    """
    asked = set() if quantisation else {FORGET} & set(sets)
    facts = {
        "model": fingerprint,
        "quantisation": quantisation,
        "quantise_head": quantise_head,
        "max_examples": config.max_examples,
        "health": [config.health_examples, config.health_tokens] if asked else None,
        "sets": {name: [data.facts, part] for name, (data, part) in sets.items()},
        "text_window": collect.text_window,
    }

    def write(out: Path) -> None:
        opened = open_model(
            Path(folder),
            text_window=collect.text_window,
            quantisation=quantisation,
            quantise_head=quantise_head,
        )
        summary: dict[str, Any] = {}
        for name, (data, part) in sets.items():
            total = counts_of(opened.rendering, data, part, place).num_examples
            phase = f"evaluate {label}: {name}"
            scores = _score(opened, data, part, total, config, collect, phase)
            write_table(out / f"{name.replace(' ', '_')}.parquet", scores, ExampleScore)
            summary[name] = asdict(mean_score(name, scores))
        found = {
            "sets": summary,
            "health": {name: _health(opened, sets[name], config) for name in asked},
            "quantised_modules": list(opened.quantised_modules),
        }
        write_json(out / "scores.json", found)

    artifact, _ = place.cached("evaluate", facts, write)
    return _reference(label, artifact, place)


def _reference(label: str, artifact: Artifact, place: Place) -> ScoreRef:
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
        health=found["health"].get(FORGET, {}),
        quantised_modules=tuple(found["quantised_modules"]),
    )


def _score(
    opened: OpenModel,
    data: DataRef,
    part: Part,
    total: int,
    config: EvaluateConfig,
    collect: CollectConfig,
    phase: str,
) -> Any:
    sample = (config.max_examples, total)
    stream = batch_stream(opened.rendering, data, collect, part=part, sample=sample)
    return score_examples(opened.model, tracked(stream, phase, min(*sample)))


def _health(
    opened: OpenModel, measured: tuple[DataRef, Part], config: EvaluateConfig
) -> dict[str, float]:
    """Whether the model still speaks when it is asked what it was to forget.

    The answers are measured and dropped; only rates are kept.
    """
    data, part = measured
    listed = list(data.examples(part))
    stride = max(1, len(listed) // max(config.health_examples, 1))
    asked = [asked_of(example) for example in listed[::stride][: config.health_examples]]
    said, expected = [], []
    for plain in (False, True):
        pairs = [(prompt, answer) for prompt, answer, is_text in asked if is_text == plain]
        rendering = replace(opened.rendering, plain=plain)
        prompts = [prompt for prompt, _ in pairs]
        limit = config.health_tokens
        said += generate(opened.model, rendering, prompts, max_new_tokens=limit)
        expected += [min(limit, len(rendering.answer_ids(*pair))) for pair in pairs]
    return {metric.name: metric.value for metric in generation_health(said, expected)}


def asked_of(example: Example) -> tuple[str, str, bool]:
    """Prompt, expected answer, and whether they are the two halves of a piece of running text."""
    if example.text is None:
        return example.prompt or "", example.answer or "", False
    piece = example.text.strip()[:TEXT_CHARACTERS]
    half = piece.rfind(" ", 0, len(piece) // 2 + 1)
    half = half if half > 0 else max(1, len(piece) // 2)
    return piece[:half].strip(), piece[half:].strip(), True
