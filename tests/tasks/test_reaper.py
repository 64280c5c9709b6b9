"""Dead runs: told from living ones by their claims, never by a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import prefect.states
import pytest
from prefect import Flow, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State

from grom.errors import DataError, MissingInput
from tasks import reaper
from tasks.artifacts import canonical_json
from tasks.bucket import Bucket
from tasks.claims import Claim, claim, finish, release, renew
from tasks.housekeep import live_claims
from tasks.place import Place
from tasks.reaper import close_killed, dead_owners, mark_crashed, purge_versions, remove_artifact
from tasks.store import Store
from tasks.tracking import Tracking, client_of, open_run
from tasks.versions import Purged
from tests.faulty import QUICK

pytestmark = pytest.mark.usefixtures("prefect_server")
LATER_S = 2 * 86400.0


@flow(name="unlearn-batches")
def batch_flow(cfg: dict[str, str]) -> None:
    """Stands for the flow of that name."""


@flow(name="sweep")
def short_flow(cfg: dict[str, str]) -> None:
    """Stands for the flow of that name."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A store and a work folder."""
    (tmp_path / "work/scratch").mkdir(parents=True)
    return Place(work=str(tmp_path / "work"), store=str(tmp_path / "store"))


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    """Of the Prefect server."""
    with get_client(sync_client=True) as opened:
        yield opened


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let two days pass by the store's clock."""

    def pass_by() -> None:
        now = Bucket.now
        monkeypatch.setattr(Bucket, "now", lambda self: now(self) + LATER_S)

    return pass_by


def run_of(
    client: SyncPrefectClient,
    place: Place,
    state: State | None = None,
    of: Flow[..., None] = batch_flow,
) -> FlowRun:
    """A flow run of a service with this store, running unless told otherwise."""
    started = prefect.states.Running() if state is None else state
    return client.create_flow_run(of, parameters={"cfg": {"store": place.store}}, state=started)


def state_of(client: SyncPrefectClient, run: FlowRun) -> str:
    """Its state now."""
    found = client.read_flow_run(run.id).state
    assert found is not None
    return found.type.value


def take(place: Place, batch: str, owner: object, lease_s: float = 600) -> Claim:
    """A worker has a batch."""
    held = claim(batch, str(owner), place.open(), lease_s)
    assert held is not None
    return held


def test_only_a_run_whose_lease_ran_out_is_marked(
    place: Place, client: SyncPrefectClient, later: Callable[[], None]
) -> None:
    runs = {
        name: run_of(client, place)
        # No batch of the foreign one lies in this store.
        for name in ("dead", "alive", "half", "waits", "pending", "foreign")
    }
    dead, alive, half, waits, pending, _ = runs.values()
    client.set_flow_run_state(waits.id, prefect.states.Paused(), force=True)
    client.set_flow_run_state(pending.id, prefect.states.Pending(), force=True)
    for batch, owner in {"a": dead, "b": half, "c": waits, "d": pending}.items():
        take(place, batch, owner.id)
    take(place, "e", alive.id, 1e6)
    take(place, "f", half.id, 1e6)
    take(place, "g", "a person")
    assert mark_crashed.fn(place).places == ()
    later()
    would = mark_crashed.fn(place, dry_run=True)
    assert state_of(client, dead) == "RUNNING"
    assert set(would.places) == {f"{one.name} ({one.id})" for one in (dead, pending)}
    assert mark_crashed.fn(place) == would
    assert {name: state_of(client, run) for name, run in runs.items()} == {
        "dead": "CRASHED",
        "pending": "CRASHED",
        "alive": "RUNNING",
        "half": "RUNNING",
        "waits": "PAUSED",
        "foreign": "RUNNING",
    }
    assert mark_crashed.fn(place).places == ()


def test_a_run_that_was_overtaken_is_known_by_its_note(
    place: Place, client: SyncPrefectClient, later: Callable[[], None]
) -> None:
    """Its claims name others now; what it took is noted."""
    run, store = run_of(client, place), place.open()
    store.create(f"desks/{run.id}.json", canonical_json(["a"]))
    take(place, "a", "another", 1e6)
    assert mark_crashed.fn(place).places == ()
    later()
    assert mark_crashed.fn(place).places == (f"{run.name} ({run.id})",)


