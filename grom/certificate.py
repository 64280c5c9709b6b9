"""The certificate of a deletion batch: what was asked, what was done, how well, and what it leaves
out.  One spelling, a digest of every part, and a signature if there is a key (`grom.signing`).

    digests      sha256 of each part's canonical bytes, so that a changed part can be named
    signature    over the canonical bytes of everything else

The ledger's lines carry the sha256 of the whole document.  It holds hashes and numbers: requests
go by their salted hash, and nothing that a row says is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from grom.certified import (
    SHA256,
    Base,
    CertifiedAttack,
    CertifiedCondition,
    CertifiedEdit,
    CertifiedLine,
    CertifiedModel,
    CertifiedRequest,
    Measured,
    Signature,
    Statistics,
)
from grom.config import Config
from grom.errors import DataError

FORMAT: Literal["grom-certificate/1"] = "grom-certificate/1"
SEALS = ("digests", "signature")
"""Parts about the others."""
OF_REQUEST = ("kind", "requests", "settings", "batch_certificate", "lines", "issued")
"""Parts in which a request's certificate differs from its batch's."""


class BrokenCertificate(DataError):
    """This is no certificate, or not as it was written."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: {reason}. Take the certificate from its store, "
            "certificates/<batch>/<run>/certificate.json, or a backup."
        )


