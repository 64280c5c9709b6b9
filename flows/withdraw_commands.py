"""`grom withdraw`: a person takes a deletion request back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import DataError


def withdraw_request(
    request_id: Annotated[str, typer.Argument(help="Id of the request, as it was submitted.")],
    config: Annotated[Path, typer.Option(help="The service's YAML file.")],
    reason: Annotated[str, typer.Option(help="Why; is recorded. No personal data.")],
    rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="The request's rows, needed if `collect.keep_request_keys` was off; a file for "
            "each batch that has the request.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Take one deletion request back: the model that serves then never had it."""
    from flows.service import read_service

    with readable_errors():
        cfg = read_service(config)
        prepare_environment(Path(cfg.work))
        from flows.withdraw import withdraw
        from grom.ledger import request_hash
        from tasks.bucket import Bucket
        from tasks.ledger import Ledger

        salt = Ledger(Bucket(cfg.store)).salt()
        digest = request_hash(request_id, salt)
        with (
            plain_logs(quiet=False),
            hashed_rows(rows or [], request_id, digest, cfg.work) as copies,
        ):
            done = withdraw(cfg, digest, reason, copies)
        console.print(
            f"withdrawn from {', '.join(done.batches)}: version {done.version} serves, and "
            f"{done.num_left} requests are still honoured",
            highlight=False,
        )


@contextmanager
def hashed_rows(
    rows: Sequence[Path], request_id: str, digest: str, work: str
) -> Iterator[tuple[str, ...]]:
    """A copy of the request's rows in each file, under its hash; gone after the block.

    Raises:
        DataError: a file has no row of the request, or a bad row.
    """
    from tasks.requests import Reading, read_requests

    folder = Path(work) / "scratch" / "forget" / f"withdraw-{digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    copies = []
    try:
        for number, path in enumerate(rows):
            reading = Reading()
            found = [
                json.loads(one.to_bytes()) | {"request_id": digest}
                for one in read_requests([(path.name, path)], reading)
                if one.request_id == request_id
            ]
            if reason := reading.reason():
                raise DataError(
                    f"{reason}. Put the row right; rows of the same request in several batches go "
                    "into a file each, each with its own --rows."
                )
            if not found:
                raise DataError(f"{path}: no row of this request. Name the file that has its rows.")
            copy = folder / f"rows-{number}.jsonl"
            copy.write_text("".join(f"{json.dumps(row)}\n" for row in found), encoding="utf-8")
            copies.append(str(copy))
        yield tuple(copies)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
