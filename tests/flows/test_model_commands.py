"""`grom models` and `grom rollback`: what a person sees, and what is true afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from flows.model_commands import list_models, roll_back
from grom.ledger import LedgerLine
from tasks.aliases import aliases_of
from tasks.ledger import Ledger
from tasks.registry import register_checkpoint
from tasks.restore import close_step, restore
from tasks.store import Store
from tasks.tracking import Tracking, client_of, open_run
from tasks.versions import promote
from tests.faulty import QUICK

THEN = "2026-12-01T10:00:00+00:00"
pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all tests: making its tables takes three seconds."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def service(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configuration of a service, with a name of the test's own."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "service.yaml"
    settings = {
        "name": tmp_path.name.replace("_", "-"),
        "model": {"source": "model"},
        "retain": {"uri": "retain.jsonl"},
        "store": str(tmp_path / "store"),
        "work": str(work),
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def name_of(service: Path) -> str:
    return f"grom-{service.parent.name.replace('_', '-')}"


def serve(service: Path, work: Path, *batches: str) -> Store:
    """Accept batches, one after the other, each by a version that is promoted."""
    name = name_of(service)
    store = Store(str(service.parent / "store"), service.parent / "scratch", patience=QUICK)
    run_id = open_run(Tracking(), work, name="r", tags={}, flow_run_id=name)
    folder = service.parent / "made"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}" + " " * 1234)
    for number, batch in enumerate(batches, start=1):
        known = ",".join(batches[:number])
        tags = {"gate": "passed", "batches": known, "requests": str(number * 1000)}
        register_checkpoint(
            Tracking(), work, run_id, folder, tags=tags, uri=f"s3://b/{name}/{number}", name=name
        )
        line = LedgerLine(
            request=f"{number:064x}", batch=batch, received=THEN, run=f"run-{number}",
            model_version=str(number), certificate=None, state="honoured", started=THEN,
            finished=THEN,
        )  # fmt: skip
        Ledger(store).append([line])
        promote(Tracking(), work, name, str(number))
    return store


def grom(command: Any, *arguments: object) -> Result:
    """Run a command."""
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_versions_as_a_person_sees_them(service: Path, work: Path) -> None:
    serve(service, work, "january", "february", "march", "april", "may")
    shown = grom(list_models, "--config", service).output
    lines = [line for line in shown.splitlines() if "│" in line]
    assert name_of(service) in shown
    newest, previous, oldest = lines[0], lines[1], lines[-1]
    for words in ("5", "champion", "2 more, march, april, may", "5,000", "passed", "1.2 kB"):
        assert words in newest
    assert "yes" not in newest
    assert "previous" in previous
    assert all(words in oldest for words in ("superseded", "january", "1,000", "yes"))
    assert name_of(service) in grom(list_models, "--work", work).output
    assert name_of(service) in grom(list_models, name_of(service), "--work", work).output


def test_a_rollback_as_a_person_sees_it(service: Path, work: Path, prefect_server: None) -> None:
    store = serve(service, work, "january", "february", "march")
    arguments = ("--config", service, "--reason", "odd answers")
    result = grom(roll_back, *arguments, "--to", "1")
    assert result.exit_code == 0, result.stderr
    assert "version 1 serves, after 3; 2 requests changed" in result.output
    again = grom(roll_back, *arguments, "--to", "1")
    assert "version 1 serves, after 3; 0 requests changed" in again.output
    last = [(line.batch, line.state, line.run) for line in Ledger(store).read()[3:]]
    assert last == [
        ("february", "rolled back", "rollback-3-1"),
        ("march", "rolled back", "rollback-3-1"),
    ]
    aliases = aliases_of(client_of(Tracking(), work), name_of(service))
    assert aliases == {"champion": "1"}
    assert "no version served before 1" in grom(roll_back, *arguments).stderr


def test_a_rollback_that_was_killed_before_the_ledger_is_finished(
    service: Path, work: Path, prefect_server: None
) -> None:
    """And not followed by another step back."""
    store = serve(service, work, "january", "february", "march")
    restore(Tracking(), work, name_of(service), "odd answers")
    result = grom(roll_back, "--config", service, "--reason", "again")
    assert "version 2 serves, after 3; 1 requests changed" in result.output
    step = restore(Tracking(), work, name_of(service), "again", to="2")
    assert not step.is_open
    close_step(Tracking(), work, name_of(service), step, ())
    assert len(Ledger(store).read()) == 4


def test_failures_are_messages_with_a_cure(service: Path, work: Path, tmp_path: Path) -> None:
    for command, arguments, words in (
        (list_models, (), "either `--config service.yaml` or `--work FOLDER`"),
        (list_models, ("--work", work, "--config", service), "either"),
        (list_models, ("--work", tmp_path / "none"), "no such folder"),
        (list_models, ("nobody", "--work", work), "no such registered model"),
        (list_models, ("--config", tmp_path / "none.yaml"), "no such file"),
        (list_models, ("--config", service), "no such registered model"),
        (roll_back, ("--config", tmp_path / "none.yaml", "--reason", "x"), "no such file"),
    ):
        result = grom(command, *arguments)
        assert result.exit_code == 1
        assert words in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "none").exists()
    assert grom(roll_back, "--config", service).exit_code == 2  # why?
