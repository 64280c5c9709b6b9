"""Notifications by a queue: what rings, what does not, and when a message may go."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus
from uuid import uuid4

import boto3
import pytest

from grom.errors import ConfigError, DataError, GromError
from tasks.sqs import (
    NotUnderstood,
    Polled,
    Queue,
    QueueMissing,
    QueueRefused,
    QueueUnreachable,
    announced,
    poll,
)

CANARY = "Quxana-7f3a"
PREFIX = "our data+ü/eu"
"""Blanks, plus signs and letters beyond ASCII are what an encoding changes."""
ROOT = f"s3://forget-me/{PREFIX}"
Message = dict[str, Any]


def created(key: str, bucket: str = "forget-me", name: str = "ObjectCreated:Put") -> Message:
    """As S3 says it."""
    return {"eventName": name, "s3": {"bucket": {"name": bucket}, "object": {"key": key}}}


def records(*of: Message) -> str:
    """As S3 sends it."""
    return json.dumps({"Records": of})


def marker(batch: str = "b", prefix: str = PREFIX) -> str:
    """Key of a batch's marker, encoded as S3 does."""
    return quote_plus(f"{prefix}/inbox/{batch}/_READY.json", safe="/")


def through_sns(body: str) -> str:
    """As SNS wraps it."""
    return json.dumps({"Type": "Notification", "MessageId": "1", "Message": body})


def through_eventbridge(key: str, kind: str = "Object Created") -> str:
    """As EventBridge says it, whose keys are not encoded."""
    detail = {"bucket": {"name": "forget-me"}, "object": {"key": key, "size": 5}}
    return json.dumps({"source": "aws.s3", "detail-type": kind, "detail": detail})


TEST_EVENT = json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "forget-me"})
PLAIN = f"{PREFIX}/inbox/b/_READY.json"


@pytest.mark.parametrize(
    "body",
    [
        records(created(marker())),
        records(created(marker(), name="s3:ObjectCreated:CompleteMultipartUpload")),
        records(created(PLAIN)),  # some that speak S3's language do not encode
        records(created("x"), created(marker()), created(marker())),
        through_sns(records(created(marker()))),
        through_eventbridge(PLAIN),
        through_sns(through_eventbridge(PLAIN)),
    ],
)
def test_a_marker_rings_whoever_brings_it(body: str) -> None:
    assert announced(body, ROOT) == ["b"]


def test_a_store_may_be_a_whole_bucket() -> None:
    for root in ("s3://forget-me", "s3://forget-me/", "s3a://forget-me"):
        assert announced(records(created("inbox/b.1_x-y/_READY.json")), root) == ["b.1_x-y"]
        assert announced(records(created("x/inbox/b/_READY.json")), root) == []


@pytest.mark.parametrize(
    "body",
    [
        TEST_EVENT,
        through_sns(TEST_EVENT),
        records(),
        records(created(marker(), bucket="another")),
        records(created(marker(prefix="our data+ü"))),
        records(created(marker(), name="ObjectRemoved:Delete")),
        records(created(marker(batch="a/b"))),
        records(created(marker(batch="../../b"))),
        records(created(marker(batch="a b"))),
        records(created(marker(batch=""))),
        records(created(f"{marker()}.tmp")),
        records(created(marker().replace("_READY", "manifest"))),
        records(created(marker().replace("inbox", "done"))),
        through_eventbridge(PLAIN, kind="Object Deleted"),
        through_eventbridge(f"x/{PLAIN}"),
    ],
)
def test_nothing_else_rings(body: str) -> None:
    assert announced(body, ROOT) == []


BROKEN = [
    CANARY,
    "",
    "[" * 100_000,
    json.dumps(CANARY),
    json.dumps([CANARY]),
    json.dumps({"Records": CANARY}),
    json.dumps({"Records": None}),
    json.dumps({"Records": [{"s3": CANARY}]}),
    json.dumps({"Records": [{"eventName": "ObjectCreated:Put", "s3": CANARY}]}),
    json.dumps({"Type": "Notification", "Message": {"text": CANARY}}),
    json.dumps({"Type": "Notification", "Message": CANARY}),
    json.dumps({"source": "aws.s3", "detail": CANARY}),
    json.dumps({"text": CANARY}),
]


@pytest.mark.parametrize("body", BROKEN)
def test_what_is_no_notification_is_named_and_not_quoted(body: str) -> None:
    with pytest.raises(NotUnderstood) as raised:
        announced(body, ROOT)
    assert CANARY not in str(raised.value)


@dataclass(frozen=True, slots=True)
class Wired:
    """A bucket of a real server that notifies a queue."""

    s3: Any
    sqs: Any
    bucket: str
    url: str

    @property
    def queue(self) -> Queue:
        """As a listener opens it."""
        return Queue(self.url, f"s3://{self.bucket}/{PREFIX}")

    def put(self, key: str) -> None:
        """Write an object."""
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=b"{}")

    def send(self, *bodies: str) -> None:
        """Send messages, in order."""
        for body in bodies:
            self.sqs.send_message(QueueUrl=self.url, MessageBody=body)

    def announce(self, *batches: str) -> None:
        """Send what the bucket would."""
        self.send(*(records(created(marker(batch), self.bucket)) for batch in batches))

    def counts(self) -> tuple[int, int]:
        """Messages that can be received, and that somebody is looking at."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)
        visible, hidden = (int(found["Attributes"][name]) for name in names)
        return visible, hidden


@pytest.fixture
def wired(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Wired:
    """A bucket and its queue, both new."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    where = {"endpoint_url": endpoint, "region_name": "us-east-1"}
    s3, sqs = boto3.client("s3", **where), boto3.client("sqs", **where)
    name = f"grom-{uuid4().hex}"
    s3.create_bucket(Bucket=name)
    url = sqs.create_queue(QueueName=name)["QueueUrl"]
    return Wired(s3, sqs, name, url)


