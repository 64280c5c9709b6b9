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
from grom.config import CollectConfig
from grom.errors import DataError
from grom.ledger import request_hash
from tasks.ledger import Ledger
from tasks.registry import registered_folder
from tasks.tracking import Tracking
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
    return request_hash(f"person-{number}@example.org", Ledger(bucket_of(cfg)).salt())


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
    states = [line.state for line in Ledger(bucket_of(cfg)).read()]
    assert states.count("withdrawn") == 3
    with pytest.raises(NotHonoured):
        withdraw(cfg, hash_of(cfg, 1), "again")
    put(cfg, "third", requests(6, 1), tmp_path)
    assert unlearn_batches(cfg).version == "6"


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
