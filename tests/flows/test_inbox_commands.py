"""`grom submit`, `status` and `retry`: what a person sees, and what nobody must see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner, Result

from flows import inbox_commands
from flows.cli import app
from tasks import doorbell
from tasks.bucket import Bucket
from tasks.claims import claim, fail, finish, renew
from tasks.inbox import check
from tasks.store import Store
from tests.faulty import QUICK

CANARY = "Quxana-7f3a"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty store."""
    monkeypatch.setenv("COLUMNS", "200")
    return str(tmp_path / "store")


def grom(*arguments: object) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two requests."""
    rows = [{"request_id": f"{CANARY}-{i}", "text": f"{CANARY} lives at {i}"} for i in range(2)]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_life_as_a_person_sees_it(root: str, file: Path, tmp_path: Path) -> None:
    assert "no batches" in grom("status", "--store", root).output
    result = grom("submit", file, "--batch", "march", "--store", root)
    assert result.exit_code == 0
    assert "submitted march: 2 requests in 1 files" in result.output
    assert "was there already" in grom("submit", file, "--batch", "march", "--store", root).output
    assert "waiting" in grom("status", "--store", root).output

    store = Store(root, tmp_path / "scratch", patience=QUICK)
    held = claim("march", "worker-1", store)
    assert held is not None
    check("march", store)
    assert "claimed" in grom("status", "march", "--store", root).output
    fail(renew(held, store, run="run-9"), store, "a.jsonl, line 3: `answer` is empty")
    shown = grom("status", "march", "--store", root).output
    for words in ("failed", "worker-1", "run-9", "line 3", f"grom retry march --store {root}"):
        assert words in shown
    assert "waits again" in grom("retry", "march", "--store", root).output

    held = claim("march", "worker-2", store)
    assert held is not None
    finish(held, store, model_version="17", certificate="c" * 64)
    shown = grom("status", "march", "--store", root).output
    assert all(words in shown for words in ("done", "worker-2", "17", "token:       3"))
    assert "done" in grom("status", "--store", root).output

    for entry in store.entries("inbox") + store.entries("claims") + store.entries("done"):
        found = store.read(entry.name)
        assert found is not None
        assert (CANARY.encode() in found.data) == ("forget-" in entry.name)


def test_the_store_may_come_from_the_environment(
    root: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROM_STORE", root)
    assert grom("submit", file).exit_code == 0
    assert "batch-" in grom("status").output


def test_failures_are_messages_with_a_cure(root: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"request_id": "r", "prompt": CANARY}))
    for arguments, words in (
        (("submit", bad), "line 1: `answer` is missing"),
        (("submit", tmp_path / "none.jsonl"), "no such file"),
        (("submit", bad, "--batch", "a/b"), "plain name"),
        (("status", "nobody"), "there is no batch nobody"),
        (("retry", "nobody"), "there is no batch nobody"),
    ):
        result = grom(*arguments, "--store", root)
        assert result.exit_code == 1
        assert words in result.stderr
        assert CANARY not in result.output + result.stderr
        assert "Traceback" not in result.stderr
    assert grom("status").exit_code == 2  # which store?


def test_a_store_that_cannot_swap_is_refused(file: Path) -> None:
    result = grom("submit", file, "--store", "memory://no-swap")
    assert result.exit_code == 1
    assert "cannot compare and swap" in result.stderr


def test_a_terminal_is_not_kept_waiting(root: str) -> None:
    opened = inbox_commands._open(root)
    assert isinstance(opened, Bucket)
    assert sum(opened.patience.waits_s()) < 1


def test_a_service_is_told_if_its_server_is_there(
    root: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is submitted either way."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(doorbell, "announce", lambda *what: told.append(what))
    result = grom("submit", file, "--batch", "march", "--ring", "support", "--store", root)
    assert "told support" in result.output
    assert told == [("march", "support")]

    monkeypatch.undo()
    with temporary_settings(updates={PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        result = grom("submit", file, "--batch", "march", "--ring", "support", "--store", root)
    assert result.exit_code == 0
    assert "support was not told" in result.output
    assert "next sweep finds the batch" in result.output
    assert "told support" not in result.output
    assert "waiting" in grom("status", "march", "--store", root).output
