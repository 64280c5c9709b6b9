"""Workers are killed in a row, wherever it could hurt; the others come to what an undisturbed one
comes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from prefect.settings import PREFECT_API_URL

from tasks.batches import status, waiting
from tasks.ledger import Ledger
from tests.aftermath import Aftermath, aftermath, everything
from tests.killed import Drill
from tests.points import Moment
from tests.services import bucket_of, put
from tests.tiny import words

FILES = "open work/scratch/drafts/"
STAGES = (
    Moment(stage="desk", what="after swap claims/first"),
    Moment(stage="load", what=FILES),
    Moment(stage="count", what=FILES),
    Moment(stage="collect", what=FILES),
    Moment(stage="solve", what="after solve"),
    Moment(stage="apply", what=FILES),
    Moment(stage="evaluate", what=FILES),
    Moment(stage="register", what="after create_model_version"),
)
"""One in each stage that writes."""
STAYS = {"load"}
"""Stages whose artifacts no other run can use, since they name the run's copies of rows."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The drill, and what an undisturbed history comes to."""

    drill: Drill
    expected: Aftermath
    files: Counter[str]

    def check(self) -> None:
        """Everything is as if nobody had been killed."""
        found = aftermath(self.drill.cfg)
        assert found == self.expected
        left = everything(self.drill.cfg) - self.files
        assert {name.split("/")[0] for name in left} <= STAYS

    def kill(self, moment: Moment) -> None:
        """A worker takes over, and is killed."""
        self.drill.lapse()
        ended = self.drill.run(moment)
        assert ended.was_killed, self.drill.log()
        assert ended.points[-1].stage == moment.stage


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Prepared:
    """The state that each history starts from."""
    drill = Drill(tmp_path_factory.mktemp("killed"), str(PREFECT_API_URL.value()))
    drill.prepare()
    drill.reset()
    drill.recover()
    return Prepared(drill, aftermath(drill.cfg), everything(drill.cfg))


def test_an_undisturbed_history_is_whole(prepared: Prepared) -> None:
    found = prepared.expected
    assert [version[0::3] for version in found.versions] == [
        ("1", "previous"),
        ("2", "candidate,champion"),
    ]
    assert [line[1] for line in found.lines] == ["accepted"] * 2 + ["first"] * 3 + ["second"] * 2
    assert found.runs == ("FINISHED", "FINISHED")
    assert found.done == ("accepted.json", "first.json", "second.json")
    assert (found.failed, found.raw) == ((), ())
    assert len(found.champion) == 2


def test_one_worker_is_killed_in_each_stage(prepared: Prepared) -> None:
    prepared.drill.reset()
    for moment in STAGES:
        prepared.kill(moment)
    assert len(Ledger(bucket_of(prepared.drill.cfg)).read()) == 2
    assert prepared.drill.recover() == 1
    prepared.check()


def test_workers_are_killed_between_all_steps_of_the_commit(prepared: Prepared) -> None:
    drill = prepared.drill
    drill.reset()
    bucket = bucket_of(drill.cfg)
    prepared.kill(Moment(stage="commit", what="after swap runs/second"))
    prepared.kill(Moment(stage="commit", what="after swap ledger/00000002-"))
    assert len(Ledger(bucket).read()) == 2
    prepared.kill(Moment(stage="commit", what="after swap ledger/00000002.json"))
    assert Ledger(bucket).read()[2:]
    assert not bucket.entries("done/first.json")
    prepared.kill(Moment(stage="promote", what="before set_registered_model_alias"))
    prepared.kill(Moment(stage="promote", what="after set_registered_model_alias"))
    prepared.kill(Moment(stage="done", what="after swap done/first.json"))
    assert [status(batch, bucket).state for batch in ("first", "second")] == ["done", "running"]
    prepared.kill(Moment(stage="done", what="before delete inbox/second"))
    assert waiting(bucket) == []
    assert aftermath(drill.cfg).raw
    assert drill.recover() == 0
    prepared.check()


def test_a_batch_that_goes_on_alone_is_entered_once(prepared: Prepared) -> None:
    drill = prepared.drill
    drill.reset()
    kept = {"request_id": "r", "prompt": words(6, 2), "answer": words(10, 3)}
    # What must stay is in `third`: it fails, so all together do, and each goes on alone.
    put(drill.cfg, "third", [kept], drill.folder)
    prepared.kill(Moment(stage="commit", what="after swap ledger/00000002.json"))
    drill.recover()
    found, expected = aftermath(drill.cfg), prepared.expected
    assert [line[:2] for line in found.lines] == [line[:2] for line in expected.lines]
    assert found.raw == ("inbox/third/forget-00001.jsonl",)
    assert found.done == expected.done
    assert found.failed == ("third.json",)
    assert set(found.runs) == {"FINISHED", "FAILED"}
