"""A changed byte, in a certificate, the ledger, an artifact or a model, is found and named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grom.certificate import BrokenCertificate, Certificate, read_certificate
from grom.ledger import LedgerLine, request_hash
from grom.signing import sealed
from tasks.certificates import NoCertificate, certificate_name, certificates_of_request
from tasks.claims import iso
from tasks.ledger import Ledger
from tasks.rollback import roll_back_ledger
from tasks.tensors import read_header
from tasks.verify import Check, verify_document, verify_in_store
from tasks.verify_model import verify_model, verify_stored_model
from tests.certified import Certified, certified_service, signing
from tests.documents import a_key
from tests.edits import flip

pytestmark = pytest.mark.usefixtures("prefect_server")
Damage = Callable[[Certified, Certificate], str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Certified:
    return certified_service(tmp_path_factory.getbasetemp())


def all_checks(found: Certificate, made: Certified, trusted: str | None = None) -> list[Check]:
    return [
        *verify_document(found, trusted),
        *verify_in_store(found, made.store),
        *verify_stored_model(found, made.store),
    ]


def failed(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.detail for check in checks if check.state == "failed"}


def requests_of(made: Certified, request_id: str) -> list[Certificate]:
    with signing(made.pem):
        return certificates_of_request(request_id, made.store)


def test_everything_holds_as_it_was_made(made: Certified) -> None:
    for batch in ("first", "second", "again"):
        assert failed(all_checks(made.certificate(batch), made)) == {}
    checks = all_checks(made.certificate("second"), made, made.public_key)
    assert {check.state for check in checks} == {"ok"}
    for request_id in ("person-0@example.org", "person-6@example.org", "common"):
        for one in requests_of(made, request_id):
            assert {check.state for check in all_checks(one, made, made.public_key)} == {"ok"}


def test_signatures_by_known_unknown_and_other_keys_and_none(made: Certified) -> None:
    signed, unsigned = made.certificate("second"), made.certificate("first")

    def signature(found: Certificate, trusted: str | None) -> Check:
        (check,) = [one for one in verify_document(found, trusted) if one.name == "signature"]
        return check

    assert signature(signed, made.public_key).state == "ok"
    assert signature(signed, None).state == "not checked"
    assert "unknown key" in signature(signed, None).detail
    assert signature(signed, "ab" * 32).state == "failed"
    assert "another key" in signature(signed, "ab" * 32).detail
    assert signature(unsigned, None).state == "not checked"
    assert signature(unsigned, made.public_key).state == "failed"
    forged = sealed(signed.model_copy(update={"approver": "Kim"}), a_key())
    assert signature(forged, made.public_key).state == "failed"


@pytest.mark.parametrize("batch", ["first", "second"])
def test_a_changed_byte_of_a_certificate_is_found(made: Certified, batch: str) -> None:
    data = made.certificate(batch).to_bytes()
    for at in range(3, len(data), 997):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            found = read_certificate(bytes(changed), "file")
        except BrokenCertificate:
            continue
        names = failed([*verify_document(found), *verify_in_store(found, made.store)])
        assert {"digests", "signature"} & set(names), at
        assert "entry in the ledger" in names, at


def test_the_changed_part_is_named(made: Certified) -> None:
    found = made.certificate("first")
    changed = found.model_copy(update={"approver": "Kim"})
    assert failed(verify_document(changed)) == {"digests": "changed: approver"}
    again = sealed(changed, None)
    assert failed(verify_document(again)) == {}
    assert "another document" in failed(verify_in_store(again, made.store))["entry in the ledger"]


def in_segment(made: Certified, found: Certificate) -> str:
    path = min((made.folder / "store" / "ledger").glob("00000002-*.parquet"))
    flip(path, len(path.read_bytes()) // 2)
    return "ledger"


def in_segments_marker(made: Certified, found: Certificate) -> str:
    flip(made.folder / "store" / "ledger" / "00000001.json", 40)
    return "ledger"


def without_a_segment(made: Certified, found: Certificate) -> str:
    for path in (made.folder / "store" / "ledger").glob("0000000[23]*"):
        path.unlink()
    return "entry in the ledger"


def in_retain_moments(made: Certified, found: Certificate) -> str:
    name = next(one.artifact for one in found.statistics if one.role == "retain")
    flip(next((made.folder / "store" / name).glob("*.gram.npy")), -9)
    return "artifacts"


def in_forget_moments(made: Certified, found: Certificate) -> str:
    name = next(one.artifact for one in found.statistics if one.role == "forget")
    flip(next((made.folder / "store" / name).glob("*.sums.parquet")), -200)
    return "artifacts"


def in_statistics_and_their_marker(made: Certified, found: Certificate) -> str:
    folder = made.folder / "store" / found.statistics[0].artifact
    other = next(one for one in found.statistics if one.role == "forget")
    shutil.copy(made.folder / "store" / other.artifact / "_SUCCESS.json", folder)
    return "artifacts"


def in_alpha(made: Certified, found: Certificate) -> str:
    flip(made.folder / "store" / "solve" / found.edit.key / "alpha.npy", -1)
    return "artifacts"


def in_an_edited_tensor(made: Certified, found: Certificate) -> str:
    path = made.checkpoint("second") / "model.safetensors"
    flip(path, read_header(path)[min(found.edit.edited)].start + 5)
    return "model files"


def in_the_factors(made: Certified, found: Certificate) -> str:
    flip(made.checkpoint("second") / "edit" / "edit.safetensors", -1)
    return "model files"


@pytest.mark.parametrize(
    "damage",
    [
        in_segment, in_segments_marker, without_a_segment, in_retain_moments, in_forget_moments,
        in_statistics_and_their_marker, in_alpha, in_an_edited_tensor, in_the_factors,
    ],
)  # fmt: skip
def test_damage_in_the_store_is_found_and_named(
    made: Certified, tmp_path: Path, damage: Damage
) -> None:
    mine, found = made.copied(tmp_path), made.certificate("second")
    name = damage(mine, found)
    names = failed(all_checks(found, mine))
    assert name in names
    assert names[name]


def test_a_line_that_was_written_anew_breaks_the_chain_of_those_who_noted_it(
    made: Certified, tmp_path: Path
) -> None:
    mine, found = made.copied(tmp_path), made.certificate("second")
    lines = Ledger(mine.store).read()
    shutil.rmtree(tmp_path / "store" / "ledger")
    names = LedgerLine.__dataclass_fields__
    forged = [
        LedgerLine(**{name: getattr(line, name) for name in names} | {"finished": iso(0)})
        for line in lines
    ]
    Ledger(mine.store).append(forged)
    assert "cut off or replaced" in failed(all_checks(found, mine))["ledger"]
    (one,) = requests_of(made, "person-6@example.org")
    assert "is another one there" in failed(all_checks(one, mine))["entry in the ledger"]


def test_what_was_rolled_back_is_no_longer_in_force(made: Certified, tmp_path: Path) -> None:
    mine, found = made.copied(tmp_path), made.certificate("second")
    (before,) = requests_of(mine, "person-6@example.org")
    roll_back_ledger(mine.store, "2", "1", iso(0))
    for one in (found, before):
        names = failed(all_checks(one, mine))
        assert list(names) == ["in force"]
        assert re.search(r"was rolled back on \d{4}-\d\d-\d\d by line \d+ of", names["in force"])
    (after,) = requests_of(mine, "person-6@example.org")
    assert [one.line["state"] for one in after.lines] == ["honoured", "rolled back"]
    assert list(failed(all_checks(after, mine))) == ["in force"]
    assert failed(all_checks(mine.certificate("first"), mine)) == {}


def enter_withdrawn(made: Certified, numbers: set[int], run: str) -> None:
    """Lines that say so of requests of `first`, without a certificate."""
    wanted = {request_hash(f"person-{n}@example.org", Ledger(made.store).salt()) for n in numbers}
    ledger, now = Ledger(made.store), iso(made.store.now())
    lines = [
        LedgerLine(
            request=line.request, batch=line.batch, received=line.received, run=run,
            model_version=None, certificate=None, state="withdrawn", started=now, finished=now,
        )
        for line in ledger.read()
        if line.request in wanted and line.state == "honoured"
    ]  # fmt: skip
    ledger.append(lines)


def test_an_older_certificate_says_what_was_withdrawn_since(
    made: Certified, tmp_path: Path
) -> None:
    mine, first = made.copied(tmp_path), made.certificate("first")
    (one,) = [one for one in requests_of(mine, "person-0@example.org") if one.batch == "first"]
    enter_withdrawn(mine, {0}, "withdraw-one")
    line = next(line for line in Ledger(mine.store).read() if line.state == "withdrawn")
    said = f"request {line.request[:12]} was withdrawn on {line.finished[:10]} by line 10 of the"
    for certificate in (first, one):
        names = failed(all_checks(certificate, mine))
        assert list(names) == ["in force"]
        assert names["in force"].startswith(said)
    assert "2 still honoured" in failed(all_checks(first, mine))["in force"]
    with pytest.raises(NoCertificate, match=r"withdraw-one, line 10 .* wrote no certificate"):
        certificates_of_request("person-0@example.org", mine.store)
    assert failed(all_checks(requests_of(mine, "person-1@example.org")[0], mine)) == {}
    enter_withdrawn(mine, {1, 2}, "withdraw-two")
    assert failed(all_checks(first, mine))["in force"].endswith("; 1 more")
    enter_withdrawn(mine, {5, 6}, "withdraw-rest")
    with pytest.raises(NoCertificate, match="base model itself took over"):
        certificates_of_request("person-6@example.org", mine.store)


def test_a_requests_certificate_must_agree_with_its_batchs(made: Certified, tmp_path: Path) -> None:
    mine = made.copied(tmp_path)
    (one,) = requests_of(mine, "common")
    granted = one.requests[0].model_copy(update={"state": "honoured", "reason": None})
    forged = sealed(one.model_copy(update={"requests": (granted,), "approver": "Kim"}), None)
    detail = failed(all_checks(forged, mine))["entry in the ledger"]
    assert "approver, requests" in detail
    line = one.lines[0].model_copy(update={"line": one.lines[0].line | {"state": "honoured"}})
    quoted = failed(verify_document(sealed(one.model_copy(update={"lines": (line,)}), None)))
    assert quoted == {"lines of the ledger, as quoted": "line 4 does not have its hash"}
    path = tmp_path / "store" / certificate_name(one.batch, one.run)
    path.unlink()
    assert "is missing" in failed(all_checks(one, mine))["entry in the ledger"]


def test_without_a_store_or_with_purged_files_less_is_checked(
    made: Certified, tmp_path: Path
) -> None:
    mine, found = made.copied(tmp_path), made.certificate("second")
    assert {check.state for check in verify_in_store(found, None)} == {"not checked"}
    assert {check.state for check in verify_stored_model(found, None)} == {"not checked"}
    shutil.rmtree(mine.checkpoint("second"))
    shutil.rmtree(tmp_path / "store" / "solve" / found.edit.key)
    checks = {check.name: check for check in all_checks(found, mine)}
    assert failed(list(checks.values())) == {}
    assert checks["model files"].state == "not checked"
    assert f"no longer in the store: solve/{found.edit.key}" in checks["artifacts"].detail


def test_a_later_version_has_the_earlier_batch_in_it_and_not_the_other_way_round(
    made: Certified, tmp_path: Path
) -> None:
    first, second = made.certificate("first"), made.certificate("second")
    later = tmp_path / "later"
    shutil.copytree(made.checkpoint("second"), later)
    found = verify_model(first, later, made.store)
    assert failed(found) == {}
    assert "a later edit" in found[0].detail
    assert (
        "not the edit of this certificate" in failed(verify_model(first, later, None)).popitem()[1]
    )
    assert failed(verify_model(second, made.checkpoint("first"), made.store))
    flip(later / "model.safetensors", -3)
    assert "model.safetensors" in failed(verify_model(first, later, made.store))["model files"]
