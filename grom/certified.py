"""The parts of a certificate (`grom.certificate`): hashes, numbers and words, nothing of a row."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grom.config import Config

SHA256 = "^[0-9a-f]{64}$"


class CertifiedRequest(Config):
    """One request, and what became of it."""

    request: str = Field(pattern=SHA256)
    """Salted hash of its id."""
    state: str
    reason: str | None = None
    """Why it was refused."""
    influence: dict[str, Any] | None = None
    """On all sites together: the columns of `grom.influence.Influence`."""


class Base(Config):
    """The model before the edit."""

    source: str
    """As the configuration calls it, without a password."""
    fingerprint: str


class CertifiedModel(Config):
    """The edited model."""

    name: str
    version: str
    dtype: str
    """Of the edited tensors."""
    files: dict[str, str]
    """sha256 of each file of the checkpoint."""
    untouched_sha256: str
    """Of all tensors that the edit left alone, by name."""


class CertifiedEdit(Config):
    """The edit."""

    key: str
    """Of its solve."""
    checkpoint: str
    """Key of what `apply` wrote."""
    files: dict[str, str]
    """sha256 of its factors, sites, exact originals and their record."""
    edited: dict[str, str]
    """sha256 of each edited tensor after the edit."""
    alpha_sha256: str
    nats: float
    beta: float
    stopped_by: str
    """What ended the search for the strength."""


class Statistics(Config):
    """Sums that the edit was solved from."""

    role: Literal["retain", "background", "forget", "forget, earlier", "forget, together"]
    artifact: str
    """Stage and key."""
    sha256: str
    """Of the digests of its files."""
    batch: str | None = None


class Measured(Config):
    """What was measured of one model on one set."""

    model: str
    precision: str
    set: str
    num_examples: int
    values: dict[str, float]
    """Means over the examples."""


class CertifiedCondition(Config):
    """A condition of the gate."""

    name: str
    value: float
    limit: float
    at_most: bool
    passed: bool
    margin: float


class CertifiedAttack(Config):
    """An attack with its verdict: removed, suppressed or not tested."""

    name: str
    verdict: str
    measure: str
    unedited: float
    edited: float
    attacked: float
    ceiling: float
    floor: float
    recovered_share: float
    num_examples: int
    reason: str


class CertifiedLine(Config):
    """A line of the ledger with its neighbour's hash, so that its own can be computed anew."""

    number: int
    previous: str
    line_hash: str
    line: dict[str, str | None]
    """The fields of `grom.ledger.LedgerLine`."""


class Signature(Config):
    """Over the canonical bytes of the document without it."""

    algorithm: Literal["Ed25519"] = "Ed25519"
    public_key: str = Field(pattern=SHA256)
    """32 bytes in hex."""
    value: str = Field(pattern="^[0-9a-f]{128}$")
