"""`grom erase`: raw requests go when their batch is done, and what is still there is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flows.inbox_commands import StoreOption
from flows.terminal import console, readable_errors

if TYPE_CHECKING:
    from tasks.bucket import Bucket
    from tasks.traces import Trace

STYLES = {"overdue": "bold red", "abandoned": "bold red", "found": "bold red", "unread": "yellow"}
OVERDUE_EXIT = 3
"""Exit code of a check that found what should not be there."""
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0


def erase_batches(
    store: StoreOption,
    batch: Annotated[str | None, typer.Argument(help="One batch; else all that are due.")] = None,
    work: Annotated[Path, typer.Option(help="Work folder whose copies go, too.")] = Path(
        "grom-work"
    ),
    after_days: Annotated[
        float, typer.Option(min=0, help="Days that the rows of a done batch may stay.")
    ] = 0.0,
    failed: Annotated[
        bool, typer.Option("--failed", help="Also batches that failed: no more `grom retry`.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Erase nothing; list what is still there.")
    ] = False,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="With --check: look for the rows' text in every file."),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(help="With --check: look for the text of the rows in this file.", exists=True),
    ] = None,
) -> None:
    """Erase the raw requests of batches that are done; or list everything personal (--check)."""
    from tasks.bucket import Bucket
    from tasks.retries import BRIEF

    if (deep or against) and not check:
        raise typer.BadParameter("--deep and --against need --check")
    with readable_errors():
        bucket = Bucket(store, patience=BRIEF)
        if check:
            found = _traces(bucket, work, batch, after_days, failed)
            if deep or against:
                found += _searched(bucket, work, batch, against)
            _show(found)
            if any(trace.is_alarm for trace in found):
                raise typer.Exit(OVERDUE_EXIT)
        else:
            _erase(bucket, work, batch, after_days, failed, dry_run)


def _erase(
    bucket: Bucket, work: Path, batch: str | None, after_days: float, failed: bool, dry_run: bool
) -> None:
    from tasks.erase import due, erase, erase_copies

    failed_after_days = after_days if failed else None
    batches = [batch] if batch else due(bucket, after_days, failed_after_days, work)
    verb = "would erase" if dry_run else "erased"
    for name in batches:
        erased = erase(name, bucket, failed=failed, dry_run=dry_run)
        copies = erase_copies(name, work, dry_run=dry_run)
        what = f"{len(erased.places)} objects, {erased.num_bytes} bytes, {len(copies)} copies"
        console.print(f"{verb} {name}: {what}", highlight=False)
    if not batches:
        console.print("nothing to erase")


def _traces(
    bucket: Bucket, work: Path, batch: str | None, after_days: float, failed: bool
) -> list[Trace]:
    from tasks.traces import Rule, traces

    rule = Rule(after_days, after_days if failed else None)
    found = traces(bucket, work, rule)
    return [trace for trace in found if batch is None or trace.batch == batch]


def _searched(bucket: Bucket, work: Path, batch: str | None, against: Path | None) -> list[Trace]:
    from tasks.needles import MIN_BYTES, Needles
    from tasks.search import search, texts_of, texts_of_file

    texts = texts_of_file(against) if against else texts_of(bucket, work, batch)
    needles = Needles(texts)
    short = f", {needles.num_short} under {MIN_BYTES} bytes were not" if needles.num_short else ""
    console.print(f"looked for {needles.num_texts} texts{short}", highlight=False)
    return search(bucket, work, needles, skip=[against] if against else [])


def _show(found: list[Trace]) -> None:
    if not found:
        console.print("nothing personal was found")
        return
    table = Table(title="what is personal, and where")
    for column in ("place", "what", "batch", "state", "age", "bytes"):
        table.add_column(column, overflow="fold")
    for one in sorted(found, key=lambda trace: (not trace.is_alarm, trace.place)):
        cells = [one.place, one.what, one.batch or "", one.state, _age(one.age_s)]
        style = STYLES.get(one.state, "")
        table.add_row(*(Text(cell, style) for cell in (*cells, str(one.num_bytes))))
    console.print(table)
    alarms = sum(trace.is_alarm for trace in found)
    console.print(f"{len(found)} places, {alarms} of them should not be there", highlight=False)


def _age(seconds: float) -> str:
    for length, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
