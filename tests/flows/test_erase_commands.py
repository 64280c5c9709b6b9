"""`grom erase`: what a person sees, and what nobody must see."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flows.erase_commands import OVERDUE_EXIT, erase_batches
from tasks.bucket import Bucket
from tasks.claims import claim, fail, finish
from tasks.submit import submit
from tests.faulty import QUICK

CANARY = "Quxana-7f3a lives at"
DAY_S = 86400.0
app = typer.Typer()
app.command("erase")(erase_batches)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store and an empty work folder, named by the environment and by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("GROM_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "store"


def grom(*arguments: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def batch(root: Path, name: str, end: str | None = "done") -> Path:
    """A batch; its raw file."""
    path = root.parent / f"{name}.jsonl"
    path.write_text(
        json.dumps({"request_id": f"{CANARY}-{name}", "text": f"{CANARY} {name} street"})
    )
    bucket = Bucket(str(root), patience=QUICK)
    submit([path], bucket, name)
    held = claim(name, "worker", bucket) if end else None
    if held is not None:
        finish(held, bucket) if end == "done" else fail(held, bucket, "no")
    return root / f"inbox/{name}/forget-00001.jsonl"


def age(path: Path, days: float) -> None:
    """Let a file be so old."""
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def test_what_is_due_is_erased(root: Path) -> None:
    done, failed, waits = (
        batch(root, name, end) for name, end in (("a", "done"), ("b", "failed"), ("c", None))
    )
    copy = Path("grom-work/scratch/forget/r/a.jsonl")
    copy.parent.mkdir(parents=True)
    copy.write_text(CANARY)
    result = grom("--dry-run")
    assert "would erase a: 1 objects" in result.output
    assert done.exists()
    result = grom()
    assert result.exit_code == 0
    assert "erased a: 1 objects" in result.output
    assert "1 copies" in result.output
    assert [path.exists() for path in (done, failed, waits, copy)] == [False, True, True, False]
    assert "nothing to erase" in grom().output
    assert "erased b" in grom("--failed").output
    assert not failed.exists()
    assert waits.exists()


def test_the_age_of_the_outcome_counts(root: Path) -> None:
    old, new = batch(root, "a"), batch(root, "b")
    age(root / "done/a.json", 3)
    assert "erased a" in grom("--after-days", 2).output
    assert (old.exists(), new.exists()) == (False, True)
    assert grom("--check", "--after-days", 2).exit_code == 0
    assert grom("--check").exit_code == OVERDUE_EXIT


def test_one_batch_may_be_named(root: Path) -> None:
    first, second, waits = batch(root, "a"), batch(root, "b"), batch(root, "c", None)
    assert grom("a").exit_code == 0
    assert (first.exists(), second.exists()) == (False, True)
    for name, words in {"c": "is waiting", "none": "there is no batch none"}.items():
        result = grom(name)
        assert result.exit_code == 1
        assert words in result.stderr
    assert waits.exists()
    assert grom("--check", "a").exit_code == 0
    assert grom("--check", "b").exit_code == OVERDUE_EXIT


def test_a_check_lists_and_its_exit_code_tells(root: Path) -> None:
    assert "nothing personal was found" in grom("--check").output
    batch(root, "c", None)
    result = grom("--check")
    assert result.exit_code == 0
    assert "waiting" in result.output
    assert "1 places, 0 of them should not be there" in result.output
    done, failed = batch(root, "a"), batch(root, "b", "failed")
    age(done, 3)
    result = grom("--check")
    assert result.exit_code == OVERDUE_EXIT
    lines = [line for line in result.output.splitlines() if "forget-00001" in line]
    assert "inbox/a" in lines[0]  # what should not be there comes first
    assert "overdue" in lines[0]
    assert "3 d" in lines[0]
    assert str(done.stat().st_size) in lines[0]
    assert "3 places, 1 of them should not be there" in result.output
    assert "2 of them should not be there" in grom("--check", "--failed").output
    assert done.exists()
    assert failed.exists()


def test_a_deep_check_looks_into_every_file_and_shows_no_text(root: Path) -> None:
    batch(root, "c", None)
    result = grom("--check", "--deep")
    assert result.exit_code == 0
    assert "looked for 2 texts" in result.output
    leak = Path("grom-work/reports/r.html")
    leak.parent.mkdir(parents=True)
    leak.write_text(f"<p>{CANARY} c street</p>")
    result = grom("--check", "--deep")
    assert result.exit_code == OVERDUE_EXIT
    assert "reports/r.html" in result.output
    assert "found" in result.output
    assert CANARY not in result.output


def test_rows_that_are_erased_can_be_looked_for_again(root: Path) -> None:
    batch(root, "a")
    grom("a")
    rows = root.parent / "a.jsonl"
    result = grom("--check", "--against", rows)
    assert result.exit_code == 0
    assert "looked for 2 texts" in result.output
    (root / "runs").mkdir()
    (root / "runs/note").write_text(f"see {CANARY} a street")
    result = grom("--check", "--against", rows)
    assert result.exit_code == OVERDUE_EXIT
    assert "runs/note" in result.output
    rows.write_text(json.dumps({"request_id": "1", "text": "short"}))
    assert "2 under 16 bytes were not" in grom("--check", "--against", rows).output


def test_wrong_options_are_said(root: Path) -> None:
    for arguments in (("--deep",), ("--against", __file__)):
        result = grom(*arguments)
        assert result.exit_code == 2
        assert "need --check" in result.stderr
    result = grom("--check", "--against", __file__)
    assert result.exit_code == 1
    assert "does not end in" in result.stderr
