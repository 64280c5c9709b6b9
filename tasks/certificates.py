"""Certificates in a store, and what signs them.

    certificates/<batch>/<run>/certificate.json

The private key is read from the environment when a document is signed: it is no setting, no
argument of a task and no part of a message.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from grom.certificate import (
    BrokenCertificate,
    Certificate,
    alike,
    of_request,
    read_certificate,
)
from grom.certified import CertifiedLine
from grom.errors import ConfigError, DataError, MissingInput
from grom.ledger import GENESIS, ChainedLine, LedgerLine
from grom.signing import read_private_key, sealed
from tasks.accepted import HONOURED, WITHDRAWN, standing
from tasks.bucket import Bucket
from tasks.claims import iso
from tasks.ledger import Ledger
from tasks.register import git_sha

logger = logging.getLogger(__name__)
CERTIFICATES = "certificates"
KEY, KEY_FILE = "GROM_SIGNING_KEY", "GROM_SIGNING_KEY_FILE"
PACKAGES = (
    "grom-pipeline", "torch", "numpy", "safetensors", "transformers", "tokenizers", "bitsandbytes",
    "mlflow", "prefect", "cryptography",
)  # fmt: skip


class NoCertificate(DataError):
    """There is nothing to show for a request or a batch."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}. `grom status` shows every batch and where it stands.")


def certificate_name(batch: str, run: str) -> str:
    """Where a batch's certificate lies."""
    return f"{CERTIFICATES}/{batch}/{run}/certificate.json"


def stored_certificate(batch: str, run: str, bucket: Bucket) -> Certificate | None:
    """A batch's certificate, or None.

    Raises:
        BrokenCertificate: it cannot be read.
    """
    name = certificate_name(batch, run)
    found = bucket.read(name)
    return None if found is None else read_certificate(found.data, f"{bucket.root}/{name}")


def certificate_of(line: ChainedLine, lines: Sequence[ChainedLine], bucket: Bucket) -> Certificate:
    """The certificate that a line of the ledger carries the hash of.

    A later step may repeat the hash under a name of its own; the first line that has it names the
    run that wrote the document.

    Raises:
        MissingInput: it carries none, or the certificate is not in the store.
        BrokenCertificate: it cannot be read, or is another one than the ledger says.
    """
    if line.certificate is None:
        raise MissingInput(
            f"{bucket.root}, line {line.number} of the ledger",
            f"no certificate: the request is {line.state}, by a run that wrote none",
        )
    first = next(
        one for one in lines if (one.batch, one.certificate) == (line.batch, line.certificate)
    )
    name = certificate_name(first.batch, first.run)
    found = stored_certificate(first.batch, first.run, bucket)
    if found is None:
        raise MissingInput(f"{bucket.root}/{name}", "the ledger names it, and it is missing")
    if found.sha256 != line.certificate:
        reason = f"its hash is not the one in line {first.number} of the ledger"
        raise BrokenCertificate(f"{bucket.root}/{name}", reason)
    return found


def latest_of_batch(batch: str, bucket: Bucket) -> Certificate:
    """The newest certificate of a batch.

    Raises:
        NoCertificate: no line of the ledger is of this batch, none carries a certificate, or all of
            it was withdrawn.
        MissingInput, BrokenCertificate: see `certificate_of`.
    """
    lines = Ledger(bucket).read()
    mine = [line for line in lines if line.batch == batch]
    return certificate_of(_newest(mine, f"batch {batch}", lines), lines, bucket)


def certificates_of_request(request_id: str, bucket: Bucket) -> list[Certificate]:
    """A certificate for each batch that a request is in, signed if there is a key.

    Raises:
        NoCertificate: the ledger has no such request, or nothing that holds was certified of it.
        MissingInput, BrokenCertificate: see `certificate_of`.
        ConfigError: the signing key is none.
    """
    ledger = Ledger(bucket)
    mine, lines = ledger.find(request_id), ledger.read()
    if not mine:
        _newest(mine, "this request", lines)
    key, issued, found, without = signing_key(), iso(bucket.now()), [], []
    for batch in dict.fromkeys(line.batch for line in mine):
        own = [line for line in mine if line.batch == batch]
        try:
            newest = _newest(own, f"this request, in batch {batch}", lines)
        except NoCertificate as error:
            without.append(error)
            continue
        quoted = [_quoted(line, lines) for line in own]
        whole = certificate_of(newest, lines, bucket)
        found.append(sealed(of_request(whole, own[0].request, quoted, issued), key))
    if not found:
        raise without[0]
    for reason in without:
        logger.warning("%s", reason)
    return found