class Certificate(Config):
    """Of a batch; or of one of its requests, taken from the batch's."""

    format: Literal["grom-certificate/1"] = FORMAT
    kind: Literal["batch", "request"] = "batch"
    batch: str
    run: str
    manifest_sha256: str
    received: str
    """All times: by the store's clock, ISO 8601 with offset zero."""
    started: str
    certified: str
    requests: tuple[CertifiedRequest, ...]
    influence_note: str
    """How exact the influence is, or why there is none."""
    base: Base
    model: CertifiedModel
    edit: CertifiedEdit
    statistics: tuple[Statistics, ...]
    settings: dict[str, Any] | None
    """Of the run, without passwords; None in a request's certificate."""
    measured: tuple[Measured, ...]
    free_answers: dict[str, dict[str, float]]
    """Model -> rates of free answers to forget prompts."""
    gate: tuple[CertifiedCondition, ...]
    attacks: tuple[CertifiedAttack, ...]
    approver: str
    software: dict[str, str]
    ledger_head: str = Field(pattern=SHA256)
    """Hash of the line that the batch's lines follow."""
    repeats: str | None = None
    """sha256 of the certificate of the run that made the version, if this batch brought nothing
    new and none was made for it."""
    not_covered: tuple[str, ...]
    batch_certificate: str | None = None
    """sha256 of the batch's certificate, in a request's."""
    lines: tuple[CertifiedLine, ...] = ()
    """What the ledger says of the request in this batch, oldest first."""
    issued: str | None = None
    """When a request's certificate was taken."""
    authenticity: str = ""
    """Whether it is signed, in words."""
    digests: dict[str, str] = Field(default_factory=dict)
    signature: Signature | None = None

    def to_bytes(self) -> bytes:
        """The one spelling of the document."""
        return canonical_bytes(self.model_dump(mode="json"))

    @property
    def sha256(self) -> str:
        """Hash of the document."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def signed_bytes(self) -> bytes:
        """What a signature is over."""
        return canonical_bytes(self.model_dump(mode="json", exclude={"signature"}))

    def digested(self) -> Certificate:
        """With the digests of its parts, and unsigned."""
        return self.model_copy(update={"digests": digests_of(self), "signature": None})


def canonical_bytes(value: object) -> bytes:
    """JSON with sorted keys and no blanks, UTF-8; NaN and Inf, which JSON lacks, as words.

    Raises:
        TypeError: the value is not made of dicts, lists, strings, numbers, bools and None.
    """
    text = json.dumps(_spelled(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def digests_of(certificate: Certificate) -> dict[str, str]:
    """sha256 of the canonical bytes of each part."""
    parts = certificate.model_dump(mode="json", exclude=set(SEALS))
    return {name: hashlib.sha256(canonical_bytes(part)).hexdigest() for name, part in parts.items()}


def changed_parts(certificate: Certificate) -> list[str]:
    """Names of the parts that their digests do not fit."""
    now, written = digests_of(certificate), certificate.digests
    return sorted(name for name in {*now, *written} if now.get(name) != written.get(name))


def read_certificate(data: bytes, where: str) -> Certificate:
    """Read a document; its digests and its signature are still to be checked.

    Raises:
        BrokenCertificate: it is not JSON, not this schema, or in another spelling; names the part.
    """
    try:
        found = json.loads(data)
    except ValueError as error:
        at = f", at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise BrokenCertificate(where, f"not JSON{at}") from None
    try:
        certificate = Certificate.model_validate(found)
    except ValidationError as error:
        parts = sorted({".".join(map(str, one["loc"])) or "document" for one in error.errors()})
        raise BrokenCertificate(where, f"{', '.join(parts)}: not as in {FORMAT}") from None
    if certificate.to_bytes() != data:
        raise BrokenCertificate(where, "not in the one spelling of a certificate")
    return certificate


def alike(one: Certificate, other: Certificate) -> bool:
    """Whether two say the same, whenever they were made."""

    def timeless(certificate: Certificate) -> dict[str, Any]:
        dumped = certificate.model_dump(mode="json", exclude={"certified", "authenticity", *SEALS})
        key = certificate.signature and certificate.signature.public_key
        return dumped | {"public_key": key}

    return canonical_bytes(timeless(one)) == canonical_bytes(timeless(other))


def of_request(
    whole: Certificate, request: str, lines: Sequence[CertifiedLine], issued: str
) -> Certificate:
    """The certificate of one request of a batch, unsigned.

    Args:
        whole: the batch's.
        request: salted hash of the request's id.
        lines: what the ledger says of it, oldest first.
        issued: the time.

    Raises:
        KeyError: the batch has no such request.
    """
    entry = {one.request: one for one in whole.requests}[request]
    changes: Mapping[str, Any] = {
        "kind": "request",
        "requests": (entry,),
        "settings": None,
        "batch_certificate": whole.sha256,
        "lines": tuple(lines),
        "issued": issued,
    }
    return whole.model_copy(update=changes).digested()


def not_covered(
    *, has_earlier: bool, has_refused: bool, has_withdrawn: bool = False
) -> tuple[str, ...]:
    """What a certificate does not say, in plain words."""
    sentences = [
        "Older versions of this model, and backups of them: they know what was requested until "
        "they are removed.",
        "Adapters trained on an older version, and models that were merged, distilled or "
        "fine-tuned from one.",
        "Quantised or converted exports (GGUF, GPTQ, AWQ and others): those made from an older "
        "version know what was requested; of this version only the loads listed under attacks "
        "were measured.",
        "Copies outside the model's weights: training data, retrieval stores and vector indexes, "
        "caches of prompts and answers, logs of the serving system.",
        "Other models, whoever trained them.",
        "Suppression is not removal. The edit lowers the probability of what was to be forgotten; "
        "an attack with the verdict `suppressed` or `not tested` may bring it back, and attacks "
        "that are not listed were not tried.",
        "Knowledge put in other words was measured only on the sets that are listed.",
    ]
    if has_earlier:
        sentences.append(
            "Requests of earlier batches: their statistics are part of this edit, but their text "
            "is erased, so how well this version forgets them was not measured again."
        )
    if has_withdrawn:
        sentences.append(
            "Requests with the state `withdrawn`: they were taken back, and this version is made "
            "as if they had never been, so what they name is in the model again, unless an "
            "honoured request names it, too. Versions from before the withdrawal, and backups of "
            "them, still suppress it. Requests that are honoured were not measured again, for "
            "their text is erased."
        )
    if has_refused:
        sentences.append(
            "Requests with the state `refused`: no edit of this kind can honour them, and the "
            "model still knows what they name."
        )
    return tuple(sentences)


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return value
