"""Progress of a phase: a bar with time left on a terminal, and an artifact in Prefect."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
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

from grom.examples import Batch

ARTIFACT_SECONDS = 3.0
"""At most one update of the Prefect artifact in this time."""


def tracked(batches: Iterable[Batch], phase: str, total: int) -> Iterator[Batch]:
    """The same batches, with the number of examples done so far shown while they pass.

    Args:
        batches: stream of batches.
        phase: name of what is going on, with the stage word first.
        total: examples in all.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    done, shown = 0, time.monotonic()
    artifact = _start(phase)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(phase, total=total)
        for batch in batches:
            yield batch
            done += len(batch.examples)
            bar.advance(task, len(batch.examples))
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
