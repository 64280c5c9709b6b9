"""The doorbell: one run for a batch however often it is rung for, and always another after it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import AutomationCore, EventTrigger, Posture, RunDeployment
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Crashed, Paused, Pending, Running

from grom.errors import MissingInput
from tasks import doorbell
from tasks.bucket import Bucket
from tasks.claims import Claim, claim, fail, finish, release, renew
from tasks.doorbell import (
    LANDED,
    DeploymentMissing,
    Rung,
    RunRefused,
    announce,
    answer,
    ring,
)
from tasks.inbox import NotReady
from tasks.manifest import Refused
from tasks.store import Store
from tests.servers import PrefectService

SHA = "ab" * 32
STUCK_S = 600.0
PAUSES_S = [120, 240, 480, 960, 1920, 3600, 3600]
"""After one run that ended without taking the batch, after two, ..."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A deployment on a real server, and what became of it."""

    client: SyncPrefectClient
    flow_id: UUID
    id: UUID
    name: str

    @property
    def key(self) -> str:
        """Of the first run for batch b."""
        return f"b-{SHA}-{self.name}"

    @property
    def full(self) -> str:
        """`<flow>/<deployment>`."""
        return f"unlearn-batches/{self.name}"

    def runs(self) -> list[FlowRun]:
        """All of them."""
        runs = self.client.read_flow_runs(limit=200)
        return [run for run in runs if run.deployment_id == self.id]

    def put(self, rung: Rung, state: State[Any]) -> float:
        """Bring a run into a state; when, by the server's clock."""
        self.client.set_flow_run_state(UUID(rung.flow_run_id), state, force=True)
        found = self.client.read_flow_run(UUID(rung.flow_run_id)).state
        assert found is not None
        return found.timestamp.timestamp()


@pytest.fixture
def deployed(prefect_service: PrefectService) -> Iterator[Deployed]:
    """A deployment of its own."""
    with prefect_service.used(), get_client(sync_client=True) as client:
        flow_id, name = client.create_flow_from_name("unlearn-batches"), uuid4().hex
        made = client.create_deployment(flow_id=flow_id, name=name, parameters={"cfg": {"rho": 2}})
        yield Deployed(client, flow_id, made, name)


def at(seconds: float) -> Callable[[], float]:
    """A clock that stands."""
    return lambda: seconds


def race(deployed: Deployed, clock: Callable[[], float] | None = None) -> list[Rung]:
    """Several who ring for one batch at once."""
    contexts = [copy_context() for _ in range(4)]

    def once(context: Context) -> Rung:
        return context.run(ring, "b", SHA, deployed.full, clock)

    with ThreadPoolExecutor(len(contexts)) as pool:
        return list(pool.map(once, contexts))


def test_of_many_who_ring_at_once_one_starts_the_run(deployed: Deployed) -> None:
    """The first one, and the one after a crash."""
    first = race(deployed)
    ended = deployed.put(first[0], Crashed())
    second = race(deployed, at(ended + PAUSES_S[0]))
    for rungs in (first, second):
        assert len({rung.flow_run_id for rung in rungs}) == 1
        assert sum(rung.is_new for rung in rungs) == 1
        assert not any(rung.wait_s for rung in rungs)
    assert len(deployed.runs()) == 2


def test_the_deployment_s_parameters_stay_and_the_run_starts_now(deployed: Deployed) -> None:
    ring("b", SHA, deployed.full)
    (run,) = deployed.runs()
    assert run.parameters == {"cfg": {"rho": 2}, "batch": "b"}
    assert run.idempotency_key == deployed.key
    assert run.expected_start_time is not None
    assert run.created is not None
    assert abs((run.expected_start_time - run.created).total_seconds()) < 2


def test_after_each_run_that_ended_the_next_one_waits_longer(deployed: Deployed) -> None:
    rung = ring("b", SHA, deployed.full)
    for pause_s in PAUSES_S:
        ended = deployed.put(rung, Crashed())
        early = ring("b", SHA, deployed.full, at(ended + pause_s - 1))
        assert (early.flow_run_id, early.is_new) == (rung.flow_run_id, False)
        assert early.wait_s == pytest.approx(1)
        last, rung = rung, ring("b", SHA, deployed.full, at(ended + pause_s))
        assert rung.is_new
        run = deployed.client.read_flow_run(UUID(rung.flow_run_id))
        assert run.idempotency_key == f"{deployed.key}-after-{last.flow_run_id}"
        again = ring("b", SHA, deployed.full, at(ended + pause_s))
        assert again == Rung(rung.flow_run_id, is_new=False)


def test_other_content_and_other_batches_do_not_wait(deployed: Deployed) -> None:
    deployed.put(ring("b", SHA, deployed.full), Crashed())
    assert ring("b", SHA, deployed.full).wait_s > 0
    assert ring("b", "cd" * 32, deployed.full).is_new
    assert ring("c", SHA, deployed.full).is_new


def test_services_with_the_same_batch_each_have_a_run(deployed: Deployed) -> None:
    """All deployments of a flow share their idempotency keys."""
    deployed.client.create_deployment(flow_id=deployed.flow_id, name=f"{deployed.name}-2")
    assert ring("b", SHA, deployed.full).is_new
    assert ring("b", SHA, f"{deployed.full}-2").is_new


@pytest.mark.parametrize("state", [Pending(), Running(), Paused()], ids=lambda state: state.name)
def test_a_run_that_is_stuck_counts_as_ended(deployed: Deployed, state: State[Any]) -> None:
    rung = ring("b", SHA, deployed.full)
    entered = deployed.put(rung, state)
    alive = ring("b", SHA, deployed.full, at(entered + STUCK_S - 1), STUCK_S)
    assert alive == Rung(rung.flow_run_id, is_new=False)
    early = ring("b", SHA, deployed.full, at(entered + STUCK_S + PAUSES_S[0] - 1), STUCK_S)
    assert early.wait_s == pytest.approx(1)
    assert ring("b", SHA, deployed.full, at(entered + STUCK_S + PAUSES_S[0]), STUCK_S).is_new


