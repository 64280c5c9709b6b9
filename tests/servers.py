"""Real servers for tests, on loopback, each at a port that it alone uses.

seaweedfs         an S3 server that checks signatures and honours conditional writes; a bucket
prefect_service   `prefect server start` with a home of its own
prefect_worker    starts `process` workers of that server; each ends with its test
mlflow_server     `mlflow server` on SQLite that serves its artifacts

They start when the first test asks for them and stop when the session ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO
from uuid import uuid4

import pytest

from tasks import server_commands
from tasks.servers import Server, ServerCommand, is_taken

GRPC_OFFSET = 10_000
"""SeaweedFS listens at each port plus this number, too."""
FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Below the ports that the system gives to clients, also with the offset on most systems."""
BUCKET = "grom-tests"
KEY, SECRET = "test-key", "test-secret"
LEASES: list[IO[bytes]] = []
"""Locks on the ports that this process took."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 server and a bucket in it."""

    endpoint: str
    key: str
    secret: str
    bucket: str

    def environment(self) -> dict[str, str]:
        """What the AWS provider chain finds its account and address in."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": "us-east-1",
        }


@dataclass(frozen=True, slots=True)
class PrefectService:
    """A Prefect server."""

    api: str
    home: Path
    server: Server

    def environment(self) -> dict[str, str]:
        """What another process needs to use it."""
        return {"PREFECT_API_URL": self.api, "PREFECT_HOME": str(self.home)}

    def used(self) -> AbstractContextManager[object]:
        """Within the block, Prefect in this process uses it."""
        from prefect.settings import PREFECT_API_URL, temporary_settings

        return temporary_settings(updates={PREFECT_API_URL: self.api})


StartWorker = Callable[..., Server]
"""start(pool, environment={...}) gives a healthy worker; `kill()` is SIGKILL to it and its runs."""


def free_port(*, twice: bool = False) -> int:
    """A port of loopback that no other process of these tests gets; `twice`: also plus 10,000."""
    folder = Path(tempfile.gettempdir()) / f"grom-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    chance = random.SystemRandom()
    for _ in range(1000):
        port = chance.randint(FIRST_PORT, LAST_PORT)
        lease = (folder / str(port)).open("wb")
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lease.close()
            continue
        ports = (port, port + GRPC_OFFSET) if twice else (port,)
        if not any(is_taken("127.0.0.1", number) for number in ports):
            LEASES.append(lease)
            return port
        lease.close()
    raise RuntimeError(f"no port is free between {FIRST_PORT} and {LAST_PORT}")


def new_mark() -> str:
    """A mark that no other process carries."""
    return f"tests-{uuid4().hex}"


def running(command: ServerCommand) -> Iterator[Server]:
    """A server that is healthy, and stops afterwards whatever happened."""
    server = Server(command)
    try:
        yield server.start().wait_until_healthy()
    finally:
        server.stop(grace_s=5)


def weed_command(folder: Path, mark: str) -> tuple[ServerCommand, str]:
    """SeaweedFS in one process, and the address of its S3 server."""
    account = {"accessKey": KEY, "secretKey": SECRET}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = [{"name": "tests", "credentials": [account], "actions": actions}]
    settings = folder / "s3.json"
    settings.write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    ports = {name: free_port(twice=True) for name in ("s3", "master", "volume", "filer", "admin")}
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    arguments = [str(Path(sys.executable).parent / "weed"), "mini", f"-dir={folder / 'data'}"]
    arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={settings}"]
    arguments += [f"-{name}.port={port}" for name, port in ports.items()]
    # `mini` would open a port of its own for each of these.
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"]
    arguments += ["-master.telemetry=false"]
    command = ServerCommand(
        name="SeaweedFS",
        arguments=tuple(arguments),
        environment={},
        health=f"{endpoint}/healthz",
        log=folder / "weed.log",
        mark=mark,
    )
    return command, endpoint


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server."""
    import fsspec

    command, endpoint = weed_command(tmp_path_factory.mktemp("seaweedfs"), new_mark())
    for _ in running(command):
        account = {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}
        fsspec.filesystem("s3", skip_instance_cache=True, **account).mkdir(BUCKET)
        yield S3Server(endpoint=endpoint, key=KEY, secret=SECRET, bucket=BUCKET)


@pytest.fixture(scope="session")
def prefect_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectService]:
    """A real Prefect server."""
    folder = tmp_path_factory.mktemp("prefect-service")
    port, home = free_port(), folder / "home"
    command = server_commands.prefect_server("127.0.0.1", port, folder, new_mark())
    own = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    for server in running(replace(command, environment={**command.environment, **own})):
        yield PrefectService(api=own["PREFECT_API_URL"], home=home, server=server)


@pytest.fixture
def prefect_worker(prefect_service: PrefectService, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers of the Prefect server."""
    started: list[Server] = []

    def start(pool: str, environment: Mapping[str, str] = {}) -> Server:
        folder = tmp_path / f"worker-{len(started)}"
        command = server_commands.prefect_worker(pool, free_port(), folder, new_mark())
        # Every 15 s, its default, is long for a test.
        own = {**prefect_service.environment(), "PREFECT_WORKER_QUERY_SECONDS": "1"}
        server = Server(replace(command, environment={**command.environment, **own, **environment}))
        started.append(server)
        return server.start().wait_until_healthy()

    try:
        yield start
    finally:
        for server in started:
            server.kill()


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real MLflow server."""
    folder, port = tmp_path_factory.mktemp("mlflow-server"), free_port()
    command = server_commands.mlflow_server(
        "127.0.0.1",
        port,
        folder / "logs",
        new_mark(),
        database=f"sqlite:///{folder / 'mlflow.db'}",
        artifacts=folder / "artifacts",
    )
    for _ in running(command):
        yield f"http://127.0.0.1:{port}"
