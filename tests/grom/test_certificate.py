"""A certificate has one spelling, and a part of it that was changed is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grom.certificate import (
    SEALS,
    BrokenCertificate,
    Certificate,
    alike,
    canonical_bytes,
    changed_parts,
    digests_of,
    not_covered,
    of_request,
    read_certificate,
)
from grom.certified import CertifiedLine, CertifiedRequest
from grom.ledger import GENESIS
from tests.documents import HASH, NOON, a_certificate, hash_of

PARTS = sorted(set(Certificate.model_fields) - set(SEALS))


def test_what_is_read_is_what_was_written_numbers_that_are_none_included() -> None:
    written = a_certificate().digested()
    data = written.to_bytes()
    assert b'"nan"' in data
    found = read_certificate(data, "file")
    assert found.to_bytes() == data
    assert found.sha256 == written.sha256
    assert changed_parts(found) == []


def test_canonical_bytes_do_not_depend_on_the_order_of_keys() -> None:
    assert canonical_bytes({"b": 1, "a": [float("inf")]}) == b'{"a":["inf"],"b":1}'
    assert canonical_bytes({"a": "ü", "b": 1}) == canonical_bytes({"b": 1, "a": "ü"})


@pytest.mark.parametrize("part", PARTS)
def test_each_changed_part_is_named(part: str) -> None:
    whole = a_certificate().digested()
    other: dict[str, Any] = {
        "kind": "request",
        "requests": (),
        "statistics": (),
        "measured": (),
        "attacks": (),
        "gate": (),
        "free_answers": {},
        "not_covered": (),
        "settings": {},
        "software": {},
        "lines": (CertifiedLine(number=1, previous=GENESIS, line_hash=HASH, line={}),),
        "base": whole.base.model_copy(update={"fingerprint": "0"}),
        "model": whole.model.model_copy(update={"version": "8"}),
        "edit": whole.edit.model_copy(update={"beta": 3.6}),
    }
    changed = whole.model_copy(update={part: other.get(part, "another")})
    assert changed_parts(changed) == [part]


def test_a_digest_that_is_missing_or_too_many_is_named() -> None:
    whole = a_certificate().digested()
    some = {name: digest for name, digest in whole.digests.items() if name != "gate"}
    assert changed_parts(whole.model_copy(update={"digests": some})) == ["gate"]
    more = whole.digests | {"extra": HASH}
    assert changed_parts(whole.model_copy(update={"digests": more})) == ["extra"]
    assert digests_of(whole) == whole.digests


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-1], "not JSON, at character"),
        (lambda data: data + b"\n", "one spelling"),
        (lambda data: data.replace(b'":', b'": ', 1), "one spelling"),
        (lambda data: b"\xff" + data, "not JSON"),
        (lambda data: b"[]", "document: not as in"),
        (lambda data: data.replace(b"grom-certificate/1", b"grom-certificate/2"), "format: not"),
        (lambda data: data.replace(b'"approver"', b'"approved"'), "approve"),
        (lambda data: data.replace(b'"beta":3.5', b'"beta":"x"'), "edit.beta"),
        (lambda data: data.replace(b'"batch":"october",', b'"batch":"october","batch":"november",'),
         "one spelling"),
    ],
)  # fmt: skip
def test_what_is_no_certificate_is_refused_without_a_value(change: Any, reason: str) -> None:
    with pytest.raises(BrokenCertificate, match=reason) as caught:
        read_certificate(change(a_certificate().digested().to_bytes()), "some.json")
    assert "some.json" in str(caught.value)
    assert "october" not in str(caught.value)


def test_alike_looks_past_the_time_alone() -> None:
    one = a_certificate().digested()
    assert alike(one, a_certificate(certified="2027-01-01T00:00:00+00:00").digested())
    assert not alike(one, a_certificate(approver="Kim").digested())
    assert not alike(one, a_certificate(ledger_head=HASH).digested())


def test_a_requests_certificate_has_its_entry_its_lines_and_the_batchs_hash() -> None:
    whole = a_certificate().digested()
    line = CertifiedLine(number=3, previous=GENESIS, line_hash=HASH, line={"state": "honoured"})
    found = of_request(whole, hash_of(1), [line], NOON)
    assert found.requests == (whole.requests[0],)
    assert found.batch_certificate == whole.sha256
    assert (found.kind, found.settings, found.lines, found.issued) == (
        "request", None, (line,), NOON
    )  # fmt: skip
    assert (found.measured, found.gate, found.not_covered) == (
        whole.measured, whole.gate, whole.not_covered
    )  # fmt: skip
    assert changed_parts(found) == []
    assert hash_of(2) not in found.to_bytes().decode()
    with pytest.raises(KeyError):
        of_request(whole, hash_of(9), [line], NOON)


def test_what_is_not_covered_is_said_as_far_as_it_applies() -> None:
    plain = " ".join(not_covered(has_earlier=False, has_refused=False))
    for words in ("Older versions", "Adapters", "GGUF", "retrieval stores", "Suppression is not"):
        assert words in plain
    assert "earlier batches" not in plain
    assert "refused" not in plain
    more = " ".join(not_covered(has_earlier=True, has_refused=True))
    assert "earlier batches" in more
    assert "refused" in more


def test_a_request_goes_by_a_hash_only() -> None:
    with pytest.raises(ValueError, match="request"):
        CertifiedRequest(request="Erika Musterfrau", state="honoured")
    assert "october" in json.loads(a_certificate().to_bytes())["batch"]
