"""What an artifact was made from, by the facts that lie beside its bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grom.errors import MissingInput
from tasks.artifacts import SCHEMA, Artifact, CorruptArtifact, artifact_key, canonical_json
from tasks.bucket import Bucket
from tasks.store import FACTS, MARKER

MAX_SCHEMA = 99


@dataclass(frozen=True, slots=True)
class Published:
    """An artifact as its marker describes it."""

    name: str
    """Stage and key."""
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    folder: str

    @property
    def key(self) -> str:
        """The key alone."""
        return self.name.split("/")[1]

    @property
    def artifact(self) -> Artifact:
        """A reference to fetch it by."""
        stage, key = self.name.split("/")
        return Artifact(stage=stage, key=key, uri=self.name)

    @property
    def sha256(self) -> str:
        """Hash of the digests of its files."""
        return hashlib.sha256(canonical_json(self.files)).hexdigest()

    def file_sha256(self, name: str) -> str:
        """sha256 of one of its files, as published."""
        return str(self.files[name]["sha256"])

    @property
    def schema(self) -> int | None:
        """The version of its stage that gives its key; None if its facts do not give it."""
        stage = self.name.split("/")[0]
        text = {"schema": 0, **self.facts}
        versions: list[int] = [SCHEMA.get(stage, 1), *range(1, MAX_SCHEMA)]
        for version in versions:
            found = hashlib.sha256(canonical_json(text | {"schema": version})).hexdigest()
            if found[:16] == self.key:
                return version
        return None


def find_published(name: str, bucket: Bucket) -> Published | None:
    """An artifact by stage and key, or None.

    Raises:
        CorruptArtifact: its marker cannot be read.
    """
    found = bucket.read(f"{name}/{MARKER}")
    if found is None:
        return None
    try:
        marker = json.loads(found.data)
        return Published(name, marker["facts"], marker["files"], marker["folder"])
    except (ValueError, KeyError, TypeError):
        raise CorruptArtifact(f"{name}/{MARKER}", "the marker cannot be read") from None


def published(name: str, bucket: Bucket) -> Published:
    """An artifact by stage and key.

    Raises:
        MissingInput: it is not, or no longer, there.
        CorruptArtifact: its marker cannot be read.
    """
    found = find_published(name, bucket)
    if found is None:
        raise MissingInput(f"{bucket.root}/{name}", "no finished artifact")
    return found


def all_published(stage: str, bucket: Bucket) -> Iterator[Published]:
    """Every finished artifact of a stage."""
    for entry in bucket.entries(stage):
        name, _, file = entry.name.rpartition("/")
        if file == MARKER and (found := find_published(name, bucket)) is not None:
            yield found


def copied_facts(one: Published, bucket: Bucket) -> Mapping[str, Any]:
    """The facts in the file beside the bytes.

    Raises:
        CorruptArtifact: it is missing, or cannot be read.
    """
    path = "/".join(filter(None, (one.name, one.folder, FACTS)))
    found = bucket.read(path)
    try:
        facts = json.loads(found.data) if found is not None else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise CorruptArtifact(path, "missing, or not JSON")
    return facts


@dataclass(frozen=True, slots=True)
class Lineage:
    """What an edited checkpoint was made from, from the last artifact to the first."""

    applied: Published
    solved: Published
    retain: tuple[Published, ...]
    """Retain moments, then those of the background; empty for sequential keys."""
    forget: Published | None
    """Moments of all batches together; None for sequential keys."""
    parts: tuple[Published, ...]
    """Those of each batch, if they were merged; else `forget` alone."""
    gone: tuple[str, ...] = ()
    """Names of artifacts that are no longer in the store."""

    @property
    def is_sequential(self) -> bool:
        """Whether keys were collected layer by layer, so that no statistics are kept."""
        return "keys" in self.solved.facts


def lineage(checkpoint: str, bucket: Bucket) -> Lineage:
    """What the checkpoint with this key of `apply` was made from.

    Raises:
        MissingInput: checkpoint or solve are not in the store.
        CorruptArtifact: a marker cannot be read.
    """
    applied = published(f"apply/{checkpoint}", bucket)
    solved = published(f"solve/{applied.facts['edit']}", bucket)
    if "keys" in solved.facts:
        return Lineage(applied, solved, (), None, ())
    names = [f"collect/{key}" for key in solved.facts["retain"]]
    together = find_published(f"collect/{solved.facts['forget']}", bucket)
    keys = [solved.facts["forget"]] if together is None else together.facts.get("parts")
    parts = [f"collect/{key}" for key in keys or [solved.facts["forget"]]]
    found = {name: find_published(name, bucket) for name in (*names, *parts)}
    return Lineage(
        applied,
        solved,
        tuple(one for name in names if (one := found[name]) is not None),
        together,
        tuple(one for name in parts if (one := found[name]) is not None),
        tuple(name for name, one in found.items() if one is None),
    )


def checkpoint_key(model: str, edit: str, beta: float) -> str:
    """The key under which `apply` keeps a checkpoint."""
    return artifact_key("apply", {"model": model, "edit": edit, "beta": beta}).split("/")[1]
