"""Every fact that determined a run's edit, in the order in which the pipeline comes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.codecs import read_json
from tasks.provenance import Lineage, Published, all_published, find_published
from tasks.runs import Run
from tasks.store import Store
from tasks.tensors import read_header

TOPICS = (
    "model", "data", "rendering", "dtype", "sites", "software", "statistics", "ridge", "target",
    "strength", "edit",
)  # fmt: skip
"""In the order of the pipeline."""
TOPIC_OF = {
    "model": "model",
    "reference": "model",
    "data": "data",
    "hold_out": "data",
    "part": "data",
    "text_window": "rendering",
    "batch_tokens": "rendering",
    "window_examples": "rendering",
    "kind": "sites",
    "layers": "sites",
    "joint": "sites",
    "keys": "sites",
    "retain": "statistics",
    "forget": "statistics",
    "parts": "statistics",
    "request_keys": "statistics",
    "ridge": "ridge",
    "target": "target",
    "replace": "target",
    "edit": "strength",
    "beta": "strength",
    "nats": "strength",
}
"""Fact of an artifact -> topic."""
ELSEWHERE = ("model", "parts", "ridge", "target", "retain", "forget", "beta")
"""Facts of moments, or of a sweep, that are shown as facts of the run."""
SHARED = ("kind", "layers", "joint", "text_window")
"""Facts that retain and forget moments of a run have in common."""


def topic_of(fact: str) -> str:
    """Where in the pipeline a fact of an artifact belongs."""
    return TOPIC_OF.get(fact, "statistics")


def run_facts(run: Run, store: Store) -> dict[str, Any]:
    """Every fact by `topic: name`, in the order of the pipeline."""
    made = run.made
    found = [("model", "base", made.applied.facts.get("model"))]
    sets = [*zip(("retain", "background"), made.retain, strict=False)]
    for name, one in sets:
        found += _collected(name, one.facts)
    parts = sorted(made.parts, key=lambda one: one.key)
    found += _collected("forget", _united(parts) if parts else {})
    if made.is_sequential:
        for number, data in enumerate(made.solved.facts["retain"]):
            found += _collected("background" if number else "retain", {"data": data})
        found += _collected("forget", {"data": made.solved.facts["forget"]})
        found += _collected("sweep", made.solved.facts)
    found += _rendering(run, store)
    found += [("dtype", "of edited tensors", _dtypes(made, store))]
    found += [("software", name, value) for name, value in sorted(run.software.items())]
    for one in (*made.retain, *parts, made.solved, made.applied):
        stage = one.name.split("/")[0]
        found.append(("software", f"mathematics of {stage}", one.schema))
    found += [("statistics", name, one.sha256) for name, one in sets]
    found.append(("statistics", "forget", [one.sha256 for one in parts]))
    for topic in ("ridge", "target"):
        found += [(topic, *item) for item in _flat(made.solved.facts.get(topic) or {})]
    found.append(("ridge", "how", made.solved.facts.get("how")))
    found.append(("strength", "beta", made.applied.facts.get("beta")))
    calibrated = calibration_of(made, store)
    if calibrated is not None:
        found += [("strength", *item) for item in _flat(calibrated[0].facts["strength"] or {})]
        found += [("strength", name, calibrated[1][name]) for name in ("nats", "stopped_by")]
    order = {topic: number for number, topic in enumerate(TOPICS)}
    ordered = sorted(found, key=lambda one: order[one[0]])
    return {f"{topic}: {name}": value for topic, name, value in ordered if value is not None}


def _collected(name: str, facts: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Facts of one set's moments."""
    shared = () if name in ("retain", "sweep") else SHARED
    return [
        (topic_of(key), inner if key in SHARED else f"{name}, {inner}", item)
        for key, value in facts.items()
        if key not in (*ELSEWHERE, *shared)
        for inner, item in _flat({key: value})
    ]


def _united(parts: Sequence[Published]) -> dict[str, Any]:
    """Facts of all forget moments together: digests in order, settings once if they agree."""
    facts: dict[str, Any] = {}
    for one in parts:
        for key, value in one.facts.items():
            facts.setdefault(key, [])
            facts[key] += [item for item in _listed(value) if item not in facts[key]]
    data = facts.pop("data", [])
    digests = sorted(one["digest"] for one in data)
    rows = [one["rows"] for one in data]
    agreed = [one for number, one in enumerate(rows) if one not in rows[:number]]
    united = {key: value[0] if len(value) == 1 else value for key, value in facts.items()}
    return united | {"data": {"digests": digests, "rows": agreed}}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def calibration_of(made: Lineage, store: Store) -> tuple[Published, dict[str, Any]] | None:
    """The search, or the setting, that gave the strength, with what it found."""
    for one in all_published("calibrate", store):
        if one.facts.get("edit") == made.solved.key:
            found = read_json(store.fetch(one.artifact) / "calibration.json")
            if found["beta"] == made.applied.facts["beta"]:
                return one, found
    return None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Nested mappings as `outer.inner`; a list of one item as that item."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            value = value[0]
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _rendering(run: Run, store: Store) -> list[tuple[str, str, Any]]:
    """Tokenizer and template, if the run's counts are still in the store."""
    facts = rendering_facts(run.made, store)
    return [("rendering", name, value) for name, value in _flat(facts or {})]


def rendering_facts(made: Lineage, store: Store) -> dict[str, Any] | None:
    """How examples were rendered, from the counts by which the run chose its layers."""
    if not made.retain:
        return None
    data, model = made.retain[0].facts["data"], made.applied.facts["model"]
    for one in all_published("select", store):
        if one.facts.get("retain") == data and one.facts.get("model") == model:
            counted = find_published(f"count/{one.facts.get('count')}", store)
            if counted is not None and "rendering" in counted.facts:
                return dict(counted.facts["rendering"])
    return None


def _dtypes(made: Lineage, store: Store) -> str | None:
    folder = store.fetch(made.applied.artifact)
    found = read_header(folder / "edit" / "undo.safetensors")
    return ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in found.values()}))
