"""The parts of a certificate that come from artifacts: the bytes of model and edit, what was
measured, and the sums that the edit was solved from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grom.certified import CertifiedAttack, CertifiedEdit, CertifiedModel, Measured, Statistics
from grom.config import Config
from tasks.accepted import Accepted
from tasks.artifacts import canonical_json
from tasks.audit import AuditRef
from tasks.place import CalibrationRef, CheckpointRef, CollectRef, EditRef, ModelRef, ScoreRef
from tasks.provenance import Lineage, Published
from tasks.register import Registered
from tasks.solve import ALPHA
from tasks.store import RESERVED
from tasks.tensors import DTYPES, chunks, model_files, weight_places
from tasks.undo import need_undo

EDIT_FILES = ("edit.safetensors", "edit.json", "undo.safetensors", "undo.json")
OTHER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Made(Config):
    """What a run made and measured."""

    run: str
    base: ModelRef
    edit: EditRef
    strength: CalibrationRef
    edited: CheckpointRef
    scores: tuple[ScoreRef, ...]
    registered: Registered
    unreached: tuple[str, ...] = ()
    """Requests that no edit of this kind can honour."""
    approver: str
    head: str
    """Hash of the ledger's last line when the run read what was accepted."""
    moments: dict[str, CollectRef]
    """Of each new batch."""
    earlier: tuple[Accepted, ...]
    influence: AuditRef | None = None


def untouched_sha256(folder: Path, edited: Mapping[str, str]) -> str:
    """Hash of all tensors of a checkpoint but these: names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for name, (path, stored) in sorted(weight_places(folder, DTYPES | OTHER_DTYPES).items()):
        if name in edited:
            continue
        sha.update(canonical_json([name, str(stored.dtype), list(stored.shape)]))
        for chunk in chunks(path, stored):
            sha.update(chunk)
    return sha.hexdigest()


def edited_parts(made: Made, found: Lineage, folder: Path) -> dict[str, Any]:
    """The parts about the edited model: its bytes, the edit's, and what was measured."""
    undo, applied = need_undo(folder / "edit"), found.applied
    dtypes = {
        str(stored.dtype).removeprefix("torch.")
        for name, (_, stored) in weight_places(folder).items()
        if name in undo.edited
    }
    dtype = ", ".join(sorted(dtypes))
    names = [name for name in model_files(folder, RESERVED) if name in applied.files]
    model = CertifiedModel(
        name=made.registered.model_name,
        version=made.registered.version,
        dtype=dtype,
        files={name: applied.file_sha256(name) for name in names},
        untouched_sha256=untouched_sha256(folder, undo.edited),
    )
    edit = CertifiedEdit(
        key=made.edit.artifact.key,
        checkpoint=applied.key,
        files={name: applied.file_sha256(f"edit/{name}") for name in EDIT_FILES},
        edited=undo.edited,
        alpha_sha256=found.solved.file_sha256(ALPHA),
        nats=made.strength.nats,
        beta=made.strength.beta,
        stopped_by=made.strength.stopped_by,
    )
    health = {score.label: score.health for score in made.scores if score.health}
    measured = tuple(row for score in made.scores for row in measured_rows(score, dtype))
    return {"model": model, "edit": edit, "measured": measured, "free_answers": health}


def measured_rows(score: ScoreRef, dtype: str) -> list[Measured]:
    """A row for each set.  Models other than the base and the edited one may have another dtype."""
    model, _, scheme = score.label.partition(" ")
    return [
        Measured(
            model=model,
            precision=scheme or dtype,
            set=name,
            num_examples=int(values["num_examples"]),
            values={key: value for key, value in values.items() if key != "num_examples"},
        )
        for name, values in score.sets.items()
    ]


def statistics_of(made: Made, found: Lineage) -> tuple[Statistics, ...]:
    """All sums that the edit came from: retain, each batch, and the batches together."""
    names = {ref.artifact.key: batch for batch, ref in made.moments.items()}
    earlier = {one.forget.key: one.batch for one in made.earlier if one.forget is not None}
    roles: list[tuple[Any, Published, str | None]] = [
        ("background" if number else "retain", one, None) for number, one in enumerate(found.retain)
    ]
    for part in found.parts:
        role = "forget" if part.key in names else "forget, earlier"
        roles.append((role, part, names.get(part.key) or earlier.get(part.key)))
    if found.forget is not None and len(found.parts) > 1:
        roles.append(("forget, together", found.forget, None))
    return tuple(
        Statistics(role=role, artifact=one.name, sha256=one.sha256, batch=batch)
        for role, one, batch in roles
    )


def attack_of(found: Mapping[str, Any]) -> CertifiedAttack:
    """A verdict without its details."""
    return CertifiedAttack(**{key: value for key, value in found.items() if key != "details"})
