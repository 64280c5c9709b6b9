"""`grom up` with real servers that want passwords: healthy, kept running, stopped to the last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.presets import ROOT
from flows.service import read_service
from flows.up import ROLES, is_loopback, mark_of
from tasks.servers import family, is_taken, status_of
from tests.servers import free_port
from tests.tiny import tiny_config

PREFECT_LOGIN, MLFLOW_LOGIN = "someone:a-first-secret", "admin:a-second-secret"


@dataclass(frozen=True, slots=True)
class Up:
    """A `grom up` that runs."""

    process: subprocess.Popen[str]
    work: Path
    output: Path
    prefect: str
    mlflow: str

    def pids(self, role: str) -> list[int]:
        return [process.pid for process in family(mark_of(self.work, role))]


def wait_for(what: Callable[[], object], timeout_s: float, up: Path | None = None) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, up.read_text() if up else "too long"
        time.sleep(0.1)


def write_service(folder: Path, **changes: Any) -> Path:
    values = tiny_config(folder).model_dump(mode="json", exclude={"forget"})
    values |= {"name": "up", "store": str(folder / "store"), "work": str(folder / "work")}
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    (folder / "store").mkdir(exist_ok=True)
    return path


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One that is ready, and asks for passwords."""
    folder = tmp_path_factory.mktemp("up")
    prefect, mlflow = free_port(), free_port()
    command = [sys.executable, "-P", "-c", "from flows.cli import app; app()", "up"]
    command += ["--config", str(write_service(folder)), "--mlflow-auth"]
    command += ["--prefect-port", str(prefect), "--mlflow-port", str(mlflow)]
    command += ["--allowed-hosts", f"localhost:{mlflow},127.0.0.1:{mlflow},mlflow.example"]
    environment = {
        **os.environ,
        "PREFECT_SERVER_API_AUTH_STRING": PREFECT_LOGIN,
        "MLFLOW_TRACKING_USERNAME": MLFLOW_LOGIN.split(":")[0],
        "MLFLOW_TRACKING_PASSWORD": MLFLOW_LOGIN.split(":")[1],
        "COLUMNS": "200",
    }
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=file, text=True
        )
    try:
        wait_for(lambda: process.poll() is not None or "Ctrl-C" in output.read_text(), 180, output)
        assert process.poll() is None, output.read_text()
        urls = (f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}")
        yield Up(process, folder / "work", output, *urls)
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(url: str, login: str | None = None, **headers: str) -> tuple[int, str]:
    if login:
        headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, ""


def test_it_says_where_everything_is(up: Up) -> None:
    lines = up.output.read_text().splitlines()
    assert f"Prefect: {up.prefect}" in lines
    assert f"MLflow:  {up.mlflow}" in lines
    assert "deployed sweep/up" in lines
    assert "secret" not in up.output.read_text()


def test_prefect_wants_its_password(up: Up) -> None:
    version = f"{up.prefect}/api/admin/version"
    assert ask(version)[0] == 401
    assert ask(version, "someone:else")[0] == 401
    assert ask(version, PREFECT_LOGIN)[0] == 200


def test_the_page_asks_the_api_at_its_own_port(up: Up) -> None:
    settings = json.loads(ask(f"{up.prefect}/ui-settings", PREFECT_LOGIN)[1])
    assert settings["api_url"] == f"{up.prefect}/api"


def test_mlflow_wants_its_password_and_a_host_it_knows(up: Up) -> None:
    experiments = f"{up.mlflow}/api/2.0/mlflow/experiments/search?max_results=1"
    assert ask(experiments)[0] == 401
    assert ask(experiments, "admin:password1234")[0] == 401
    assert ask(experiments, MLFLOW_LOGIN)[0] == 200
    assert ask(experiments, MLFLOW_LOGIN, Host="mlflow.example")[0] == 200
    assert ask(experiments, MLFLOW_LOGIN, Host="evil.example")[0] == 403


def test_servers_listen_on_loopback_only(up: Up) -> None:
    for role in ROLES:
        for process in family(mark_of(up.work, role)):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip == "127.0.0.1", (role, connection)


def test_the_worker_works_for_the_service(up: Up) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    settings = {PREFECT_API_URL: f"{up.prefect}/api", PREFECT_API_AUTH_STRING: PREFECT_LOGIN}
    with temporary_settings(updates=settings), get_client(sync_client=True) as client:
        sweep = client.read_deployment_by_name("sweep/up")
        (worker,) = client.read_workers_for_work_pool("grom")
        assert worker.status == "ONLINE"
        assert sweep.work_pool_name == "grom"
    assert sweep.parameters["cfg"]["store"] == str(up.work.parent / "store")


def test_no_secret_is_in_arguments_logs_or_databases(up: Up) -> None:
    for role in ROLES:
        for process in family(mark_of(up.work, role)):
            assert "secret" not in " ".join(process.cmdline())
    for path in up.work.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"a-first-secret" not in content, path
            assert b"a-second-secret" not in content, path


def test_what_dies_starts_again(up: Up) -> None:
    before = up.pids("mlflow")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: status_of(f"{up.mlflow}/health") == 200, 60, up.output)
    assert not set(before) & set(up.pids("mlflow"))
    assert "MLflow ended; it starts again in 1 s" in up.output.read_text()


def test_sigterm_ends_it_without_an_error_and_leaves_nothing(up: Up) -> None:
    up.process.terminate()
    assert up.process.wait(timeout=60) == 0
    assert up.output.read_text().endswith("stopped\n")
    assert [up.pids(role) for role in ROLES] == [[], [], []]
    for url in (up.prefect, up.mlflow):
        assert not is_taken("127.0.0.1", int(url.rpartition(":")[2]))


def grom_up(folder: Path, *arguments: str) -> Result:
    config = str(write_service(folder))
    return CliRunner().invoke(app, ["up", "--config", config, *arguments])


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("environment", "arguments", "cure"),
    [
        ({}, [], "Set PREFECT_SERVER_API_AUTH_STRING=user:password"),
        ({"PREFECT_SERVER_API_AUTH_STRING": "a:b"}, [], "Give --mlflow-auth"),
        ({}, ["--mlflow-auth"], "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_servers_that_others_reach_want_passwords(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    arguments: list[str],
    cure: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = grom_up(tmp_path, "--host", "0.0.0.0", *arguments)
    assert result.exit_code == 1
    assert cure in result.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.usefixtures("own_environment")
def test_a_port_that_is_taken_is_named_with_the_option(tmp_path: Path) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', {})); input()"
    port = free_port()
    command = [sys.executable, "-c", code.format(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        wait_for(lambda: is_taken("127.0.0.1", port), 10)
        result = grom_up(tmp_path, "--mlflow-port", str(port), "--prefect-port", str(free_port()))
        other.kill()
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1 is taken" in result.stderr
    assert "--mlflow-port" in result.stderr


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.0.2.1", False),
        ("localhost.example", False),
    ],
)
def test_what_is_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) == own


def test_the_example_is_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.presets import demo

    monkeypatch.chdir(ROOT)
    example, preset = read_service(ROOT / "infra" / "service.yaml"), demo()
    assert example.model.chat_template == preset.model.chat_template
    assert example.retain.without == preset.retain.without
    assert Path(example.retain.uri).resolve() == Path(preset.retain.uri)
    for name in ("select", "strength", "evaluate", "hold_out"):
        assert getattr(example, name) == getattr(preset, name)
