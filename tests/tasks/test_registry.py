"""MLflow: one run per flow run, versions that are whole or absent, no text of any example."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grom.errors import ConfigError, MissingInput
from tasks.aliases import PurgedVersion
from tasks.registry import register_checkpoint, registered_folder
from tasks.tracking import (
    Tracking,
    close_run,
    log_dataset,
    log_figure_file,
    log_metrics,
    log_params,
    log_table_file,
    open_run,
)

TRACKING = Tracking()
TAGS = {"gate": "passed"}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: making its tables takes three seconds."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def client(work: Path) -> MlflowClient:
    """MLflow's own view of that database."""
    address = f"sqlite:///{work}/mlflow.db"
    return MlflowClient(address, registry_uri=address)


@pytest.fixture
def run_id(work: Path, request: pytest.FixtureRequest) -> str:
    """A run of the test's own."""
    return a_run(work, request.node.name)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No test may leave something in the current folder, or an active run."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []
    assert mlflow.active_run() is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def a_run(work: Path, flow_run_id: str) -> str:
    """The run of a flow run."""
    return open_run(TRACKING, work, name="unlearn", tags={"batch": "b1"}, flow_run_id=flow_run_id)


def logits(folder: Path) -> torch.Tensor:
    """What the model in a folder says, loaded with plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(10).unsqueeze(0)).logits
    return found


def register(work: Path, run_id: str, folder: Path, name: str, **more: Any) -> Any:
    """Register under a name of the test's own."""
    options: dict[str, Any] = {"tags": TAGS, "uri": f"s3://bucket/apply/{name}"} | more
    tracking = options.pop("tracking", TRACKING)
    return register_checkpoint(tracking, work, run_id, folder, name=name, **options)


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "/tmp/mlruns"])
def test_runs_in_folders_are_refused(uri: str) -> None:
    with pytest.raises(ValidationError, match="no longer keeps runs in folders"):
        Tracking(uri=uri)


def test_a_resumed_flow_continues_its_run(work: Path, client: MlflowClient) -> None:
    first = a_run(work, "flow-1")
    close_run(TRACKING, work, first, "FAILED")
    assert client.get_run(first).info.status == "FAILED"
    assert a_run(work, "flow-2") != first
    assert a_run(work, "flow-1") == first
    run = client.get_run(first)
    assert run.info.status == "RUNNING"
    assert run.data.tags["prefect.flow_run_id"] == "flow-1"
    assert run.data.tags["batch"] == "b1"
    close_run(TRACKING, work, first)
    assert client.get_run(first).info.status == "FINISHED"


def test_what_is_done_decides_which_run_is_continued(work: Path, client: MlflowClient) -> None:
    """Not which flow run does it, if there is a key."""
    first, other, unkeyed = (
        open_run(TRACKING, work, name="n", tags={}, flow_run_id=flow, run_key=key)
        for flow, key in (("flow-3", "key-1"), ("flow-3", "key-2"), ("flow-5", None))
    )
    assert len({first, other, unkeyed}) == 3
    again = open_run(TRACKING, work, name="n", tags={}, flow_run_id="flow-4", run_key="key-1")
    assert again == first
    tags = client.get_run(first).data.tags
    assert (tags["grom.run"], tags["prefect.flow_run_id"]) == ("key-1", "flow-4")
    assert "grom.run" not in client.get_run(unkeyed).data.tags


def test_parameters_have_no_passwords_and_no_names(
    work: Path, client: MlflowClient, run_id: str
) -> None:
    settings = {
        "tracking": {"uri": "http://me:hush@host/"},
        "retain": {"only": ["Jane"], "uri": "https://host/rows?signature=hush"},
    }
    log_params(TRACKING, work, run_id, settings)
    uri = "s3://me:hush@host/rows"
    log_dataset(
        TRACKING, work, run_id, name="r", uri=uri, digest="d", context="c", num_rows=1
    )  # fmt: skip
    run = client.get_run(run_id)
    assert run.data.params == {
        "tracking.uri": "http://***@host/",
        "retain.only": "1 groups",
        "retain.uri": "https://host/rows?***",
    }
    assert run.inputs is not None
    assert "hush" not in run.inputs.dataset_inputs[0].dataset.source


def test_a_deleted_experiment_is_named(work: Path, client: MlflowClient) -> None:
    tracking = Tracking(experiment="gone")
    open_run(tracking, work, name="a", tags={}, flow_run_id="f")
    experiment = client.get_experiment_by_name("gone")
    assert experiment is not None
    client.delete_experiment(experiment.experiment_id)
    with pytest.raises(ConfigError, match="'gone' was deleted"):
        open_run(tracking, work, name="a", tags={}, flow_run_id="f")


