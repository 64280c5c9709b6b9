"""Workers at the same moment, and workers whose clock is wrong; each is a process of its own."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tasks import claims
from tasks.batches import waiting
from tasks.ledger import Ledger
from tests.aftermath import Aftermath, aftermath, assert_same_update, champion_folder
from tests.killed import Drill, wait_for
from tests.services import bucket_of

HOUR_S = 3600.0


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Drill:
    """A service whose workers are processes of their own."""
    drill = Drill(tmp_path_factory.mktemp("drill"), str(PREFECT_API_URL.value()))
    drill.prepare()
    return drill


@pytest.fixture(scope="module")
def expected(drill: Drill) -> Aftermath:
    """What it comes to if nothing happens."""
    drill.reset()
    drill.go_on()
    return aftermath(drill.cfg)


def test_of_two_workers_at_once_one_honours_the_batch(drill: Drill) -> None:
    drill.reset()
    shutil.rmtree(drill.live / "store" / "inbox" / "second")
    race(drill)
    found = aftermath(drill.cfg)
    assert [line[1:] for line in found.lines[2:]] == [("first", "2", "honoured")] * 3
    assert [version[0] for version in found.versions] == ["1", "2"]
    assert found.runs == ("FINISHED", "FINISHED")
    assert (found.done, found.raw) == (("accepted.json", "first.json"), ())


def test_two_workers_that_get_a_batch_each_come_to_one_edit(
    drill: Drill, expected: Aftermath, tmp_path: Path
) -> None:
    drill.reset()
    drill.go_on()
    before = champion_folder(drill.cfg)
    assert before is not None
    shutil.copytree(before, tmp_path / "expected")
    drill.reset()
    race(drill)
    found = aftermath(drill.cfg)
    lines = [(line[0], line[1], line[3]) for line in found.lines]
    assert sorted(lines) == sorted((line[0], line[1], line[3]) for line in expected.lines)
    assert (found.done, found.raw) == (expected.done, ())
    assert {run.split(",")[0] for run in found.runs} == {"FINISHED"}
    after = champion_folder(drill.cfg)
    assert after is not None
    assert_same_update(after, tmp_path / "expected")


def race(drill: Drill) -> None:
    """Two workers start at the same moment, and both must end well."""
    gate = drill.folder / "gate"
    gate.unlink(missing_ok=True)
    workers = [drill.launch(prepare=partial(wait_for, gate))[0] for _ in range(2)]
    gate.touch()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0], drill.log()


def shift_clock(seconds: float) -> None:
    """The clock of this process is wrong from now on."""
    right = time.time
    time.time = lambda: right() + seconds


def test_a_clock_that_is_an_hour_off_changes_nothing(drill: Drill, expected: Aftermath) -> None:
    drill.reset()
    bucket = bucket_of(drill.cfg)
    held = claims.claim("second", "another worker", bucket, lease_s=30)
    assert held is not None
    assert drill.run(prepare=partial(shift_clock, HOUR_S)).exit_code == 0, drill.log()
    assert waiting(bucket) == []
    assert aftermath(drill.cfg).lines == expected.lines[:5]
    claims.release(held, bucket)
    assert drill.run(prepare=partial(shift_clock, -HOUR_S)).exit_code == 0, drill.log()
    found = aftermath(drill.cfg)
    assert [line[:2] for line in found.lines] == [line[:2] for line in expected.lines]
    assert (found.done, found.raw) == (expected.done, ())
    now = datetime.now(UTC)
    for line in Ledger(bucket).read():
        for when in (line.received, line.started, line.finished):
            assert abs((now - datetime.fromisoformat(when)).total_seconds()) < HOUR_S / 2
