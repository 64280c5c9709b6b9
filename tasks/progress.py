"""Progress of a phase: a bar with time left on a terminal, and an artifact in Prefect."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from grom.batches import Batch

Passing = TypeVar("Passing")
ARTIFACT_SECONDS = 3.0
"""At most one update of the Prefect artifact in this time."""


def tracked(batches: Iterable[Batch], phase: str, total: int) -> Iterator[Batch]:
    """The same batches, with the number of examples done so far shown while they pass.

    Args:
        batches: stream of batches.
        phase: name of what is going on, with the stage word first.
        total: examples in all.
    """
    yield from counted(batches, phase, total, lambda batch: len(batch.examples))


def counted(
    stream: Iterable[Passing],
    phase: str,
    total: int,
    size_of: Callable[[Passing], int],
    done: int = 0,
) -> Iterator[Passing]:
    """The same things, with the sum of their sizes shown while they pass.

    Args:
        stream: things.
        phase: name of what is going on, with the stage word first.
        total: sum of all sizes.
        size_of: size of one thing.
        done: what an earlier, interrupted run has done already.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    shown = time.monotonic()
    artifact = _start(phase)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(phase, total=total, completed=done)
        for passing in stream:
            yield passing
            done += size_of(passing)
            bar.advance(task, size_of(passing))
            if artifact is not None and time.monotonic() - shown > ARTIFACT_SECONDS:
                update_progress_artifact(artifact, progress=min(100.0, 100 * done / max(total, 1)))
                shown = time.monotonic()
    if artifact is not None:
        update_progress_artifact(artifact, progress=100.0)


def _start(phase: str) -> UUID | None:
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return None
    key = "".join(
        letter if letter.isascii() and letter.isalnum() else "-" for letter in phase.lower()
    )
    artifact = create_progress_artifact(progress=0.0, key=key, description=phase)
    return artifact if isinstance(artifact, UUID) else None
