"""Runs that are over, found by any of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grom.certificate import Certificate
from grom.errors import DataError, MissingInput
from grom.ledger import ChainedLine
from tasks.accepted import HONOURED, WITHDRAWN, accepted
from tasks.aliases import CHECKPOINT_TAG
from tasks.certificates import certificate_of
from tasks.codecs import read_json
from tasks.ledger import Ledger
from tasks.provenance import Lineage, Published, all_published, find_published, lineage
from tasks.store import Store
from tasks.tracking import Tracking, client_of

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
        certified = line.state == WITHDRAWN and line.certificate is not None
        if name in (line.batch, line.run) and (line.state == HONOURED or certified):
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
