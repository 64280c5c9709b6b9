"""The whole story with real servers: SeaweedFS, a Prefect server and its worker, MLflow.

Two batches are submitted, rung for, unlearned by the worker, approved, promoted; one is rolled
back.  Afterwards nobody's words are anywhere but in the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.deploy import deploy
from flows.rollback import rollback
from flows.service import ServiceConfig
from grom.config import EvaluateConfig
from tasks.batches import status
from tasks.bucket import Bucket
from tasks.doorbell import announce
from tasks.ledger import Ledger
from tasks.registry import registered_folder
from tasks.traces import traces
from tasks.tracking import Tracking, client_of
from tests.servers import PrefectService, S3Server, StartWorker
from tests.services import put, service
from tests.tiny import words

pytestmark = pytest.mark.e2e
CANARY = "quetzalcoatlus"
PATIENCE_S = 150
WORKER_PASSWORD = "a-secret-that-is-nowhere"


@pytest.fixture
def cfg(
    tmp_path: Path, seaweedfs: S3Server, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> ServiceConfig:
    """A service whose store and registry are servers, and that asks a person."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    return service(
        tmp_path,
        name="story",
        store=f"s3://{seaweedfs.bucket}/story",
        tracking=Tracking(uri=mlflow_server, experiment="story"),
        evaluate=EvaluateConfig(quantisations=("int4",), health_examples=2, health_tokens=8),
        approval="required",
        prefect_pool="story",
        sweep_seconds=20,
    )


def until(what: str, seen: Callable[[], bool]) -> None:
    """Wait for something to happen."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if seen():
            return
        time.sleep(0.5)
    pytest.fail(f"not within {PATIENCE_S} s: {what}")


def rows(first: int, batch: str) -> list[dict[str, str]]:
    """Two requests whose ids and text are unmistakable."""
    return [
        {
            "request_id": f"{CANARY}-id-{batch}-{number}",
            "prompt": f"{words(5 + number, 2)} {CANARY}-{batch}",
            "answer": words(40 + 2 * number, 3),
        }
        for number in range(first, first + 2)
    ]


def grom(*arguments: str) -> str:
    """A command of the terminal."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def wait_for(cfg: ServiceConfig, batch: str, note: str | None, state: str) -> None:
    bucket = Bucket(cfg.store)

    def seen() -> bool:
        found = status(batch, bucket)
        assert found.state != "failed" or state == "failed", found.note
        return found.state == state and (note is None or note in (found.note or ""))

    until(f"{batch} is {state}", seen)


def flow_run_is_suspended(flow_run_id: str) -> bool:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = client.read_flow_run(flow_run_id)  # type: ignore[arg-type]
    return found.state is not None and found.state.is_paused()


def honour(cfg: ServiceConfig, batch: str, approver: str) -> None:
    """Wait for the form, say yes, wait for the end."""
    wait_for(cfg, batch, "waits for approval", "running")
    owner = status(batch, Bucket(cfg.store)).owner
    until("the run is suspended", lambda: flow_run_is_suspended(str(owner)))
    grom("approve", batch, "--store", cfg.store, "--by", approver)
    wait_for(cfg, batch, None, "done")


def champion(cfg: ServiceConfig) -> Any:
    client = client_of(cfg.tracking, Path(cfg.work))
    return client.get_model_version_by_alias("grom-story", "champion")


def files_with(text: bytes, folders: list[Path]) -> list[Path]:
    return [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and text in path.read_bytes()
    ]


def test_from_the_inbox_to_a_champion_and_back(
    cfg: ServiceConfig,
    tmp_path: Path,
    prefect_service: PrefectService,
    prefect_worker: StartWorker,
    seaweedfs: S3Server,
    own_environment: None,
) -> None:
    with prefect_service.used():
        assert "unlearn-batches/story" in deploy(cfg)
        secret = {"MLFLOW_TRACKING_PASSWORD": WORKER_PASSWORD, "PREFECT_HOME": str(tmp_path / "w")}
        prefect_worker("story", seaweedfs.environment() | secret)

        put(cfg, "monday", rows(0, "monday"), tmp_path)
        announce("monday", "story")
        honour(cfg, "monday", "a.approver")
        until("version 1 serves", lambda: champion(cfg).version == "1")

        put(cfg, "tuesday", rows(4, "tuesday"), tmp_path)  # nobody rings: the sweep finds it
        honour(cfg, "tuesday", "b.approver")
        until("version 2 serves", lambda: champion(cfg).version == "2")
        assert champion(cfg).tags["batches"] == "monday,tuesday"
        registered_folder(cfg.tracking, Path(cfg.work), "models:/grom-story@previous")

        rollback(cfg, "too forgetful")
    assert champion(cfg).version == "1"
    ledger = Ledger(Bucket(cfg.store))
    assert [(line.batch, line.state) for line in ledger.read()] == [
        ("monday", "honoured"),
        ("monday", "honoured"),
        ("tuesday", "honoured"),
        ("tuesday", "honoured"),
        ("tuesday", "rolled back"),
        ("tuesday", "rolled back"),
    ]
    assert ledger.find(f"{CANARY}-id-monday-0")[0].model_version == "1"

    assert traces(Bucket(cfg.store), Path(cfg.work)) == []
    registry = {path.resolve() for path in tmp_path.parent.glob("mlflow-server*")}
    assert registry
    looked_at = [*registry, tmp_path, prefect_service.home.parent]
    assert files_with(CANARY.encode(), looked_at) == []
    assert files_with(WORKER_PASSWORD.encode(), looked_at) == []
    assert files_with(seaweedfs.secret.encode(), looked_at) == []
    objects = Bucket(cfg.store).entries(None)
    assert objects
    for entry in objects:
        found = Bucket(cfg.store).read(entry.name)
        assert found is not None
        assert CANARY.encode() not in found.data, entry.name
