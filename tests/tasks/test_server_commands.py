"""What real servers do with the settings they are started with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tasks.server_commands import mlflow_server, prefect_worker, reachable
from tests.servers import PrefectService

COMPOSE = Path(__file__).resolve().parents[2] / "infra" / "compose.yaml"


def test_a_slot_that_is_held_survives_the_servers_end(prefect_service: PrefectService) -> None:
    """Otherwise Prefect ends the run that holds it, and never gives the slot to another."""
    from prefect.client.orchestration import get_client

    with prefect_service.used(), get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name("survives", 1)
        held = client.increment_concurrency_slots_with_lease(
            names=["survives"], slots=1, mode="concurrency", lease_duration=60
        ).json()
        prefect_service.server.kill()
        prefect_service.server.start().wait_until_healthy()
        client.renew_concurrency_lease(held["lease_id"], lease_duration=60)
        limit = client.read_global_concurrency_limit_by_name("survives")
        assert limit.active_slots == 1
        client.release_concurrency_slots_with_lease(held["lease_id"])
        assert client.read_global_concurrency_limit_by_name("survives").active_slots == 0


def test_results_of_a_worker_are_json_files(tmp_path: Path) -> None:
    command = prefect_worker("pool", 1, tmp_path, "mark")
    assert command.environment["PREFECT_RESULTS_PERSIST_BY_DEFAULT"] == "true"
    assert command.environment["PREFECT_RESULTS_DEFAULT_SERIALIZER"] == "json"


def test_passwords_go_through_the_environment_and_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    where = {"database": "sqlite:///m.db", "artifacts": tmp_path, "login": "admin:tell-nobody"}
    command = mlflow_server("127.0.0.1", 5000, folder, "mark", **where)  # type: ignore[arg-type]
    assert command.environment["MLFLOW_AUTH_ADMIN_PASSWORD"] == "tell-nobody"
    assert "tell-nobody" not in " ".join(command.arguments)
    for path in folder.iterdir():
        assert "tell-nobody" not in path.read_text()


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("127.0.0.1", "127.0.0.1:80"),
        ("0.0.0.0", "127.0.0.1:80"),
        ("::1", "[::1]:80"),
        ("::", "127.0.0.1:80"),
        ("gpu.example", "gpu.example:80"),
    ],
)
def test_where_this_machine_reaches_a_server(host: str, where: str) -> None:
    assert reachable(host, 80) == where


def test_containers_are_published_on_loopback_with_passwords_and_hosts() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
    assert "PREFECT_SERVER_API_AUTH_STRING" in services["prefect"]["environment"]
    mlflow = services["mlflow"]["command"]
    assert "--app-name=basic-auth" in mlflow
    (hosts,) = [one for one in mlflow if one.startswith("--allowed-hosts=")]
    assert "mlflow:5000" in hosts.removeprefix("--allowed-hosts=").split(",")
    for name in ("deploy", "worker"):
        environment = services[name]["environment"]
        assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
        assert environment["PREFECT_API_URL"] == "http://prefect:4200/api"


def test_what_containers_run_is_what_up_runs(tmp_path: Path) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    worker = prefect_worker("grom", 1, tmp_path, "mark")
    assert services["worker"]["command"] == ["python", *worker.arguments[2:]]
    persisted = {name: value for name, value in worker.environment.items() if "RESULTS" in name}
    assert persisted.items() <= services["worker"]["environment"].items()
