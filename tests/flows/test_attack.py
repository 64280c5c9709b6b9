"""`grom attack` from the command line's words to the verdicts, with real components."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.attack import AttackRun, attack
from flows.attack_command import run_of, show_attacks
from flows.cli import app
from flows.presets import PRESETS
from flows.terminal import console
from grom.attack import verdict
from grom.attack_config import ALL_ATTACKS, AttackConfig, RelearnConfig
from grom.config import DataConfig, ModelConfig
from grom.errors import ConfigError
from tasks.attack import AttackRow
from tasks.codecs import read_table
from tasks.tracking import Tracking, client_of
from tests.reference import tiny_model
from tests.tiny import checkpoint, forget_rows, residue, save_model, write_rows


def files(folder: Path) -> tuple[Path, Path, DataConfig]:
    """A random model, the same with another last layer, and rows."""
    unedited = checkpoint(folder / "unedited")
    model = tiny_model("llama")
    model.get_parameter("model.layers.2.mlp.down_proj.weight").mul_(-1)
    rows = write_rows(folder / "forget.jsonl", forget_rows())
    return unedited, save_model(folder / "edited", model), DataConfig(uri=str(rows))


@pytest.mark.e2e
def test_a_whole_round_ends_in_verdicts_in_the_store_and_in_mlflow(
    tmp_path: Path, prefect_server: None
) -> None:
    unedited, edited, forget = files(tmp_path)
    outcome = attack(
        AttackRun(
            edited=ModelConfig(source=str(edited)),
            unedited=ModelConfig(source=str(unedited)),
            retrained=ModelConfig(source=str(unedited)),
            forget=forget,
            attack=AttackConfig(
                attacks=("int4", "prune", "relearn", "lens"), relearn=RelearnConfig(steps=2)
            ),
            work=str(tmp_path / "work"),
        )
    )
    names = ["int4", "prune 0.1", "prune 0.3", "prune 0.5", "relearn", "lens"]
    assert [result.name for result in outcome.attacked.results] == names
    table = outcome.place.fetch(outcome.attacked.artifact) / "attacks.parquet"
    assert [row.name for row in read_table(table, AttackRow)] == names
    run = client_of(Tracking(), tmp_path / "work").get_run(outcome.run_id)
    assert run.info.status == "FINISHED"
    assert "attack/int4/attacked" in run.data.metrics
    assert residue(tmp_path / "work") == []


def described(**changes: Any) -> AttackRun:
    words: dict[str, Any] = {
        "edited": "edited", "unedited": "before", "retrained": None, "forget": DataConfig(uri="f"),
        "config": None, "attack": {}, "work": Path("w"),
    }  # fmt: skip
    return run_of(**{**words, **changes})


def test_the_command_line_names_models_data_and_attacks() -> None:
    run = described(retrained="r", attack={"attacks": ["nf4"], "relearn": {"steps": 3}})
    assert (run.edited.source, run.unedited.source) == ("edited", "before")
    assert run.retrained == ModelConfig(source="r")
    assert run.attack == AttackConfig(attacks=("nf4",), relearn=RelearnConfig(steps=3))
    assert described().attack.attacks == ALL_ATTACKS


def test_a_configuration_fills_in_what_is_not_given() -> None:
    name = "tofu_smollm2_retrained_level"
    run, whole = described(unedited=None, forget=None, config=name), PRESETS[name]()
    assert (run.unedited, run.retrained, run.forget) == (whole.model, whole.retrained, whole.forget)
    assert run.retrained is not None
    other = described(config=name, retrained="mine")
    assert (other.unedited.source, other.forget.uri) == ("before", "f")
    assert other.retrained == ModelConfig(source="mine")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unedited": None}, "--unedited"),
        ({"forget": None}, "--forget"),
        ({"attack": {"attacks": ["nf5"]}}, "nf4, fp4"),
        ({"attack": {"max_examples": 0}}, "--limit"),
    ],
)
def test_what_is_missing_or_unknown_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        described(**changes)


def test_the_table_says_attack_numbers_verdict_and_why() -> None:
    shown = verdict("nf4", 0.9, 0.1, 0.5, reason_not_tested="")
    hidden = verdict("int8", 0.9, 0.1, 0.1, reason_not_tested="head only")
    with console.capture() as captured:
        show_attacks([shown, hidden])
    text = " ".join(captured.get().split())
    for word in ("nf4", "0.900", "0.500", "50%", "suppressed", "int8", "not tested", "head only"):
        assert word in text


@pytest.mark.usefixtures("own_environment")
def test_a_command_without_data_is_a_message_and_exit_code_1(tmp_path: Path) -> None:
    words = ["attack", "edited", "--unedited", "before", "--work", str(tmp_path)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 1
    assert "--forget" in result.output
    assert "Traceback" not in result.output
