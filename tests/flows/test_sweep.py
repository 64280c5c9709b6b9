"""The sweep: what it finds, whom it rings for, and that it outlasts outages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Running

from flows.service import ServiceConfig
from flows.sweep import Swept, described, look, sweep
from grom.config import DataConfig, ModelConfig
from tasks import claims
from tasks.bucket import Bucket
from tasks.claims import claim, finish
from tasks.doorbell import DeploymentMissing
from tasks.outcomes import read_outcome
from tasks.prefect_api import ServerUnreachable
from tasks.retries import BucketMissing
from tests.servers import PrefectService

LATER_S = 120 + 1
"""After a run that ended without taking its batch, the next one may start."""


@pytest.fixture
def client(prefect_service: PrefectService) -> Iterator[SyncPrefectClient]:
    """Of a real server, which flows use as well."""
    with prefect_service.used(), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def cfg(tmp_path: Path, client: SyncPrefectClient) -> ServiceConfig:
    """A service that is deployed, with an empty store."""
    flow_id, name = client.create_flow_from_name("unlearn-batches"), uuid4().hex
    client.create_deployment(flow_id=flow_id, name=name)
    return service(tmp_path, name)


def service(folder: Path, name: str = "nobody") -> ServiceConfig:
    """A service by its name."""
    return ServiceConfig(
        name=name,
        model=ModelConfig(source="model"),
        retain=DataConfig(uri="retain.jsonl"),
        store=str(folder / "store"),
        work=str(folder / "work"),
    )


def land(cfg: ServiceConfig, *batches: str) -> Bucket:
    """Batches as a listing shows them, oldest first; what their documents say does not matter."""
    bucket = Bucket(cfg.store)
    for batch in batches:
        bucket.create(f"inbox/{batch}/manifest.json", b"{}")
        bucket.create(f"inbox/{batch}/_READY.json", b"{}")
        time.sleep(0.01)
    return bucket


def crash(client: SyncPrefectClient, swept: Swept) -> float:
    """Let the run end without taking anything; when."""
    assert swept.flow_run_id is not None
    run_id = UUID(swept.flow_run_id)
    client.set_flow_run_state(run_id, Crashed(), force=True)
    state = client.read_flow_run(run_id).state
    assert state is not None
    return state.timestamp.timestamp()


def runs(client: SyncPrefectClient, cfg: ServiceConfig) -> list[FlowRun]:
    """All runs of the service."""
    deployed = client.read_deployment_by_name(f"unlearn-batches/{cfg.name}").id
    return [run for run in client.read_flow_runs(limit=200) if run.deployment_id == deployed]


def at(seconds: float) -> Callable[[], float]:
    """A clock that stands."""
    return lambda: seconds


def test_the_oldest_batch_is_rung_for_once(cfg: ServiceConfig, client: SyncPrefectClient) -> None:
    land(cfg, "z", "a")
    first, second = look(cfg), look(cfg)
    assert (first.waiting, first.rung_for, first.is_new) == (("z", "a"), "z", True)
    assert second == first.model_copy(update={"is_new": False})
    (run,) = runs(client, cfg)
    assert str(run.id) == first.flow_run_id
    assert run.parameters == {"batch": "z"}


def test_an_empty_inbox_asks_no_server(tmp_path: Path) -> None:
    with temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert look(service(tmp_path)) == Swept()


def test_two_sweeps_at_once_start_one_run(cfg: ServiceConfig, client: SyncPrefectClient) -> None:
    land(cfg, "b")
    contexts = [copy_context() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        swept = list(pool.map(lambda context: context.run(look, cfg), contexts))
    assert len({one.flow_run_id for one in swept}) == len(runs(client, cfg)) == 1
    assert sum(one.is_new for one in swept) == 1


def test_a_batch_whose_run_crashed_does_not_hold_up_the_next(
    cfg: ServiceConfig, client: SyncPrefectClient
) -> None:
    land(cfg, "a")
    ended = crash(client, look(cfg))
    land(cfg, "b")
    swept = look(cfg, at(ended))
    assert swept.wait_s == {"a": 120.0}
    assert (swept.rung_for, swept.is_new) == ("b", True)
    assert "a not again for 120 s" in described(swept)
    crash(client, swept)
    nothing = look(cfg, at(ended))
    assert (nothing.rung_for, set(nothing.wait_s)) == (None, {"a", "b"})
    again = look(cfg, at(ended + LATER_S))
    assert (again.rung_for, again.is_new) == ("a", True)
    assert len(runs(client, cfg)) == 3


def test_a_run_whose_worker_is_gone_is_replaced(
    cfg: ServiceConfig, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server shows it as running for ever; the store knows better."""
    bucket = land(cfg, "b")
    first = look(cfg)
    assert first.flow_run_id is not None
    client.set_flow_run_state(UUID(first.flow_run_id), Running(), force=True)
    assert claim("b", first.flow_run_id, bucket, cfg.lease_s) is not None
    assert look(cfg).waiting == ()
    real = Bucket.now
    monkeypatch.setattr(Bucket, "now", lambda self: real(self) + 3600)
    second = look(cfg, at(time.time() + 3600))
    assert (second.rung_for, second.is_new) == ("b", True)


def test_what_cannot_be_read_does_not_stop_the_others(
    cfg: ServiceConfig, client: SyncPrefectClient, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = land(cfg, "large", "b")
    bucket.create("claims/broken.json", b"{}")
    manifest = Path(cfg.store, "inbox/large/manifest.json")
    with manifest.open("wb") as file:
        file.truncate(17 * 2**20)
    with caplog.at_level(logging.WARNING):
        swept = look(cfg)
    assert (swept.waiting, swept.rung_for) == (("large", "b"), "b")
    assert set(swept.problems) == {"large"}
    assert len(runs(client, cfg)) == 1
    assert "claims/broken.json" in caplog.text
    assert "manifest.json" in caplog.text


def test_outcomes_of_killed_workers_are_published(
    cfg: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = land(cfg, "b")
    held = claim("b", "a", bucket)
    assert held is not None
    with monkeypatch.context() as killed:
        killed.setattr(claims, "publish", lambda *_: None)
        outcome = finish(held, bucket)
    assert look(cfg) == Swept(settled=("b",))
    assert read_outcome("b", "done", bucket) == outcome


def test_the_flow_gives_what_it_found(cfg: ServiceConfig, client: SyncPrefectClient) -> None:
    land(cfg, "b")
    swept = sweep(cfg)
    assert swept.rung_for == "b"
    assert swept == look(cfg).model_copy(update={"is_new": True})


def test_what_is_down_or_missing_is_named(cfg: ServiceConfig, tmp_path: Path) -> None:
    land(cfg, "b")
    with pytest.raises(DeploymentMissing, match="unlearn-batches/nobody"):
        look(service(tmp_path))
    with (
        temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(ServerUnreachable),
    ):
        look(cfg)


def test_a_bucket_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise BucketMissing("s3://nobody")

    monkeypatch.setattr(Bucket, "entries", missing)
    with pytest.raises(BucketMissing):
        look(service(tmp_path))