def test_a_run_that_no_worker_has_fetched_is_waited_for(deployed: Deployed) -> None:
    rung = ring("b", SHA, deployed.full)
    later = ring("b", SHA, deployed.full, at(time.time() + 1e6))
    assert later == Rung(rung.flow_run_id, is_new=False)


def test_runs_that_the_list_does_not_show_are_met_in_the_chain(deployed: Deployed) -> None:
    """Somebody took their tags away."""
    first = deployed.client.create_flow_run_from_deployment(
        deployed.id, idempotency_key=deployed.key
    )
    ended = deployed.put(Rung(str(first.id), is_new=True), Completed())
    second = deployed.client.create_flow_run_from_deployment(
        deployed.id, idempotency_key=f"{deployed.key}-after-{first.id}"
    )
    met = ring("b", SHA, deployed.full, at(ended + PAUSES_S[0]))
    assert met == Rung(str(second.id), is_new=False)


def submitted(store: Bucket, batch: str = "b", marker: bytes = b"{}") -> None:
    """A batch as a listing shows it; what its documents say does not matter to a doorbell."""
    store.create(f"inbox/{batch}/manifest.json", b"{}")
    store.create(f"inbox/{batch}/_READY.json", marker)


def taken(store: Bucket) -> Claim:
    """A claim that must succeed."""
    held = claim("b", "a", store)
    assert held is not None
    return held


def test_a_batch_that_waits_is_rung_for(store: Store, deployed: Deployed) -> None:
    submitted(store)
    first = answer("b", store, deployed.full)
    assert first is not None
    assert first.is_new
    release(taken(store), store)
    assert answer("b", store, deployed.full) == Rung(first.flow_run_id, is_new=False)


def test_a_batch_that_somebody_has_or_had_is_not(store: Store, deployed: Deployed) -> None:
    submitted(store)
    held = taken(store)
    assert answer("b", store, deployed.full) is None
    held = renew(held, store, run="r")
    assert answer("b", store, deployed.full) is None
    fail(held, store, "no")
    assert answer("b", store, deployed.full) is None
    submitted(store, "c")
    done = claim("c", "a", store)
    assert done is not None
    finish(done, store)
    assert answer("c", store, deployed.full) is None
    assert deployed.runs() == []


def test_a_batch_whose_worker_is_gone_is(
    store: Store, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(store)
    taken(store)
    now = Bucket.now
    monkeypatch.setattr(Bucket, "now", lambda self: now(self) + 3600)
    rung = answer("b", store, deployed.full)
    assert rung is not None
    assert rung.is_new


def test_what_is_not_whole_is_named(store: Store, deployed: Deployed) -> None:
    with pytest.raises(MissingInput, match="no batch b"):
        answer("b", store, deployed.full)
    store.create("inbox/b/manifest.json", b"{}")
    with pytest.raises(NotReady):
        answer("b", store, deployed.full)
    store.create("inbox/c/_READY.json", b"{}")
    with pytest.raises(Refused, match=r"without manifest\.json"):
        answer("c", store, deployed.full)
    assert deployed.runs() == []


def test_a_batch_that_breaks_the_schema_is_rung_for(store: Store, deployed: Deployed) -> None:
    """So that a run refuses it for all to see."""
    submitted(store, marker=b"no json")
    rung = answer("b", store, deployed.full)
    assert rung is not None
    assert rung.is_new


def listens(deployed: Deployed, resource: str) -> None:
    """Let the server start a run of the deployment when a batch lands."""
    deployed.client.create_automation(
        AutomationCore(
            name=deployed.name,
            trigger=EventTrigger(
                expect={LANDED},
                match={"prefect.resource.id": resource},
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[RunDeployment(source="selected", deployment_id=deployed.id)],
        )
    )


def test_an_event_starts_a_run(deployed: Deployed) -> None:
    """`announce`, and the JSON that the module's docstring gives to producers."""
    listens(deployed, f"grom.deletions.{deployed.name}")
    (shown,) = re.findall(r"-d '(\[.*\])' ", doorbell.__doc__ or "", re.DOTALL)
    shown = shown.replace("'$(uuidgen)'", str(uuid4())).replace("<name>", deployed.name)
    shown = shown.replace("'$(date -u +%FT%TZ)'", time.strftime("%FT%TZ", time.gmtime()))
    announce("b", "another service")
    announce("b", deployed.name)
    post(shown)
    deadline = time.monotonic() + 60
    while len(deployed.runs()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(deployed.runs()) == 2


def post(body: str) -> None:
    """As curl does."""
    address = PREFECT_API_URL.value()
    assert address is not None
    httpx.post(f"{address}/events", json=json.loads(body)).raise_for_status()


def test_a_name_that_is_not_deployed_is_named(deployed: Deployed) -> None:
    with pytest.raises(DeploymentMissing, match=r"no deployment unlearn-batches/none.*grom deploy"):
        ring("b", SHA, "unlearn-batches/none")


def test_a_deployment_of_another_version_is_named(deployed: Deployed) -> None:
    deployed.client.create_deployment(
        flow_id=deployed.flow_id,
        name=f"{deployed.name}-old",
        parameter_openapi_schema={"type": "object", "properties": {"batch": {"type": "integer"}}},
        enforce_parameter_schema=True,
    )
    with pytest.raises(RunRefused, match=r"HTTP 409.*grom deploy"):
        ring("b", SHA, f"{deployed.full}-old")
