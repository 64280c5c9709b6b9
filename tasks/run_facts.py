"""Runs that are over: found by name, and every fact that determined their edit, in the order of the
pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grom.certificate import Certificate
from grom.errors import DataError, MissingInput
from grom.ledger import ChainedLine
from tasks.accepted import HONOURED, accepted
from tasks.aliases import CHECKPOINT_TAG
from tasks.certificates import certificate_of
from tasks.codecs import read_json
from tasks.ledger import Ledger
from tasks.provenance import Lineage, Published, all_published, find_published, lineage
from tasks.store import Store
from tasks.tensors import read_header
from tasks.tracking import Tracking, client_of

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
    "inverse": "statistics",
    "how": "ridge",
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
CHECKPOINT = re.compile(r"(?:.*/)?apply/([0-9a-f]{16})(?:/[0-9a-f]{8})?/?")
KEY = re.compile("[0-9a-f]{16}")


class NoSuchRun(DataError):
    """Nothing of that name was run here."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(
            f"{name}: no run of {where}. Name a batch, the key of a service's run, the id of an "
            "MLflow run (with --work or --config where it is recorded), or apply/KEY."
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over."""

    name: str
    made: Lineage
    software: Mapping[str, str] = field(default_factory=dict)
    """As far as it was recorded."""
    certificate: Certificate | None = None

    @property
    def checkpoint(self) -> str:
        """Key of what `apply` wrote."""
        return self.made.applied.key


def find_run(name: str, store: Store, tracking: Tracking | None, work: Path) -> Run:
    """A run by the name of a batch, its key, its MLflow id, or the key of its checkpoint.

    Args:
        name: what it is called.
        store: where its artifacts are.
        tracking: where MLflow runs are recorded; None: not asked.
        work: of an embedded MLflow.

    Raises:
        NoSuchRun: nothing is called so.
        MissingInput: its checkpoint or its solve is no longer in the store.
        DataError: the ledger or an artifact is broken.
    """
    if match := CHECKPOINT.fullmatch(name):
        return Run(name, lineage(match[1], store))
    lines = Ledger(store).read()
    for line in reversed(lines):
        if name in (line.batch, line.run) and line.state == HONOURED:
            return _of_line(name, line, lines, store)
    if KEY.fullmatch(name) and find_published(f"apply/{name}", store) is not None:
        return Run(name, lineage(name, store))
    if tracking is not None:
        tags = _tags(name, tracking, work)
        if tags and (match := CHECKPOINT.fullmatch(tags.get(CHECKPOINT_TAG, ""))):
            commit = tags.get("git_sha")
            return Run(name, lineage(match[1], store), {"commit": commit} if commit else {})
    raise NoSuchRun(name, store.root)


def _of_line(name: str, line: ChainedLine, lines: list[ChainedLine], store: Store) -> Run:
    """The run that a line of the ledger names."""
    if line.certificate is not None:
        found = certificate_of(line, lines, store)
        made = lineage(found.edit.checkpoint, store)
        return Run(name, made, found.software, found)
    (record,) = accepted([line], store)
    for one in all_published("apply", store):
        if one.facts.get("edit") == record.edit and _nats(one, store) == record.nats:
            return Run(name, lineage(one.key, store))
    raise MissingInput(f"{store.root}/apply", f"the checkpoint of run {line.run} is gone")


def _nats(applied: Published, store: Store) -> float:
    facts = read_json(store.fetch(applied.artifact) / "edit" / "edit.json")["facts"]
    return float(facts["nats"])


def _tags(run_id: str, tracking: Tracking, work: Path) -> dict[str, str]:
    """Of the version that an MLflow run registered."""
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        return {}
    found = client_of(tracking, work).search_model_versions(f"run_id = '{run_id}'")
    return dict(found[0].tags) if found else {}


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
