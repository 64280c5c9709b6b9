"""`grom up`: a service's servers and worker, kept running on this machine; `grom ui`: to look."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from flows.deploy import load_service
from flows.terminal import console, prepare_environment, readable_errors
from grom.errors import ConfigError
from tasks.server_commands import mlflow_server, prefect_server, prefect_worker, reachable
from tasks.servers import Server, ServerCommand, free_port, is_taken
from tasks.supervise import Restarts, only_one, running, stopped_by_signals
from tasks.tracking import Tracking, address_of

LOOPBACK = "127.0.0.1"
ROLES = ("worker", "mlflow", "prefect")
"""In the order in which they stop: a run that is stopped can still say so."""
Port = Annotated[int, typer.Option(min=1, max=65535)]
Work = Annotated[Path, typer.Option(help="Folder for scratch files, MLflow and Prefect.")]


class OpenServer(ConfigError):
    """Others could reach a server that asks nobody who they are."""

    def __init__(self, host: str, missing: str) -> None:
        super().__init__(
            f"--host {host}: other machines could use servers that ask for no password. {missing}, "
            "or leave --host out."
        )


class PortTaken(ConfigError):
    """Another process listens there."""

    def __init__(self, host: str, port: int, option: str) -> None:
        super().__init__(
            f"port {port} of {host} is taken by another process. Stop it, or choose another port "
            f"with {option}."
        )


def up(
    config: Annotated[Path, typer.Option(help="The service's YAML file.")],
    work: Annotated[Path | None, typer.Option(help="Overrides the configuration's work.")] = None,
    prefect_port: Port = 4200,
    mlflow_port: Port = 5000,
    host: Annotated[str, typer.Option(help="Address that the servers bind to.")] = LOOPBACK,
    mlflow_auth: Annotated[
        bool,
        typer.Option(
            "--mlflow-auth",
            help="MLflow asks for MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.",
        ),
    ] = False,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="Names by which others reach MLflow, with commas: host,host:5000."),
    ] = None,
) -> None:
    """Start Prefect, MLflow, a worker and the sweep of a service, and keep them running."""
    with readable_errors():
        cfg = load_service(config, work)
        folder = Path(cfg.work)
        login = login_of_mlflow() if mlflow_auth else None
        refuse_open_servers(host, login)
        prepare_environment(folder)
        commands = [prefect_command(host, prefect_port, folder)]
        if cfg.tracking.uri is None:
            commands.append(mlflow_command(host, mlflow_port, folder, login, allowed_hosts))
        ports = {"--prefect-port": prefect_port, "--mlflow-port": mlflow_port}
        with alone(folder, host, ports) as stopped, running(commands, stopped) as servers:
            if not stopped.is_set():
                deploy_in_a_process(config, folder)
            worker = worker_command(cfg.prefect_pool, folder)
            with running([worker], stopped) as workers:
                show_urls(servers)
                Restarts([*servers, *workers], console.print).keep(stopped)
        console.print("stopped")


def ui(work: Work = Path("grom-work"), mlflow_port: Port = 5000, prefect_port: Port = 4200) -> None:
    """Start the MLflow and Prefect UIs over a work folder, on this machine only."""
    with readable_errors():
        prepare_environment(work)
        commands = [
            prefect_command(LOOPBACK, prefect_port, work),
            mlflow_command(LOOPBACK, mlflow_port, work, None, None),
        ]
        ports = {"--prefect-port": prefect_port, "--mlflow-port": mlflow_port}
        with alone(work, LOOPBACK, ports) as stopped, running(commands, stopped) as servers:
            show_urls(servers)
            Restarts(servers, console.print).keep(stopped)


def login_of_mlflow() -> str:
    """`user:password` of MLflow's administrator.

    Raises:
        ConfigError: the environment names none.
    """
    user, password = (
        os.environ.get(f"MLFLOW_TRACKING_{what}") for what in ("USERNAME", "PASSWORD")
    )
    if not user or not password:
        raise ConfigError(
            "--mlflow-auth: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, here and "
            "for everyone who uses MLflow. The first start makes them its administrator."
        )
    return f"{user}:{password}"


def refuse_open_servers(host: str, mlflow_login: str | None) -> None:
    """Refuse to let other machines reach servers without a password.

    Raises:
        OpenServer: says which.
    """
    if is_loopback(host):
        return
    if not os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        raise OpenServer(host, "Set PREFECT_SERVER_API_AUTH_STRING=user:password")
    if mlflow_login is None:
        raise OpenServer(host, "Give --mlflow-auth")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, of whatever
        return False


def prefect_command(host: str, port: int, work: Path) -> ServerCommand:
    """Prefect's server; this process and its other children use it from now on."""
    os.environ["PREFECT_API_URL"] = f"http://{reachable(host, port)}/api"
    if secret := os.environ.get("PREFECT_SERVER_API_AUTH_STRING"):
        os.environ["PREFECT_API_AUTH_STRING"] = secret
    return prefect_server(host, port, work / "logs", mark_of(work, "prefect"))


def mlflow_command(
    host: str, port: int, work: Path, login: str | None, allowed_hosts: str | None
) -> ServerCommand:
    """MLflow's server over the work folder's database; this process's other children use it."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    command = mlflow_server(
        host,
        port,
        work / "logs",
        mark_of(work, "mlflow"),
        database=address_of(Tracking(), work),
        artifacts=(work / "mlartifacts").resolve(),
        allowed_hosts=allowed_hosts,
        login=login,
    )
    os.environ["MLFLOW_TRACKING_URI"] = f"http://{reachable(host, port)}"
    return command


def worker_command(pool: str, work: Path) -> ServerCommand:
    """A worker of the pool."""
    return prefect_worker(pool, free_port(), work / "logs", mark_of(work, "worker"))


def mark_of(work: Path, role: str) -> str:
    """Mark of the processes of one role over a work folder, whoever started them."""
    return f"{work.resolve()}:{role}"


@contextmanager
def alone(work: Path, host: str, ports: dict[str, int]) -> Iterator[Event]:
    """With the work folder and the ports for oneself, until the event that signals set.

    Raises:
        AlreadyUp: another one has the folder.
        PortTaken: names the option to change.
    """
    marks = [mark_of(work, role) for role in ROLES]
    with stopped_by_signals() as stopped, only_one(work, marks) as num_left:
        if num_left:
            console.print(f"stopped {num_left} processes that an earlier `grom up` had left")
        for option, port in ports.items():
            if is_taken(host, port):
                raise PortTaken(host, port, option)
        yield stopped


def deploy_in_a_process(config: Path, work: Path) -> None:
    """Deploy the service; in another process, since loading flows takes memory for good."""
    code = "from flows.cli import app; app()"
    command = [sys.executable, "-P", "-c", code, "deploy", "--config", str(config)]
    done = subprocess.run([*command, "--work", str(work)], check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def show_urls(servers: Sequence[Server]) -> None:
    """Say where the servers are."""
    for server in servers:
        parts = server.command.health.split("/")
        console.print(f"{server.name + ':':<8} http://{parts[2]}", highlight=False)
    names = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    shown = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    console.print(f"In another terminal: export {shown}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C stops everything.")
