"""What earlier runs accepted: their forget moments, from which a new run solves without old text.

    runs/<batch>/<run>/accepted.json     written before the ledger names that run

The ledger decides.  A batch counts while one of its requests is honoured by its last line; a run
that was killed before the ledger had its lines left a file that nobody reads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from grom.ledger import ChainedLine
from tasks.artifacts import Artifact, CorruptArtifact, canonical_json
from tasks.bucket import Bucket
from tasks.place import CollectRef, SitesRef

RUNS = "runs"
HONOURED, REFUSED, ROLLED_BACK, WITHDRAWN = "honoured", "refused", "rolled back", "withdrawn"


class Accepted(BaseModel):
    """What one run took over from one batch.  Hashes and numbers, never a row."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: str
    run: str
    manifest_sha256: str
    forget: Artifact | None
    """Its forget moments; None if every row had been honoured before."""
    num_requests: int
    model_name: str
    model_version: str
    edit: str
    """Key of the edit that the version was made with."""
    nats: float
    """Strength of that edit: the mean direct drop of all suppressed positions."""
    sites: SitesRef
    retain: tuple[CollectRef, ...]
    """Retain moments that it was solved with."""
    approver: str
    """Who promoted it: a person, or `gate`."""

    @property
    def name(self) -> str:
        """Where it lies."""
        return f"{RUNS}/{self.batch}/{self.run}/accepted.json"


def write_accepted(record: Accepted, bucket: Bucket) -> None:
    """Write a record; one that an interrupted attempt of the same run left is replaced."""
    data, version = canonical_json(record.model_dump(mode="json")), None
    while bucket.swap(record.name, data, version) is None:
        found = bucket.read(record.name)
        version = None if found is None else found.version


def standing(lines: list[ChainedLine]) -> dict[tuple[str, str], ChainedLine]:
    """The last line of each request in each batch."""
    return {(line.request, line.batch): line for line in lines}


def counted_by_batch(lines: list[ChainedLine]) -> dict[str, dict[str, int]]:
    """How many requests of each batch stand in each state."""
    found: dict[str, dict[str, int]] = {}
    for line in standing(lines).values():
        counts = found.setdefault(line.batch, {})
        counts[line.state] = counts.get(line.state, 0) + 1
    return found


def accepted(lines: list[ChainedLine], bucket: Bucket) -> list[Accepted]:
    """Records of the batches that count, in the order in which the ledger took them.

    Raises:
        CorruptArtifact: a record is missing or cannot be read.
    """
    runs: dict[str, str] = {}
    for line in standing(lines).values():
        if line.state == HONOURED:
            runs[line.batch] = line.run
    return [_read(f"{RUNS}/{batch}/{run}/accepted.json", bucket) for batch, run in runs.items()]


def moments_of(records: Sequence[Accepted]) -> list[CollectRef]:
    """Their forget moments, each once."""
    artifacts = {record.forget.key: record.forget for record in records if record.forget}
    return [CollectRef(artifact=one, reused=True, seconds=0.0) for one in artifacts.values()]


def _read(name: str, bucket: Bucket) -> Accepted:
    found = bucket.read(name)
    if found is None:
        raise CorruptArtifact(name, "the ledger names it, and it is missing")
    try:
        return Accepted.model_validate(json.loads(found.data))
    except (ValueError, ValidationError):
        raise CorruptArtifact(name, "not the record of an accepted batch") from None
