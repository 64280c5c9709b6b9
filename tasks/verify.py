"""Whether a certificate can be relied on: the document, its signature, the ledger, the artifacts.

Each check is ok, failed, or not checked, and says what it looked at.  The model's bytes are checked
by `verify_model.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from grom.certificate import OF_REQUEST, SEALS, Certificate, changed_parts
from grom.errors import DataError
from grom.ledger import GENESIS, ChainedLine, LedgerLine, line_hash
from grom.signing import signature_holds
from tasks.accepted import HONOURED, WITHDRAWN, standing
from tasks.certificates import certificate_of
from tasks.ledger import DIGITS, LEDGER, Ledger, Segment
from tasks.provenance import find_published
from tasks.solve import ALPHA
from tasks.store import Store

State = Literal["ok", "failed", "not checked"]
NO_STORE = "no store was given"
MAX_NAMED = 2
"""Requests that a check names; more are counted."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    detail: str


def verify_document(certificate: Certificate, trusted: str | None = None) -> list[Check]:
    """Check a document by itself.

    Args:
        certificate: as it was read, which checked schema and spelling.
        trusted: public key in hex; not given: nobody's signature is trusted.
    """
    kind = f"certificate of a {certificate.kind}"
    checks = [Check("schema", "ok", f"{certificate.format}, {kind}")]
    if changed := changed_parts(certificate):
        checks.append(Check("digests", "failed", f"changed: {', '.join(changed)}"))
    else:
        checks.append(Check("digests", "ok", f"{len(certificate.digests)} parts as written"))
    checks.append(_signature(certificate, trusted))
    if certificate.kind == "request":
        checks.append(_own_lines(certificate))
    return checks


def _signature(certificate: Certificate, trusted: str | None) -> Check:
    name, signature = "signature", certificate.signature
    if signature is None:
        state: State = "failed" if trusted else "not checked"
        return Check(name, state, "the document is not signed")
    if not signature_holds(certificate):
        return Check(name, "failed", "the document is not the one that was signed")
    key = f"{signature.algorithm} key {signature.public_key}"
    if trusted is None:
        return Check(name, "not checked", f"it holds, by an unknown key: {key}")
    if signature.public_key != trusted:
        return Check(name, "failed", f"it holds, but by another key than the trusted one: {key}")
    return Check(name, "ok", f"by the trusted {key}")


def _own_lines(certificate: Certificate) -> Check:
    """The ledger's lines that a request's certificate brings along."""
    name = "lines of the ledger, as quoted"
    (entry,) = certificate.requests
    for one in certificate.lines:
        try:
            line = LedgerLine(**one.line)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return Check(name, "failed", f"line {one.number} is no line of a ledger")
        if line_hash(one.previous, line) != one.line_hash:
            return Check(name, "failed", f"line {one.number} does not have its hash")
        if (line.request, line.batch) != (entry.request, certificate.batch):
            return Check(name, "failed", f"line {one.number} is of another request")
    named = {one.line.get("certificate") for one in certificate.lines}
    if certificate.batch_certificate not in named:
        return Check(name, "failed", "none of them carries the hash of the batch's certificate")
    return Check(name, "ok", f"{len(certificate.lines)}, each with its hash")


def verify_in_store(certificate: Certificate, store: Store | None) -> list[Check]:
    """Check a document against the store that it comes from: ledger, state, artifacts."""
    names = ("ledger", "entry in the ledger", "in force", "artifacts")
    if store is None:
        return [Check(name, "not checked", NO_STORE) for name in names]
    try:
        lines = Ledger(store).read()
    except DataError as error:
        rest = [Check(name, "not checked", "the ledger is broken") for name in names[1:3]]
        return [Check(names[0], "failed", str(error)), *rest, _artifacts(certificate, store)]
    return [
        _segments(store) or _chain(certificate, lines),
        _entry(certificate, lines, store),
        _in_force(certificate, lines),
        _artifacts(certificate, store),
    ]


def _segments(store: Store) -> Check | None:
    """A failed check if a segment has other bytes than were written, wherever in it."""
    for number in count(1):
        found = store.read(f"{LEDGER}/{number:0{DIGITS}d}.json")
        if found is None:
            return None
        segment = Segment.model_validate_json(found.data)
        lines = store.read(segment.file)
        if lines is None or hashlib.sha256(lines.data).hexdigest() != segment.sha256:
            return Check(
                "ledger", "failed", f"{segment.file}: its bytes are not those it is named by"
            )
    return None


def _chain(certificate: Certificate, lines: Sequence[ChainedLine]) -> Check:
    """Whether the ledger holds, and still has the line that the batch's lines follow."""
    hashes = [GENESIS, *(line.line_hash for line in lines)]
    name = "ledger"
    if certificate.ledger_head not in hashes:
        detail = "it lacks the line that this batch's lines follow: it was cut off or replaced"
        return Check(name, "failed", detail)
    follows = hashes.index(certificate.ledger_head)
    own = [line.number for line in lines if line.run == certificate.run]
    if own and certificate.kind == "batch" and min(own) != follows + 1:
        return Check(name, "failed", f"line {min(own)} does not follow the line it should")
    return Check(name, "ok", f"{len(lines)} lines, each follows from the one before")


