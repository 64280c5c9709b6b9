"""The ledger: what became of each deletion request, as a chain of hashes.

    line_hash = sha256(hash of the line before, as 64 hex digits + canonical bytes of the line)

The first line follows 64 zeros.  A line cannot be changed, removed, put in or moved without every
hash after it.  Lines cut off at the end are found by whoever noted the last hash, as each batch's
outcome and certificate do.

A request id may be a name, an address or a customer's number, and few enough of these exist to try
them all.  So the ledger holds `HMAC-SHA256(salt, id)`, and the salt lies elsewhere: with it an
auditor finds a given request's lines, without it nobody finds out whose lines they are, and once
it is destroyed the ledger is anonymous and still verifies.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from grom.errors import BrokenLedger

GENESIS = "0" * 64
"""What the first line follows."""
STATES = ("honoured", "refused", "rolled back", "withdrawn")
MIN_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """What one run did with one request.  Ids, hashes and times; nothing that a row says."""

    request: str
    """`request_hash` of the request's id."""
    batch: str
    received: str
    """When the batch was complete.  All times: ISO 8601 with offset zero."""
    run: str
    model_version: str | None
    """Version of the registered model that no longer knows it; None unless honoured."""
    certificate: str | None
    """sha256 of the certificate."""
    state: str
    """One of `STATES`."""
    started: str
    finished: str

    def __post_init__(self) -> None:
        """Check what the type cannot.

        Raises:
            ValueError: a hash, time or state is none.
        """
        hashes = [self.request, *([] if self.certificate is None else [self.certificate])]
        if not all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes):
            raise ValueError("`request` and `certificate` are sha256 in hex")
        if self.state not in STATES:
            raise ValueError(f"`state` is one of {', '.join(STATES)}")
        if not self.batch or not self.run:
            raise ValueError("`batch` and `run` are not empty")
        for when in (self.received, self.started, self.finished):
            if datetime.fromisoformat(when).utcoffset() != timedelta(0):
                raise ValueError("times are ISO 8601 with offset zero")

    @property
    def key(self) -> tuple[str, str, str]:
        """Request, batch and run: one line for each."""
        return self.request, self.batch, self.run

    @property
    def result(self) -> tuple[str, str | None, str | None]:
        """What two lines with one key must agree about; times differ when a run is resumed."""
        return self.state, self.model_version, self.certificate

    def to_bytes(self) -> bytes:
        """The one spelling of the line: JSON, keys sorted, no blanks, UTF-8."""
        names = sorted(field.name for field in fields(LedgerLine))
        values = {name: getattr(self, name) for name in names}
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainedLine(LedgerLine):
    """A line in its place."""

    number: int
    """From 1."""
    line_hash: str


def request_hash(request_id: str, salt: bytes) -> str:
    """HMAC-SHA256 of a request's id, exactly as it was given, in hex.

    Raises:
        ValueError: the salt has under 16 bytes.
    """
    if len(salt) < MIN_SALT_BYTES:
        raise ValueError(f"a salt has at least {MIN_SALT_BYTES} bytes")
    return hmac.new(salt, request_id.encode(), hashlib.sha256).hexdigest()


def line_hash(previous: str, line: LedgerLine) -> str:
    """sha256 over the hash of the line before and the line's canonical bytes, in hex."""
    return hashlib.sha256(previous.encode() + line.to_bytes()).hexdigest()


def chain(
    lines: Iterable[LedgerLine], previous: str = GENESIS, first_number: int = 1
) -> list[ChainedLine]:
    """Lines in their places, after the line whose hash is `previous`."""
    chained = []
    for number, line in enumerate(lines, start=first_number):
        previous = line_hash(previous, line)
        plain = {field.name: getattr(line, field.name) for field in fields(LedgerLine)}
        chained.append(ChainedLine(**plain, number=number, line_hash=previous))
    return chained


def verify(
    lines: Sequence[ChainedLine],
    previous: str = GENESIS,
    first_number: int = 1,
    where: str = "ledger",
) -> str:
    """Check a chain, or a piece of one that follows the line whose hash is `previous`.

    Returns:
        hash of the last line, which the next piece follows; `previous` if there are no lines.

    Raises:
        BrokenLedger: names the first line that does not fit.
    """
    for number, line in enumerate(lines, start=first_number):
        if line.number != number:
            raise BrokenLedger(where, number, f"line {line.number} is in its place")
        previous = line_hash(previous, line)
        if line.line_hash != previous:
            raise BrokenLedger(where, number, "its hash does not follow from the line before")
    return previous
