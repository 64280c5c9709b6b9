"""`grom sweep`, `grom listen`: the doorbells that one runs oneself."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import GromError

logger = logging.getLogger(__name__)
LONGEST_PAUSE_S = 60.0
ServiceOption = Annotated[Path, typer.Option("--config", help="The service's YAML file.")]


def sweep_inbox(
    config: ServiceOption,
    every: Annotated[
        float | None, typer.Option(min=1, help="Seconds between sweeps, until Ctrl-C; else once.")
    ] = None,
) -> None:
    """Look into the inbox, and start a run if a batch waits."""
    with readable_errors():
        from flows.service import read_service

        cfg = read_service(config)
        prepare_environment(Path(cfg.work))
        from flows.sweep import look

        with plain_logs(quiet=False):
            if every is None:
                look(cfg)
                return
            with until_stopped():
                repeat(lambda: look(cfg), every)


def listen_to_queue(
    config: ServiceOption,
    queue: Annotated[str, typer.Option(help="URL of the SQS queue that the bucket notifies.")],
) -> None:
    """Start a run whenever the store's bucket announces a batch, until Ctrl-C."""
    with readable_errors():
        from flows.service import read_service

        cfg = read_service(config)
        prepare_environment(Path(cfg.work))
        from tasks.bucket import Bucket
        from tasks.doorbell import answer
        from tasks.sqs import Queue, poll

        source, bucket = Queue(queue, cfg.store), Bucket(cfg.store)
        deployment = f"unlearn-batches/{cfg.name}"

        def handle(batch: str) -> None:
            answer(batch, bucket, deployment, stuck_s=cfg.lease_s)

        with plain_logs(quiet=False), until_stopped():
            console.print(f"listening to {queue}", highlight=False, soft_wrap=True)
            repeat(lambda: poll(source, handle), 0.0)


def repeat(do: Callable[[], object], every_s: float) -> None:
    """Do something for ever.  What fails is said and done again: after every_s, and after twice as
    long each time, up to a minute, if that is longer."""
    failures = 0
    while True:
        try:
            do()
            failures = 0
        except GromError as error:
            failures = min(failures + 1, 10)
            logger.warning("%s: %s", type(error).__name__, error)
        pause_s = min(2.0**failures, LONGEST_PAUSE_S) if failures else 0.0
        time.sleep(max(every_s, pause_s))


@contextmanager
def until_stopped() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block without an error."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
