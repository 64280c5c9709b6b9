"""Several servers together: one owner of a work folder, started side by side, kept running."""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType

from grom.errors import ConfigError
from tasks.servers import Server, ServerCommand, stop_family

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two starts of a server that keeps dying; doubled each time."""


class AlreadyUp(ConfigError):
    """Another `grom up` uses the work folder."""

    def __init__(self, work: Path) -> None:
        super().__init__(
            f"{work}: another `grom up` or `grom ui` runs over this folder. Stop it, or give this "
            "one another folder with --work."
        )


class Restarts:
    """Starts servers again that died, after a pause that doubles while they keep dying."""

    def __init__(self, servers: Sequence[Server], tell: Callable[[str], None]) -> None:
        self._servers, self._tell = servers, tell
        self._due_s: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}
        self._started_s: dict[str, float] = {}

    def keep(self, stopped: Event, poll_s: float = 0.5) -> None:
        """Watch the servers until `stopped` is set."""
        while not stopped.wait(poll_s):
            for server in self._servers:
                if not server.is_running():
                    self._restart(server, time.monotonic())

    def _restart(self, server: Server, now_s: float) -> None:
        name = server.name
        if name not in self._due_s:
            lived_s = now_s - self._started_s.get(name, -LONGEST_PAUSE_S)
            doubled = min(2 * self._pause_s.get(name, 0), LONGEST_PAUSE_S)
            pause_s = max(FIRST_PAUSE_S, doubled if lived_s < LONGEST_PAUSE_S else 0)
            self._due_s[name], self._pause_s[name] = now_s + pause_s, pause_s
            log = server.command.log
            self._tell(f"{name} ended; it starts again in {pause_s:.0f} s, its log is {log}")
        elif now_s >= self._due_s[name]:
            del self._due_s[name]
            self._started_s[name] = now_s
            if not server.command.children_go_on:
                stop_family(server.command.mark)  # they would keep its port
            server.start()


@contextmanager
def only_one(work: Path, marks: Sequence[str]) -> Iterator[int]:
    """Keep others from a work folder, and stop what one that was killed has left running.

    Args:
        work: the folder.
        marks: of the servers over this folder, in the order in which they stop.

    Yields:
        number of processes that were left.

    Raises:
        AlreadyUp: another one has it.
    """
    with (work / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyUp(work) from None
        yield sum(stop_family(mark) for mark in marks)


@contextmanager
def stopped_by_signals() -> Iterator[Event]:
    """An event that Ctrl-C, SIGTERM and the end of the terminal set."""
    stopped = Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running(commands: Sequence[ServerCommand], stopped: Event) -> Iterator[list[Server]]:
    """Healthy servers, started side by side; they stop with the block, the last one first.

    Raises:
        ServerFailed: one did not come up.
    """
    servers = [Server(command) for command in commands]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_healthy(stopped=stopped.is_set)
        yield servers
    finally:
        for server in reversed(servers):
            server.stop()
