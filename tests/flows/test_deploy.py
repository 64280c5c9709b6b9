"""Deployments on a real server: all from one file, applied twice without anything twice."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows.cli import app
from flows.deploy import DEPLOYMENTS, SecretSetting, absolute, deploy, filled, refuse_secrets
from flows.service import ServiceConfig
from grom.config import DataConfig, ModelConfig
from tests.servers import PrefectService, StartWorker

FLOWS = ("unlearn-batches", "sweep", "housekeeping", "rollback", "evaluate")
TEMPLATE = "{{ bos_token }}{{ messages[0]['content'] }}{{ service.name }}"
"""A model's chat template looks like placeholders."""


def service(folder: Path, **changes: Any) -> ServiceConfig:
    values: dict[str, Any] = {
        "name": f"deploy-{folder.name.replace('_', '-')}",
        "model": ModelConfig(source="models/tiny", chat_template=TEMPLATE),
        "retain": DataConfig(uri=str(folder / "retain.jsonl")),
        "work": str(folder / "work"),
        "store": str(folder / "store"),
        "cron": "30 2 * * 6",
        "timezone": "Europe/Berlin",
        "sweep_seconds": 45,
        "prefect_pool": f"pool-{folder.name}",
    }
    return ServiceConfig.model_validate(values | changes)


@pytest.fixture
def connected(prefect_service: PrefectService) -> Iterator[PrefectService]:
    with prefect_service.used():
        yield prefect_service


