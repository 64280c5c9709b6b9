"""Which failures of a store pass by themselves, how long to wait, and how to name those that stay.

Tried again: connections that break, timeouts, 5xx, SlowDown, expired tokens.  Never tried again:
what is wrong with the request or the data.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto

from grom.errors import ConfigError, GromError, NotEnoughDisk, ResourceError

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")

PASSING_CODES = {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
REFUSING_CODES = {
    "403",
    "AccessDenied",
    "AllAccessDisabled",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
SKEWED_CODE, NO_BUCKET_CODE = "RequestTimeTooSkewed", "NoSuchBucket"
BAD_NAME_CODE = "InvalidBucketName"
PASSING_ERRNOS = {errno.EBUSY, errno.EREMOTEIO, errno.ESTALE, errno.EAGAIN, errno.EINTR}
PASSING_TYPES = (
    ConnectionError,
    TimeoutError,
    aiohttp.ClientError,
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
)
NO_CREDENTIALS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound)
BAD_ADDRESS = (boto.ParamValidationError, boto.InvalidRegionError, boto.NoRegionError)


class BucketMissing(ConfigError):
    """The bucket does not exist."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: there is no such bucket. Check its name and the endpoint "
            "(AWS_ENDPOINT_URL_S3), or create the bucket."
        )


class AccessRefused(ConfigError):
    """The store does not accept the credentials, or they may not do this."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: the store refuses access ({reason}). Check the credentials (AWS_PROFILE, or "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY) and that they may list, read, write and "
            "delete there."
        )


class StoreUnreachable(ResourceError):
    """The store did not answer, or answered with errors of its own, until patience ran out."""

    def __init__(self, where: str, reason: str, attempts: int) -> None:
        super().__init__(
            f"{where}: no usable answer in {attempts} attempts ({reason}). Check that the endpoint "
            "is right and the server runs; nothing was lost, start again when it does."
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How often to try, and how long to wait in between: doubling, half of it random."""

    attempts: int = 10
    first_s: float = 0.2
    longest_s: float = 15.0

    def waits_s(self) -> Iterator[float]:
        """Seconds before the second, third, ... attempt; 27 to 54 in all by default."""
        for attempt in range(self.attempts - 1):
            wait = min(self.longest_s, self.first_s * 2**attempt)
            yield wait * random.uniform(0.5, 1.0)


BRIEF = Patience(attempts=3)
"""For someone who waits at a terminal."""


def patiently(
    do: Callable[[], Answer], where: str, patience: Patience, reopen: Callable[[], None]
) -> Answer:
    """Do something with a store until it works.

    Args:
        do: what to do; may have happened although it failed, so it must bear being done twice.
        where: names the store in messages.
        patience: how often.
        reopen: builds a new session, with new credentials.

    Raises:
        BucketMissing, AccessRefused, StoreUnreachable, NotEnoughDisk: as they say.
    """
    waits = patience.waits_s()
    while True:
        try:
            return do()
        except Exception as error:
            wait_s = next(waits, None) if passes(error) else None
            if wait_s is None:
                if (named := explained(error, where, patience.attempts)) is None:
                    raise
                raise named from error
            logger.info("store %s: %s; again in %.1f s", where, kind_of(error), wait_s)
            time.sleep(wait_s)
            if code_of(error) in EXPIRED_CODES:
                reopen()


def passes(error: BaseException) -> bool:
    """Whether the same request may work a little later."""
    if isinstance(error, GromError | FileNotFoundError | FileExistsError):
        return False
    code = code_of(error)
    if code is not None:
        return code in PASSING_CODES | EXPIRED_CODES or _status_of(error) >= 500
    if isinstance(error, PASSING_TYPES):
        return True
    return isinstance(error, OSError) and error.errno in PASSING_ERRNOS


def explained(error: BaseException, where: str, attempts: int) -> GromError | None:
    """The error as its reader needs it; None if it is not one of a store."""
    code = code_of(error)
    if isinstance(error, GromError):
        return None
    if code == NO_BUCKET_CODE:
        return BucketMissing(where)
    if code == SKEWED_CODE:
        return AccessRefused(where, "this machine's clock is wrong, set it first")
    if isinstance(error, NO_CREDENTIALS):
        return AccessRefused(where, "no credentials were found")
    if code in REFUSING_CODES | EXPIRED_CODES or isinstance(error, PermissionError):
        return AccessRefused(where, code or kind_of(error))
    if isinstance(error, BAD_ADDRESS) or code == BAD_NAME_CODE or "Invalid endpoint" in str(error):
        return ConfigError(f"{where}: not a usable address. Check bucket name and endpoint.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughDisk(where, 0.0, 0.0)
    return StoreUnreachable(where, kind_of(error), attempts) if passes(error) else None


def code_of(error: BaseException) -> str | None:
    """The store's own word for an error, like `SlowDown`; None if the store did not say one."""
    response = _response_of(error)
    code = response.get("Error", {}).get("Code") if response else None
    return None if code is None else str(code)


def kind_of(error: BaseException) -> str:
    """What went wrong, in a word; never the error's text, which may quote what was sent."""
    return code_of(error) or type(error).__name__


def _status_of(error: BaseException) -> int:
    response = _response_of(error) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _response_of(error: BaseException) -> dict[str, Any] | None:
    for link in (error, error.__cause__):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return response
    return None
