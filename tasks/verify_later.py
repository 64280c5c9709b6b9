"""Whether a later version of a model still holds what a certificate says.

Each version is solved from the base anew, so it has another edit, but from the same statistics:
those of the certificate, or what withdrawals left of them, beside those of other batches.  Or a
version holds nothing of it, since its requests were withdrawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grom.certificate import Certificate
from grom.certified import Statistics
from grom.errors import DataError
from tasks.accepted import HONOURED, WITHDRAWN, standing
from tasks.artifacts import artifact_key
from tasks.ledger import Ledger
from tasks.provenance import Published, checkpoint_key, find_published, lineage, published
from tasks.store import Store
from tasks.withdraw import groups_in


@dataclass(frozen=True, slots=True)
class Later:
    """A version that was made after the certificate's."""

    applied: Published
    """Its checkpoint."""
    what: str
    """How it belongs to the certificate, in words."""
    holds: bool
    """Whether every request that the certificate calls honoured is part of its edit."""


def later_version(facts: Mapping[str, Any], certificate: Certificate, store: Store) -> Later | None:
    """The version with an edit of these facts, or None if it has nothing to do with a certificate.

    Args:
        facts: of the edit that lies with the model.
        certificate: of another edit.
        store: where artifacts and ledger are.
    """
    try:
        applied, parts = _made(facts, store)
        if facts["model"] != certificate.base.fingerprint:
            return None
        names, forgotten = {part.name for part in parts}, _forgotten(certificate)
        own = {one.artifact for one in forgotten if one.batch == certificate.batch}
        if own or _honours(certificate):
            # A batch that brought nothing new is in the others' statistics.
            what = _contained(own or {one.artifact for one in forgotten}, names, parts, store)
            if what is not None:
                return Later(applied, what, holds=True)
        return _without(applied, parts, certificate, bool(own), store)
    except (DataError, KeyError, ValueError):
        return None


def _made(facts: Mapping[str, Any], store: Store) -> tuple[Published, tuple[Published, ...]]:
    """A checkpoint, and the forget statistics of its edit; none if it is a copy of the base."""
    if facts["edit"] is None:
        return published(artifact_key("apply", dict(facts)), store), ()
    made = lineage(checkpoint_key(facts["model"], facts["edit"], facts["beta"]), store)
    return made.applied, made.parts


def _forgotten(certificate: Certificate) -> list[Statistics]:
    return [one for one in certificate.statistics if one.role in ("forget", "forget, earlier")]


def _honours(certificate: Certificate) -> bool:
    return any(one.state == HONOURED for one in certificate.requests)


def _contained(
    own: set[str], names: set[str], parts: Sequence[Published], store: Store
) -> str | None:
    """How an edit of these parts contains statistics, in words; None if it does not."""
    if own <= names:
        return "a later edit, solved from these statistics as well"
    if all(name in names or _less_of(name, parts, store) for name in own):
        return "a later edit, solved from what withdrawals left of these statistics"
    return None


def _less_of(name: str, parts: Sequence[Published], store: Store) -> bool:
    """Whether one of the parts is this artifact without requests that were withdrawn since."""

    def gone(facts: Mapping[str, Any]) -> set[str]:
        return {request for one in facts["data"] for request in one.get("without", ())}

    def whole(facts: Mapping[str, Any]) -> dict[str, Any]:
        kept = [{k: v for k, v in one.items() if k != "without"} for one in facts["data"]]
        return {**facts, "data": kept}

    found = find_published(name, store)
    return found is not None and any(
        whole(part.facts) == whole(found.facts) and gone(found.facts) < gone(part.facts)
        for part in parts
    )


def _without(
    applied: Published,
    parts: Sequence[Published],
    certificate: Certificate,
    has_own: bool,
    store: Store,
) -> Later | None:
    """A version that was made without the requests of a certificate, which were withdrawn.

    While others of its batch are honoured, what is left of its statistics must be there instead.
    """
    stand = [
        one for one in standing(Ledger(store).read()).values() if one.batch == certificate.batch
    ]
    names = {one.request for one in certificate.requests}
    gone = [one for one in stand if one.state == WITHDRAWN and one.request in names]
    is_left = any(one.state == HONOURED for one in stand)
    if not gone or (is_left and (has_own or _honours(certificate))):
        return None
    groups = {one.request for one in gone}
    for part in parts:
        if groups & groups_in(store.fetch(part.artifact)):
            return None
    last = max(gone, key=lambda line: line.number)
    what = (
        f"{'another edit' if parts else 'the base model, without an edit'}, made without what was "
        f"withdrawn on {last.finished[:10]} by line {last.number} of the ledger"
    )
    return Later(applied, what, holds=not _honours(certificate))
