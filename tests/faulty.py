"""A store that fails on purpose: what networks, proxies and servers do to requests.

refused         the connection is refused; nothing happened
slow            the request timed out on its way; nothing happened
busy            503 SlowDown; nothing happened
expired         the token is no longer valid, until the session is opened anew
lost reply      it happened, and the answer did not arrive
twice           it was delivered twice; the second answer arrived
truncated       half of the bytes arrived
lag             a listing shows what was there some listings ago
"""

from __future__ import annotations

import errno
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from unittest.mock import patch

from botocore.exceptions import ClientError

from tasks.backends import Backend, Entry, Found
from tasks.bucket import Bucket
from tasks.retries import Patience
from tasks.store import Store

Answer = TypeVar("Answer")
Choose = Callable[[str], str | None]
FAULTS = ("refused", "slow", "busy", "expired", "lost reply", "twice", "truncated", "lag")
QUICK = Patience(attempts=12, first_s=0.001, longest_s=0.01)


def s3_error(kind: type[OSError], code: str, status: int) -> OSError:
    """An error as s3fs raises it."""
    error = kind(errno.EIO, code)
    response: Any = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error.__cause__ = ClientError(response, "GetObject")
    return error


def once(fault: str) -> Choose:
    """The first request of each kind meets the fault."""
    met: Counter[str] = Counter()

    def choose(operation: str) -> str | None:
        met[operation] += 1
        return fault if met[operation] == 1 else None

    return choose


def storm(seed: int, share: float = 0.3, faults: Sequence[str] = FAULTS) -> Choose:
    """Any request meets any fault, with a probability."""
    numbers = random.Random(seed)
    return lambda _: numbers.choice(faults) if numbers.random() < share else None


@contextmanager
def bad_connection(choose: Choose, delay_s: float = 0.0) -> Iterator[Counter[str]]:
    """Within the block every bucket of this process has a bad connection; the faults it met."""
    plain, faults = Bucket.__dict__["backend"], Counter[str]()

    def chosen(operation: str) -> str | None:
        time.sleep(delay_s)
        fault = choose(operation)
        faults.update([fault] if fault else [])
        return fault

    broken = cached_property(lambda bucket: FaultyBackend(plain.func(bucket), chosen))
    broken.__set_name__(Bucket, "backend")
    with patch.object(Bucket, "backend", broken), patch("tasks.bucket.Patience", lambda: QUICK):
        yield faults


def faulty(store: Store, choose: Choose) -> Store:
    """The same store, through a bad connection."""
    broken = Store(store.root, store.scratch, store._options, QUICK)
    broken.backend = FaultyBackend(store.backend, choose)
    return broken


class FaultyBackend:
    """A backend whose requests meet faults."""

    def __init__(self, backend: Backend, choose: Choose) -> None:
        self.backend, self._choose = backend, choose
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._expired = False
        self._listings: dict[str, list[Entry]] = {}

    def read(self, name: str, limit: int) -> Found | None:
        fault, found = self._meets("read", lambda: self.backend.read(name, limit))
        if fault == "truncated" and found is not None:
            return replace(found, data=found.data[: len(found.data) // 2])
        return found

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        fault, announced = self._meets("download", lambda: self._from_start(name, target, limit))
        if fault == "truncated" and announced is not None:
            target.truncate(target.tell() // 2)
            target.seek(0, 2)
        return announced

    def upload(self, source: Path, name: str) -> int:
        fault, size = self._meets("upload", lambda: self.backend.upload(source, name))
        if fault == "truncated":
            with tempfile.NamedTemporaryFile() as half:
                half.write(source.read_bytes()[: size // 2])
                half.flush()
                return self.backend.upload(Path(half.name), name)
        return size

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        return self._meets("swap", lambda: self.backend.swap(name, data, version))[1]

    def delete(self, name: str) -> None:
        self._meets("delete", lambda: self.backend.delete(name))

    def entries(self, folder: str) -> list[Entry]:
        fault, now = self._meets("entries", lambda: self.backend.entries(folder))
        before, self._listings[folder] = self._listings.get(folder, []), now
        return before if fault == "lag" else now

    def now(self) -> float:
        return self._meets("now", lambda: self.backend.now())[1]

    def reopen(self) -> None:
        self._expired = False
        self.backend.reopen()

    def _from_start(self, name: str, target: BinaryIO, limit: int) -> int | None:
        target.seek(0)
        target.truncate()
        return self.backend.download(name, target, limit)

    def _meets(self, operation: str, do: Callable[[], Answer]) -> tuple[str | None, Answer]:
        fault = self._choose(operation)
        self.requests[operation] += 1
        self.faults[fault or "none"] += 1
        self._expired = self._expired or fault == "expired"
        if self._expired:
            raise s3_error(PermissionError, "ExpiredToken", 400)
        if fault == "refused":
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        if fault == "slow":
            raise TimeoutError("slow")
        if fault == "busy":
            raise s3_error(OSError, "SlowDown", 503)
        if fault in ("lost reply", "twice"):
            do()
            if fault == "lost reply":
                raise ConnectionResetError(errno.ECONNRESET, "reset")
        return fault, do()
