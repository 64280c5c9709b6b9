"""Stage attack, second half: the verdict on each attack, from readings of all models."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from prefect import task

from grom.attack import AttackResult
from grom.attack_config import AttackConfig
from grom.config import Config
from grom.prompts import PREFIXES
from tasks.artifacts import Artifact
from tasks.codecs import write_json, write_table
from tasks.codes import changed_modules
from tasks.place import ModelRef, Place
from tasks.probe import Reading
from tasks.register import TrackedRun
from tasks.subject import Probe
from tasks.tracking import log_metrics, log_table_file
from tasks.verdicts import HEAD, EditedParts, Judge

logger = logging.getLogger(__name__)
LOGGED = ("recovered_share", "attacked", "ceiling", "floor")


@dataclass(frozen=True, slots=True)
class AttackRow:
    """A result without its details, for a table."""

    name: str
    measure: str
    unedited: float
    edited: float
    attacked: float
    ceiling: float
    floor: float
    recovered_share: float
    verdict: str
    reason: str
    num_examples: int


class Attacked(Config):
    """The verdicts."""

    artifact: Artifact
    results: tuple[AttackResult, ...]


@task
def edited_parts(unedited: ModelRef, edited: ModelRef, config: AttackConfig) -> EditedParts:
    """Compare two checkpoints' files: which modules were edited, and the head with them?"""
    stored = changed_modules(Path(unedited.folder), Path(edited.folder))
    parts = EditedParts(stored=stored, quantise_head=bool(config.quantise_head))
    logger.info("attack: the checkpoints differ in %d matrices", len(stored))
    if config.quantise_head is None and HEAD in parts.modules:
        return parts.model_copy(update={"quantise_head": True})
    return parts


def probes_of(config: AttackConfig, role: str) -> tuple[Probe, ...]:
    """What a model is to be probed with.

    Args:
        config: attacks.
        role: unedited, edited, or retrained, which serves relearning and the lens alone.
    """
    found = [] if role == "retrained" else [Probe(kind="plain")]
    for name in config.attacks:
        if name == "relearn":
            found.append(Probe(kind="rest"))
            found += [Probe(kind="relearn")] if role != "unedited" else []
        elif role == "retrained" and name != "lens":
            continue
        elif name == "prune":
            found += [Probe(kind="prune", variant=f"{share:g}") for share in config.prune_shares]
        elif name == "prefix":
            found += [Probe(kind="prefix", variant=prefix) for prefix in PREFIXES]
        else:
            found.append(Probe(kind=name))
    return tuple(found)


@task
def judge_attacks(
    unedited: ModelRef,
    edited: ModelRef,
    parts: EditedParts,
    before: dict[str, Reading],
    after: dict[str, Reading],
    reference: dict[str, Reading],
    config: AttackConfig,
    place: Place,
) -> Attacked:
    """A verdict on each attack, as `attacks.json` and `attacks.parquet` in the store."""
    folders = Path(unedited.folder), Path(edited.folder)
    judge = Judge(before, after, reference, config, parts, folders)
    results = [result for name in config.attacks for result in judge.results(name)]
    rows = [_row(result) for result in results]

    def write(out: Path) -> None:
        write_json(out / "attacks.json", [asdict(result) for result in results])
        write_table(out / "attacks.parquet", rows, AttackRow)

    facts = {
        "verdicts": [unedited.fingerprint, edited.fingerprint],
        "parts": parts.model_dump(mode="json"),
        "bounds": asdict(config.bounds),
        "results": [[row.name, row.reason] for row in rows],
        "readings": [
            [name, one.artifact.key]
            for readings in (before, after, reference)
            for name, one in sorted(readings.items())
            if one.artifact is not None
        ],
    }
    artifact, _ = place.cached("attack", facts, write)
    for row in rows:
        logger.info("attack %s: %s (%s)", row.name, row.verdict, row.reason)
    return Attacked(artifact=artifact, results=tuple(results))


def _row(result: AttackResult) -> AttackRow:
    return AttackRow(**{column.name: getattr(result, column.name) for column in fields(AttackRow)})


@task
def log_attacks(run: TrackedRun, attacked: Attacked, place: Place) -> None:
    """`attack/<name>/recovered_share` and the values behind it, and the verdicts as tables."""
    metrics: dict[str, float] = {}
    for result in attacked.results:
        values = {name: getattr(result, name) for name in LOGGED}
        if "echo_share" in result.details:
            values["echo_share"] = result.details["echo_share"]
        for name, value in values.items():
            if math.isfinite(value):
                metrics[f"attack/{result.name}/{name}"] = value
    log_metrics(*run.where, metrics)
    folder = place.fetch(attacked.artifact)
    for table in ("attacks.json", "attacks.parquet"):
        log_table_file(*run.where, folder / table)