def _entry(certificate: Certificate, lines: Sequence[ChainedLine], store: Store) -> Check:
    name = "entry in the ledger"
    if certificate.kind == "request":
        return _entry_of_request(certificate, lines, store)
    by_key = {line.key: line for line in lines}
    for entry in certificate.requests:
        line = by_key.get((entry.request, certificate.batch, certificate.run))
        short = f"request {entry.request[:12]}"
        if line is None:
            return Check(name, "failed", f"{short} has no line of this batch and run")
        if line.state != entry.state:
            return Check(name, "failed", f"line {line.number}: {short} is {line.state} there")
        if line.certificate != certificate.sha256:
            detail = f"line {line.number} has the hash of another document than this one"
            return Check(name, "failed", detail)
    return Check(name, "ok", f"{len(certificate.requests)} lines carry this document's hash")


def _entry_of_request(
    certificate: Certificate, lines: Sequence[ChainedLine], store: Store
) -> Check:
    name = "entry in the ledger"
    for one in certificate.lines:
        there = lines[one.number - 1] if 0 < one.number <= len(lines) else None
        if there is None or there.line_hash != one.line_hash:
            return Check(name, "failed", f"line {one.number} is another one there")
    line = next((one for one in lines if one.certificate == certificate.batch_certificate), None)
    if line is None:
        return Check(name, "failed", "no line carries the hash of the batch's certificate")
    try:
        whole = certificate_of(line, lines, store)
    except DataError as error:
        return Check(name, "failed", str(error))
    changed = _differing(certificate, whole)
    if changed:
        return Check(name, "failed", f"not as in the batch's certificate: {', '.join(changed)}")
    return Check(name, "ok", f"{len(certificate.lines)} lines, and the batch's certificate agrees")


def _differing(certificate: Certificate, whole: Certificate) -> list[str]:
    """Parts of a request's certificate that are not those of its batch's."""
    other = {*OF_REQUEST, *SEALS, "authenticity"}
    names = [name for name in Certificate.model_fields if name not in other]
    found = [name for name in names if getattr(certificate, name) != getattr(whole, name)]
    return found + ([] if certificate.requests[0] in whole.requests else ["requests"])


def _in_force(certificate: Certificate, lines: Sequence[ChainedLine]) -> Check:
    """Whether what was honoured is still honoured, by the last line of each request."""
    name, now = "in force", standing(list(lines))
    states = {one.request: one.state for one in certificate.requests}
    found = [line for one in states if (line := now.get((one, certificate.batch))) is not None]
    lost = [line for line in found if states[line.request] == HONOURED != line.state]
    counts = Counter(states.values())
    said = ["requests: " + ", ".join(f"{number} {state}" for state, number in counts.items())]
    if lost:
        said = [_lost(line) for line in lost[:MAX_NAMED]]
        said += [f"{len(lost) - MAX_NAMED} more"] if len(lost) > MAX_NAMED else []
        said += [f"{num} still honoured"] if (num := counts[HONOURED] - len(lost)) else []
    own = certificate.sha256 if certificate.kind == "batch" else certificate.batch_certificate
    newer = [line for line in found if line.certificate not in (None, own)]
    if newer:
        of = "REQUEST_ID" if certificate.kind == "request" else f"--batch {certificate.batch}"
        said.append(
            f"a newer certificate exists, see line {newer[0].number}: `grom certificate {of}`"
        )
    again = {line.batch for line in now.values() if _is_back(line, states)}
    said += [f"forgotten again since, in batch {batch}" for batch in sorted(again)]
    return Check(name, "failed" if lost else "ok", "; ".join(said))


def _lost(line: ChainedLine) -> str:
    when = f"on {line.finished[:10]} by line {line.number} of the ledger"
    return f"request {line.request[:12]} was {line.state} {when}"


def _is_back(line: ChainedLine, states: Mapping[str, str]) -> bool:
    """Whether a line honours, in another batch, what the certificate says was withdrawn."""
    return line.state == HONOURED and states.get(line.request) == WITHDRAWN


def _artifacts(certificate: Certificate, store: Store) -> Check:
    """Whether solve and statistics are those of the certificate, to the byte."""
    name, failures, gone, num_ok = "artifacts", list[str](), list[str](), 0
    expected = {one.artifact: one.sha256 for one in certificate.statistics}
    for artifact in (f"solve/{certificate.edit.key}", *expected):
        try:
            found = find_published(artifact, store)
            if found is None:
                gone.append(artifact)
                continue
            store.fetch(found.artifact)
            alpha = found.file_sha256(ALPHA) if artifact not in expected else None
        except (DataError, KeyError) as error:
            failures.append(str(error))
            continue
        if alpha not in (None, certificate.edit.alpha_sha256):
            failures.append(f"{artifact}: another alpha")
        elif artifact in expected and found.sha256 != expected[artifact]:
            failures.append(f"{artifact}: not the files that were certified")
        else:
            num_ok += 1
    if failures:
        return Check(name, "failed", "; ".join(failures))
    missing = f"; no longer in the store: {', '.join(gone)}" if gone else ""
    detail = f"{num_ok} artifacts, every file with its hash{missing}"
    return Check(name, "ok" if num_ok else "not checked", detail)
