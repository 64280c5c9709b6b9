"""`grom eval` says what is wrong in one line with its cure, and shows metrics so that they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from flows import show_metrics
from flows.cli import app
from flows.show_metrics import metric_rows, remarks
from grom.benchmarks import BENCHMARKS
from grom.metrics import Metric
from tests.exams import write_tofu
from tests.tiny import CANARY, checkpoint

pytestmark = pytest.mark.usefixtures("own_environment")


def grom(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--benchmark", "tofu"], "ConfigError: no benchmark 'tofu'; there are counterfact, mmlu,"),
        (["--split", "forget"], "ConfigError: --split 'forget': write NAME=FILE, for instance"),
        (["--split", "forget="], "ConfigError: --split 'forget=': write NAME=FILE"),
        (["--split", "forgot=a"], "ConfigError: tofu_forget01 has no split 'forgot'; it has forg"),
        (["--quantisation", "nf5"], "ConfigError: --quantisation 'nf5': there are nf4, fp4, int8"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_cure_before_anything_starts(
    tmp_path: Path, options: list[str], said: str
) -> None:
    named = options if "--benchmark" in options else [*options, "--benchmark", "tofu_forget01"]
    result = grom("eval", "no-model", "--work", str(tmp_path / "work"), *named)
    assert result.exit_code == 1
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    assert not list((tmp_path / "work").glob("*"))


def test_a_missing_file_or_model_is_one_line_with_its_cure(
    tmp_path: Path, prefect_server: None
) -> None:
    write_tofu(tmp_path / "tofu")
    common = ["--benchmark", "tofu_forget01", "--work", str(tmp_path / "work"), "--quiet"]
    result = grom("eval", "./no-model", *common, "--data", str(tmp_path / "tofu"))
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "MissingInput: ./no-model: this folder does not exist. "
        "Check the path or the address in the configuration.\n"
    )
    result = grom("eval", str(checkpoint(tmp_path / "model")), *common, "--data", str(tmp_path))
    assert result.exit_code == 1
    assert "the 'forget' split of tofu_forget01. Give its folder with --data" in result.stderr
    result = grom("eval", str(tmp_path / "model"), *common, "--data", str(tmp_path / "tofu"),
                  "--limit", "1")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "tofu_forget01: 27 items, 1 rows of each split" in result.stdout
    assert "weights: model float32" in result.stdout
    assert CANARY not in result.output


def test_every_benchmark_is_listed_with_its_splits() -> None:
    result = grom("benchmarks")
    assert result.exit_code == 0
    lines = {line.split(" ")[0]: line for line in result.stdout.splitlines()}
    assert set(BENCHMARKS) <= set(lines)
    assert "forget, retain, real authors, world facts, (holdout)" in lines["tofu_forget01"]


METRIC = Metric("score", 0.5, 7, "compat", "higher", 0, 1)


def shown(found: dict[str, list[Metric]], width: int = 200, *, intervals: bool = True) -> list[str]:
    """The rows of the table, without its title and head."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(metric_rows("title", found, intervals=intervals))
    return [line.strip() for line in captured.get().splitlines()[4:] if line.strip()]


def test_variants_that_show_the_same_numbers_share_a_row() -> None:
    rows = [METRIC, replace(METRIC, variant="correct", value=0.5001)]
    assert shown({"model": rows}) == ["score    both      higher   7   0.500"]
    rows[1] = replace(rows[1], value=0.51)
    first, second = shown({"model": rows})
    assert ("compat" in first, "correct" in second) == (True, True)
    near = [METRIC, replace(METRIC, variant="correct", better="reference")]
    assert [line.split()[2] for line in shown({"model": near})] == ["higher", "as"]


def test_a_metric_that_no_model_has_is_a_remark_and_not_a_row() -> None:
    missing = replace(METRIC, value=float("nan"), num=0, missing="not computed: no items")
    assert shown({"a": [missing], "b": [missing]}) == []
    (row,) = shown({"a": [missing], "b": [METRIC]})
    assert row.split() == ["score", "compat", "higher", "7", "-", "0.500"]


def test_small_numbers_keep_their_digits_and_intervals_can_be_left_out() -> None:
    small = replace(METRIC, value=1.834e-21, interval=(0.0, 0.25))
    assert shown({"model": [small]})[0].endswith("1.83e-21 [0.000, 0.250]")
    assert shown({"model": [small]}, intervals=False)[0].endswith("7   1.83e-21")


def test_each_remark_is_said_once_with_all_it_is_about() -> None:
    gone = replace(METRIC, value=float("nan"), num=0)
    no_split = replace(gone, name="AUC of loss", missing="not computed: no split")
    found = {
        "model": [
            METRIC.noted("few"),
            replace(METRIC, variant="correct").noted("few"),
            no_split,
            replace(no_split, name="AUC of zlib"),
            replace(METRIC, name="final", parts={"a": 0.5, "b": 0.25}),
        ],
        "reference": [
            METRIC.noted("few"),
            replace(METRIC, variant="correct"),
            no_split,
            replace(no_split, name="AUC of zlib"),
            replace(gone, name="final", missing="not computed: no retrained reference"),
        ],
    }
    assert remarks(found, "reference") == [
        "score: few",
        "AUC of loss; AUC of zlib: not computed: no split",
        "final (model): weakest part: b = 0.25",
    ]
    only = {"model": found["model"], "reference": [METRIC, *found["reference"][1:]]}
    assert remarks(only, None)[0] == "score (model): few"
    assert remarks(only, None)[-1] == "final (reference): not computed: no retrained reference"


def test_the_command_s_table_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [
        replace(METRIC, name=f"real authors truth ratio (geometric) {at}", interval=(0.1, 0.9))
        for at in range(3)
    ]
    console = Console(width=80)
    monkeypatch.setattr(show_metrics, "console", console)
    table = metric_rows("title", {"model": long, "reference": long}, intervals=False)
    wide = metric_rows("title", {"model": long, "reference": long}, intervals=True)
    assert show_metrics._width(table) <= 90 < show_metrics._width(wide)
    with console.capture() as captured:
        console.print(table)
    assert max(map(len, captured.get().splitlines())) <= 80
