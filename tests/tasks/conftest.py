"""Stores to test with: a local folder, and an S3 server in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from tasks.store import Store
from tests.faulty import QUICK

BUCKET = "grom-tests"


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """Address of an S3 server in this process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    account = {"key": "testing", "secret": "testing", "endpoint_url": address}
    fsspec.filesystem("s3", **account).mkdir(BUCKET)
    yield address
    server.stop()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store."""
    scratch = tmp_path / "scratch"
    if request.param == "local":
        return Store(str(tmp_path / "store"), scratch, patience=QUICK)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    options = {"endpoint_url": request.getfixturevalue("endpoint")}
    return Store(f"s3://{BUCKET}/{uuid4().hex}/artifacts", scratch, options, QUICK)
