"""Who works on a batch: `claims/<batch>.json`, changed by compare and swap only.

Every change of a batch's state is one such swap, so there is one order of them, and a worker that
lost its lease, however late it wakes up, cannot end the batch: its version is no longer there.  The
outcome goes into the claim first; `done/` and `failed/` are published from it, by its owner or, if
that was killed in between, by whoever comes next.

A lease has run out when the store's clock is more than `lease_s` past the time at which the store
wrote the claim.  Both times are the store's: no worker's clock counts, an hour off or not.

The token starts at 1 and grows by one with each takeover and each retry.  An owner that comes back,
a resumed run say, takes its own claim over at once.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grom.errors import GromError
from tasks.artifacts import CorruptArtifact, canonical_json
from tasks.bucket import Bucket
from tasks.manifest import plain_batch
from tasks.outcomes import DONE, FAILED, Outcome, publish, read_outcome

logger = logging.getLogger(__name__)
CLAIMS = "claims"
LEASE_S = 600.0
MARGIN_S = 2.0
"""Times in HTTP headers are whole seconds."""


class LeaseLost(GromError):
    """Another worker took the batch over."""

    def __init__(self, batch: str, token: int) -> None:
        super().__init__(
            f"batch {batch}: the claim with token {token} was taken over, so this run ends without "
            "effect. Check `grom status` for who works on it now; give a longer lease if runs are "
            "often overtaken."
        )


class Record(BaseModel):
    """What `claims/<batch>.json` holds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: str
    owner: str
    token: int = Field(ge=1)
    lease_s: float = Field(gt=0)
    run: str | None = None
    """The run that works on it; None before it starts.  Who takes it over goes on with that."""
    released: bool = False
    note: str | None = None
    """Why it was given back; quotes no row."""
    expires_as: str | None = None
    """The reason why the batch fails if this lease runs out; not given: it is free again then."""
    outcome: Outcome | None = None
    nonce: str = ""
    """Tells two writes apart."""

    def to_bytes(self) -> bytes:
        """Canonical JSON, never twice the same."""
        return canonical_json(self.model_dump(mode="json") | {"nonce": uuid4().hex})


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as one writer knows it."""

    record: Record
    version: str
    """Of the object in the store."""

    @property
    def batch(self) -> str:
        """What is claimed."""
        return self.record.batch

    @property
    def token(self) -> int:
        """Fencing token."""
        return self.record.token


@dataclass(frozen=True, slots=True)
class Seen:
    """A claim as it lies in the store."""

    record: Record
    version: str
    modified: float
    """When it was last written, by the store's clock."""

    def has_run_out(self, now: float) -> bool:
        """Whether the lease is over, `now` being the store's."""
        return now - self.modified > self.record.lease_s + MARGIN_S


def claim(batch: str, owner: str, bucket: Bucket, lease_s: float = LEASE_S) -> Claim | None:
    """Take a batch, if nobody has it.  Of several workers that try at once one gets it.

    Args:
        batch: its name.
        owner: who; must differ between workers, and be the same for a run that is resumed.
        bucket: the store.
        lease_s: how long, without renewal, until another may take it over.

    Returns:
        the claim, or None: another worker has the batch, or it is done or failed, now say.
    """
    plain_batch(batch)
    seen = look(batch, bucket)
    if seen is None:
        if any(read_outcome(batch, state, bucket) for state in (DONE, FAILED)):
            return None
        record = Record(batch=batch, owner=owner, token=1, lease_s=lease_s)
        return _swapped(record, None, bucket)
    if seen.record.outcome is not None:
        publish(seen.record.outcome, bucket)
        return None
    free = seen.record.released or seen.record.owner == owner or seen.has_run_out(bucket.now())
    if not free:
        return None
    run = seen.record.run
    record = Record(batch=batch, owner=owner, token=seen.record.token + 1, lease_s=lease_s, run=run)
    taken = _swapped(record, seen.version, bucket)
    reason = seen.record.expires_as
    if taken is not None and reason is not None and seen.record.owner != owner:
        fail(taken, bucket, reason)
        return None
    return taken


def renew(
    held: Claim,
    bucket: Bucket,
    run: str | None = None,
    lease_s: float | None = None,
    expires_as: str | None = None,
) -> Claim:
    """Begin the lease anew.

    Args:
        held: the claim.
        bucket: the store.
        run: from now on this run works on it.
        lease_s: another length, for a long pause say.
        expires_as: see `Record`.

    Raises:
        LeaseLost: another worker has it.
    """
    changes: dict[str, Any] = {
        "run": run or held.record.run,
        "lease_s": lease_s or held.record.lease_s,
        "expires_as": expires_as or held.record.expires_as,
    }
    return _kept(held, changes, bucket)


def release(held: Claim, bucket: Bucket, note: str | None = None) -> None:
    """Give a batch back without an outcome; `note` says why and must quote no row.

    Raises:
        LeaseLost: another worker has it already.
    """
    _kept(held, {"released": True, "note": note}, bucket)


def finish(
    held: Claim,
    bucket: Bucket,
    *,
    model_version: str | None = None,
    certificate: str | None = None,
    ledger: str | None = None,
) -> Outcome:
    """The batch is done.

    Raises:
        LeaseLost: another worker has it; nothing was published.
    """
    facts = {"model_version": model_version, "certificate": certificate, "ledger": ledger}
    return _end(held, bucket, "done", facts)


def fail(held: Claim, bucket: Bucket, reason: str) -> Outcome:
    """The batch cannot be honoured as it is; `reason` must quote no row (see `reason_of`).

    Raises:
        LeaseLost: another worker has it; nothing was published.
    """
    return _end(held, bucket, "failed", {"reason": reason})


def look(batch: str, bucket: Bucket) -> Seen | None:
    """The claim as it lies in the store, or None.

    Raises:
        CorruptArtifact: it cannot be read.
    """
    name = f"{CLAIMS}/{batch}.json"
    found = bucket.read(name)
    if found is None:
        return None
    try:
        record = Record.model_validate(json.loads(found.data))
    except (ValueError, ValidationError):
        raise CorruptArtifact(name, "not a claim") from None
    return Seen(record, found.version, found.modified)


def reopen(seen: Seen, bucket: Bucket) -> bool:
    """Make a failed batch free again, under the next token; False if it changed meanwhile."""
    changes = {
        "released": True,
        "outcome": None,
        "run": None,
        "note": None,
        "expires_as": None,
        "token": seen.record.token + 1,
    }
    record = seen.record.model_copy(update=changes)
    return _swapped(record, seen.version, bucket) is not None


def _end(held: Claim, bucket: Bucket, state: str, facts: dict[str, str | None]) -> Outcome:
    outcome = Outcome.model_validate(
        {
            "state": state,
            "batch": held.batch,
            "token": held.token,
            "owner": held.record.owner,
            "run": held.record.run,
            "finished": iso(bucket.now()),
            **facts,
        }
    )
    _kept(held, {"outcome": outcome}, bucket)
    publish(outcome, bucket)
    return outcome


def iso(seconds: float) -> str:
    """A time of the store as ISO 8601, UTC, whole seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _kept(held: Claim, changes: dict[str, Any], bucket: Bucket) -> Claim:
    changed = _swapped(held.record.model_copy(update=changes), held.version, bucket)
    if changed is None:
        raise LeaseLost(held.batch, held.token)
    return changed


def _swapped(record: Record, version: str | None, bucket: Bucket) -> Claim | None:
    made = bucket.swap(f"{CLAIMS}/{record.batch}.json", record.to_bytes(), version)
    return None if made is None else Claim(record, made)