def found(cfg: ServiceConfig) -> dict[str, Any]:
    """What the server has of a service, without what differs from one deploy to the next."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    with get_client(sync_client=True) as client:
        tag = DeploymentFilterTags(all_=[f"service:{cfg.name}"])
        deployments = client.read_deployments(deployment_filter=DeploymentFilter(tags=tag))
        automations = [one for one in client.read_automations() if cfg.name in one.name]
        limits = client.read_concurrency_limits(limit=100, offset=0)
        pools = client.read_work_pools()
    return {
        "deployments": {client_name(one): one for one in deployments},
        "num_deployments": len(deployments),
        "automations": automations,
        "gpu": [limit.concurrency_limit for limit in limits if limit.tag == "gpu"],
        "pools": [pool for pool in pools if pool.name == cfg.prefect_pool],
    }


def client_name(deployment: Any) -> str:
    return str(deployment.entrypoint).rpartition(".")[2].replace("_", "-")


def test_a_service_is_deployed_with_schedules_limits_and_a_trigger(
    tmp_path: Path, connected: PrefectService
) -> None:
    cfg = service(tmp_path)
    assert deploy(cfg) == tuple(f"{flow}/{cfg.name}" for flow in FLOWS)
    server = found(cfg)
    deployments = server["deployments"]
    assert set(deployments) == set(FLOWS)
    (periodic,) = deployments["unlearn-batches"].schedules
    assert (periodic.schedule.cron, periodic.schedule.timezone) == ("30 2 * * 6", "Europe/Berlin")
    (always,) = deployments["sweep"].schedules
    assert always.schedule.interval.total_seconds() == 45
    (daily,) = deployments["housekeeping"].schedules
    assert daily.schedule.timezone == "Europe/Berlin"
    assert deployments["rollback"].schedules == deployments["evaluate"].schedules == []
    for flow in ("unlearn-batches", "sweep", "housekeeping", "rollback"):
        cfg_there = deployments[flow].parameters["cfg"]
        assert ServiceConfig.model_validate(cfg_there) == cfg  # the chat template, too
    assert deployments["evaluate"].parameters["cfg"]["model"]["source"] == (
        f"models:/grom-{cfg.name}@champion"
    )
    for one in deployments.values():
        assert one.pull_steps == []
        assert one.path is None
        assert {"grom", f"service:{cfg.name}"} == set(one.tags)
        assert one.description
        assert one.enforce_parameter_schema
        assert one.work_pool_name == cfg.prefect_pool
    limit = deployments["unlearn-batches"].concurrency_options
    assert limit.collision_strategy.value == "ENQUEUE"
    assert deployments["unlearn-batches"].global_concurrency_limit.limit == 1
    assert server["gpu"] == [1]
    assert [(pool.type, pool.concurrency_limit) for pool in server["pools"]] == [("process", None)]


def test_deploying_again_changes_what_changed_and_adds_nothing(
    tmp_path: Path, connected: PrefectService
) -> None:
    first = service(tmp_path)
    deploy(first)
    before = found(first)
    deploy(first)
    deploy(first.model_copy(update={"cron": None, "sweep_seconds": 90.0}))
    after = found(first)
    assert after["num_deployments"] == before["num_deployments"] == len(FLOWS)
    assert len(after["automations"]) == len(before["automations"]) == 1
    assert len(after["pools"]) == 1
    assert after["gpu"] == [1]
    for flow in FLOWS:
        assert after["deployments"][flow].id == before["deployments"][flow].id
    assert after["deployments"]["unlearn-batches"].schedules == []
    (always,) = after["deployments"]["sweep"].schedules
    assert always.schedule.interval.total_seconds() == 90


def test_an_event_starts_a_run_with_its_batch(tmp_path: Path, connected: PrefectService) -> None:
    from tasks.doorbell import announce

    cfg = service(tmp_path)
    deploy(cfg)
    announce("b-17", cfg.name)
    announce("b-18", f"{cfg.name}-of-another-name")
    run = wait_for_run(f"unlearn-batches/{cfg.name}", timeout_s=20)
    assert run.parameters["batch"] == "b-17"
    assert ServiceConfig.model_validate(run.parameters["cfg"]) == cfg


def test_a_worker_runs_what_was_deployed(
    tmp_path: Path, connected: PrefectService, prefect_worker: StartWorker
) -> None:
    from prefect.deployments import run_deployment

    cfg = service(tmp_path)
    (tmp_path / "store").mkdir()
    deploy(cfg)
    prefect_worker(cfg.prefect_pool)
    run: Any = run_deployment(f"sweep/{cfg.name}", timeout=90, poll_interval=0.5, as_subflow=False)
    assert run.state.is_completed(), run.state.message


def test_flows_load_as_a_worker_loads_them_from_another_folder(tmp_path: Path) -> None:
    entrypoints = [one["entrypoint"] for one in template()["deployments"]]
    code = (
        "import sys\n"
        "from prefect.flows import load_flow_from_entrypoint as load\n"
        "names = [load(one, use_placeholder_flow=False).name for one in sys.argv[1:]]\n"
        "assert names == " + repr(list(FLOWS)) + ", names\n"
    )
    command = [sys.executable, "-P", "-c", code, *entrypoints]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_flow_with_a_limit_is_retried() -> None:
    from prefect.flows import load_flow_from_entrypoint

    for one in template()["deployments"]:
        flow: Any = load_flow_from_entrypoint(one["entrypoint"], use_placeholder_flow=False)
        assert not flow.retries


def test_what_a_placeholder_is_replaced_by_is_not_looked_into() -> None:
    named = {"name": "n", "text": "{{ service.name }}", "none": None, "number": 3}
    given = {"a": ["{{ service.text }}", "x-{{ service.name }}"], "b": "{{ service.number }}"}
    assert filled(given, named, named) == {"a": ["{{ service.name }}", "x-n"], "b": 3}
    assert filled("{{ service }}", named, named) == named
    assert filled("{{ event.payload.batch }}", named, named) == "{{ event.payload.batch }}"
    assert filled({"cron": "{{ service.none }}", "slug": "s"}, named, named) == {"slug": "s"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("store", "s3://key:tell-nobody@bucket/prefix"),
        ("tracking", {"uri": "https://user:tell-nobody@mlflow.example"}),
        ("tracking", {"uri": "postgresql://u:tell-nobody@db/mlflow"}),
        ("store", "https://host/data?X-Amz-Signature=tell-nobody"),
        ("model", {"source": "m", "revision": "hf_tellnobodytellnobody0123"}),
    ],
)
def test_a_secret_in_the_settings_is_refused_without_being_repeated(
    tmp_path: Path, setting: str, value: Any
) -> None:
    values = service(tmp_path).model_dump(mode="json")
    refuse_secrets(values)
    with pytest.raises(SecretSetting) as raised:
        refuse_secrets(values | {setting: value})
    assert str(raised.value).startswith(setting)
    assert "MLFLOW_TRACKING_URI" in str(raised.value)
    assert "ell" + "nobody" not in str(raised.value).replace("-", "")


def test_relative_paths_become_absolute_and_addresses_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    given = service(
        tmp_path,
        model=ModelConfig(source="mine", adapter="mine"),
        reference=ModelConfig(source="someone/model"),
        retain=DataConfig(uri="rows/*.jsonl"),
        background=DataConfig(uri="s3://bucket/rows"),
        also={"further": DataConfig(uri="further.jsonl")},
        work="work",
        store="s3://bucket/prefix",
    )
    made = ServiceConfig.model_validate(absolute(given.model_dump(mode="json")))
    assert made.model == ModelConfig(source=str(tmp_path / "mine"), adapter=str(tmp_path / "mine"))
    assert made.reference == given.reference
    assert made.retain.uri == str(tmp_path / "rows/*.jsonl")
    assert made.also["further"].uri == str(tmp_path / "further.jsonl")
    assert (made.background, made.store) == (given.background, given.store)
    assert made.work == str(tmp_path / "work")


@pytest.mark.usefixtures("own_environment")
def test_a_missing_server_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(service(tmp_path).model_dump(mode="json")))
    nowhere = "http://127.0.0.1:9/api"
    # Prefect is imported by now, and may know another server.
    with temporary_settings(updates={PREFECT_API_URL: nowhere}):
        arguments = ["deploy", "--config", str(path), "--api", nowhere]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "ServerUnreachable: " in result.stderr
    assert "Traceback" not in result.output


def template() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(DEPLOYMENTS.read_text())
    return values


def wait_for_run(deployment: str, timeout_s: float) -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

    deadline = time.monotonic() + timeout_s
    with get_client(sync_client=True) as client:
        deployment_id = client.read_deployment_by_name(deployment).id
        chosen = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))
        while time.monotonic() < deadline:
            runs = client.read_flow_runs(flow_run_filter=chosen)
            if runs := [run for run in runs if run.parameters.get("batch")]:
                return runs[0]
            time.sleep(0.2)
    raise AssertionError(f"no run of {deployment} in {timeout_s} s")
