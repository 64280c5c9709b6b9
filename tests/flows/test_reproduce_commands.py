"""`grom reproduce` and `grom diff` from the terminal, exit codes included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from flows import reproduce_commands
from tasks.tracking import client_of
from tests.certified import Certified, certified_service
from tests.edits import flip
from tests.tiny import retain_rows, write_rows

pytestmark = pytest.mark.usefixtures("prefect_server", "own_environment")

app = typer.Typer(pretty_exceptions_enable=False)
app.command("reproduce")(reproduce_commands.reproduce_run)
app.command("diff")(reproduce_commands.diff_runs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Certified:
    return certified_service(tmp_path_factory.getbasetemp())


def grom(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def configuration(made: Certified, path: Path, **changes: object) -> Path:
    values = made.cfg.model_dump(mode="json") | changes
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_run_by_batch_and_by_mlflow_id(made: Certified, tmp_path: Path) -> None:
    where = ("--store", made.store.root, "--work", made.cfg.work)
    client = client_of(made.cfg.tracking, Path(made.cfg.work))
    ids = {str(one.version): one.run_id for one in client.search_model_versions("name='grom-tiny'")}
    for name in ("second", ids["2"]):
        result = grom("reproduce", name, *where)
        assert result.exit_code == 0, result.output
        assert "same bytes" in result.output
        assert "every fact is as it was recorded" in result.output
    unknown = grom("reproduce", "f" * 32, *where)
    assert unknown.exit_code == 1
    assert "no run of" in unknown.output


def test_with_its_configuration_what_it_read_is_compared(made: Certified, tmp_path: Path) -> None:
    where = ("--store", made.store.root, "--work", tmp_path / "work", "--json")
    same = configuration(made, tmp_path / "same.yaml")
    result = grom("reproduce", "first", *where, "--config", same)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["differences"] == []
    rows = retain_rows()
    rows[4] = rows[4] | {"answer": "w30 w31 w32"}
    uri = str(write_rows(tmp_path / "moved.jsonl", rows))
    retain = made.cfg.retain.model_dump(mode="json") | {"uri": uri}
    other = configuration(made, tmp_path / "other.yaml", retain=retain)
    result = grom("reproduce", "first", *where, "--config", other)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["outcome"] == "same bytes"
    assert "moved.jsonl, line 5" in found["differences"][0]["fact"]


def test_damage_is_named_and_ends_with_1(made: Certified, tmp_path: Path) -> None:
    mine = made.copied(tmp_path)
    name = made.certificate("first").statistics[0].artifact
    flip(next((tmp_path / "store" / name).glob("*.gram.npy")), -9)
    result = grom("reproduce", "first", "--store", mine.store.root, "--work", tmp_path / "work")
    assert result.exit_code == 1
    assert f"first fact that differs: statistics: {name}" in result.output


def test_diff_of_two_batches(made: Certified, tmp_path: Path) -> None:
    where = ("--store", made.store.root, "--work", tmp_path)
    result = grom("diff", "first", "second", *where)
    assert result.exit_code == 0, result.output
    assert "data.digests" in result.output
    assert "|P - Q| / |P| =" in result.output
    same = grom("diff", "second", "again", *where)
    assert "no fact differs" in same.output
    values = json.loads(grom("diff", "first", "second", *where, "--json").stdout)
    assert [site for site, _ in values["sites"]] == [
        "model.layers.1.mlp.down_proj",
        "model.layers.2.mlp.down_proj",
    ]
