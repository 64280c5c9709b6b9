"""The terminal: where lines go, embedded defaults, readable errors."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.logging import RichHandler

from grom.errors import GromError

console = Console()
errors = Console(stderr=True)


def prepare_environment(work: Path) -> None:
    """Embedded defaults, for this process and its children: nothing outside the work folder, no
    call to a hub or a telemetry service.  What the environment says already stays."""
    work.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    defaults = {
        "PREFECT_HOME": str((work / "prefect").resolve()),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "grom,tasks,flows",
        "PREFECT_LOGGING_ROOT_LEVEL": "INFO",  # else these say nothing below a warning
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def quiet_libraries() -> None:
    """No progress bars, warnings and telemetry of libraries, unless the environment wants them."""
    defaults = {
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def plain_logs(*, quiet: bool) -> Iterator[None]:
    """Our own log lines on the terminal, beside the progress bars."""
    warnings.filterwarnings("ignore", module=r"(transformers|bitsandbytes|mlflow|torch)\.")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    handler = RichHandler(console=errors, show_path=False, markup=False)
    level = logging.WARNING if quiet else logging.INFO
    loggers = [logging.getLogger(name) for name in ("grom", "tasks", "flows")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def readable_errors() -> Iterator[None]:
    """A failure that the user can cure is a message and exit code 1, without a traceback."""
    try:
        yield
    except GromError as error:
        errors.print(f"[bold red]{type(error).__name__}:[/] ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
