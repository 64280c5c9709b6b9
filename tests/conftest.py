"""Settings of every test: offline, seeded, reproducible examples from Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "AWS_EC2_METADATA_DISABLED": "true",
}
os.environ.update(OFFLINE)  # before a test module imports transformers, prefect or mlflow

pytest_plugins = ["tests.servers"]

# deadline: the first call into torch takes longer than any sensible one.
settings.register_profile("grom", deadline=None, max_examples=15, derandomize=True, database=None)
settings.load_profile("grom")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A real Prefect server with its own database, for every flow of the session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield
