"""Runs that are killed: a service's flow in a process of its own, and what is left when others have
gone on.

A point is a moment between two effects, and a run that is told to ends there by SIGKILL:

store     before and after each request to the store, so that its answer may be lost
file      before each file is opened for writing, renamed, linked or removed: between the files of a
          draft, and inside what the store does
mlflow    before and after each call of a client that changes something
stage     before and after each task

Points are counted in the thread of the flow, from 1 on; the thread that renews claims has none.
Processes come from a server that has imported everything, so that one starts in a moment.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.service import ServiceConfig
from tests.services import EASY_GATE, put, requests, service

Kind = Literal["store", "file", "mlflow", "stage", "start"]
PRELOADED = ["tests.killed", "tests.faulty", "flows.unlearn_batches", "mlflow.tracking.client"]
PRELOADED += ["mlflow.store.tracking.sqlalchemy_store", "transformers.models.llama.modeling_llama"]
STORE_METHODS = ("read", "download", "upload", "swap", "delete", "entries", "now")
MLFLOW_VERBS = ("create_", "set_", "log_", "update_", "delete_", "finalize_")
FILE_EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
STAGES = {
    "load_model": "load",
    "load_data": "load",
    "collect_retain": "collect",
    "collect_forget": "collect",
    "merge_forget": "collect",
    "find_unreached": "solve",
    "promote_honoured": "promote",
}
"""Of tasks that have another name."""
AFTER = {"register": "commit", "promote": "erase"}
"""What the flow does after a task, where it is more than to start the next one."""
LONG_AGO_S = 3600.0


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in a run."""

    number: int
    stage: str
    """Task that was at work, or the part of the flow around it."""
    kind: Kind
    what: str

    @classmethod
    def parse(cls, line: str) -> Point:
        """From a line of a trace."""
        number, stage, kind, what = line.split("\t")
        return cls(int(number), stage, kind, what)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.number}\t{self.stage}\t{self.kind}\t{self.what}"


@dataclass(frozen=True, slots=True)
class Moment:
    """When to be killed: at the first point that fits."""

    number: int | None = None
    stage: str | None = None
    what: str = ""
    """Part of what the point is."""

    def has_come(self, point: Point) -> bool:
        """Whether this is the point."""
        return (
            self.number in (None, point.number)
            and self.stage in (None, point.stage)
            and self.what in point.what
        )


@dataclass(slots=True)
class Points:
    """Counts the points of this process, writes them down, and ends it at one of them."""

    root: Path
    """Files elsewhere do not count."""
    trace: Path
    moment: Moment | None
    stage: str = "desk"
    number: int = 0
    _inside: bool = False
    _thread: int = field(default_factory=threading.get_ident)

    def reach(self, kind: Kind, what: str) -> None:
        """One more point."""
        if self._inside or threading.get_ident() != self._thread:
            return
        self._inside = True
        self.number += 1
        point = Point(self.number, self.stage, kind, what)
        with self.trace.open("a") as trace:
            trace.write(f"{point}\n")
        if self.moment is not None and self.moment.has_come(point):
            os.kill(os.getpid(), signal.SIGKILL)
        self._inside = False

    def around(self, kind: Kind, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with a point before and one after."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            what = f"{name} {self._named(args)}".strip()
            self.reach(kind, f"before {what}")
            answer = do(*args, **kwargs)
            self.reach(kind, f"after {what}")
            return answer

        return counted

    def staged(self, do: Callable[..., Any]) -> Callable[..., Any]:
        """The call of a task, with its name as the stage until the next one."""

        def counted(task: Any, *args: Any, **kwargs: Any) -> Any:
            self.stage = STAGES.get(task.name, task.name)
            self.reach("stage", f"before {task.name}")
            answer = do(task, *args, **kwargs)
            self.reach("stage", f"after {task.name}")
            self.stage = AFTER.get(self.stage, self.stage)
            return answer

        return counted

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """A file is about to be changed."""
        if event not in FILE_EVENTS or not args:
            return
        is_read = event == "open" and not (len(args) > 2 and (args[2] or 0) & WRITES)
        if not is_read and isinstance(args[0], str) and args[0].startswith(str(self.root)):
            self.reach("file", f"{event} {self._short(args[0])}")

    def _named(self, args: tuple[Any, ...]) -> str:
        return next((self._short(arg) for arg in args[1:] if isinstance(arg, str)), "")

    def _short(self, name: str) -> str:
        return name.removeprefix(f"{self.root}/").replace("\n", " ")[:80]


def watch(points: Points) -> None:
    """Put points into everything that changes something.  For a process that ends after it."""
    from mlflow import MlflowClient
    from prefect import Task

    from tasks.folder import LocalBackend
    from tasks.s3 import S3Backend

    for kind, owner, names in (
        ("store", LocalBackend, STORE_METHODS),
        ("store", S3Backend, STORE_METHODS),
        ("mlflow", MlflowClient, [n for n in dir(MlflowClient) if n.startswith(MLFLOW_VERBS)]),
    ):
        for name in names:
            setattr(owner, name, points.around(kind, name, getattr(owner, name)))
    Task.__call__ = points.staged(Task.__call__)  # type: ignore[method-assign, assignment]
    sys.addaudithook(points.audit)


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


def work(job: Job) -> None:
    """Run the flow once.  The whole life of a process."""
    with job.trace.with_suffix(".log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ["PREFECT_API_URL"] = job.api
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.unlearn_batches import unlearn_batches

    points = Points(job.root, job.trace, job.moment)
    watch(points)
    if job.prepare is not None:
        job.prepare()
    with temporary_settings(updates={PREFECT_API_URL: job.api}):
        points.reach("start", "before the flow")
        unlearn_batches(job.cfg)
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

    def run(self, moment: Moment | None = None, prepare: Callable[[], None] | None = None) -> Ended:
        """Run the flow in a process of its own."""
        process, trace = self.launch(moment, prepare)
        process.join()
        lines = trace.read_text().splitlines() if trace.exists() else []
        assert process.exitcode is not None
        return Ended(process.exitcode, tuple(map(Point.parse, lines)))

    def launch(
        self, moment: Moment | None = None, prepare: Callable[[], None] | None = None
    ) -> tuple[Any, Path]:
        """Start such a process; it, and the trace of its points."""
        self.num_started += 1
        trace = self.folder / "traces" / f"{self.num_started:04d}.txt"
        trace.parent.mkdir(exist_ok=True)
        spawn = multiprocessing.get_context("forkserver")
        spawn.set_forkserver_preload(PRELOADED)
        process = spawn.Process(
            target=work, args=(Job(self.cfg, self.api, self.live, trace, moment, prepare),)
        )
        process.start()
        return process, trace

    def log(self) -> str:
        """What the latest process said."""
        return (self.folder / "traces" / f"{self.num_started:04d}.log").read_text()

    def lapse(self) -> None:
        """Let so much time pass, by the store's clock, that every lease has run out."""
        for path in (self.live / "store" / "claims").glob("*.json"):
            stat = path.stat()
            os.utime(path, (stat.st_atime, stat.st_mtime - LONG_AGO_S))
