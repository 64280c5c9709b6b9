"""Servers as child processes: started, asked for their health, stopped to the last.

A worker runs each flow run in a session of its own, so a process group does not hold all that a
server started.  Each server therefore carries a mark in its environment, which all its descendants
inherit: also those of a server that was killed.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Self
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil

from grom.errors import GromError

MARK = "GROM_SERVER"
"""Environment variable that says which server a process belongs to."""
TAIL_LINES, TAIL_BYTES = 20, 20_000
START_S = 180.0
STOP_S = 15.0
POLL_S = 0.1


class ServerFailed(GromError):
    """A server did not come up."""

    def __init__(self, name: str, what: str, log: Path) -> None:
        super().__init__(f"{name}: {what}. The end of {log}:\n{tail(log)}")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What a server is, before it runs."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    """Added to this process's own; may hold passwords, the arguments must not."""
    health: str
    """Address that answers 200 when the server is ready."""
    log: Path
    mark: str
    """Tells its processes from all others; the same each time the same service starts."""
    login: str | None = field(default=None, repr=False)
    """`user:password` to ask for its health with."""
    children_go_on: bool = False
    """What it started does not end when it dies and is started again."""


class Server:
    """A server that runs, or ran."""

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.command.name

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it, in a process group of its own, with its lines added to the log."""
        self.command.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.command.environment, MARK: self.command.mark}
        with self.command.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command.arguments,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_until_healthy(
        self, timeout_s: float = START_S, stopped: Callable[[], bool] = lambda: False
    ) -> Self:
        """Wait for its health address, or until `stopped` says that nobody waits any longer.

        Raises:
            ServerFailed: it ended, refused the login, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while not stopped():
            if not self.is_running():
                raise ServerFailed(self.name, "it ended while it started", self.command.log)
            status = status_of(self.command.health, self.command.login)
            if status == 200:
                return self
            if status in (401, 403):
                what = f"it refuses user and password ({status}); check those in the environment"
                raise ServerFailed(self.name, what, self.command.log)
            if time.monotonic() > deadline:
                what = f"{self.command.health} did not answer in {timeout_s:.0f} s"
                raise ServerFailed(self.name, what, self.command.log)
            time.sleep(POLL_S)
        return self

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM to all its processes, SIGKILL to those that are left after a while."""
        stop_family(self.command.mark, grace_s)
        if self._process is not None:
            self._process.wait()

    def kill(self) -> None:
        """SIGKILL to all its processes at once, as when the power fails."""
        stop_family(self.command.mark, 0)
        if self._process is not None:
            self._process.wait()


def family(mark: str) -> list[psutil.Process]:
    """All processes of this user that carry a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # A zombie has no environment, and nothing can be done about it.
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def stop_family(mark: str, grace_s: float = STOP_S) -> int:
    """Stop all processes that carry a mark; returns how many there were."""
    members = family(mark)
    if grace_s > 0:
        _signal(members, signal.SIGTERM)
        psutil.wait_procs(members, timeout=grace_s)
    for _ in range(3):  # some may have been started meanwhile
        if left := family(mark):
            _signal(left, signal.SIGKILL)
            psutil.wait_procs(left, timeout=STOP_S)
    return len(members)


def status_of(url: str, login: str | None = None, timeout_s: float = 5.0) -> int | None:
    """Status of a GET request with `user:password`, or None: no answer."""
    headers = {}
    if login is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    try:
        with urlopen(Request(url, headers=headers), timeout=timeout_s) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except (URLError, OSError, HTTPException):
        return None


def is_taken(host: str, port: int) -> bool:
    """Whether another process listens at that port, so that no server can bind to it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    """The last lines of a log."""
    if not log.is_file():
        return "(there is no log)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "(it is empty)"


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