def look(wired: Wired, handle: Callable[[str], object], visibility_s: int = 60) -> Polled:
    """One poll that does not wait for long."""
    return poll(wired.queue, handle, wait_s=1, visibility_s=visibility_s)


def test_a_bucket_that_notifies_its_queue(wired: Wired) -> None:
    """The whole way: the server's own test, data files, manifest, marker."""
    asked = wired.sqs.get_queue_attributes(QueueUrl=wired.url, AttributeNames=["QueueArn"])
    target = {"QueueArn": asked["Attributes"]["QueueArn"], "Events": ["s3:ObjectCreated:*"]}
    wired.s3.put_bucket_notification_configuration(
        Bucket=wired.bucket, NotificationConfiguration={"QueueConfigurations": [target]}
    )
    for name in ("forget-00001.jsonl", "manifest.json", "_READY.json"):
        wired.put(f"{PREFIX}/inbox/march/{name}")
    rung: list[str] = []
    deleted = 0
    while (polled := look(wired, rung.append)).deleted:
        deleted += polled.deleted
        assert polled.left == 0
    assert rung == ["march"]
    assert deleted == 4
    assert wired.counts() == (0, 0)


def test_an_empty_queue_is_waited_for(wired: Wired) -> None:
    start = time.monotonic()
    assert look(wired, pytest.fail) == Polled()
    assert time.monotonic() - start > 0.9


def test_a_message_goes_after_its_batch_was_handled(wired: Wired) -> None:
    wired.announce("b")
    seen: list[tuple[int, int]] = []
    assert look(wired, lambda _: seen.append(wired.counts())) == Polled(("b",), deleted=1)
    assert seen == [(0, 1)]
    assert wired.counts() == (0, 0)


def test_of_duplicates_one_rings(wired: Wired) -> None:
    wired.announce("b", "c", "b")
    rung: list[str] = []
    assert look(wired, rung.append) == Polled(("b", "c"), deleted=3)
    assert rung == ["b", "c"]


def test_what_cannot_be_handled_stays_and_the_others_go_on(
    wired: Wired, caplog: pytest.LogCaptureFixture
) -> None:
    wired.send(CANARY)
    wired.announce("bad", "good", "bad")

    def handle(batch: str) -> None:
        if batch == "bad":
            raise DataError("batch bad: not there yet")

    with caplog.at_level(logging.WARNING, "tasks.sqs"):
        assert look(wired, handle) == Polled(("good",), deleted=1, left=3)
    assert wired.counts() == (0, 3)
    assert CANARY not in caplog.text
    assert caplog.text.count("stays in the queue: batch bad: not there yet") == 2
    assert "not a notification of S3" in caplog.text


def test_who_fails_or_is_killed_gets_its_messages_again(wired: Wired) -> None:
    class ServerDown(GromError):
        """Not the batch's fault."""

    def fails(batch: str) -> None:
        if batch == "b":
            raise ServerDown

    wired.announce("a", "b", "c")
    with pytest.raises(ServerDown):
        look(wired, fails, visibility_s=2)
    assert sum(wired.counts()) == 2
    time.sleep(2.1)
    assert look(wired, lambda _: None) == Polled(("b", "c"), deleted=2)


@pytest.mark.usefixtures("wired")
def test_a_queue_that_is_not_there_is_named(endpoint: str) -> None:
    with pytest.raises(QueueMissing, match="no such queue"):
        poll(Queue(f"{endpoint}/123456789012/nobody", ROOT), pytest.fail, wait_s=0)


def test_a_message_that_is_no_longer_ours_to_delete_is_named(wired: Wired) -> None:
    """It comes again, which does no harm."""
    with pytest.raises(QueueUnreachable, match="ReceiptHandleIsInvalid"):
        wired.queue.delete({"ReceiptHandle": "too old"})


def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(QueueUnreachable, match=r"EndpointConnectionError.*sweep finds"):
        poll(Queue("http://127.0.0.1:9/123456789012/q", ROOT), pytest.fail, wait_s=0)


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    with pytest.raises(QueueRefused, match="no credentials were found"):
        poll(Queue("http://127.0.0.1:9/123456789012/q", ROOT), pytest.fail, wait_s=0)


def test_region_and_endpoint_come_from_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    for url, region, endpoint in (
        (
            "https://sqs.eu-central-1.amazonaws.com/1/q",
            "eu-central-1",
            "eu-central-1.amazonaws.com",
        ),
        ("http://localhost:9324/1/q", "us-west-2", "http://localhost:9324"),
    ):
        client = Queue(url, ROOT)._client
        assert client.meta.region_name == region
        assert client.meta.endpoint_url.endswith(endpoint)


@pytest.mark.parametrize("url", ["", "my-queue", "arn:aws:sqs:eu-central-1:1:q", "https://x.y/"])
def test_only_a_url_names_a_queue(url: str) -> None:
    with pytest.raises(ConfigError, match="get-queue-url"):
        Queue(url, ROOT)


def test_a_folder_notifies_nobody() -> None:
    with pytest.raises(ConfigError, match="grom sweep --every"):
        Queue("http://127.0.0.1:9/1/q", "/srv/store")
