"""Stage certify: what a run did for each of its batches, in writing, before the ledger has it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from grom.certificate import Certificate, not_covered
from grom.certified import Base, CertifiedCondition, CertifiedRequest
from grom.config import Config
from grom.influence import WHOLE
from grom.ledger import ChainedLine
from tasks.accepted import HONOURED, REFUSED, WITHDRAWN, Accepted, standing
from tasks.audit import AuditRef
from tasks.bucket import Bucket
from tasks.certificates import (
    certificate_of,
    signing_key,
    software,
    write_certificate,
    written_certificate,
)
from tasks.certified import Made, attack_of, edited_parts, statistics_of
from tasks.claims import iso
from tasks.desk import Taken
from tasks.influence_tables import read_influence
from tasks.ledger import Ledger
from tasks.place import Place
from tasks.provenance import lineage
from tasks.shown import shown_settings

logger = logging.getLogger(__name__)
NOT_AUDITED = "not measured: no audit was part of this run"
TAKEN_BACK = "withdrawn on request: this version is made as if it had never been asked for"
NOT_REACHED = "no edit of this kind reaches it: none of its tokens is specific to what is forgotten"


class Asked(Config):
    """What is certified of one batch."""

    batch: str
    manifest_sha256: str
    received: str
    started: str
    requests: tuple[str, ...]
    """Salted hashes."""
    withdrawn: str | None = None
    """The one of them that is taken back."""

    @property
    def of_batch(self) -> dict[str, Any]:
        """The parts of the certificate that come from here."""
        return self.model_dump(exclude={"requests", "withdrawn"})


def asked_of(taken: Sequence[Taken]) -> tuple[Asked, ...]:
    """What is certified of the batches on the desk."""
    return tuple(
        Asked(
            batch=one.batch,
            manifest_sha256=one.checked.manifest_sha256,
            received=iso(one.checked.received),
            started=one.started,
            requests=one.requests,
        )
        for one in taken
    )


def asked_again(
    records: Sequence[Accepted], withdrawn: str, run: str, lines: list[ChainedLine], bucket: Bucket
) -> tuple[Asked, ...]:
    """What is certified of batches that a request is taken out of: it, and what is left.

    A run that was killed and is done again began when its first certificate says.
    """
    stand = [line for line in standing(lines).values() if line.state == HONOURED]
    now = iso(bucket.now())
    begun = {record.batch: written_certificate(record.batch, run, bucket) for record in records}
    return tuple(
        Asked(
            batch=record.batch,
            manifest_sha256=record.manifest_sha256,
            received=next(line.received for line in stand if line.batch == record.batch),
            started=now if (first := begun[record.batch]) is None else first.started,
            requests=tuple(line.request for line in stand if line.batch == record.batch),
            withdrawn=withdrawn,
        )
        for record in records
    )


@task(cache_policy=NO_CACHE)  # what it writes lies outside of its arguments
def certify(
    asked: tuple[Asked, ...], made: Made, settings: dict[str, Any], place: Place
) -> dict[str, str]:
    """Write the certificate of each batch.  Returns their sha256 by batch.

    Done again it finds what it wrote, unless something else is to be said by then.

    Raises:
        ConfigError: the signing key is none.
    """
    store, key = place.open(), signing_key()
    found = lineage(made.edited.artifact.key, store)
    source = shown_settings({"source": made.base.source})["source"]
    influences, note = _influences(made.influence, place)
    common = {
        "run": made.run,
        "certified": iso(store.now()),
        "influence_note": note,
        "base": Base(source=str(source), fingerprint=made.base.fingerprint),
        **edited_parts(made, found, place.fetch(made.edited.artifact)),
        "statistics": statistics_of(made, found),
        "settings": shown_settings(settings),
        "gate": tuple(CertifiedCondition(**one) for one in made.registered.conditions),
        "attacks": tuple(attack_of(one) for one in made.registered.attacks),
        "approver": made.approver,
        "software": software(),
        "ledger_head": made.head,
    }
    written = {}
    for one in asked:
        requests = tuple(_request(name, one, made.unreached, influences) for name in one.requests)
        certificate = Certificate(
            **common,
            **one.of_batch,
            requests=requests,
            not_covered=not_covered(
                has_earlier=bool(made.earlier),
                has_refused=any(entry.state == REFUSED for entry in requests),
                has_withdrawn=any(entry.state == WITHDRAWN for entry in requests),
            ),
        )
        written[one.batch] = write_certificate(certificate, key, store)
    logger.info("certify: %d certificates, %s", len(written), "signed" if key else "not signed")
    return written


@task(cache_policy=NO_CACHE)
def certify_repeated(
    asked: tuple[Asked, ...], latest: Accepted, run: str, head: str, place: Place
) -> dict[str, str]:
    """Certificates of batches that bring nothing new: the latest version honours them already.

    Returns:
        their sha256 by batch; nothing if that version has no certificate.
    """
    store, key = place.open(), signing_key()
    lines = Ledger(store).read()
    own = [one for one in standing(lines).values() if one.batch == latest.batch]
    whole = next((certificate_of(one, lines, store) for one in own if one.certificate), None)
    if whole is None:
        return {}
    changes = {
        "run": run,
        "certified": iso(store.now()),
        "ledger_head": head,
        "repeats": whole.sha256,
        "influence_note": "nothing new was forgotten; see the certificate that this one repeats",
        "software": software(),
    }
    written = {}
    for one in asked:
        entries = tuple(CertifiedRequest(request=name, state=HONOURED) for name in one.requests)
        changed = changes | one.of_batch | {"requests": entries}
        written[one.batch] = write_certificate(whole.model_copy(update=changed), key, store)
    return written


def _influences(ref: AuditRef | None, place: Place) -> tuple[dict[str, dict[str, Any]], str]:
    """Of each request on all sites together, and how exact that is."""
    if ref is None:
        return {}, NOT_AUDITED
    rows = [row for row in read_influence(ref, place) if row.site == WHOLE]
    named = {row.request: asdict(row) for row in rows}
    for values in named.values():
        del values["request"], values["site"]
    return named, ". ".join([ref.exactness, *ref.warnings])


def _request(
    name: str, asked: Asked, unreached: Sequence[str], influences: Mapping[str, dict[str, Any]]
) -> CertifiedRequest:
    if name == asked.withdrawn:
        return CertifiedRequest(request=name, state=WITHDRAWN, reason=TAKEN_BACK)
    refused = name in unreached
    return CertifiedRequest(
        request=name,
        state=REFUSED if refused else HONOURED,
        reason=NOT_REACHED if refused else None,
        influence=influences.get(name),
    )