def test_a_run_that_ends_meanwhile_keeps_its_state(
    place: Place,
    client: SyncPrefectClient,
    later: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(client, place)
    take(place, "a", run.id)
    later()

    def ends(bucket: Bucket) -> object:
        client.set_flow_run_state(run.id, prefect.states.Completed(), force=True)
        return live_claims(bucket)

    monkeypatch.setattr(reaper, "live_claims", ends)
    assert mark_crashed.fn(place).places == ()
    assert state_of(client, run) == "COMPLETED"


def test_a_run_that_wakes_up_meanwhile_is_left_alone(
    place: Place,
    client: SyncPrefectClient,
    later: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(client, place)
    held = take(place, "a", run.id)
    later()
    find = dead_owners

    def wakes(bucket: Bucket) -> list[str]:
        found = find(bucket)
        renew(held, bucket, lease_s=1e6)
        return found

    monkeypatch.setattr(reaper, "dead_owners", wakes)
    assert mark_crashed.fn(place).places == ()
    assert state_of(client, run) == "RUNNING"


def test_runs_without_a_claim_count_by_what_they_can_take(
    place: Place,
    client: SyncPrefectClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Place(work=place.work, store=str(tmp_path / "other"))
    stuck = run_of(client, place, prefect.states.Pending())
    sweep = run_of(client, place, of=short_flow)
    working = run_of(client, place)
    strangers = [
        run_of(client, other, prefect.states.Pending()),
        run_of(client, other, of=short_flow),
    ]
    now = datetime.now(UTC).timestamp()
    assert mark_crashed.fn(place).places == ()
    monkeypatch.setattr(reaper, "now_of", lambda _: now + 2 * 3600)
    assert mark_crashed.fn(place).places == (f"{stuck.name} ({stuck.id})",)
    monkeypatch.setattr(reaper, "now_of", lambda _: now + 7 * 3600)
    assert mark_crashed.fn(place).places == (f"{sweep.name} ({sweep.id})",)
    assert [state_of(client, run) for run in (working, *strangers)] == [
        "RUNNING",
        "PENDING",
        "RUNNING",
    ]


def test_owners_by_their_signs_of_life(place: Place, later: Callable[[], None]) -> None:
    store = place.open()
    finish(take(place, "a", "ended"), store)
    release(take(place, "b", "gave back"), store)
    take(place, "c", "lapsed", 1)
    finish(take(place, "d", "both"), store)
    take(place, "e", "both", 1e6)
    assert dead_owners(store) == []  # the last steps may take an hour
    later()
    assert dead_owners(store) == ["ended", "gave back", "lapsed"]


def test_runs_in_mlflow_are_closed_with_their_flow_runs(
    place: Place, client: SyncPrefectClient, tmp_path: Path
) -> None:
    tracking = Tracking(uri=f"sqlite:///{tmp_path / 'mlflow.db'}", experiment="e")
    assert close_killed.fn(tracking, place).places == ()
    running, crashed, claimed = run_of(client, place), run_of(client, place), uuid4()
    client.set_flow_run_state(crashed.id, prefect.states.Crashed(), force=True)
    renew(take(place, "a", "heir"), place.open(), run=f"{claimed}")
    keys = {
        "running": str(running.id),
        "crashed": str(crashed.id),
        "crashed, one batch": f"{crashed.id}-a",
        "unknown to Prefect": str(uuid4()),
        "gone on with by another": f"{claimed}-a",
        "by hand": "my run",
    }
    work, mlflow = Path(place.work), client_of(tracking, Path(place.work))
    runs = {
        name: open_run(tracking, work, name=name, tags={}, flow_run_id=key, run_key=key)
        for name, key in keys.items()
    }

    def states() -> dict[str, str]:
        return {name: mlflow.get_run(run).info.status for name, run in runs.items()}

    dead = {"crashed", "crashed, one batch", "unknown to Prefect"}
    would = close_killed.fn(tracking, place, dry_run=True)
    assert set(states().values()) == {"RUNNING"}
    assert set(would.places) == {keys[name] for name in dead}
    assert set(close_killed.fn(tracking, place).places) == set(would.places)
    assert {name for name, state in states().items() if state == "KILLED"} == dead
    assert close_killed.fn(tracking, place).places == ()


def test_versions_are_purged_by_the_rule(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked = place.open(), []
    with store.publish("apply", {"n": 1}) as folder:
        (folder / "model.safetensors").write_bytes(b"1")
    made = store.find("apply", {"n": 1})
    assert made is not None

    def purge(*_: object, **rule: object) -> list[Purged]:
        asked.append({name: rule[name] for name in ("keep_versions", "keep_days", "dry_run")})
        if not rule["dry_run"]:
            rule["remove"](made.uri)  # type: ignore[operator]
        return [Purged("m", "1", 7, (made.uri,))]

    monkeypatch.setattr(reaper, "purge", purge)
    would = purge_versions.fn(Tracking(), "m", place, 2, 5.0, True)
    assert store.find("apply", {"n": 1}) is not None
    assert purge_versions.fn(Tracking(), "m", place, 2, 5.0) == would
    assert (would.places, would.num_bytes) == (("m, version 1",), 7)
    assert store.find("apply", {"n": 1}) is None
    assert asked[1] == {"keep_versions": 2, "keep_days": 5.0, "dry_run": False}


def test_a_model_that_is_not_registered_yet_has_nothing_to_purge(
    place: Place, tmp_path: Path
) -> None:
    tracking = Tracking(uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert purge_versions.fn(tracking, "none", place, 1, 0.0).places == ()


def test_an_artifact_goes_with_its_download(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), tmp_path / "work/scratch", patience=QUICK)
    made = []
    for number in (1, 2):
        with store.publish("apply", {"n": number}) as folder:
            (folder / "edit").mkdir()
            (folder / "edit/file").write_text("x")
        found = store.find("apply", {"n": number})
        assert found is not None
        made.append(found)
    fetched = tmp_path / "work/scratch/fetched/apply" / made[0].key
    fetched.mkdir(parents=True)
    remove_artifact(made[0].uri, store, tmp_path / "work")
    remove_artifact(made[0].uri, store, tmp_path / "work")
    assert not fetched.exists()
    assert not (tmp_path / "store/apply" / made[0].key).exists()
    assert store.fetch(made[1]).is_dir()
    with pytest.raises(MissingInput):
        store.fetch(made[0])
    for uri in (
        "s3://other/apply/0123456789abcdef/x",
        f"{(tmp_path / 'store').as_uri()}/../x",
        "",
        "/etc",
    ):
        with pytest.raises(DataError, match="not an artifact"):
            remove_artifact(uri, store, tmp_path)
