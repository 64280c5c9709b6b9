"""Moments in the life of a process at which it can be told to end by SIGKILL.

store     before and after each request to the store, so that its answer may be lost
file      before each file is opened for writing, renamed, linked or removed: between the files of a
          draft, and inside what the store does
mlflow    before and after each call of a client that changes something
stage     before and after each task

They are counted in the thread of the flow, from 1 on; the thread that renews claims has none.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["store", "file", "mlflow", "stage", "start"]
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
AFTER = {"register": "commit", "certify": "commit", "promote": "done"}
"""What the flow does after a task, where it is more than to start the next one."""


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

    patched: tuple[tuple[Kind, Any, Iterable[str]], ...] = (
        ("store", LocalBackend, STORE_METHODS),
        ("store", S3Backend, STORE_METHODS),
        ("mlflow", MlflowClient, [n for n in dir(MlflowClient) if n.startswith(MLFLOW_VERBS)]),
    )
    for kind, owner, names in patched:
        for name in names:
            setattr(owner, name, points.around(kind, name, getattr(owner, name)))
    Task.__call__ = points.staged(Task.__call__)  # type: ignore[method-assign]
    sys.addaudithook(points.audit)
