"""The command line says what there is, and what went wrong without a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.config import UnlearnConfig, read_config
from flows.presets import PRESETS, ROOT
from tests.tiny import CANARY, residue, tiny_config, write_rows

README = (ROOT / "README.md").read_text()


pytestmark = pytest.mark.usefixtures("own_environment")


def grom(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def succeeded(*arguments: str) -> str:
    result = grom(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def commands() -> set[str]:
    return set(typer.main.get_group(app).commands)


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_presets_are_listed_with_what_they_are() -> None:
    found = succeeded("presets")
    for name, build in PRESETS.items():
        assert name in found
        assert (build.__doc__ or "").strip() in found


def test_the_schema_is_json_with_every_section() -> None:
    schema = json.loads(succeeded("schema"))
    assert set(schema["properties"]) == set(UnlearnConfig.model_fields)


@pytest.mark.parametrize("name", PRESETS)
def test_a_shown_preset_read_back_is_the_preset(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(succeeded("show-config", name))
    assert read_config(path) == PRESETS[name]()


@pytest.mark.parametrize("command", ["run", "show-config"])
def test_an_unknown_preset_is_a_message_and_exit_code_1(command: str) -> None:
    result = grom(command, "nothing-of-the-sort")
    assert result.exit_code == 1
    assert result.stderr == (
        "ConfigError: nothing-of-the-sort: no such file, and no preset of that name; "
        "see `grom presets`\n"
    )


def test_a_wrong_setting_is_a_message_and_exit_code_1(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {source: m}\nforget: {uri: f}\nretain: {uri: r}\nstrenght: 3\n")
    result = grom("run", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"ConfigError: {path}:\n  strenght: Extra inputs")
    assert "Traceback" not in result.output


def test_a_run_that_fails_is_a_message_a_failed_run_and_nothing_half_made(
    tmp_path: Path, prefect_server: None
) -> None:
    from tasks.tracking import Tracking, client_of

    config = tiny_config(tmp_path)
    rows = [{"prompt": "w5", "answer": "w6"}, {"prompt": CANARY}]
    write_rows(tmp_path / "retain.jsonl", rows)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    result = grom("run", str(path), "--quiet")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "MalformedRow: retain.jsonl, line 2: `answer` is missing. Every row needs either `prompt` "
        "and `answer` or `text`, all of them non-empty strings; correct or remove the row.\n"
    )
    assert "Traceback" not in result.output
    assert CANARY not in result.output
    client = client_of(Tracking(), tmp_path / "work")
    (experiment,) = client.search_experiments(filter_string="name = 'unlearning'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert client.search_registered_models() == []
    assert residue(tmp_path / "work") == []


def test_commands_of_the_readme_exist() -> None:
    named = set(re.findall(r"(?:^\s+|`)(?:bash infra/run )?grom ([a-z-]+)", README, re.MULTILINE))
    assert named
    assert named <= commands()
    assert named | {"demo"} == commands()


def test_jobs_of_the_readme_exist() -> None:
    script = (ROOT / "infra" / "run").read_text()
    for job in re.findall(r"bash infra/run (\w+)", README):
        assert f"\n  {job})" in script


def test_presets_of_the_readme_exist() -> None:
    for name in re.findall(r"^\s+grom (?:run|show-config) (\w+)\b(?!\.)", README, re.MULTILINE):
        assert name in PRESETS


def test_the_configuration_of_the_readme_is_one(tmp_path: Path) -> None:
    (text,) = fenced("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert read_config(path).name == "my-model"


def test_the_tree_of_the_readme_is_the_repository() -> None:
    section = README.split("## The tree")[1].split("\n## ")[0]
    named = set(re.findall(r"^    (\S+?)/?  ", section, re.MULTILINE))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    found = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert named == {name for name in found if not name.startswith(".")} - {"README.md"}


def test_paths_that_the_readme_names_exist() -> None:
    paths = set(re.findall(r"`((?:flows|tasks|grom|infra|tests)/[\w./]+)`", README))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_command_line_sets_prefects_environment_before_it_imports_prefect() -> None:
    code = "import sys, flows.cli; sys.exit('prefect' in sys.modules or 'mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