def _newest(mine: Sequence[ChainedLine], what: str, lines: Sequence[ChainedLine]) -> ChainedLine:
    """The last line with a certificate, unless a withdrawal without one came after it."""
    if not mine:
        raise NoCertificate(what, "the ledger has no line of it; write it as it was submitted")
    last = mine[-1]
    if last.certificate is None and last.state == WITHDRAWN:
        raise NoCertificate(what, _uncertified(last, lines))
    certified = [line for line in mine if line.certificate is not None]
    if not certified:
        raise NoCertificate(what, f"its last line says `{last.state}`, without a certificate")
    return certified[-1]


def _uncertified(line: ChainedLine, lines: Sequence[ChainedLine]) -> str:
    """Why a withdrawal has no certificate, and what that means for older ones."""
    end = max(one.number for one in lines if one.run == line.run)
    reason = "nothing was left to forget, so the base model itself took over, without an edit"
    if any(one.state == HONOURED for one in standing(list(lines[:end])).values()):
        reason = "that run wrote no certificate"
    return (
        f"withdrawn on {line.finished[:10]} by run {line.run}, line {line.number} of the ledger: "
        f"{reason}. Older certificates of it hold no longer; submit it anew if it is to be "
        "forgotten again"
    )


def _quoted(line: ChainedLine, lines: Sequence[ChainedLine]) -> CertifiedLine:
    previous = GENESIS if line.number == 1 else lines[line.number - 2].line_hash
    return CertifiedLine(
        number=line.number,
        previous=previous,
        line_hash=line.line_hash,
        line={field.name: getattr(line, field.name) for field in fields(LedgerLine)},
    )


def write_certificate(
    certificate: Certificate, key: Ed25519PrivateKey | None, bucket: Bucket
) -> str:
    """Seal and write a certificate, unless one that says the same is there.  Returns its sha256.

    A run may be taken up by another worker, and the ledger takes one hash for a request and run;
    so what differs in its time alone is the same certificate.
    """
    whole = sealed(certificate, key)
    name, version_now = certificate_name(whole.batch, whole.run), None
    while bucket.swap(name, whole.to_bytes(), version_now) is None:
        found = bucket.read(name)
        version_now = None if found is None else found.version
        there = None if found is None else _readable(found.data, name)
        if there is not None and alike(there, whole):
            return there.sha256
    return whole.sha256


def written_certificate(batch: str, run: str, bucket: Bucket) -> Certificate | None:
    """What an attempt of a run that was killed wrote of a batch, if it can be read."""
    try:
        return stored_certificate(batch, run, bucket)
    except BrokenCertificate:
        return None


def _readable(data: bytes, name: str) -> Certificate | None:
    try:
        return read_certificate(data, name)
    except BrokenCertificate:
        return None


def signing_key() -> Ed25519PrivateKey | None:
    """The key of the environment, or None.

    Raises:
        ConfigError: it is no Ed25519 key, or its file cannot be read.
    """
    if text := os.environ.get(KEY):
        return read_private_key(text, KEY)
    path = os.environ.get(KEY_FILE)
    if not path:
        return None
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {path} cannot be read ({type(error).__name__})") from None
    return read_private_key(text, KEY_FILE)


def software() -> dict[str, str]:
    """Versions of what computed, and the kind of machine."""
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        kind += f", {torch.cuda.get_device_name()}"
    found = {"python": platform.python_version(), "commit": git_sha(), "machine": kind}
    return found | {name: version(name) for name in PACKAGES}
