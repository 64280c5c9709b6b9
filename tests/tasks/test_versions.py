"""Versions: an alias never lies, a step that was killed comes to the same end, purged is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from mlflow import MlflowClient

from grom.errors import ConfigError, GromError, MissingInput
from tasks import version_info
from tasks.aliases import PurgedVersion, aliases_of
from tasks.registry import register_checkpoint, registered_folder
from tasks.restore import Restored, close_step, restore
from tasks.tracking import Tracking, client_of, open_run
from tasks.versions import close_stale, promote, purge, superseded, versions

DAY_S = 86400.0
REFERRED = Tracking(copy_below_gb=0)
LATER = 10 * DAY_S
NUM_BYTES = 2 + 64
WRITES = (
    "set_registered_model_alias",
    "delete_registered_model_alias",
    "set_registered_model_tag",
    "set_model_version_tag",
    "delete_model_version_tag",
    "delete_logged_model",
)
"""Each is a point to be killed at."""


class Killed(BaseException):
    """No `except Exception` sees it, as with SIGKILL."""


class Model:
    """A registered model, and the store that its checkpoints are in."""

    def __init__(self, tracking: Tracking, work: Path, name: str) -> None:
        self.tracking, self.work, self.name = tracking, work, name
        self.client = client_of(tracking, work)
        self.run_id = open_run(tracking, work, name="r", tags={}, flow_run_id=name)
        self.removed: list[str] = []

    def make(self, gate: str = "passed", uri: str | None = None, **tags: str) -> str:
        """Register a version; its number."""
        folder = self.work / "made"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"w" * 64)
        number = len(self.client.search_model_versions(f"name = '{self.name}'")) + 1
        return register_checkpoint(
            self.tracking,
            self.work,
            self.run_id,
            folder,
            tags={"gate": gate, **tags},
            uri=uri or f"s3://bucket/{self.name}/{number}",
            name=self.name,
            deserved=gate == "passed",
        ).version

    def serve(self, count: int) -> None:
        """Register and promote versions 1, 2, ..."""
        for _ in range(count):
            self.promote(self.make())

    def promote(self, number: str) -> str | None:
        return promote(self.tracking, self.work, self.name, number)

    def restore(self, reason: str = "it was bad", to: str | None = None) -> Restored:
        return restore(self.tracking, self.work, self.name, reason, to)

    def close(self, step: Restored, *dead: str) -> None:
        close_step(self.tracking, self.work, self.name, step, dead)

    def purge(self, keep: int = 1, later_s: float = LATER, **how: Any) -> list[str]:
        """Purge; the numbers of those whose files are gone."""
        newest = max(info.created for info in versions(self.tracking, self.work, self.name))
        rule: dict[str, Any] = {"keep_versions": keep, "keep_days": 1, "now": newest + later_s}
        found = purge(
            self.tracking, self.work, self.name, **rule, **{"remove": self.removed.append} | how
        )
        return [one.number for one in found]

    def states(self) -> list[str]:
        """Newest first."""
        return [info.state for info in versions(self.tracking, self.work, self.name)]

    def aliases(self) -> dict[str, str]:
        """Who serves, and who served before."""
        found = aliases_of(self.client, self.name)
        return {alias: number for alias, number in found.items() if alias != "candidate"}

    def tags(self, number: str) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, number).tags)

    def source(self, number: str) -> Path:
        """Folder of MLflow's copy."""
        source = str(self.client.get_model_version(self.name, number).source)
        return Path(source.removeprefix("file://"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: making its tables takes three seconds."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def model(work: Path, request: pytest.FixtureRequest) -> Model:
    """A model of the test's own."""
    return Model(Tracking(), work, request.node.name.replace("[", "-").rstrip("]"))


@contextmanager
def killed_at(write: int) -> Iterator[list[str]]:
    """Killed before the given write to MLflow; the writes that were reached."""
    reached: list[str] = []

    def broken(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            reached.append(name)
            if len(reached) > write:
                raise Killed
            return do(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in WRITES:
            patch.setattr(MlflowClient, name, broken(name, getattr(MlflowClient, name)))
        yield reached


def test_the_champion_becomes_the_previous_one(model: Model) -> None:
    model.make()
    model.make()
    assert model.promote("1") is None
    assert model.aliases() == {"champion": "1"}
    assert model.promote("2") == "1"
    assert model.promote("2") == "1"  # again: nothing changes
    assert model.aliases() == {"champion": "2", "previous": "1"}
    assert model.states() == ["champion", "previous"]


def test_who_is_late_promotes_nothing(model: Model) -> None:
    model.tracking = REFERRED
    for _ in range(3):
        model.make()
    model.promote("1")
    model.promote("3")
    assert model.promote("2") == "3"
    assert model.promote("1") == "3"
    assert model.aliases() == {"champion": "3", "previous": "1"}


def test_what_did_not_pass_or_is_not_there_is_refused(model: Model) -> None:
    model.tracking = REFERRED
    model.make(gate="failed")
    model.make()
    model.client.delete_model_version_tag(model.name, "2", "gate")
    for number in ("1", "2"):
        with pytest.raises(ConfigError, match=f"version {number}: its gate says"):
            model.promote(number)
    with pytest.raises(MissingInput, match="no such version"):
        model.promote("7")
    with pytest.raises(MissingInput, match="nobody"):
        promote(model.tracking, model.work, "nobody", "1")
    assert model.aliases() == {}
    assert model.states() == ["candidate", "failed"]


def test_a_promotion_killed_anywhere_can_be_repeated(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(1)
    for write in range(10):
        before, number = str(write + 1), model.make()
        with killed_at(write) as reached:
            model.promote(number)
        assert model.aliases()["champion"] in (before, number)
        assert model.promote(number) == before
        assert model.aliases() == {"champion": number, "previous": before}
        assert model.tags(number)["replaces"] == before
        if len(reached) <= write:
            break
    assert reached == [WRITES[3], WRITES[0], WRITES[0], WRITES[3]]


def test_a_step_back_says_from_where_why_and_when(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(3)
    step = model.restore(" answers are  odd\n")
    assert (step.from_version, step.to_version, step.reason) == ("3", "2", "answers are odd")
    assert model.aliases() == {"champion": "2", "previous": "1"}
    for number in ("2", "3"):
        tags = model.tags(number)
        assert tags["rollback"] == "3 to 2"
        assert (tags["rollback_reason"], tags["rollback_time"]) == (step.reason, step.time)
    assert (
        '"reason": "answers are odd"'
        in model.client.get_registered_model(model.name).tags["rollback"]
    )
    assert model.states() == ["superseded", "champion", "previous"]
    assert model.promote("3") == "2"  # by a run that woke up late
    assert model.aliases()["champion"] == "2"


def test_an_open_step_is_gone_on_with_and_then_another_is_taken(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(3)
    step = model.restore()
    assert model.restore("other words") == step
    assert model.restore(to="2") == step
    model.close(step)
    assert model.restore(to="2") == Restored("3", "2", step.reason, step.time, is_open=False)
    assert model.restore().to_version == "1"
    assert model.aliases() == {"champion": "1"}


def test_a_step_back_can_be_taken_back(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(3)
    model.close(model.restore(to="1"))
    assert model.states() == ["superseded", "superseded", "champion"]
    model.close(model.restore("a mistake", to="3"))
    assert model.aliases() == {"champion": "3", "previous": "2"}
    assert model.promote("3") == "2"
    model.close(model.restore())
    assert model.aliases() == {"champion": "2", "previous": "1"}


def test_a_step_back_killed_anywhere_can_be_repeated(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(3)
    for write in range(30):
        to = "1" if write % 2 else None
        with killed_at(write) as reached:
            model.restore(to=to)
        step = model.restore(to=to)
        with killed_at(write):
            model.close(step, "3")
        model.close(model.restore(to=to) if to else step, "3")
        assert model.aliases() == ({"champion": "1"} if to else {"champion": "2", "previous": "1"})
        assert model.tags("3")["rolled_back_to"] == step.to_version
        model.close(model.restore("for the next point", to="3"))
        if len(reached) <= write:
            break
    assert len(reached) > 8


def test_a_run_that_had_not_heard_of_the_step_is_taken_back(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(2)
    step = model.restore()
    model.serve(1)
    assert model.aliases()["champion"] == "3"
    model.close(step, "2", "3")
    assert model.aliases() == {"champion": "1"}
    model.promote("3")
    assert model.aliases() == {"champion": "1"}


def test_a_version_that_was_taken_back_while_it_was_promoted(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.serve(1)
    model.make()
    set_alias = MlflowClient.set_registered_model_alias

    def late(client: MlflowClient, name: str, alias: str, number: str) -> None:
        if (alias, number) == ("champion", "2"):
            client.set_model_version_tag(name, number, "rolled_back_to", "1")
        set_alias(client, name, alias, number)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", late)
    assert model.promote("2") == "1"
    assert model.aliases()["champion"] == "1"


def test_steps_that_cannot_be_taken_say_why(model: Model) -> None:
    model.tracking = REFERRED
    model.make()
    with pytest.raises(ConfigError, match="no version serves yet"):
        model.restore()
    model.promote("1")
    with pytest.raises(ConfigError, match="no version served before 1"):
        model.restore()
    with pytest.raises(ConfigError, match="serves already"):
        model.restore(to="1")
    with pytest.raises(MissingInput, match="no such version"):
        model.restore(to="9")
    model.make(gate="failed")
    with pytest.raises(ConfigError, match="its gate says failed"):
        model.restore(to="2")
    model.make()
    with pytest.raises(ConfigError, match="version 3 never served"):
        model.restore(to="3")
    for reason in ("", " \n", "x" * 501):
        with pytest.raises(ConfigError, match="reason"):
            model.restore(reason)
    model.client.set_registered_model_tag(model.name, "rollback", "{}")
    with pytest.raises(GromError, match="tag `rollback` was changed"):
        model.restore()


def test_versions_are_listed_with_what_they_are(model: Model) -> None:
    model.tracking = REFERRED
    model.make(batches="a", requests="2")
    model.make(batches="a,b", requests="5")
    model.make(gate="failed")
    model.make(batches="a,b,c", requests="7")
    model.promote("1")
    model.promote("2")
    found = versions(model.tracking, model.work, model.name)
    assert [info.number for info in found] == ["4", "3", "2", "1"]
    assert model.states() == ["candidate", "failed", "champion", "previous"]
    assert [info.aliases for info in found] == [("candidate",), (), ("champion",), ("previous",)]
    assert [info.batches for info in found] == [("a", "b", "c"), (), ("a", "b"), ("a",)]
    assert [info.requests for info in found] == [7, None, 5, 2]
    assert {info.num_bytes for info in found} == {NUM_BYTES}
    assert [info.still_knows for info in found] == [False, False, False, True]
    assert set(found) < set(versions(model.tracking, model.work))
    with pytest.raises(MissingInput):
        versions(model.tracking, model.work, "nobody")


def test_files_of_superseded_versions_are_gone(model: Model) -> None:
    model.serve(5)
    model.make(gate="failed")
    sources = {number: model.source(number) for number in ("1", "2", "3", "4", "5", "6")}
    assert model.purge(keep=6) == model.purge(later_s=0) == []
    assert model.purge(keep=4, dry_run=True) == ["2", "1"]
    assert all((source / "model.safetensors").is_file() for source in sources.values())
    assert model.purge(keep=4) == ["2", "1"]
    assert model.purge(keep=4) == []
    assert not any(sources[number].exists() for number in ("1", "2"))
    assert all((sources[number] / "model.safetensors").is_file() for number in ("3", "4", "5"))
    assert model.removed == [f"s3://bucket/{model.name}/{number}" for number in ("2", "1")]
    assert model.states()[-2:] == ["purged", "purged"]
    assert not versions(model.tracking, model.work, model.name)[-1].still_knows
    assert "purging" not in model.tags("1")
    assert model.tags("1")["gate"] == "passed"  # a record
    assert model.purge(keep=0) == ["6", "3"]  # all but champion and previous
    with pytest.raises(PurgedVersion, match="version 1: its files were purged"):
        registered_folder(model.tracking, model.work, f"models:/{model.name}/1")
    with pytest.raises(PurgedVersion):
        model.restore(to="1")


def test_candidates_stay(model: Model) -> None:
    """Each may wait for a person, though the alias has moved on to the next."""
    model.tracking = REFERRED
    model.make()
    model.make()
    assert model.purge(keep=0) == []
    model.promote("2")
    assert model.purge(keep=0) == ["1"]


def test_a_referred_artifact_is_removed_by_who_owns_it(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(3)
    assert model.purge() == ["1"]
    assert model.removed == [f"s3://bucket/{model.name}/1"]


def test_an_artifact_of_two_versions_stays_with_the_other(model: Model) -> None:
    """The same edit again, after a change of settings and back."""
    model.serve(2)
    again = model.make(uri=f"s3://bucket/{model.name}/1")
    assert again == "3"  # the first is older than the champion, and is no longer used
    model.promote(again)
    assert model.make(uri=f"s3://bucket/{model.name}/1") == "3"
    assert model.purge() == ["1"]
    assert model.removed == []
    assert not model.source("1").exists()
    assert model.source("3").is_dir()


def test_what_was_rolled_back_is_registered_anew(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(2)
    model.close(model.restore())
    assert model.make(uri=f"s3://bucket/{model.name}/2") == "3"
    model.promote("3")
    assert model.aliases() == {"champion": "3", "previous": "1"}


def test_a_purge_killed_anywhere_goes_on(model: Model) -> None:
    model.serve(2)
    for write in range(10):
        model.serve(1)
        number = str(write + 1)
        with killed_at(write) as reached:
            model.purge()
        model.purge()
        assert model.purge() == []
        assert not model.source(number).exists()
        assert model.states()[:3] == ["champion", "previous", "purged"]
        assert model.removed[-1] == f"s3://bucket/{model.name}/{number}"
        if len(reached) <= write:
            break
    assert len(reached) == 4


def test_a_purge_that_failed_goes_on(model: Model) -> None:
    model.serve(3)

    def refuse(_: str) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        model.purge(remove=refuse)
    assert model.states()[-1] == "superseded"
    with pytest.raises(PurgedVersion):  # some of its files may be gone
        model.restore(to="1")
    assert model.purge() == ["1"]


def test_files_that_stay_are_no_success(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    model.serve(3)
    monkeypatch.setattr(LocalArtifactRepository, "delete_artifacts", lambda *_: None)
    with pytest.raises(GromError, match="could not be removed"):
        model.purge()
    assert "purged" not in model.tags("1")


def test_a_version_that_gets_an_alias_before_its_files_go_stays(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.serve(3)
    set_tag = MlflowClient.set_model_version_tag

    def restored(client: MlflowClient, name: str, number: str, key: str, value: str) -> None:
        if key == "purging":
            client.set_registered_model_alias(name, "champion", number)
        set_tag(client, name, number, key, value)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", restored)
    assert model.purge() == []
    assert model.source("1").is_dir()
    assert "purging" not in model.tags("1")


def test_a_version_whose_files_go_gets_no_alias(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if it was looked at before they began to go."""
    model.serve(3)
    remove = version_info.remove_files

    def raced(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr("tasks.restore.check_fit", lambda _: None)
            with pytest.raises(PurgedVersion):
                model.restore(to="1")
        remove(*arguments)

    monkeypatch.setattr("tasks.versions.remove_files", raced)
    assert model.purge() == ["1"]
    assert model.aliases() == {"champion": "3", "previous": "2"}


def test_of_a_purge_and_a_step_back_at_once_no_alias_is_left_without_files(model: Model) -> None:
    model.tracking = REFERRED
    model.serve(1)
    for _ in range(5):
        target = model.aliases()["champion"]
        model.serve(2)

        def go_back(to: str = target) -> None:
            with suppress(PurgedVersion):
                model.restore(to=to)

        with ThreadPoolExecutor(2) as pool:
            back, gone = pool.submit(go_back), pool.submit(model.purge)
            back.result()
            gone.result()
        purged = [uri.rsplit("/", 1)[1] for uri in model.removed]
        assert not set(purged) & set(model.aliases().values())


def test_others_versions_are_left_alone(model: Model) -> None:
    """Whatever somebody else registered under the name."""
    model.client.create_registered_model(model.name)
    model.client.create_model_version(model.name, "s3://elsewhere/model", model.run_id)
    model.serve(2)
    rule: dict[str, Any] = {"keep_versions": 0, "keep_days": 0, "now": 1e12}
    assert superseded(model.tracking, model.work, model.name, **rule) == []


def test_runs_that_nobody_works_on_are_closed(work: Path) -> None:
    tracking = Tracking(experiment="stale")
    assert close_stale(tracking, work, "stale", lambda _: False) == []
    keys: Sequence[str | None] = ["dead", "alive", None]
    runs = [
        open_run(tracking, work, name="r", tags={}, flow_run_id=f"f-{key}", run_key=key)
        for key in keys
    ]
    assert close_stale(tracking, work, "stale", lambda key: key == "alive") == runs[:1]
    client = client_of(tracking, work)
    assert [client.get_run(run).info.status for run in runs] == ["KILLED", "RUNNING", "RUNNING"]


def test_bytes_are_gone_from_an_object_store(
    work: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    for name, value in {**account, "MLFLOW_S3_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    tracking = Tracking(experiment="on-s3")
    where = "s3://grom-tests/mlflow"
    client_of(tracking, work).create_experiment("on-s3", artifact_location=where)
    model = Model(tracking, work, "on-s3")
    model.serve(3)
    s3 = boto3.client("s3", endpoint_url=endpoint)

    def left() -> int:
        found = s3.list_objects_v2(Bucket="grom-tests", Prefix="mlflow/models/")
        return len(found.get("Contents", []))

    assert left() == 6
    assert model.purge() == ["1"]
    assert left() == 4


def test_bytes_are_gone_from_a_server(mlflow_server: str, tmp_path: Path) -> None:
    """The whole life, through the server's own storage of artifacts."""
    model = Model(Tracking(uri=mlflow_server), tmp_path, "whole-life")
    model.serve(3)
    before = registered_folder(model.tracking, tmp_path, "models:/whole-life/1")
    assert (before / "model.safetensors").is_file()
    assert model.purge() == ["1"]
    assert not before.exists()  # what was downloaded, too
    version = model.client.get_model_version("whole-life", "1")
    from mlflow.artifacts import list_artifacts

    assert list_artifacts(version.source, tracking_uri=mlflow_server) == []
    assert model.promote("3") == "2"
    model.close(model.restore("slow"))
    assert model.aliases() == {"champion": "2"}  # the first has no files any more
    assert model.states() == ["superseded", "champion", "purged"]
