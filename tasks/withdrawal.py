"""A withdrawal enters the ledger: one segment, as a run does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from pydantic import Field

from grom.config import Config
from grom.ledger import ChainedLine, LedgerLine
from tasks.accepted import HONOURED, RUNS, WITHDRAWN, Accepted, standing, write_accepted
from tasks.bucket import Bucket
from tasks.claims import iso
from tasks.ledger import Ledger
from tasks.place import CollectRef


class Withdrawal(Config):
    """What a withdrawal came to."""

    run: str
    request: str
    """Salted hash of its id."""
    model_version: str
    edit: str
    """Key of the edit; empty if nothing is left to forget."""
    nats: float
    head: str
    """Hash of the ledger's last line when it began."""
    certificates: dict[str, str] = Field(default_factory=dict)
    """sha256 by batch; none where nothing is left to forget."""


def enter_withdrawal(
    records: Sequence[Accepted],
    left: Mapping[str, CollectRef | None],
    found: Withdrawal,
    lines: list[ChainedLine],
    bucket: Bucket,
) -> None:
    """Write what is left of the request's batches, then their lines.

    Every other request of these batches gets a line with the new version, since what was accepted
    of its batch is now what the withdrawal left.

    Args:
        records: of the batches that had the request.
        left: moments by batch; None for a batch without any.
        found: the withdrawal.
        lines: the ledger, as `found.head` ends it.
        bucket: the store.

    Raises:
        LedgerMoved: another run was entered meanwhile; nothing was.
    """
    stand = [line for line in standing(lines).values() if line.state == HONOURED]
    for record in records:
        remaining = {one.request for one in stand if one.batch == record.batch} - {found.request}
        ref = left[record.batch]
        changed = {
            "run": found.run,
            "forget": None if ref is None else ref.artifact,
            "num_requests": len(remaining),
            "model_version": found.model_version,
            "edit": found.edit,
            "nats": found.nats or record.nats,
        }
        write_accepted(record.model_copy(update=changed), bucket)
    batches, now = {record.batch for record in records}, iso(bucket.now())
    new = [_line(line, found, now) for line in stand if line.batch in batches]
    Ledger(bucket).append(new, after=found.head)


def entered_with(line: ChainedLine, bucket: Bucket) -> Accepted | None:
    """What the run of a line left of its batch; None if there is no record of it."""
    found = bucket.read(f"{RUNS}/{line.batch}/{line.run}/accepted.json")
    return None if found is None else Accepted.model_validate_json(found.data)


def _line(line: ChainedLine, found: Withdrawal, now: str) -> LedgerLine:
    plain = LedgerLine(**{field.name: getattr(line, field.name) for field in fields(LedgerLine)})
    own = found.certificates.get(line.batch)
    again = replace(plain, run=found.run, started=now, finished=now, certificate=own)
    if line.request == found.request:
        return replace(again, state=WITHDRAWN, model_version=None)
    return replace(again, model_version=found.model_version)
