"""`grom withdraw`: a person takes a deletion request back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
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
        Path | None,
        typer.Option(help="The request's rows, needed if `collect.keep_request_keys` was off."),
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
        with plain_logs(quiet=False), hashed_rows(rows, request_id, digest, cfg.work) as copy:
            done = withdraw(cfg, digest, reason, copy)
        console.print(
            f"withdrawn from {', '.join(done.batches)}: version {done.version} serves, and "
            f"{done.num_left} requests are still honoured",
            highlight=False,
        )


@contextmanager
def hashed_rows(rows: Path | None, request_id: str, digest: str, work: str) -> Iterator[str | None]:
    """A copy of the request's rows under its hash, gone after the block.

    Raises:
        DataError: the file has no row of the request.
    """
    if rows is None:
        yield None
        return
    from tasks.requests import Reading, read_requests

    folder = Path(work) / "scratch" / "forget" / f"withdraw-{digest[:12]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        found = [
            json.loads(one.to_bytes()) | {"request_id": digest}
            for one in read_requests([(rows.name, rows)], Reading())
            if one.request_id == request_id
        ]
        if not found:
            raise DataError(f"{rows}: no row of this request. Name the file that has its rows.")
        copy = folder / "rows.jsonl"
        copy.write_text("".join(f"{json.dumps(row)}\n" for row in found))
        yield str(copy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
