"""Runs that are killed: a service's flow in a process of its own, at a point of `points.py`, and
what others make of what is left.

Processes come from a server that has imported everything, so that one starts in a moment.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from flows.service import ServiceConfig
from tasks.batches import settle, waiting
from tasks.servers import Server
from tests.points import Moment, Point, Points, watch
from tests.services import EASY_GATE, bucket_of, put, requests, service

Flow = Literal["unlearn-batches", "housekeeping"]
PRELOADED = [
    "tests.killed",
    "flows.unlearn_batches",
    "flows.housekeeping",
    "mlflow.store.tracking.sqlalchemy_store",
    "transformers.models.llama.modeling_llama",
]
DAYS_S = 2 * 86400.0
"""Leases have run out by then, and housekeeping removes what nobody has."""
PATIENCE_S, PAUSE_S = 60.0, 4.0
HANGS_S = 150.0
"""No worker takes so long; before that it says where it is."""
LIVES = 3
"""So many workers may be needed after a kill."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is to do."""

    cfg: ServiceConfig
    api: str
    """Address of the Prefect server."""
    root: Path
    trace: Path
    moment: Moment | None
    prepare: Callable[[], None] | None = None
    """Done first: a fault that this process is to meet."""
    flow: Flow = "unlearn-batches"


def work(job: Job) -> None:
    """Run a flow once.  The whole life of a process."""
    with job.trace.with_suffix(".log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    faulthandler.dump_traceback_later(HANGS_S - 10)
    os.environ["PREFECT_API_URL"] = job.api
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.housekeeping import housekeeping
    from flows.unlearn_batches import unlearn_batches

    points = Points(job.root, job.trace, job.moment)
    watch(points)
    if job.prepare is not None:
        job.prepare()
    with temporary_settings(updates={PREFECT_API_URL: job.api}):
        points.reach("start", "before the flow")
        (unlearn_batches if job.flow == "unlearn-batches" else housekeeping)(job.cfg)
        points.stage = "end"
        points.reach("start", "after the flow")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    exit_code: int
    points: tuple[Point, ...]

    @property
    def was_killed(self) -> bool:
        """By its point."""
        return self.exit_code == -signal.SIGKILL


@dataclass(slots=True)
class Drill:
    """A service in a state that can be gone back to: one batch is accepted, two wait."""

    folder: Path
    api: str
    live: Path = field(init=False)
    start: Path = field(init=False)
    cfg: ServiceConfig = field(init=False)
    num_started: int = 0

    def __post_init__(self) -> None:
        self.live, self.start = self.folder / "live", self.folder / "start"
        self.cfg = service(
            self.folder,
            work=str(self.live / "work"),
            store=str(self.live / "store"),
            gate=EASY_GATE,
        )

    def prepare(self) -> None:
        """Make the state."""
        put(self.cfg, "accepted", requests(0, 2), self.folder)
        first = self.run()
        assert first.exit_code == 0, self.log()
        put(self.cfg, "first", requests(4, 3), self.folder)
        put(self.cfg, "second", requests(8, 2), self.folder)
        self.live.rename(self.start)

    def reset(self) -> None:
        """Go back to it.  Addresses stay the same, and so do the times of files."""
        shutil.rmtree(self.live, ignore_errors=True)
        shutil.copytree(self.start, self.live)

    def run(
        self,
        moment: Moment | None = None,
        prepare: Callable[[], None] | None = None,
        flow: Flow = "unlearn-batches",
    ) -> Ended:
        """Run a flow in a process of its own."""
        process, trace = self.launch(moment, prepare, flow)
        process.join(HANGS_S)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"a worker hangs\n{self.log()}")
        lines = trace.read_text().splitlines() if trace.exists() else []
        assert process.exitcode is not None
        return Ended(process.exitcode, tuple(map(Point.parse, lines)))

    def launch(
        self,
        moment: Moment | None = None,
        prepare: Callable[[], None] | None = None,
        flow: Flow = "unlearn-batches",
    ) -> tuple[Any, Path]:
        """Start such a process; it, and the trace of its points."""
        self.num_started += 1
        trace = self.folder / "traces" / f"{self.num_started:04d}.txt"
        trace.parent.mkdir(exist_ok=True)
        spawn = multiprocessing.get_context("forkserver")
        spawn.set_forkserver_preload(PRELOADED)
        job = Job(self.cfg, self.api, self.live, trace, moment, prepare, flow)
        process = spawn.Process(target=work, args=(job,))
        process.start()
        return process, trace

    def log(self) -> str:
        """What the latest process said."""
        return (self.folder / "traces" / f"{self.num_started:04d}.log").read_text()

    def recover(self) -> int:
        """Let others go on: sweeps, workers while a batch waits, housekeeping; how many workers."""
        num_workers = 0
        while self.sweep() and num_workers < LIVES:
            self.go_on()
            num_workers += 1
        self.go_on("housekeeping")
        return num_workers

    def sweep(self) -> bool:
        """Days later: publish outcomes, as a sweep does, and say whether a batch waits."""
        self.lapse()
        bucket = bucket_of(self.cfg)
        settle(bucket)
        return bool(waiting(bucket))

    def go_on(self, flow: Flow = "unlearn-batches") -> None:
        """Run a flow that must end well."""
        ended = self.run(flow=flow)
        assert ended.exit_code == 0, self.log()

    def outage(self, server: Server, down_s: float) -> int:
        """Run the flow, kill its server while it collects, start that again; the exit code."""
        reached = self.folder / "reached"
        reached.unlink(missing_ok=True)
        process, _ = self.launch(prepare=partial(pause_in_collect, reached))
        wait_for(reached)
        server.kill()
        try:
            time.sleep(down_s)
        finally:
            server.start().wait_until_healthy()
        process.join()
        return int(process.exitcode)

    def lapse(self) -> None:
        """Let days pass by the clock of the store and of scratch, which is that of its files."""
        for path in (*self.live.glob("store/**/*"), *self.live.glob("work/scratch/**/*")):
            stat = path.stat()
            os.utime(path, (stat.st_atime - DAYS_S, stat.st_mtime - DAYS_S))


def wait_for(path: Path) -> None:
    """Wait until a file is there."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.001)


def pause_in_collect(reached: Path) -> None:
    """Let this process say when it collects, and then take a while."""
    from grom.collect import collect_moments

    def slowly(*args: Any, **kwargs: Any) -> Any:
        reached.touch()
        time.sleep(PAUSE_S)
        return collect_moments(*args, **kwargs)

    patch("tasks.collect.collect_moments", slowly).start()
