"""Keeping a claim while a run of hours works: a thread that renews it."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from grom.errors import GromError
from tasks import claims
from tasks.bucket import Bucket
from tasks.claims import Claim, LeaseLost
from tasks.outcomes import Outcome

logger = logging.getLogger(__name__)
RENEWALS_PER_LEASE = 3


class Keeper:
    """A claim that is renewed in the background until the block ends or an outcome is written.

    The claim stays when the block ends, so that a run that was killed and one that failed look the
    same: its owner resumes, or another takes over when the lease has run out.
    """

    def __init__(self, held: Claim, bucket: Bucket) -> None:
        """held: the claim, which nobody else may renew meanwhile."""
        self._held, self._bucket = held, bucket
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._lost: LeaseLost | None = None
        self._thread = threading.Thread(target=self._beat, daemon=True, name="claim keeper")

    def __enter__(self) -> Self:
        """Start to renew."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    @property
    def run(self) -> str | None:
        """The run that works on the batch, perhaps begun by an earlier owner."""
        return self._held.record.run

    @property
    def token(self) -> int:
        """Fencing token."""
        return self._held.token

    def check(self) -> None:
        """Do nothing while the claim is held.

        Raises:
            LeaseLost: another worker has it.
        """
        if self._lost is not None:
            raise self._lost

    def renew(
        self,
        run: str | None = None,
        lease_s: float | None = None,
        expires_as: str | None = None,
    ) -> None:
        """See `claims.renew`."""
        with self._lock:
            self._held = claims.renew(self._held, self._bucket, run, lease_s, expires_as)

    def release(self, note: str | None = None) -> None:
        """See `claims.release`."""
        with self._lock:
            self._stop.set()
            claims.release(self._held, self._bucket, note)

    def finish(
        self,
        model_version: str | None = None,
        certificate: str | None = None,
        ledger: str | None = None,
    ) -> Outcome:
        """See `claims.finish`."""
        with self._lock:
            self._stop.set()
            return claims.finish(
                self._held,
                self._bucket,
                model_version=model_version,
                certificate=certificate,
                ledger=ledger,
            )

    def fail(self, reason: str) -> Outcome:
        """See `claims.fail`."""
        with self._lock:
            self._stop.set()
            return claims.fail(self._held, self._bucket, reason)

    def _beat(self) -> None:
        while not self._stop.wait(self._held.record.lease_s / RENEWALS_PER_LEASE):
            with self._lock:
                if self._stop.is_set():
                    return
                try:
                    self._held = claims.renew(self._held, self._bucket)
                except LeaseLost as lost:
                    self._lost = lost
                    logger.warning("%s", lost)
                    return
                except GromError as error:  # the lease may outlast it
                    logger.warning("batch %s: not renewed (%s)", self._held.batch, error)
