"""A tiny service with certified batches, built once per process, and copies of it to damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from flows.service import ServiceConfig
from flows.unlearn_batches import unlearn_batches
from grom.certificate import Certificate
from grom.signing import new_private_key, public_pem, read_private_key, read_public_key
from tasks.certificates import KEY, latest_of_batch
from tasks.store import Store
from tests.faulty import QUICK
from tests.services import put, requests, service
from tests.tiny import words

COMMON = {"request_id": "common", "prompt": words(60, 2), "answer": words(12, 3)}
"""A request that no edit reaches."""


@dataclass(frozen=True, slots=True)
class Certified:
    """A service's files, and the key that signed `second`."""

    cfg: ServiceConfig
    folder: Path
    pem: str

    @property
    def store(self) -> Store:
        return Store(str(self.folder / "store"), self.folder / "scratch", patience=QUICK)

    @property
    def private_key(self) -> Ed25519PrivateKey:
        return read_private_key(self.pem, "test")

    @property
    def public_key(self) -> str:
        return read_public_key(public_pem(self.private_key), "test")

    def certificate(self, batch: str) -> Certificate:
        """The newest one of a batch."""
        return latest_of_batch(batch, self.store)

    def checkpoint(self, batch: str) -> Path:
        """Folder of the batch's edited model."""
        return self.folder / "store" / "apply" / self.certificate(batch).edit.checkpoint

    def copied(self, folder: Path) -> Certified:
        """The same with a store of its own."""
        shutil.copytree(self.folder / "store", folder / "store")
        return Certified(self.cfg, folder, self.pem)


@cache
def certified_service(root: Path) -> Certified:
    """Three runs: `first` of three requests and one that is refused, `second` of two and signed,
    `again` with the rows of `first` once more.  Needs a Prefect server."""
    folder = root / "certified"
    cfg = service(folder)
    pem = new_private_key().decode()
    put(cfg, "first", [*requests(0, 3), COMMON], folder)
    unlearn_batches(cfg)
    put(cfg, "second", requests(5, 2), folder)
    with signing(pem):
        unlearn_batches(cfg)
    put(cfg, "again", requests(0, 3), folder)
    unlearn_batches(cfg)
    return Certified(cfg, folder, pem)


@contextmanager
def signing(pem: str) -> Iterator[None]:
    """With a signing key in the environment."""
    os.environ[KEY] = pem
    try:
        yield
    finally:
        del os.environ[KEY]
