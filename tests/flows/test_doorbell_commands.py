"""`grom sweep` and `grom listen`: once, for ever, through outages, until they are stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from flows import sweep
from flows.doorbell_commands import (
    listen_to_queue,
    repeat,
    sweep_inbox,
    until_stopped,
)
from grom.errors import DataError
from tasks import doorbell, sqs
from tasks.sqs import Polled, QueueUnreachable

pytestmark = pytest.mark.usefixtures("own_environment")
QUEUE = "http://127.0.0.1:9/123456789012/q"
app = typer.Typer()
app.command("sweep")(sweep_inbox)
app.command("listen")(listen_to_queue)


def grom(*arguments: object) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A service's file."""
    return written(tmp_path, store=str(tmp_path / "store"))


def written(folder: Path, **settings: str) -> Path:
    """A service's file with some settings."""
    values = {
        "name": "support",
        "model": {"source": "model"},
        "retain": {"uri": "retain.jsonl"},
        "work": str(folder / "work"),
        **settings,
    }
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been slept; Ctrl-C after ten times."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr("flows.doorbell_commands.time", SimpleNamespace(sleep=sleep))
    return slept


def fails_until(number: int) -> Callable[..., None]:
    """Something that works from its `number`-th time on, counted from 0."""
    calls = iter(range(1_000_000))

    def do(*_: object) -> None:
        if next(calls) < number:
            raise DataError("down")

    return do


def test_once(config: Path) -> None:
    result = grom("sweep", "--config", config)
    assert result.exit_code == 0
    assert "sweep support: 0 batches wait" in result.stderr


def test_once_fails_with_a_message(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "look", fails_until(1))
    result = grom("sweep", "--config", config)
    assert result.exit_code == 1
    assert result.stderr == "DataError: down\n"


def test_for_ever_outlasts_failures(
    config: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "look", fails_until(7))
    result = grom("sweep", "--config", config, "--every", 30)
    assert result.exit_code == 0
    assert "stopped" in result.stdout
    assert result.stderr.count("DataError: down") == 7
    assert pauses == [30.0] * 4 + [32.0] + [60.0] * 2 + [30.0] * 3


def test_pauses_grow_and_a_success_ends_them(pauses: list[float]) -> None:
    works = iter([False, False, True, False, *([True] * 6)])

    def do() -> None:
        if not next(works):
            raise DataError("down")

    with until_stopped():
        repeat(do, 0.0)
    assert pauses == [2.0, 4.0, 0.0, 2.0, *[0.0] * 6]


def test_a_bug_is_no_outage(pauses: list[float]) -> None:
    def broken() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        repeat(broken, 0.0)
    assert pauses == []


def test_sigterm_ends_it_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with until_stopped():
        repeat(lambda: os.kill(os.getpid(), signal.SIGTERM), 0.0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_listening_rings_and_outlasts_outages(
    tmp_path: Path, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = written(tmp_path, store="s3://forget-me/eu")
    rung: list[object] = []
    down = fails_until(2)

    def poll(queue: sqs.Queue, handle: Callable[[str], object]) -> Polled:
        assert (queue.url, queue.root) == (QUEUE, "s3://forget-me/eu")
        try:
            down()
        except DataError:
            raise QueueUnreachable(queue.url, "EndpointConnectionError") from None
        handle("march")
        return Polled(("march",), deleted=1)

    def answer(batch: str, _: object, deployment: str, *, stuck_s: float) -> None:
        rung.append((batch, deployment, stuck_s))

    monkeypatch.setattr(sqs, "poll", poll)
    monkeypatch.setattr(doorbell, "answer", answer)
    result = grom("listen", "--config", config, "--queue", QUEUE)
    assert result.exit_code == 0
    assert pauses == [2.0, 4.0] + [0.0] * 8
    assert rung == [("march", "unlearn-batches/support", 600.0)] * 8
    assert result.stderr.count("QueueUnreachable") == 2


def test_only_s3_notifies_a_queue(config: Path) -> None:
    result = grom("listen", "--config", config, "--queue", QUEUE)
    assert result.exit_code == 1
    assert "grom sweep --every" in result.stderr
