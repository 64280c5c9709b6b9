"""The service's flow on a tiny model: batches in, a champion out, whatever happens in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flows.service import ServiceConfig
from flows.unlearn_batches import AllFailed, unlearn_batches
from grom.config import GateConfig
from grom.errors import GromError
from tasks import claims
from tasks.batches import status, statuses
from tasks.ledger import Ledger
from tasks.registry import registered_folder
from tasks.tracking import Tracking, client_of
from tests.services import EASY_GATE, bucket_of, dense_edit, outcome, put, requests, service
from tests.tiny import CANARY, words

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """One MLflow database for the module: making its tables takes seconds."""
    return Tracking(uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


def of_test(folder: Path, database: Tracking, **changes: Any) -> ServiceConfig:
    """A service with a registered model of its own."""
    tracking = database.model_copy(
        update={"experiment": folder.parent.name + folder.name, "model_name": f"m-{folder.name}"}
    )
    return service(folder, tracking=tracking, **changes)


def champion(cfg: ServiceConfig) -> dict[str, torch.Tensor]:
    """P of the model that is in service."""
    uri = f"models:/{cfg.tracking.model_name}@champion"
    return dense_edit(registered_folder(cfg.tracking, Path(cfg.work), uri))


def test_two_runs_give_the_edit_of_one_run_on_both_batches(
    tmp_path: Path, database: Tracking
) -> None:
    apart = of_test(tmp_path / "apart", database)
    put(apart, "first", requests(0, 3), tmp_path)
    one = unlearn_batches(apart)
    assert (one.done, one.version) == (("first",), "1")
    raw = [entry.name for entry in bucket_of(apart).entries("inbox/first")]
    assert sorted(raw) == ["inbox/first/_READY.json", "inbox/first/manifest.json"]
    put(apart, "second", requests(5, 2), tmp_path)
    two = unlearn_batches(apart)
    assert (two.done, two.version) == (("second",), "2")

    together = of_test(tmp_path / "together", database)
    put(together, "second", requests(5, 2), tmp_path)
    put(together, "first", requests(0, 3), tmp_path)
    both = unlearn_batches(together)
    assert (sorted(both.done), both.version) == (["first", "second"], "1")

    found, expected = champion(apart), champion(together)
    for name, update_MN in expected.items():
        assert torch.dist(found[name], update_MN) <= 1e-9 * update_MN.norm()
    lines = Ledger(bucket_of(apart)).read()
    assert [(line.batch, line.model_version) for line in lines] == [("first", "1")] * 3 + [
        ("second", "2")
    ] * 2
    assert {line.state for line in lines} == {"honoured"}
    assert outcome(apart, "second")["ledger"] == lines[-1].line_hash


def test_ids_and_text_are_nowhere_after_the_run(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path, database)
    rows = [{"request_id": "Erika Musterfrau", "text": f"{words(40, 6)} {CANARY} {words(46, 9)}"}]
    put(cfg, "personal", rows, tmp_path)
    unlearn_batches(cfg)
    assert outcome(cfg, "personal")["model_version"] == "1"
    secrets = (b"Musterfrau", CANARY.encode(), words(40, 6).encode())
    places = [*Path(cfg.work).rglob("*"), *Path(cfg.store).rglob("*")]
    places.append(Path(str(database.uri).removeprefix("sqlite:///")))
    for path in places:
        if path.is_file():
            assert not any(secret in path.read_bytes() for secret in secrets), path


def test_a_bad_batch_fails_and_the_others_go_on(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "good", requests(0), tmp_path)
    put(cfg, "kept", [{"request_id": "r", "prompt": words(6, 2), "answer": words(10, 3)}], tmp_path)
    put(cfg, "changed", requests(4), tmp_path)
    (file,) = Path(cfg.store, "inbox", "changed").glob("forget-*")
    file.write_bytes(file.read_bytes().replace(b"w", b"v"))
    done = unlearn_batches(cfg)
    assert done.done == ("good",)
    assert done.failed == ("kept",)
    assert "changed" in done.settled
    assert "sha256" in outcome(cfg, "changed", "failed")["reason"]
    assert "retain" in outcome(cfg, "kept", "failed")["reason"]
    assert {one.batch: one.state for one in statuses(bucket_of(cfg))} == {
        "good": "done",
        "kept": "failed",
        "changed": "failed",
    }


def test_a_failed_gate_keeps_the_champion(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "first", requests(0), tmp_path)
    unlearn_batches(cfg)
    strict = cfg.model_copy(update={"gate": GateConfig(max_forget_probability=1e-9)})
    put(cfg, "second", requests(4), tmp_path)
    with pytest.raises(AllFailed, match="second"):
        unlearn_batches(strict)
    assert "failed the gate: forget probability" in outcome(cfg, "second", "failed")["reason"]
    client = client_of(cfg.tracking, Path(cfg.work))
    name = str(cfg.tracking.model_name)
    assert str(client.get_model_version_by_alias(name, "champion").version) == "1"
    assert len(Ledger(bucket_of(cfg)).read()) == 2
    assert list(Path(cfg.store, "inbox", "second").glob("forget-*"))


def test_the_services_trouble_lets_the_batch_wait_with_a_note(
    tmp_path: Path, database: Tracking
) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "early", requests(0), tmp_path)
    Path(cfg.retain.uri).rename(tmp_path / "elsewhere.jsonl")
    with pytest.raises(GromError, match="nothing at this address"):
        unlearn_batches(cfg)
    found = status("early", bucket_of(cfg))
    assert found.state == "waiting"
    assert found.is_ready
    assert "nothing at this address" in str(found.note)
    (tmp_path / "elsewhere.jsonl").rename(cfg.retain.uri)
    assert unlearn_batches(cfg).done == ("early",)


def test_rows_that_were_honoured_before_are_not_counted_twice(
    tmp_path: Path, database: Tracking
) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "first", requests(0, 3), tmp_path)
    unlearn_batches(cfg)
    before = champion(cfg)
    put(cfg, "again", requests(0, 3)[::-1], tmp_path)
    assert unlearn_batches(cfg).done == ("again",)
    after = champion(cfg)
    assert all(torch.equal(before[name], after[name]) for name in before)
    lines = Ledger(bucket_of(cfg)).read()
    assert [line.model_version for line in lines] == ["1"] * 6
    assert len({line.request for line in lines}) == 3


def test_a_request_without_a_token_of_its_own_is_refused_by_name_of_its_hash(
    tmp_path: Path, database: Tracking
) -> None:
    cfg = of_test(tmp_path, database)
    common = {"request_id": "common", "prompt": words(60, 2), "answer": words(12, 3)}
    put(cfg, "mixed", [*requests(0, 4), common], tmp_path)
    assert unlearn_batches(cfg).done == ("mixed",)
    ledger = Ledger(bucket_of(cfg))
    assert [line.state for line in ledger.find("common")] == ["refused"]
    assert sorted(line.state for line in ledger.read()) == ["honoured"] * 4 + ["refused"]


def test_a_batch_that_another_worker_has_is_left_alone(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "taken", requests(0), tmp_path)
    held = claims.claim("taken", "another", bucket_of(cfg), lease_s=60)
    assert held is not None
    done = unlearn_batches(cfg, batch="taken")
    assert (done.done, done.settled) == ((), ("taken",))
    claims.release(held, bucket_of(cfg))
    assert unlearn_batches(cfg, batch="taken").done == ("taken",)


def test_approval_needs_a_worker(tmp_path: Path, database: Tracking) -> None:
    cfg = of_test(tmp_path, database, approval="required", gate=EASY_GATE)
    put(cfg, "first", requests(0), tmp_path)
    with pytest.raises(GromError, match="grom deploy"):
        unlearn_batches(cfg)
    assert status("first", bucket_of(cfg)).is_ready
