"""`grom submit`, `grom status`, `grom retry`: the life of a deletion batch, from the terminal."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.terminal import console, readable_errors
from grom.errors import BrokenLedger, GromError

if TYPE_CHECKING:
    from tasks.batches import BatchStatus
    from tasks.bucket import Bucket

StoreOption = Annotated[
    str,
    typer.Option(
        "--store", envvar="GROM_STORE", help="Root of the store: a folder, or s3://bucket/prefix."
    ),
]
STYLES = {
    "waiting": "yellow",
    "claimed": "cyan",
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
}


def submit_batch(
    files: Annotated[list[Path], typer.Argument(help="JSON Lines or Parquet files.")],
    store: StoreOption,
    batch: Annotated[
        str | None,
        typer.Option(help="Name of the batch, without personal data; else its content names it."),
    ] = None,
    ring: Annotated[
        str | None,
        typer.Option(help="Also tell this service, by its name, so that it need not sweep first."),
    ] = None,
) -> None:
    """Check files of deletion requests and put them into the inbox as one batch."""
    from tasks.submit import submit

    with readable_errors():
        submitted = submit(files, _open(store, probe=True), batch)
        what = f"{submitted.num_requests} requests in {submitted.num_files} files"
        if submitted.is_new:
            console.print(f"submitted {submitted.batch}: {what}", highlight=False)
        else:
            console.print(f"{submitted.batch} was there already: {what}; nothing was uploaded")
        if ring is not None:
            _announce(submitted.batch, ring)
        console.print(f"look: grom status {submitted.batch} --store {store}", soft_wrap=True)


def show_status(
    store: StoreOption,
    batch: Annotated[str | None, typer.Argument(help="One batch, in detail; else all.")] = None,
) -> None:
    """Show where each deletion batch stands, and what the ledger says of its requests."""
    from tasks.batches import status, statuses

    with readable_errors():
        bucket = _open(store)
        if batch is None:
            _show_table(statuses(bucket), _entered(bucket), store)
        else:
            _show_one(status(batch, bucket), _entered(bucket), store)


def retry_batch(
    batch: Annotated[str, typer.Argument(help="A batch that failed.")], store: StoreOption
) -> None:
    """Let a failed batch wait again, after what it failed for was put right."""
    from tasks.batches import retry

    with readable_errors():
        retry(batch, _open(store))
        console.print(f"{batch} waits again; the next sweep takes it up")


def _announce(batch: str, name: str) -> None:
    """The batch is in the inbox either way, so a server that is down is no failure."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    from tasks.doorbell import announce

    try:
        announce(batch, name)
    except GromError as error:
        console.print(Text(f"{name} was not told: {error}", "yellow"), soft_wrap=True)
        console.print("its next sweep finds the batch")
    else:
        console.print(f"told {name}", highlight=False)


def _open(store: str, probe: bool = False) -> Bucket:
    from tasks.bucket import Bucket
    from tasks.retries import BRIEF

    bucket = Bucket(store, patience=BRIEF)
    if probe:
        bucket.probe(swaps=True)
    return bucket


def _entered(bucket: Bucket) -> dict[str, str]:
    """What the ledger says of each batch's requests, in words."""
    from tasks.accepted import counted_by_batch
    from tasks.ledger import Ledger

    try:
        counts = counted_by_batch(Ledger(bucket).read())
    except BrokenLedger as error:
        console.print(f"[bold red]ledger:[/] {escape(str(error))}")
        return {}
    return {
        batch: ", ".join(f"{number} {state}" for state, number in found.items())
        for batch, found in counts.items()
    }


def _show_table(found: list[BatchStatus], entered: dict[str, str], store: str) -> None:
    if not found:
        console.print(f"{store}: no batches. `grom submit FILE --store {store}` makes one.")
        return
    table = Table(title="deletion batches")
    for column in ("batch", "state", "requests", "received", "since", "by", "note"):
        table.add_column(column, overflow="fold")
    for one in found:
        times = [_time(one.received), _time(one.since)]
        cells = [one.batch, one.state, entered.get(one.batch), *times, one.owner, one.note]
        styles = ["", STYLES[one.state], *[""] * 5]
        table.add_row(*(Text(cell or "", style) for cell, style in zip(cells, styles, strict=True)))
    console.print(table)


def _show_one(found: BatchStatus, entered: dict[str, str], store: str) -> None:
    outcome = found.outcome
    lines = {
        "batch": found.batch,
        "state": found.state,
        "requests": entered.get(found.batch),
        "received": _time(found.received),
        "since": _time(found.since),
        "by": found.owner,
        "token": None if found.token is None else str(found.token),
        "run": found.run,
        "model": outcome.model_version if outcome else None,
        "certificate": outcome.certificate if outcome else None,
        "why": found.note,
    }
    for name, value in lines.items():
        if value:
            console.print(
                Text(f"{name + ':':<13}{value}", STYLES[value] if name == "state" else ""),
                soft_wrap=True,
            )
    if found.state == "failed":
        console.print(
            f"cure:        put it right, then `grom retry {found.batch} --store {store}`",
            soft_wrap=True,
        )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
