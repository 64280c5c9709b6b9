"""`grom reproduce`, `grom diff`: does an edit come out again, and what sets two runs apart."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from flows.config import JobConfig, UnlearnConfig
from flows.inbox_commands import StoreOption
from flows.presets import load
from flows.service import read_service
from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import ConfigError

if TYPE_CHECKING:
    from tasks.compare import Comparison
    from tasks.recorded import Difference
    from tasks.reproduce import Reproduced
    from tasks.runs import Run
    from tasks.store import Store

STYLES = {
    "same bytes": "green",
    "within tolerance": "green",
    "different": "bold red",
    "not solved": "bold red",
}
FAILED_EXIT = 1
RUN_HELP = "A batch, the key of a service's run, the id of an MLflow run, or apply/KEY."
Config = Annotated[
    str | None,
    typer.Option(help="Configuration of the run: what it read is compared with today's, too."),
]
Work = Annotated[Path, typer.Option(help="Work folder: scratch, and the embedded MLflow.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_WORK = Path("grom-work")
MLFLOW = "MLFLOW_TRACKING_URI"


def reproduce_run(
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    store: StoreOption,
    config: Config = None,
    work: Work = DEFAULT_WORK,
    as_json: Json = False,
) -> None:
    """Solve a run's edit again from its statistics; name the first fact that differs."""
    with readable_errors():
        prepare_environment(work)
        from tasks.inputs import input_differences
        from tasks.reproduce import reproduce

        job = None if config is None else _job(config, work)
        opened = _open(store, work)
        found = _find(run, opened, job, work)
        with plain_logs(quiet=True):
            changed = [] if job is None else input_differences(found, *_inputs(job, opened, work))
            result = reproduce(found, opened, work, changed)
        if as_json:
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
        else:
            _show_reproduced(result)
    if result.outcome in ("different", "not solved") or changed:
        raise typer.Exit(FAILED_EXIT)


def diff_runs(
    one: Annotated[str, typer.Argument(help=RUN_HELP)],
    other: Annotated[str, typer.Argument(help="Likewise.")],
    store: StoreOption,
    work: Work = DEFAULT_WORK,
    as_json: Json = False,
) -> None:
    """Show what sets two runs apart: facts in the order of the pipeline, numbers, the edits."""
    with readable_errors():
        prepare_environment(work)
        from tasks.compare import compare

        opened = _open(store, work)
        found = compare(_find(one, opened, None, work), _find(other, opened, None, work), opened)
        if as_json:
            sys.stdout.write(json.dumps(asdict(found)) + "\n")
        else:
            _show_comparison(found, one, other)


def _open(store: str, work: Path) -> Store:
    from tasks.retries import BRIEF
    from tasks.store import Store

    return Store(store, work / "scratch", patience=BRIEF)


def _find(name: str, store: Store, job: JobConfig | None, work: Path) -> Run:
    from tasks.runs import find_run
    from tasks.tracking import Tracking

    tracking = job.tracking if job is not None else Tracking()
    asked = tracking.uri or os.environ.get(MLFLOW) or (work / "mlflow.db").is_file()
    return find_run(name, store, tracking if asked else None, work)


def _job(config: str, work: Path) -> JobConfig:
    """The configuration of a job, or of a service."""
    try:
        return load(config, work)
    except ConfigError as error:
        try:
            return read_service(Path(config))
        except ConfigError:
            raise error from None


def _inputs(job: JobConfig, store: Store, work: Path) -> tuple[Any, Store, Any]:
    from tasks.edits import open_base
    from tasks.inputs import Inputs
    from tasks.place import Place

    # What is only looked at goes to a store of this machine.
    place = Place(work=str(work), store=str(work / "scratch" / "reproduced"))
    settings = {name: getattr(job, name).model_dump(mode="json") for name in ("ridge", "target")}
    inputs = Inputs(
        model=open_base(job.model, place, job.tracking)[0],
        retain=job.retain,
        hold_out=job.hold_out,
        background=job.background,
        forget=job.forget if isinstance(job, UnlearnConfig) else None,
        settings=settings,
    )
    return inputs, store, place


def _show_reproduced(found: Reproduced) -> None:
    console.print(Text(found.outcome, STYLES[found.outcome]), end="")
    console.print(f": {found.detail}; {found.seconds:.1f} s", highlight=False, soft_wrap=True)
    if found.sites:
        table = Table(title="|P - P'| / |P|")
        table.add_column("site", overflow="fold")
        table.add_column("relative", justify="right")
        for site, relative in found.sites:
            table.add_row(site, f"{relative:.1e}")
        console.print(table)
    if found.first is None:
        console.print("every fact is as it was recorded")
        return
    _show_differences(found.differences)


def _show_differences(differences: tuple[Difference, ...]) -> None:
    first = differences[0]
    console.print(
        Text(f"first fact that differs: {first.topic}: {first.fact}", "yellow"), soft_wrap=True
    )
    table = Table()
    for column in ("of", "fact", "then", "now"):
        table.add_column(column, overflow="fold")
    for one in differences:
        table.add_row(*map(Text, (one.topic, one.fact, one.then, one.now)))
    console.print(table)


def _show_comparison(found: Comparison, one: str, other: str) -> None:
    if not found.facts:
        console.print("no fact differs")
    else:
        table = Table(title="facts that differ, in the order of the pipeline")
        for column in ("fact", one, other):
            table.add_column(column, overflow="fold")
        for fact in found.facts:
            table.add_row(*(Text(str(cell)) for cell in fact))
        console.print(table)
    table = Table(title="numbers")
    for column in ("what", one, other):
        table.add_column(column, overflow="fold")
    for name, then, now in found.numbers:
        if then != now and not (math.isnan(then) and math.isnan(now)):
            table.add_row(Text(name), f"{then:.6g}", f"{now:.6g}")
    if table.row_count:
        console.print(table)
    for site, relative in found.sites:
        console.print(f"{site}: |P - Q| / |P| = {relative:.1e}", highlight=False, soft_wrap=True)
    if found.alone:
        console.print(f"edited by one of them only: {', '.join(found.alone)}", soft_wrap=True)
