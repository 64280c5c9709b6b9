"""What tests of the command line share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_environment() -> Iterator[None]:
    """The command line sets variables and log levels for its process."""
    before = dict(os.environ)
    loggers = [logging.getLogger(name) for name in ("grom", "tasks", "flows", "alembic")]
    levels = [logger.level for logger in loggers]
    yield
    os.environ.clear()
    os.environ.update(before)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
