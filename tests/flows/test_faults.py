"""The real flow with faults that are none of its own: the edit is that of an undisturbed run, or
the run ends with a reason."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import flows.unlearn_batches as module
from flows.rollback import rollback
from flows.service import ServiceConfig
from flows.unlearn_batches import unlearn_batches
from grom.errors import NotEnoughDisk
from tasks import inbox
from tasks.batches import status
from tasks.commit import commit
from tasks.folder import LocalBackend
from tasks.ledger import Ledger
from tasks.registry import registered_folder
from tasks.statistics import save_collected
from tasks.tracking import Tracking
from tests.aftermath import assert_same_update
from tests.faulty import Choose, bad_connection, storm
from tests.services import bucket_of, outcome, put, requests, service

pytestmark = pytest.mark.usefixtures("prefect_server")
FULL_DISK = Path("/dev/full")
NO_ANSWER = ("busy", "slow", "refused", "expired")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """One MLflow database for the runs of this process."""
    return Tracking(uri=f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")


def of_test(folder: Path, database: Tracking) -> ServiceConfig:
    """A service with a registered model of its own and one batch."""
    name = f"m-{folder.name}"
    tracking = database.model_copy(update={"experiment": name, "model_name": name})
    cfg = service(folder, tracking=tracking)
    put(cfg, "first", requests(0, 3), folder)
    return cfg


def champion(cfg: ServiceConfig) -> Path:
    """Files of the model that is in service."""
    uri = f"models:/{cfg.tracking.model_name}@champion"
    return registered_folder(cfg.tracking, Path(cfg.work), uri)


def edit_of(cfg: ServiceConfig) -> str:
    """Hash of its edit."""
    return hashlib.sha256((champion(cfg) / "edit/edit.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, database: Tracking) -> str:
    """Hash of the edit for that batch."""
    cfg = of_test(tmp_path_factory.mktemp("undisturbed"), database)
    assert unlearn_batches(cfg).done == ("first",)
    return edit_of(cfg)


@pytest.mark.parametrize(
    ("choose", "delay_s"),
    [
        (storm(1, 0.3, NO_ANSWER), 0.0),
        (storm(2, 0.3, ("truncated",)), 0.0),
        (storm(3, 0.5, ("twice", "lost reply")), 0.0),
        (storm(4, 0.3, ("lag",)), 0.0),
        (lambda _: None, 0.01),
    ],
    ids=["no answer", "truncated", "delivered twice", "listings lag", "slow"],
)
def test_a_bad_connection_changes_nothing(
    tmp_path: Path, database: Tracking, undisturbed: str, choose: Choose, delay_s: float
) -> None:
    cfg = of_test(tmp_path, database)
    with bad_connection(choose, delay_s) as faults:
        assert unlearn_batches(cfg, batch="first").done == ("first",)
    assert delay_s or faults.total() > 20
    assert edit_of(cfg) == undisturbed
    assert [line.batch for line in Ledger(bucket_of(cfg)).read()] == ["first"] * 3
    assert outcome(cfg, "first")["model_version"] == "1"


def change_rows(cfg: ServiceConfig) -> None:
    """Somebody writes other rows of the same size into the batch."""
    (file,) = Path(cfg.store, "inbox", "first").glob("forget-*")
    file.write_bytes(file.read_bytes().replace(b"w4", b"w5"))


def before(do: Callable[..., Any], happens: Callable[[], None]) -> Callable[..., Any]:
    """The same function, and something happens just before it."""

    def changed(*args: Any, **kwargs: Any) -> Any:
        happens()
        return do(*args, **kwargs)

    return changed


def test_a_batch_that_changes_before_it_is_copied_fails(
    tmp_path: Path, database: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path, database)
    changed = before(LocalBackend.download, partial(change_rows, cfg))
    monkeypatch.setattr(LocalBackend, "download", changed)
    found = unlearn_batches(cfg)
    assert (found.done, found.settled) == ((), ("first",))
    assert "sha256" in outcome(cfg, "first", "failed")["reason"]
    assert Ledger(bucket_of(cfg)).read() == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(inbox, "_keep_requests"), (module, "load_inputs")],
    ids=["between hash and parse", "after the check"],
)
def test_a_batch_that_changes_after_it_was_copied_is_what_it_was(
    tmp_path: Path,
    database: Tracking,
    undisturbed: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
) -> None:
    cfg = of_test(tmp_path, database)
    monkeypatch.setattr(owner, name, before(getattr(owner, name), partial(change_rows, cfg)))
    assert unlearn_batches(cfg).done == ("first",)
    assert edit_of(cfg) == undisturbed


@pytest.mark.skipif(not FULL_DISK.exists(), reason="no device that is always full")
def test_a_full_disk_lets_the_batch_wait_with_a_note(
    tmp_path: Path, database: Tracking, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path, database)

    def on_a_full_disk(folder: Path, *args: Any, **kwargs: Any) -> None:
        (folder / "collected.json").symlink_to(FULL_DISK)
        save_collected(folder, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr("tasks.collect.save_collected", on_a_full_disk)
        with pytest.raises(NotEnoughDisk):
            unlearn_batches(cfg)
    found = status("first", bucket_of(cfg))
    assert found.is_ready
    assert "GB free" in str(found.note)
    assert not list(Path(cfg.work, "scratch").rglob("*.jsonl"))
    assert unlearn_batches(cfg).done == ("first",)
    assert edit_of(cfg) == undisturbed


def test_no_room_for_the_rows_lets_the_batch_wait_with_a_note(
    tmp_path: Path, database: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path, database)
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NotEnoughDisk):
        unlearn_batches(cfg)
    found = status("first", bucket_of(cfg))
    assert found.is_ready
    assert "0.00 GB free" in str(found.note)


def test_a_batch_accepted_between_solve_and_commit_is_solved_with(
    tmp_path: Path, database: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path / "apart", database)
    nested: list[tuple[str, ...]] = []

    def overtaken(*args: Any) -> None:
        if not nested:
            nested.append(())
            put(cfg, "other", requests(6, 2), tmp_path)
            nested[0] = unlearn_batches(cfg).done
        commit(*args)

    monkeypatch.setattr("flows.unlearn_batches.commit", overtaken)
    found = unlearn_batches(cfg)
    assert (nested, found.done, found.version) == ([("other",)], ("first",), "3")
    lines = Ledger(bucket_of(cfg)).read()
    assert [(line.batch, line.model_version) for line in lines] == [("other", "2")] * 2 + [
        ("first", "3")
    ] * 3
    monkeypatch.undo()
    together = of_test(tmp_path / "together", database)
    put(together, "other", requests(6, 2), tmp_path)
    assert sorted(unlearn_batches(together).done) == ["first", "other"]
    assert_same_update(champion(cfg), champion(together))


def test_a_row_that_two_waiting_batches_have_counts_once(
    tmp_path: Path, database: Tracking, undisturbed: str
) -> None:
    cfg = of_test(tmp_path, database)
    put(cfg, "second", requests(0, 3)[::-1], tmp_path)
    assert unlearn_batches(cfg).done == ("first", "second")
    assert edit_of(cfg) == undisturbed
    lines = Ledger(bucket_of(cfg)).read()
    assert [line.batch for line in lines] == ["first"] * 3 + ["second"] * 3


def test_rows_count_again_when_what_had_them_is_rolled_back_meanwhile(
    tmp_path: Path, database: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = of_test(tmp_path, database)
    unlearn_batches(cfg)
    put(cfg, "second", requests(4, 2), tmp_path)
    unlearn_batches(cfg)
    put(cfg, "again", requests(4, 2)[::-1], tmp_path)
    steps: list[str] = []

    def overtaken(*args: Any) -> None:
        if not steps:
            steps.append(rollback(cfg, "a test").to_version)
        commit(*args)

    monkeypatch.setattr("flows.unlearn_batches.commit", overtaken)
    found = unlearn_batches(cfg)
    assert (steps, found.done, found.version) == (["1"], ("again",), "3")
    states = {(line.batch, line.state) for line in Ledger(bucket_of(cfg)).read()[-2:]}
    assert states == {("again", "honoured")}
