"""A request that is taken back was never made: one after the other, down to the base model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from flows.service import ServiceConfig
from flows.unlearn_batches import unlearn_batches
from flows.withdraw import NotHonoured, withdraw
from flows.withdraw_commands import hashed_rows
from grom.certificate_page import render_certificate
from grom.config import CollectConfig
from grom.errors import DataError
from grom.ledger import request_hash
from tasks.artifacts import Artifact
from tasks.certificates import certificates_of_request, latest_of_batch
from tasks.ledger import Ledger
from tasks.place import Place
from tasks.registry import registered_folder
from tasks.tracking import Tracking
from tasks.verify import Check, verify_in_store
from tasks.verify_model import verify_model
from tasks.withdraw import TextNeeded
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
    last = withdraw(cfg, hash_of(cfg, 1), "changed their mind")
    assert (last.num_left, last.version) == (0, "5")
    base = Path(cfg.model.source)
    assert sha256(served(cfg) / "model.safetensors") == sha256(base / "model.safetensors")
    lines = Ledger(bucket_of(cfg)).read()
    assert [line.state for line in lines].count("withdrawn") == 3
    assert [bool(line.certificate) for line in lines if line.state == "withdrawn"] == [1, 1, 0]
    with pytest.raises(NotHonoured):
        withdraw(cfg, hash_of(cfg, 1), "again")
    put(cfg, "third", requests(6, 1), tmp_path)
    assert unlearn_batches(cfg).version == "6"


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
    entries = {one.request: one.state for one in whole.requests}
    assert entries == {
        hash_of(cfg, 0): "withdrawn", hash_of(cfg, 1): "honoured", hash_of(cfg, 2): "honoured",
    }  # fmt: skip
    assert (whole.model.version, whole.gate[0].name) == ("3", "held-out retain left")
    roles = sorted((one.role, one.batch) for one in whole.statistics if one.batch)
    assert roles == [("forget", "first"), ("forget, earlier", "second")]
    assert any("taken back" in sentence for sentence in whole.not_covered)
    own = {n: certificates_of_request(id_of(n), store)[0] for n in (0, 1)}
    assert [one.requests[0].state for one in own.values()] == ["withdrawn", "honoured"]
    for certificate in (whole, *own.values()):
        checks = verify_in_store(certificate, store) + verify_model(certificate, served(cfg), store)
        assert set(states(checks).values()) == {"ok"}, checks
        assert "Withdrawn" in render_certificate(own[0])

    assert states(verify_in_store(older[0], store))["in force"] == "failed"
    checks = verify_in_store(older[1], store) + verify_model(older[1], served(cfg), store)
    assert set(states(checks).values()) == {"ok"}, checks
    said = "; ".join(check.detail for check in checks)
    assert "the ledger names a later certificate" in said
    assert "what withdrawals left of this batch's statistics" in said
    # A model of before the withdrawal is not the one of the new certificate.
    before = store.fetch(Artifact(stage="apply", key=older[1].edit.checkpoint, uri=""))
    assert "failed" in states(verify_model(own[1], before, store)).values()

    put(cfg, "third", requests(6, 1), tmp_path)
    unlearn_batches(cfg)
    for certificate in (own[1], latest_of_batch("third", store)):
        checks = verify_in_store(certificate, store) + verify_model(certificate, served(cfg), store)
        assert set(states(checks).values()) == {"ok"}, checks


def test_without_kept_keys_the_text_is_needed_and_does(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path / "text", database, CollectConfig())
    put(cfg, "first", requests(0, 3), tmp_path)
    unlearn_batches(cfg)
    digest = hash_of(cfg, 0)
    with pytest.raises(TextNeeded, match="--rows"):
        withdraw(cfg, digest, "changed their mind")
    changed = [requests(0, 1)[0] | {"answer": "w9 w8"}]
    wrong = write_rows(tmp_path / "wrong.jsonl", changed)
    with (
        hashed_rows(wrong, "person-0@example.org", digest, cfg.work) as copy,
        pytest.raises(DataError, match="exactly as they were submitted"),
    ):
        withdraw(cfg, digest, "changed their mind", copy)
    right = write_rows(tmp_path / "right.jsonl", requests(0, 2))
    with hashed_rows(right, "person-0@example.org", digest, cfg.work) as copy:
        assert withdraw(cfg, digest, "changed their mind", copy).num_left == 2
    assert not Path(str(copy)).exists()
    assert served(cfg).name
