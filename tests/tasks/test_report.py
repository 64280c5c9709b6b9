"""The report of a run is on disk and in MLflow, with all its numbers and nothing private."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from grom.config import AutoStrength, StrengthConfig
from grom.gate import Condition
from tasks.pictures import Findings, calibration_of, request_means
from tasks.report import write_report
from tasks.shown import shown_settings
from tasks.tracking import Tracking, open_run
from tests.stages import Stages, stages
from tests.tiny import forget_rows, retain_rows, write_rows

PASSED = Condition("forget probability", 0.1, 0.5, at_most=True)
NAMED = "request-of-jane-doe"
FACTS = {"base_fingerprint": "3fa29c"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """A run with two forget requests of three rows each, and a search for the strength."""
    run = stages(tmp_path_factory.mktemp("report"))
    rows = [
        {**row, "request_id": f"{NAMED}-{number // 3}"} for number, row in enumerate(forget_rows())
    ]
    write_rows(Path(run.config.forget.uri), rows)
    auto = AutoStrength(forget_probability=1e-3, utility_floor=None, max_nats=8)
    return run.but(strength=StrengthConfig(auto=auto))


def findings(run: Stages, **changes: Any) -> Findings:
    scores = tuple(score_of(run, edited=edited) for edited in (False, True))
    whole: dict[str, Any] = {
        "name": "tiny",
        "settings": run.config.model_dump(mode="json"),
        "facts": FACTS,
        "sites": run.sites,
        "calibrated": run.calibrated,
        "scores": scores,
        "conditions": [PASSED],
    }
    return Findings(**{**whole, **changes})


def score_of(run: Stages, *, edited: bool) -> Any:
    score = run.score(edited=edited)
    return score.model_copy(
        update={"sets": {name.replace("held", "retain, held"): s for name, s in score.sets.items()}}
    )


def logged(run: Stages, run_id: str, folder: str | None = None) -> set[str]:
    address = f"sqlite:///{run.work.resolve() / 'mlflow.db'}"
    found = MlflowClient(address).list_artifacts(run_id, folder)
    return {entry.path for entry in found}


def test_the_report_is_on_disk_and_in_mlflow_with_the_pictures_it_shows(run: Stages) -> None:
    run_id = open_run(Tracking(), run.work, name="tiny", tags={}, flow_run_id="flow-1")
    ratios = {"edited": [0.5, 0.9], "unedited": [0.2, 0.3], "retrained": [0.6, 0.8]}
    found = findings(run, truth_ratios=ratios)
    path = write_report((Tracking(), run.work, run_id), found, run.place)
    assert path == run.work / "reports" / f"tiny-{run_id[:8]}" / "report.html"
    pictures = {"bars.png", "trade_off.png", "forgetting.png", "truth_ratios.png"}
    assert {file.name for file in path.parent.iterdir()} == {
        "report.html",
        "calibration.json",
        *pictures,
    }
    assert logged(run, run_id, "figures") == {f"figures/{name}" for name in pictures}
    assert "report.html" in logged(run, run_id)
    text = path.read_text()
    assert text.count("data:image/png;base64,") == len(pictures)
    told = ("Gate passed", run_id, FACTS["base_fingerprint"], "grom-pipeline", "max_nats: 8.0")
    assert [words for words in told if words not in text] == []


def test_nothing_private_is_in_the_report(run: Stages) -> None:
    run_id = open_run(Tracking(), run.work, name="tiny", tags={}, flow_run_id="flow-2")
    found = findings(run)
    text = write_report((Tracking(), run.work, run_id), found, run.place).read_text()
    assert NAMED in Path(run.config.forget.uri).read_text()
    assert NAMED not in text
    assert not [row for row in forget_rows() + retain_rows() if row["answer"] in text]


def test_sets_are_in_the_order_of_a_run(run: Stages) -> None:
    score = score_of(run, edited=False)
    numbers = score.sets["forget"]
    names = ("also", "retain, held out", "retain, seen", "forget", "zebra")
    mixed = score.model_copy(update={"sets": dict.fromkeys(names, numbers)})
    assert findings(run, scores=(mixed,)).sets == [
        "forget", "retain, seen", "retain, held out", "also", "zebra",
    ]  # fmt: skip


def test_forgetting_is_averaged_over_the_rows_of_a_request(run: Stages) -> None:
    score = score_of(run, edited=False)
    means = request_means(score, run.place)
    assert list(means) == [f"{NAMED}-0", f"{NAMED}-1"]
    assert sum(means.values()) / 2 == pytest.approx(score.sets["forget"]["probability"])
    assert request_means(None, run.place) == {}


def test_a_run_that_measured_little_has_a_report_that_says_so(run: Stages) -> None:
    run_id = open_run(Tracking(), run.work, name="tiny", tags={}, flow_run_id="flow-3")
    before, after = (score_of(run, edited=edited) for edited in (False, True))
    empty = after.model_copy(
        update={
            "sets": {**after.sets, "retain, held out": {"num_examples": 0, "probability": math.nan}}
        }
    )
    given = Stages(run.config.model_copy(update={"strength": StrengthConfig(nats=4)}))
    stopped = given.calibrated.model_copy(update={"stopped_by": "utility floor"})
    found = findings(run, scores=(before, empty), calibrated=stopped)
    path = write_report((Tracking(), run.work, run_id), found, run.place)
    text = path.read_text()
    assert not (path.parent / "trade_off.png").exists()
    assert "retain, held out: no examples" in text
    assert "The forget level was not reached" in text


def test_settings_are_shown_without_passwords_and_names_of_groups() -> None:
    settings = {
        "tracking": {"uri": "postgresql://me:secret@host/db", "experiment": "a@b"},
        "forget": {"only": ["jane", "joe"], "without": [], "uri": "s3://bucket/x", "limit": None},
        "layers": [1, 2],
    }
    assert shown_settings(settings) == {
        "tracking": {"uri": "postgresql://***@host/db", "experiment": "a@b"},
        "forget": {"only": "2 groups", "without": [], "uri": "s3://bucket/x", "limit": None},
        "layers": [1, 2],
    }


def test_a_calibration_from_json_has_numbers_again() -> None:
    point = {"nats": 1.0, "beta": 2.0, "forget_probability": 0.3, "held_out_probability": "nan"}
    stored = {
        "beta": 2.0, "nats": 1.0, "stopped_by": "given", "target_probability": None,
        "floor_probability": None, "before": None, "curve": [point],
    }  # fmt: skip
    found = calibration_of(stored)
    assert found.before is None
    assert math.isnan(found.curve[0].held_out_probability)
