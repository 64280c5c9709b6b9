"""Where each batch stands, read from objects alone.

waiting     in the inbox; nobody has it, or the lease of who had it ran out
claimed     a worker has it
running     a worker has it, and a run works on it
done        honoured, for ever
failed      cannot be honoured as it is; `retry` makes it wait again
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from grom.errors import DataError, GromError, MissingInput
from tasks import claims
from tasks.artifacts import CorruptArtifact
from tasks.backends import Entry
from tasks.bucket import Bucket
from tasks.claims import CLAIMS, Seen
from tasks.inbox import Arrival, arrivals, documents
from tasks.manifest import plain_batch
from tasks.outcomes import DONE, FAILED, Outcome, publish, read_outcome

logger = logging.getLogger(__name__)
State = Literal["waiting", "claimed", "running", "done", "failed"]


class NotFailed(DataError):
    """Only what failed can be retried."""

    def __init__(self, batch: str, state: str) -> None:
        super().__init__(
            f"batch {batch}: is {state}, not failed, so there is nothing to retry. Check "
            f"`grom status {batch}`."
        )


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Where a batch stands."""

    batch: str
    state: State
    is_ready: bool
    """Waiting, and can be taken up."""
    received: float | None = None
    """When its marker was written, by the store's clock."""
    since: float | None = None
    """When it came into this state."""
    owner: str | None = None
    token: int | None = None
    run: str | None = None
    outcome: Outcome | None = None
    note: str | None = None
    """What a person should know: why it failed, why it cannot be taken up."""


def statuses(bucket: Bucket) -> list[BatchStatus]:
    """All batches, those in the inbox first, oldest first.

    What is done is listed, not opened: `outcome` is None there.
    """
    inbox = {arrival.batch: arrival for arrival in arrivals(bucket)}
    done, failed, claimed = (_listed(folder, bucket) for folder in (DONE, FAILED, CLAIMS))
    now = bucket.now()
    found = []
    for batch in dict.fromkeys([*inbox, *claimed, *failed, *done]):
        arrival = inbox.get(batch)
        if batch in done:
            found.append(_done(batch, arrival, done[batch].modified, None))
            continue
        try:
            seen = claims.look(batch, bucket) if batch in claimed else None
            failure = read_outcome(batch, FAILED, bucket) if batch in failed else None
        except CorruptArtifact as error:  # the others go on
            found.append(BatchStatus(batch, "waiting", is_ready=False, note=str(error)))
            continue
        found.append(_status(batch, arrival, seen, failure, now))
    return found


def status(batch: str, bucket: Bucket) -> BatchStatus:
    """One batch, with all that can be said without opening its files.

    Raises:
        MissingInput: there is no trace of it.
    """
    arrival = next(iter(arrivals(bucket, plain_batch(batch))), None)
    outcome = read_outcome(batch, DONE, bucket)
    if outcome is not None:
        return _done(batch, arrival, None, outcome)
    seen, failure = claims.look(batch, bucket), read_outcome(batch, FAILED, bucket)
    if arrival is None and seen is None and failure is None:
        raise MissingInput(bucket.where, f"there is no batch {batch}")
    found = _status(batch, arrival, seen, failure, bucket.now())
    if found.is_ready and arrival is not None:
        try:
            documents(batch, bucket)
        except GromError as error:
            return _waiting(arrival, str(error))
    return found


def waiting(bucket: Bucket) -> list[str]:
    """Names of the batches that can be taken up now, oldest first."""
    return [found.batch for found in statuses(bucket) if found.is_ready]


def retry(batch: str, bucket: Bucket) -> None:
    """Let a failed batch wait again.

    Raises:
        MissingInput: there is no trace of it.
        NotFailed: it is in another state.
    """
    found = status(batch, bucket)
    if found.state != FAILED:
        raise NotFailed(batch, found.state)
    seen = claims.look(batch, bucket)
    if seen is not None and not claims.reopen(seen, bucket):
        raise NotFailed(batch, status(batch, bucket).state)
    # Under the new token it counts no longer; who fails meanwhile publishes again.
    bucket.delete(f"{FAILED}/{batch}.json")


def settle(bucket: Bucket) -> list[str]:
    """Publish the outcomes that killed workers left in their claims; the names of those batches.

    A claim that cannot be read is left to `statuses`, which shows it.
    """
    published = {(state, batch) for state in (DONE, FAILED) for batch in _listed(state, bucket)}
    settled = []
    for batch in _listed(CLAIMS, bucket):
        if (DONE, batch) in published:
            continue
        try:
            seen = claims.look(batch, bucket)
        except CorruptArtifact as error:
            logger.warning("batch %s: not settled (%s)", batch, error)
            continue
        outcome = seen.record.outcome if seen else None
        if outcome is not None and (outcome.state, batch) not in published:
            publish(outcome, bucket)
            settled.append(batch)
    return settled


def _listed(folder: str, bucket: Bucket) -> dict[str, Entry]:
    return {
        entry.name.split("/", 1)[1].removesuffix(".json"): entry for entry in bucket.entries(folder)
    }


def _status(
    batch: str, arrival: Arrival | None, seen: Seen | None, failure: Outcome | None, now: float
) -> BatchStatus:
    received = arrival.received if arrival else None
    outcome = seen.record.outcome if seen else failure
    if outcome is not None and outcome.state == DONE:
        return _done(batch, arrival, seen.modified if seen else None, outcome)
    if outcome is not None:
        return BatchStatus(
            batch,
            "failed",
            is_ready=False,
            received=received,
            since=seen.modified if seen else None,
            owner=outcome.owner,
            token=outcome.token,
            run=outcome.run,
            outcome=outcome,
            note=outcome.reason,
        )
    if seen is not None and not seen.record.released and not seen.has_run_out(now):
        return BatchStatus(
            batch,
            "running" if seen.record.run else "claimed",
            is_ready=False,
            received=received,
            since=seen.modified,
            owner=seen.record.owner,
            token=seen.record.token,
            run=seen.record.run,
            note="waits for approval" if seen.record.expires_as else None,
        )
    note = None
    if seen is not None and seen.record.released and seen.record.note:
        note = f"the last run gave it back: {seen.record.note}"
    elif seen is not None and not seen.record.released:
        note = f"the lease of {seen.record.owner} ran out; the next worker takes over"
    if arrival is None:
        return BatchStatus(batch, "waiting", is_ready=False, note="its files are gone")
    return _waiting(arrival, arrival.problem or note, is_ready=arrival.problem is None)


def _waiting(arrival: Arrival, note: str | None, is_ready: bool = True) -> BatchStatus:
    received = arrival.received
    return BatchStatus(
        arrival.batch, "waiting", is_ready, received=received, since=received, note=note
    )


def _done(
    batch: str, arrival: Arrival | None, since: float | None, outcome: Outcome | None
) -> BatchStatus:
    return BatchStatus(
        batch,
        "done",
        is_ready=False,
        received=arrival.received if arrival else None,
        since=since,
        owner=outcome.owner if outcome else None,
        token=outcome.token if outcome else None,
        run=outcome.run if outcome else None,
        outcome=outcome,
    )
