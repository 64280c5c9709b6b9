"""Notifications of the store by way of a queue: SQS, or what speaks its language.

A bucket tells its queue about new objects, itself, through SNS or through EventBridge.  Of those
only `<root>/inbox/<batch>/_READY.json` rings.  A message is deleted after what it announces was
handled, never before: who is killed in between gets it again.

deleted         handled; about other objects; the queue's own test
left            not understood, or its batch is not whole: after some receptions SQS moves it to the
                dead-letter queue, if there is one, and logs never show what it says
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus, urlsplit

from grom.errors import ConfigError, DataError, GromError, ResourceError
from tasks.manifest import BATCH_NAME, INBOX, READY
from tasks.retries import BAD_ADDRESS, NO_CREDENTIALS, REFUSING_CODES, code_of, kind_of, passes

logger = logging.getLogger(__name__)
LONGEST_POLL_S = 20
VISIBILITY_S = 180
"""A message is seen by nobody else for so long: ten of them, and a server that is slow."""
MISSING_CODES = {"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"}
REFUSED_CODES = REFUSING_CODES | {
    "AccessDeniedException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
}
AWS_HOST = re.compile(r"sqs(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
DEFAULT_REGION = "us-east-1"


class QueueMissing(ConfigError):
    """There is no such queue."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}: there is no such queue. Check the URL and the account.")


class QueueRefused(ConfigError):
    """The queue does not accept the credentials, or they may not do this."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"{url}: the queue refuses access ({reason}). Check the credentials and that they may "
            "`sqs:ReceiveMessage` and `sqs:DeleteMessage`."
        )


class QueueUnreachable(ResourceError):
    """The queue did not answer."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"{url}: no usable answer of the queue ({reason}). Check URL and network; messages "
            "stay in the queue, and the sweep finds their batches anyway."
        )


class NotUnderstood(DataError):
    """A message is no notification of a store."""

    def __init__(self) -> None:
        super().__init__("not a notification of S3. Check who else sends to this queue.")


@dataclass(frozen=True, slots=True)
class Polled:
    """What one look into the queue came to."""

    batches: tuple[str, ...] = ()
    """That were handled, each once."""
    deleted: int = 0
    left: int = 0


class Queue:
    """The queue that a store's bucket notifies.

    Args:
        url: as `aws sqs get-queue-url` prints it.  Region and endpoint come from it, credentials
            from the provider's chain.
        root: of the store, `s3://bucket/prefix`.

    Raises:
        ConfigError: one is not of that kind.
    """

    def __init__(self, url: str, root: str) -> None:
        import boto3

        if not root.startswith(("s3://", "s3a://")):
            raise ConfigError(
                f"{root}: only S3 notifies a queue. Use `grom sweep --every SECONDS`."
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.path.strip("/"):
            raise ConfigError(
                f"{url}: not the URL of a queue. `aws sqs get-queue-url --queue-name NAME` has it."
            )
        session = boto3.Session()
        at_aws = AWS_HOST.fullmatch(parts.hostname or "")
        region = at_aws.group(1) if at_aws else session.region_name or DEFAULT_REGION
        endpoint = None if at_aws else f"{parts.scheme}://{parts.netloc}"
        self.url, self.root = url, root
        self._client = session.client("sqs", region_name=region, endpoint_url=endpoint)

    def receive(self, wait_s: int, visibility_s: int) -> list[dict[str, Any]]:
        """Up to ten messages, after `wait_s` at most.

        Raises:
            QueueMissing, QueueRefused, QueueUnreachable: as they say.
        """
        answer = self._ask(
            "receive_message",
            MaxNumberOfMessages=10,
            WaitTimeSeconds=wait_s,
            VisibilityTimeout=visibility_s,
        )
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def delete(self, message: dict[str, Any]) -> None:
        """Remove a message for good; raises as `receive`."""
        self._ask("delete_message", ReceiptHandle=message["ReceiptHandle"])

    def _ask(self, method: str, **what: Any) -> Any:
        try:
            return getattr(self._client, method)(QueueUrl=self.url, **what)
        except Exception as error:
            if (named := self._named(error)) is None:
                raise
            raise named from error

    def _named(self, error: Exception) -> GromError | None:
        code = code_of(error)
        if code in MISSING_CODES:
            return QueueMissing(self.url)
        if isinstance(error, NO_CREDENTIALS) or code in REFUSED_CODES:
            return QueueRefused(self.url, code or "no credentials were found")
        if isinstance(error, BAD_ADDRESS) or "Invalid endpoint" in str(error):
            return ConfigError(f"{self.url}: not a usable address. Check the URL of the queue.")
        if passes(error) or code is not None:
            return QueueUnreachable(self.url, kind_of(error))
        return None


def poll(
    queue: Queue,
    handle: Callable[[str], object],
    wait_s: int = LONGEST_POLL_S,
    visibility_s: int = VISIBILITY_S,
) -> Polled:
    """Wait for messages once, and handle each batch that they announce.

    Args:
        queue: where from.
        handle: called with a batch's name; what it returns does not matter.  A DataError leaves the
            message in the queue, any other error ends the poll and leaves the others as well.
        wait_s: how long to wait for the first message, 20 at most.
        visibility_s: so long after they were received, messages that are left come again.

    Raises:
        QueueMissing, QueueRefused, QueueUnreachable: as they say.
    """
    handled: dict[str, None] = {}
    deleted = left = 0
    for message in queue.receive(wait_s, visibility_s):
        try:
            for batch in announced(message["Body"], queue.root):
                if batch not in handled:
                    handle(batch)
                handled[batch] = None
        except DataError as error:
            logger.warning("message %s stays in the queue: %s", message["MessageId"], error)
            left += 1
            continue
        queue.delete(message)
        deleted += 1
    return Polled(tuple(handled), deleted, left)


def announced(body: str, root: str) -> list[str]:
    """The batches below a root that a message says are complete.

    Raises:
        NotUnderstood: it is no notification.
    """
    bucket, _, prefix = root.partition("://")[2].strip("/").partition("/")
    pattern = re.compile(
        f"{re.escape(f'{prefix}/' if prefix else '')}{INBOX}/({BATCH_NAME.pattern})/{READY}"
    )
    found: dict[str, None] = {}
    try:
        for where, key in _created(_parsed(body)):
            # S3 encodes keys, EventBridge and some others do not.
            matches = [pattern.fullmatch(name) for name in (unquote_plus(key), key)]
            if where == bucket and (match := next(filter(None, matches), None)):
                found[match.group(1)] = None
    except (KeyError, TypeError, AttributeError):
        raise NotUnderstood from None
    return list(found)


def _created(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Bucket and key of each new object, whatever the message is wrapped in."""
    if message.get("Type") == "Notification":  # SNS
        message = _parsed(message["Message"])
    if message.get("Event") == "s3:TestEvent":
        return
    if message.get("source") == "aws.s3":  # EventBridge
        if message["detail-type"] == "Object Created":
            yield _object(message["detail"])
        return
    records: Iterable[dict[str, Any]] = message["Records"]
    for record in records:
        if record["eventName"].removeprefix("s3:").startswith("ObjectCreated:"):
            yield _object(record["s3"])


def _object(found: dict[str, Any]) -> tuple[str, str]:
    return str(found["bucket"]["name"]), str(found["object"]["key"])


def _parsed(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise NotUnderstood from None
    if not isinstance(parsed, dict):
        raise NotUnderstood
    return parsed
