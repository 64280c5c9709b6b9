"""A request that is taken back was never made: one after the other, down to the base model."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from flows.service import ServiceConfig
from flows.unlearn_batches import unlearn_batches
from flows.withdraw import NotHonoured, withdraw
from flows.withdraw_commands import hashed_rows
from grom.certificate import Certificate
from grom.certificate_page import render_certificate
from grom.config import CollectConfig
from grom.errors import DataError
from grom.ledger import request_hash
from tasks.artifacts import Artifact
from tasks.certificates import NoCertificate, certificates_of_request, latest_of_batch
from tasks.ledger import Ledger
from tasks.place import Place
from tasks.registry import registered_folder
from tasks.runs import find_run
from tasks.store import Store
from tasks.tracking import Tracking
from tasks.verify import Check, verify_in_store
from tasks.verify_model import verify_model
from tasks.withdraw import TextNeeded
from tests.edits import flip
from tests.services import bucket_of, dense_edit, put, requests, service
from tests.tiny import write_rows

pytestmark = pytest.mark.usefixtures("prefect_server")
KEPT = CollectConfig(keep_request_keys=True)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    return Tracking(uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


def of_test(folder: Path, database: Tracking, collect: CollectConfig = KEPT) -> ServiceConfig:
    tracking = database.model_copy(
        update={"experiment": folder.parent.name + folder.name, "model_name": f"w-{folder.name}"}
    )
    return service(folder, tracking=tracking, collect=collect)


def served(cfg: ServiceConfig) -> Path:
    uri = f"models:/{cfg.tracking.model_name}@champion"
    return registered_folder(cfg.tracking, Path(cfg.work), uri)


def hash_of(cfg: ServiceConfig, number: int) -> str:
    return request_hash(id_of(number), Ledger(bucket_of(cfg)).salt())


def id_of(number: int) -> str:
    return f"person-{number}@example.org"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_request_in_turn_down_to_the_base_model(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path / "whole", database)
    put(cfg, "first", requests(0, 2), tmp_path)
    unlearn_batches(cfg)
    put(cfg, "second", requests(4, 1), tmp_path)
    unlearn_batches(cfg)

    withdraw(cfg, hash_of(cfg, 0), "changed their mind")
    never = of_test(tmp_path / "never", database)
    put(never, "first", requests(1, 1), tmp_path)
    put(never, "second", requests(4, 1), tmp_path)
    unlearn_batches(never)
    found, expected = dense_edit(served(cfg)), dense_edit(served(never))
    for name, update_MN in expected.items():
        assert torch.dist(found[name], update_MN) <= 1e-9 * update_MN.norm()

    withdraw(cfg, hash_of(cfg, 4), "court order")
    store = Place(work=cfg.work, store=cfg.store).open()
    own = {number: certificates_of_request(id_of(number), store)[0] for number in (0, 1, 4)}
    assert [one.requests[0].state for one in own.values()] == ["withdrawn", "honoured", "withdrawn"]
    last = withdraw(cfg, hash_of(cfg, 1), "changed their mind")
    assert (last.num_left, last.version) == (0, "5")
    base = Path(cfg.model.source)
    assert sha256(served(cfg) / "model.safetensors") == sha256(base / "model.safetensors")
    lines = Ledger(bucket_of(cfg)).read()
    assert [line.state for line in lines].count("withdrawn") == 3
    assert [bool(line.certificate) for line in lines if line.state == "withdrawn"] == [1, 1, 0]
    with pytest.raises(NotHonoured, match=rf"withdrawn on \S+ by line {len(lines)} of"):
        withdraw(cfg, hash_of(cfg, 1), "again")
    the_base_model_has_no_certificate(own, store, served(cfg), tmp_path / "changed")
    put(cfg, "third", requests(6, 1), tmp_path)
    assert unlearn_batches(cfg).version == "6"
    checks = verify_model(own[4], served(cfg), store)
    assert set(states(checks).values()) == {"ok"}, checks
    assert "another edit, made without what was withdrawn on" in checks[0].detail
    with pytest.raises(NoCertificate, match="nothing was left to forget"):
        latest_of_batch("first", store)


def the_base_model_has_no_certificate(
    own: Mapping[int, Certificate], store: Store, base: Path, changed: Path
) -> None:
    """Older ones of requests 0, 1 and 4, of which 1 was withdrawn last, when nothing is left."""
    run = Ledger(store).read()[-1].run
    with pytest.raises(NoCertificate, match=f"by run {run}, .* nothing was left to forget"):
        certificates_of_request(id_of(1), store)
    assert certificates_of_request(id_of(0), store)[0].sha256 != own[1].sha256
    for number in (0, 4):
        checks = verify_in_store(own[number], store) + verify_model(own[number], base, store)
        assert set(states(checks).values()) == {"ok"}, checks
        assert any("the base model, without an edit" in check.detail for check in checks)
    found = {one.name: one for one in verify_in_store(own[1], store)}["in force"]
    assert found.state == "failed"
    assert re.search(r"was withdrawn on \d{4}-\d\d-\d\d by line \d+ of the ledger", found.detail)
    found = {one.name: one for one in verify_model(own[1], base, store)}["edit in the model"]
    assert (found.state, "withdrawn" in found.detail) == ("failed", True)
    shutil.copytree(base, changed)
    flip(changed / "model.safetensors", -3)
    assert states(verify_model(own[4], changed, store))["model files"] == "failed"
    (changed / "model.safetensors").rename(changed / "model-00001-of-00001.safetensors")
    assert states(verify_model(own[4], changed, store))["model files"] == "failed"
    # What still had request 4 in it is no model of its withdrawal.
    (before,) = [one for one in own[0].statistics if one.batch == "second"]
    assert before.role == "forget, earlier"
    with_4 = store.fetch(Artifact(stage="apply", key=own[0].edit.checkpoint, uri=""))
    assert "failed" in states(verify_model(own[4], with_4, store)).values()


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


def test_a_withdrawal_is_certified_and_older_certificates_say_so(
    tmp_path: Path, database: Tracking
) -> None:
    cfg = of_test(tmp_path / "certified", database)
    place = Place(work=cfg.work, store=cfg.store)
    store = place.open()
    put(cfg, "first", requests(0, 3), tmp_path)
    unlearn_batches(cfg)
    older = {n: certificates_of_request(id_of(n), store)[0] for n in (0, 1)}
    put(cfg, "second", requests(5, 1), tmp_path)
    unlearn_batches(cfg)
    withdraw(cfg, hash_of(cfg, 0), "changed their mind")

    whole = latest_of_batch("first", store)
    run = Ledger(store).read()[-1].run
    assert run.startswith("withdraw-")
    for name in (run, "first"):  # a batch's latest run
        again = find_run(name, store, None, Path(cfg.work))
        assert again.checkpoint == whole.edit.checkpoint
    entries = {one.request: one.state for one in whole.requests}
    assert entries == {
        hash_of(cfg, 0): "withdrawn", hash_of(cfg, 1): "honoured", hash_of(cfg, 2): "honoured",
    }  # fmt: skip
    assert (whole.model.version, whole.gate[0].name) == ("3", "held-out retain left")
    roles = sorted((one.role, one.batch) for one in whole.statistics if one.batch)
    assert roles == [("forget", "first"), ("forget, earlier", "second")]
    assert any("taken back" in sentence for sentence in whole.not_covered)
    assert whole.requests[0].reason is not None
    assert b"changed their mind" not in whole.to_bytes()
    own = {n: certificates_of_request(id_of(n), store)[0] for n in (0, 1)}
    assert [one.requests[0].state for one in own.values()] == ["withdrawn", "honoured"]
    for certificate in (whole, *own.values()):
        checks = verify_in_store(certificate, store) + verify_model(certificate, served(cfg), store)
        assert set(states(checks).values()) == {"ok"}, checks
        assert "Withdrawn" in render_certificate(own[0])

    found = {one.name: one for one in verify_in_store(older[0], store)}["in force"]
    assert found.state == "failed"
    assert re.search(r"was withdrawn on \d{4}-\d\d-\d\d by line \d+ of the ledger", found.detail)
    checks = verify_in_store(older[1], store) + verify_model(older[1], served(cfg), store)
    assert set(states(checks).values()) == {"ok"}, checks
    said = "; ".join(check.detail for check in checks)
    assert "a newer certificate exists" in said
    assert "`grom certificate REQUEST_ID`" in said
    assert "what withdrawals left of these statistics" in said
    # A model of before the withdrawal is not the one of the new certificate.
    before = store.fetch(Artifact(stage="apply", key=older[1].edit.checkpoint, uri=""))
    assert "failed" in states(verify_model(own[1], before, store)).values()

    put(cfg, "third", requests(0, 1), tmp_path)
    unlearn_batches(cfg)
    for certificate in (*own.values(), latest_of_batch("third", store)):
        checks = verify_in_store(certificate, store) + verify_model(certificate, served(cfg), store)
        assert set(states(checks).values()) == {"ok"}, checks
    said = "; ".join(check.detail for check in verify_in_store(own[0], store))
    assert "forgotten again since, in batch third" in said


def test_without_kept_keys_the_text_is_needed_and_does(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path / "text", database, CollectConfig())
    put(cfg, "first", requests(0, 3), tmp_path)
    unlearn_batches(cfg)
    other = requests(6, 1)[0] | {"request_id": id_of(1)}
    put(cfg, "more", [other], tmp_path)
    unlearn_batches(cfg)
    digest = hash_of(cfg, 0)
    with pytest.raises(TextNeeded, match="--rows"):
        withdraw(cfg, digest, "changed their mind")
    changed = [requests(0, 1)[0] | {"answer": "w9 w8"}]
    wrong = write_rows(tmp_path / "wrong.jsonl", changed)
    with (
        hashed_rows([wrong], "person-0@example.org", digest, cfg.work) as copy,
        pytest.raises(DataError, match="exactly as they were submitted"),
    ):
        withdraw(cfg, digest, "changed their mind", copy)
    right = write_rows(tmp_path / "right.jsonl", requests(0, 2))
    with hashed_rows([right], "person-0@example.org", digest, cfg.work) as copy:
        assert withdraw(cfg, digest, "changed their mind", copy).num_left == 3
    digest = hash_of(cfg, 1)
    both = write_rows(tmp_path / "both.jsonl", [requests(1, 1)[0], other])
    with (
        pytest.raises(DataError, match="each with its own --rows"),
        hashed_rows([both], id_of(1), digest, cfg.work),
    ):
        pass
    files = [write_rows(tmp_path / "other.jsonl", [other]), right]
    with hashed_rows(files, id_of(1), digest, cfg.work) as copy:
        done = withdraw(cfg, digest, "changed their mind", copy)
    assert (done.batches, done.num_left) == (("first", "more"), 1)
    store = Place(work=cfg.work, store=cfg.store).open()
    for number, state in enumerate(("withdrawn", "withdrawn", "honoured")):
        own = certificates_of_request(id_of(number), store)[0]
        assert own.requests[0].state == state
        checks = verify_in_store(own, store) + verify_model(own, served(cfg), store)
        assert set(states(checks).values()) == {"ok"}, checks
    assert not any(Path(one).exists() for one in copy)


def test_killed_anywhere_the_same_call_again_comes_to_the_same_end(
    tmp_path: Path, database: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path / "killed", database)
    put(cfg, "first", requests(0, 3), tmp_path)
    unlearn_batches(cfg)
    store, digest = Place(work=cfg.work, store=cfg.store).open(), hash_of(cfg, 0)

    def killed(*_: object) -> None:
        raise InterruptedError

    def withdraw_killed_in(name: str, now: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(f"flows.withdraw.{name}", killed)
            patched.setattr("tasks.certify.iso", lambda _: now)
            withdraw(cfg, digest, "changed their mind")

    num_lines = len(Ledger(store).read())
    with pytest.raises(InterruptedError):
        withdraw_killed_in("enter_withdrawal", "2026-01-02T12:00:00+00:00")
    assert len(Ledger(store).read()) == num_lines
    (path,) = Path(cfg.store).glob("certificates/first/withdraw-*/certificate.json")
    written = path.read_bytes()
    with pytest.raises(InterruptedError):
        withdraw_killed_in("promote", "2026-01-02T13:00:00+00:00")
    assert path.read_bytes() == written
    lines = Ledger(store).read()[num_lines:]
    assert {line.certificate for line in lines} == {hashlib.sha256(written).hexdigest()}
    with pytest.raises(NotHonoured, match="was withdrawn on"):
        withdraw(cfg, digest, "changed their mind")
    assert len(Ledger(store).read()) == num_lines + len(lines)
    (again,) = certificates_of_request(id_of(1), store)
    assert again.model.version == "2"
    checks = verify_in_store(again, store) + verify_model(again, served(cfg), store)
    assert set(states(checks).values()) == {"ok"}, checks