def test_params_are_logged_once(
    work: Path, client: MlflowClient, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    many = {f"p{i}": i for i in range(150)}
    log_params(TRACKING, work, run_id, {"ridge": {"rho": 0.03}, "long": "x" * 7000, "many": many})
    log_params(TRACKING, work, run_id, {"ridge": {"rho": 0.03}, "long": "x" * 7000})
    assert not caplog.records
    log_params(TRACKING, work, run_id, {"ridge": {"rho": 0.04, "mu": None}})
    assert "ridge.rho" in caplog.text
    params = client.get_run(run_id).data.params
    assert (params["ridge.rho"], params["ridge.mu"], params["many.p149"]) == ("0.03", "None", "149")
    assert len(params["long"]) == 6000


def test_metrics_keep_their_steps(work: Path, client: MlflowClient, run_id: str) -> None:
    for layer in (24, 25):
        log_metrics(TRACKING, work, run_id, {"solve/cond": layer / 2}, step=layer)
    history = client.get_metric_history(run_id, "solve/cond")
    assert [(point.step, point.value) for point in history] == [(24, 12.0), (25, 12.5)]


def test_numbers_that_are_not_finite_are_logged_and_named(
    work: Path, client: MlflowClient, run_id: str
) -> None:
    log_metrics(TRACKING, work, run_id, {"a/x": math.nan, "a/y": 1.0})
    log_metrics(TRACKING, work, run_id, {"a/z": math.inf})
    data = client.get_run(run_id).data
    assert math.isnan(data.metrics["a/x"])
    assert data.metrics["a/z"] > 1e308
    assert data.tags["non_finite"] == "a/x, a/z"


@pytest.mark.parametrize("name", ["f(x)", "p@1", "a//b", "/a", "a/", "..", "a/../b", "", "größe"])
def test_a_bad_metric_name_is_refused_before_anything_is_sent(
    work: Path, client: MlflowClient, run_id: str, name: str
) -> None:
    with pytest.raises(ValueError, match="metric names"):
        log_metrics(TRACKING, work, run_id, {name: 1.0, "good": 1.0})
    assert client.get_run(run_id).data.metrics == {}


def test_files_are_artifacts_of_the_run(
    work: Path, client: MlflowClient, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "curve.png").write_bytes(b"png")
    (tmp_path / "sites.csv").write_bytes(b"a,b")
    log_figure_file(TRACKING, work, run_id, tmp_path / "curve.png")
    log_table_file(TRACKING, work, run_id, tmp_path / "sites.csv")
    for name in ("figures/curve.png", "tables/sites.csv"):
        assert [file.path for file in client.list_artifacts(run_id, name.split("/")[0])] == [name]
    location = client.get_run(run_id).info.artifact_uri
    assert location.startswith((work / "mlartifacts").as_uri())


@pytest.mark.parametrize(
    ("scheme", "kind"), [("", "local"), ("s3://bucket", "s3"), ("hf:/", "hf"), ("file://", "local")]
)
def test_data_is_recorded_by_address_and_digest(
    work: Path, client: MlflowClient, run_id: str, tmp_path: Path, scheme: str, kind: str
) -> None:
    # MLflow keeps the first source of a name and digest, so each case has a digest of its own.
    secret, digest = "Basil Mahfouz was born in Kuwait", sha256(scheme.encode()).hexdigest()
    path = tmp_path / "forget.jsonl"
    path.write_text(secret)
    for _ in range(2):
        log_dataset(
            TRACKING, work, run_id, name="forget", uri=f"{scheme}{path}", digest=digest,
            context="forget", num_rows=1,
        )  # fmt: skip
    inputs = client.get_run(run_id).inputs
    assert inputs is not None
    (found,) = inputs.dataset_inputs
    assert (found.dataset.source_type, found.dataset.digest) == (kind, digest[:36])
    assert digest in str(found.dataset.profile)
    assert path.name in found.dataset.source
    for file in work.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


def test_a_registered_checkpoint_loads_with_plain_transformers(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    version = register(work, run_id, checkpoint, "whole")
    assert (version.version, version.uri) == ("1", "models:/whole/1")
    found = client.get_model_version_by_alias("whole", "candidate")
    assert (str(found.version), found.run_id, found.tags["gate"]) == ("1", run_id, "passed")
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    assert found.tags["bytes"] == str(size)
    for uri in ("models:/whole@candidate", version.uri):
        folder = registered_folder(TRACKING, work, uri)
        assert folder != checkpoint
        assert torch.equal(logits(folder), logits(checkpoint))


def test_a_large_checkpoint_is_registered_by_reference(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    before = sum(1 for _ in (work / "mlartifacts").rglob("*"))
    tracking = Tracking(copy_below_gb=0)
    register(work, run_id, checkpoint, "large", tracking=tracking, uri=checkpoint.as_uri())
    assert registered_folder(TRACKING, work, "models:/large@candidate") == checkpoint
    assert sum(1 for _ in (work / "mlartifacts").rglob("*")) == before


def test_files_that_a_server_has_are_not_looked_for_in_its_database(
    work: Path, client: MlflowClient
) -> None:
    client.create_registered_model("served")
    client.create_model_version("served", "mlflow-artifacts:/1/models/m-1/artifacts")
    with pytest.raises(ConfigError, match="Set MLFLOW_TRACKING_URI to the server's http address"):
        registered_folder(TRACKING, work, "models:/served/1")
    assert not list((work / "registered").rglob("*"))


def test_a_run_does_not_begin_where_only_a_server_finds_its_files(
    work: Path, client: MlflowClient
) -> None:
    """Else it would fail at the end, when the model is registered."""
    tracking = Tracking(experiment="served")
    client.create_experiment("served", artifact_location="mlflow-artifacts:/7")
    with pytest.raises(ConfigError, match=r"'served'.*MLFLOW_TRACKING_URI"):
        open_run(tracking, work, name="run", tags={}, flow_run_id="f")


def test_a_server_is_not_referred_to_a_local_folder(
    work: Path, run_id: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.registry.address_of", lambda *_: "http://127.0.0.1:9")
    tracking = Tracking(copy_below_gb=0)
    with pytest.raises(ConfigError, match="no local folder by reference"):
        register(work, run_id, checkpoint, "far", tracking=tracking, uri=checkpoint.as_uri())


def test_the_same_checkpoint_is_one_version(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    first = register(work, run_id, checkpoint, "twice")
    assert register(work, a_run(work, "another"), checkpoint, "twice") == first
    assert register(work, run_id, checkpoint, "twice", uri="s3://b/other").version == "2"
    assert str(client.get_model_version_by_alias("twice", "candidate").version) == "2"


@pytest.mark.parametrize("step", ["log_model_artifacts", "create_model_version", "alias"])
def test_a_failure_leaves_no_version(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path, step: str, monkeypatch: Any
) -> None:
    name = f"broken-{step}"

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError(step)

    with monkeypatch.context() as broken:
        method = "set_registered_model_alias" if step == "alias" else step
        broken.setattr(MlflowClient, method, fail)
        with pytest.raises(ConnectionError):
            register(work, run_id, checkpoint, name)
    assert client.search_model_versions(f"name = '{name}'") == []
    experiment_id = client.get_run(run_id).info.experiment_id
    models = client.search_logged_models([experiment_id], f"name = '{name}'")
    assert [model.status for model in models] == ["FAILED"]
    assert register(work, run_id, checkpoint, name).name == name


def test_a_reserved_alias_leaves_no_version(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    with pytest.raises(MlflowException, match="reserved"):
        register(work, run_id, checkpoint, "reserved", alias="latest")
    assert client.search_model_versions("name = 'reserved'") == []


def test_a_failure_keeps_a_version_that_was_there(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    register(work, run_id, checkpoint, "kept")
    with pytest.raises(MlflowException, match="reserved"):
        register(work, run_id, checkpoint, "kept", alias="latest")
    assert registered_folder(TRACKING, work, "models:/kept@candidate").is_dir()


def test_what_is_no_checkpoint_is_not_registered(work: Path, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"config\.json"):
        register(work, run_id, tmp_path, "empty")


@pytest.mark.parametrize("tag", ["purging", "purged", "rolled_back_to"])
def test_a_version_that_must_not_serve_is_not_used_again(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path, tag: str
) -> None:
    register(work, run_id, checkpoint, tag)
    client.set_model_version_tag(tag, "1", tag, "now")
    assert register(work, run_id, checkpoint, tag).version == "2"


def test_a_version_older_than_the_champion_is_not_used_again(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path
) -> None:
    register(work, run_id, checkpoint, "old")
    register(work, run_id, checkpoint, "old", uri="s3://b/other")
    client.set_registered_model_alias("old", "champion", "1")
    assert register(work, run_id, checkpoint, "old").version == "1"
    client.set_registered_model_alias("old", "champion", "2")
    assert register(work, run_id, checkpoint, "old").version == "3"


def test_a_version_that_is_purged_while_it_is_registered_gets_no_alias(
    work: Path, client: MlflowClient, run_id: str, checkpoint: Path, monkeypatch: Any
) -> None:
    register(work, run_id, checkpoint, "raced", deserved=False)
    set_tag = MlflowClient.set_model_version_tag

    def purged(self: MlflowClient, name: str, number: str, key: str, value: str) -> None:
        set_tag(self, name, number, key, value)
        set_tag(self, name, number, "purging", "now")

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", purged)
    with pytest.raises(PurgedVersion):
        register(work, run_id, checkpoint, "raced")
    assert client.get_registered_model("raced").aliases == {}


@pytest.mark.parametrize("uri", ["models:/nobody@candidate", "models:/nobody/3"])
def test_a_version_that_does_not_exist_is_named(work: Path, uri: str) -> None:
    with pytest.raises(MissingInput, match="no such version"):
        registered_folder(TRACKING, work, uri)


@pytest.mark.parametrize("uri", ["models:/m-1234", "runs:/1/model", "grom"])
def test_other_addresses_are_refused(work: Path, uri: str) -> None:
    with pytest.raises(ConfigError, match="models:/name@alias"):
        registered_folder(TRACKING, work, uri)
