"""What Prefect's server, its worker and MLflow's server are started with.

Passwords go through the environment: arguments are visible to every user of the machine.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from tasks.servers import ServerCommand

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILDCARDS = ("0.0.0.0", "::")
ADMINISTRATOR = """[mlflow]
default_permission = READ
database_uri = {database}
"""
"""MLflow takes the administrator's name and password from the environment."""


def prefect_server(host: str, port: int, folder: Path, mark: str) -> ServerCommand:
    """Prefect's server, with its database in `PREFECT_HOME`.

    Args:
        host: address it binds to.
        port: port it binds to.
        folder: of its log.
        mark: of its processes.
    """
    page = f"http://{reachable(host, port)}/api"
    environment = {
        # The page asks the API at this address; its own default is port 4200 whatever the port is.
        "PREFECT_SERVER_UI_API_URL": os.environ.get("PREFECT_SERVER_UI_API_URL") or page,
        # In memory, its default, leases are lost with the server: it then ends the runs that hold
        # one and never gives their slots back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
    }
    return ServerCommand(
        name="Prefect",
        arguments=_module("prefect", "server", "start", "--host", host, "--port", str(port)),
        environment=environment,
        health=f"http://{reachable(host, port)}/api/health",
        log=folder / "prefect.log",
        mark=mark,
    )


def prefect_worker(pool: str, health_port: int, folder: Path, mark: str) -> ServerCommand:
    """A worker that runs the flow runs of a pool as processes of this machine.

    Its results are JSON files, so that what a task returned survives the process that ran it.
    """
    environment = {
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "PREFECT_WORKER_WEBSERVER_PORT": str(health_port),
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    }
    return ServerCommand(
        name="worker",
        arguments=_module(
            "prefect", "worker", "start", "--pool", pool, "--type", "process", "--with-healthcheck"
        ),
        environment=environment,
        health=f"http://127.0.0.1:{health_port}/health",
        log=folder / "worker.log",
        mark=mark,
        children_go_on=True,
    )


def mlflow_server(
    host: str,
    port: int,
    folder: Path,
    mark: str,
    *,
    database: str,
    artifacts: Path,
    allowed_hosts: str | None = None,
    login: str | None = None,
) -> ServerCommand:
    """MLflow's server; clients reach its artifacts through it.

    Args:
        host: address it binds to.
        port: port it binds to.
        folder: of its log and, with a login, of its settings of users.
        mark: of its processes.
        database: address of its database.
        artifacts: folder of its artifacts.
        allowed_hosts: names and ports by which it may be asked, with commas; else loopback's.
        login: `user:password` of its administrator, if it shall ask for one.
    """
    arguments = ["--backend-store-uri", database, "--artifacts-destination", artifacts.as_uri()]
    arguments += ["--workers", "1", "--host", host, "--port", str(port)]
    if allowed_hosts:
        arguments += ["--allowed-hosts", allowed_hosts]
    path, environment = "health", {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    if login is not None:
        arguments += ["--app-name", "basic-auth"]
        environment |= _users(folder, login)
        path = "api/2.0/mlflow/experiments/search?max_results=1"  # /health asks for no login
    return ServerCommand(
        name="MLflow",
        arguments=_module("mlflow", "server", *arguments),
        environment=environment,
        health=f"http://{reachable(host, port)}/{path}",
        log=folder / "mlflow.log",
        mark=mark,
        login=login,
    )


def reachable(host: str, port: int) -> str:
    """Host and port by which this machine reaches a server that binds to `host`."""
    host = "127.0.0.1" if host in WILDCARDS else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _module(*arguments: str) -> tuple[str, ...]:
    # -P: what lies in the folder that it is started in is no part of the program.
    return (sys.executable, "-P", "-m", *arguments)


def _users(folder: Path, login: str) -> dict[str, str]:
    """Environment of MLflow's user database, which lies beside the logs' folder."""
    user, _, password = login.partition(":")
    settings = folder / "mlflow-users.ini"
    folder.mkdir(parents=True, exist_ok=True)
    database = (folder.parent / "mlflow-users.db").resolve()
    settings.write_text(ADMINISTRATOR.format(database=f"sqlite:///{database}"), encoding="utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": (
            os.environ.get("MLFLOW_FLASK_SERVER_SECRET_KEY") or secrets.token_hex(32)
        ),
    }
