"""Each batch gets a certificate before the ledger has it: it says what is so, nothing personal."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flows.unlearn_batches import unlearn_batches
from grom.certificate import BrokenCertificate, changed_parts, read_certificate
from grom.errors import ConfigError, MissingInput
from grom.ledger import GENESIS
from grom.signing import sealed, signature_holds
from tasks.certificates import (
    KEY,
    KEY_FILE,
    NoCertificate,
    certificate_name,
    certificates_of_request,
    signing_key,
    software,
    stored_certificate,
    write_certificate,
)
from tasks.certified import untouched_sha256
from tasks.ledger import Ledger
from tests.certified import Certified, certified_service, signing
from tests.documents import a_certificate, a_key
from tests.services import outcome, put, requests, service

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Certified:
    return certified_service(tmp_path_factory.getbasetemp())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_ledger_and_outcome_have_the_hash_of_each_batchs_certificate(made: Certified) -> None:
    lines = Ledger(made.store).read()
    assert len(lines) == 9
    for line in lines:
        name = certificate_name(line.batch, line.run)
        assert sha256(made.folder / "store" / name) == line.certificate
        assert outcome(made.cfg, line.batch)["certificate"] == line.certificate


def test_a_certificate_says_what_was_done(made: Certified) -> None:
    found, folder = made.certificate("second"), made.checkpoint("second")
    lines = Ledger(made.store).read()
    assert {one.state for one in found.requests} == {"honoured"}
    assert found.ledger_head == lines[3].line_hash
    assert found.approver == "gate"
    assert found.base.source == made.cfg.model.source
    assert (found.model.name, found.model.version) == ("grom-tiny", "2")
    assert found.model.dtype == "float32"
    assert found.model.files["model.safetensors"] == sha256(folder / "model.safetensors")
    assert found.edit.files["edit.safetensors"] == sha256(folder / "edit" / "edit.safetensors")
    assert found.model.untouched_sha256 == untouched_sha256(folder, found.edit.edited)
    solve = folder.parents[1] / "solve" / found.edit.key
    assert found.edit.alpha_sha256 == sha256(solve / "alpha.npy")
    assert found.edit.nats == pytest.approx(4)
    roles = [(one.role, one.batch) for one in found.statistics]
    assert roles[0] == ("retain", None)
    assert sorted(roles[1:3], key=str) == [("forget", "second"), ("forget, earlier", "first")]
    assert roles[3] == ("forget, together", None)
    assert found.settings is not None
    assert found.settings["ridge"]["w_retain"] == 100
    assert found.software == software()
    measured = {(one.model, one.set): one for one in found.measured}
    assert measured["edited", "forget"].num_examples == 2
    assert measured["edited", "forget"].precision == "float32"
    assert [one.name for one in found.gate] == ["forget probability", "held-out retain left"]
    assert any("earlier batches" in sentence for sentence in found.not_covered)
    assert not any("earlier batches" in one for one in made.certificate("first").not_covered)


def test_refused_requests_say_why(made: Certified) -> None:
    found = made.certificate("first")
    assert found.ledger_head == GENESIS
    assert [one.state for one in found.requests] == ["honoured"] * 3 + ["refused"]
    assert "no edit of this kind" in str(found.requests[3].reason)
    assert any("`refused`" in sentence for sentence in found.not_covered)


def test_signed_if_there_is_a_key(made: Certified) -> None:
    first, second = made.certificate("first"), made.certificate("second")
    assert first.signature is None
    assert first.authenticity.startswith("not signed")
    assert second.signature is not None
    assert second.signature.public_key == made.public_key
    assert signature_holds(second)


def test_a_batch_that_brings_nothing_new_repeats_the_certificate(made: Certified) -> None:
    again, second = made.certificate("again"), made.certificate("second")
    assert again.repeats == second.sha256
    assert (again.model, again.edit, again.measured) == (second.model, second.edit, second.measured)
    mine = {one.request for one in made.certificate("first").requests}
    assert {one.request for one in again.requests} < mine
    assert changed_parts(again) == []


def test_the_key_and_ids_of_requests_are_nowhere(made: Certified) -> None:
    secrets = [made.pem.splitlines()[1].encode(), b"person-0@example.org", b"person-6@example.org"]
    for path in made.folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(secret in data for secret in secrets), path


def test_a_requests_own_certificates(made: Certified) -> None:
    with signing(made.pem):
        first, again = certificates_of_request("person-0@example.org", made.store)
    assert (first.batch, again.batch) == ("first", "again")
    assert first.batch_certificate == made.certificate("first").sha256
    assert [one.line["state"] for one in first.lines] == ["honoured"]
    assert first.lines[0].previous == GENESIS
    assert signature_holds(first)
    assert b"person-0" not in first.to_bytes()
    with pytest.raises(NoCertificate, match="no line"):
        certificates_of_request("person-77@example.org", made.store)


def test_a_certificate_that_is_missing_or_another_one_is_named(
    made: Certified, tmp_path: Path
) -> None:
    mine = made.copied(tmp_path)
    found = made.certificate("first")
    path = tmp_path / "store" / certificate_name("first", found.run)
    path.write_bytes(sealed(found.model_copy(update={"approver": "Kim"}), None).to_bytes())
    with pytest.raises(BrokenCertificate, match="line 1 of the ledger"):
        mine.certificate("first")
    path.unlink()
    with pytest.raises(MissingInput, match="is missing"):
        mine.certificate("first")


def test_the_same_again_keeps_what_was_written_and_another_one_replaces_it(
    made: Certified, tmp_path: Path
) -> None:
    store, key = made.copied(tmp_path).store, a_key()
    first = write_certificate(a_certificate(), key, store)
    later = a_certificate(certified="2027-01-01T00:00:00+00:00")
    assert write_certificate(later, key, store) == first
    moved = write_certificate(a_certificate(ledger_head="cd" * 32), key, store)
    found = stored_certificate("october", "run-1", store)
    assert found is not None
    assert first != moved == found.sha256
    unsigned = write_certificate(a_certificate(ledger_head="cd" * 32), None, store)
    assert unsigned != moved
    path = tmp_path / "store" / certificate_name("october", "run-1")
    path.write_bytes(b"{}")
    assert write_certificate(later, key, store) == read_certificate(path.read_bytes(), "x").sha256


def test_a_bad_key_is_found_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = service(tmp_path)
    put(cfg, "first", requests(0), tmp_path)
    monkeypatch.setenv(KEY, "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="GROM_SIGNING_KEY") as caught:
        unlearn_batches(cfg)
    assert "c2VjcmV0" not in str(caught.value)
    assert not (tmp_path / "store" / "claims").exists()


def test_the_key_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Certified
) -> None:
    monkeypatch.delenv(KEY, raising=False)
    assert signing_key() is None
    path = tmp_path / "key.pem"
    monkeypatch.setenv(KEY_FILE, str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        signing_key()
    path.write_text(made.pem)
    assert signing_key() is not None
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=KEY_FILE):
        signing_key()
