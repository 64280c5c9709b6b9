"""How a batch ended: `done/<batch>.json` or `failed/<batch>.json`.

Both are published from the batch's claim, which decides (`claims.py`), and can be published again.
"""

from __future__ import annotations

import json
import logging
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from grom.errors import GromError
from tasks.artifacts import CorruptArtifact, canonical_json
from tasks.bucket import Bucket
from tasks.manifest import Refused

logger = logging.getLogger(__name__)
DONE, FAILED = "done", "failed"


class Outcome(BaseModel):
    """How a batch ended, and by whom.  Never a row's text."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    state: Literal["done", "failed"]
    batch: str
    token: int
    """Fencing token of the claim that it ended under."""
    owner: str
    run: str | None = None
    finished: str = ""
    """When, by the store's clock, ISO 8601."""
    reason: str | None = None
    """Why it failed."""
    model_version: str | None = None
    certificate: str | None = None
    """Hash of the certificate."""
    ledger: str | None = None
    """Hash of the ledger's last line after this batch was entered."""

    @property
    def name(self) -> str:
        """Where it is published."""
        return f"{self.state}/{self.batch}.json"

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))


def reason_of(error: BaseException) -> str:
    """Why a run failed, in words that can be kept: the message of an error of ours, which never
    quotes a row, or the kind of any other."""
    if isinstance(error, Refused):
        return error.reason
    return str(error) if isinstance(error, GromError) else type(error).__name__


def publish(outcome: Outcome, bucket: Bucket) -> None:
    """Write an outcome where everybody looks for it.

    The first `done` stays for ever.  A `failed` of an earlier attempt is replaced.
    """
    version: str | None = None
    while bucket.swap(outcome.name, outcome.to_bytes(), version) is None:
        found = bucket.read(outcome.name)
        if found is not None:
            written = parse_outcome(found.data, outcome.name)
            if outcome.state == DONE or written.token >= outcome.token:
                return
        version = None if found is None else found.version
    logger.info("batch %s: %s", outcome.batch, outcome.state)


def read_outcome(batch: str, state: str, bucket: Bucket) -> Outcome | None:
    """The published outcome of a batch, or None.

    Raises:
        CorruptArtifact: it cannot be read.
    """
    name = f"{state}/{batch}.json"
    found = bucket.read(name)
    return None if found is None else parse_outcome(found.data, name)


def parse_outcome(data: bytes, name: str) -> Outcome:
    """Read an outcome.

    Raises:
        CorruptArtifact: it is not one.
    """
    try:
        return Outcome.model_validate(json.loads(data))
    except (ValueError, ValidationError):
        raise CorruptArtifact(name, "not the outcome of a batch") from None
