"""Whether what a run read is still what lies there: the model, the rows, the rendering, settings.

Rows are named by file and line; what they say is compared by digest only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from grom.config import DataConfig, HoldOutConfig
from tasks.artifacts import artifact_key, canonical_json
from tasks.load import load_data
from tasks.models import open_rendering
from tasks.place import DataRef, Part, Place
from tasks.provenance import find_published
from tasks.recorded import Difference
from tasks.run_facts import rendering_facts
from tasks.runs import Run
from tasks.shown import shown_settings
from tasks.store import RESERVED, Store
from tasks.tensors import content_of, model_files, read_header
from tasks.undo import Undo, need_undo

TOKENIZER_FILES = (
    "chat_template",
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
)
MAX_SHOWN = 200
"""Characters of a value."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the run would read today."""

    model: Path
    """The base, as a plain checkpoint."""
    retain: DataConfig
    hold_out: HoldOutConfig
    background: DataConfig | None = None
    forget: DataConfig | None = None
    """None for a service, whose rows are erased."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """ridge, target."""


def input_differences(run: Run, inputs: Inputs, store: Store, place: Place) -> list[Difference]:
    """What has changed since the run, in no particular order.

    Raises:
        MissingInput: something is no longer there.
        DataError: rows cannot be read.
    """
    made = run.made
    undo = need_undo(store.fetch(made.applied.artifact) / "edit")
    recorded = rendering_facts(made, store)
    found = [*model_differences(undo, inputs.model)]
    sets: list[tuple[str, DataConfig | None, HoldOutConfig | None, Any, Part]] = [
        ("retain", inputs.retain, inputs.hold_out, made.retain[0].facts["data"], "seen")
    ]
    if len(made.retain) > 1:
        facts = made.retain[1].facts["data"]
        sets.append(("background", inputs.background, None, facts, "all"))
    if inputs.forget is not None and made.parts:
        sets.append(("forget", inputs.forget, None, made.parts[0].facts["data"][0], "all"))
    for role, config, hold_out, facts, part in sets:
        if config is None:
            found.append(Difference("data", role, "part of the run", "not configured"))
            continue
        data = load_data.fn(config, place, role, hold_out)
        found += _set_differences(role, facts, data, part, recorded, store)
    if recorded is not None:
        window = int(recorded["text_window"])
        now = open_rendering(inputs.model, text_window=window)[0].facts
        found += _by_name("rendering", "", recorded, now)
    for topic in ("ridge", "target"):
        found += _by_name(topic, "", made.solved.facts[topic], inputs.settings.get(topic, {}))
    return found


def model_differences(undo: Undo, folder: Path) -> Iterator[Difference]:
    """Files of the base that are not those that were edited."""
    now = {name: content_of(folder / name) for name in model_files(folder, RESERVED)}
    for name in sorted({*undo.files, *now}):
        then, there = undo.files.get(name), now.get(name)
        if then == there:
            continue
        topic = "rendering" if name.startswith(TOKENIZER_FILES) else "model"
        if name.endswith(".safetensors") and there is not None:
            kinds = {str(one.dtype) for one in read_header(folder / name).values()}
            fact = f"{name}, {', '.join(sorted(kinds))}"
        else:
            fact = name
        yield Difference(
            topic,
            fact,
            then.sha256 if then else "not there",
            there.sha256 if there else "not there",
        )


def _set_differences(
    role: str,
    facts: Mapping[str, Any],
    data: DataRef,
    part: Part,
    rendering: Mapping[str, Any] | None,
    store: Store,
) -> Iterator[Difference]:
    now = data.facts
    yield from _by_name("data", f"{role}, ", facts["rows"], now["rows"])
    yield from _by_name("data", f"{role}, ", {"hold_out": facts["hold_out"]}, now)
    if facts["digest"] != now["digest"]:
        where = _first_row(facts, data, part, rendering, store)
        yield Difference("data", f"{role}, {where}", str(facts["digest"]), str(now["digest"]))


def _first_row(
    facts: Mapping[str, Any],
    data: DataRef,
    part: Part,
    rendering: Mapping[str, Any] | None,
    store: Store,
) -> str:
    """The first row that is another one now, as far as the run's digests are still there."""
    if rendering is None:
        return "digest of all rows"
    wanted = {"rendering": dict(rendering), "data": dict(facts), "part": part}
    counted = find_published(artifact_key("count", wanted), store)
    if counted is None:
        return "digest of all rows"
    then = np.fromfile(store.fetch(counted.artifact) / "digests.bin", dtype="<u8")
    for number, (digest, example) in enumerate(zip_longest(then, data.examples(part)), 1):
        if example is None:
            return f"row {number} of the part that is {part}: no longer there"
        if digest is None or int(example.digest, 16) != int(digest):
            return f"row {number} of the part that is {part}, {example.place}"
    return "digest of all rows; those of this part are the same"


def _by_name(
    topic: str, prefix: str, then: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Difference]:
    """The facts of `then` that are other ones now."""
    shown_then, shown_now = shown_settings(then), shown_settings(now)
    for name in then:
        if canonical_json(then[name]) != canonical_json(now.get(name)):
            values = (_shown(shown.get(name)) for shown in (shown_then, shown_now))
            yield Difference(topic, f"{prefix}{name}", *values)


def _shown(value: Any) -> str:
    text = canonical_json(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
