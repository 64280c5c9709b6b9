"""Pictures and tables of a run, for MLflow and Prefect.  Numbers and digests only, no text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from grom.calibrate import Calibration, CurvePoint
from grom.gate import Condition
from grom.report import draw_layer_scores, draw_trade_off
from grom.select import LayerScore
from tasks.calibrate import read_calibration
from tasks.codecs import read_json, write_json
from tasks.models import scratch_folder
from tasks.place import CalibrationRef, Place, ScoreRef, SitesRef
from tasks.tracking import Tracking, log_figure_file, log_table_file

Where = tuple[Tracking, Path, str]
"""Tracking server, work folder and id of the MLflow run."""


def log_pictures(where: Where, sites: SitesRef, calibrated: CalibrationRef, place: Place) -> None:
    """The trade-off curve and the layer scores, as PNG, with the numbers behind them."""
    chosen = read_json(place.fetch(sites.artifact) / "sites.json")
    found = read_calibration(calibrated, place)
    _, work, run_id = where
    with scratch_folder(work / "scratch", f"pictures-{run_id}") as folder:
        write_json(folder / "calibration.json", found)
        log_table_file(*where, folder / "calibration.json")
        if chosen["scores"]:
            scores = [
                LayerScore(score["layer"], score["forget_effect"], score["retain_effect"])
                for score in chosen["scores"]
            ]
            draw_layer_scores(scores, sites.layers, folder / "layer_scores.png")
            log_figure_file(*where, folder / "layer_scores.png")
        if found["curve"]:
            draw_trade_off(calibration_of(found), folder / "trade_off.png")
            log_figure_file(*where, folder / "trade_off.png")


def calibration_of(found: dict[str, Any]) -> Calibration:
    """The calibration with numbers where JSON has none."""

    def point(values: dict[str, Any]) -> CurvePoint:
        return CurvePoint(**{name: float(value) for name, value in values.items()})

    return Calibration(
        **found
        | {
            "before": point(found["before"]),
            "curve": tuple(point(values) for values in found["curve"]),
        }
    )


def show_in_prefect(scores: tuple[ScoreRef, ...], conditions: list[Condition], uri: str) -> None:
    """A report and the gate table as Prefect artifacts."""
    names = list(scores[0].sets)
    lines = ["| set | " + " | ".join(score.label for score in scores) + " |"]
    lines.append("| --- |" + " --- |" * len(scores))
    for name in names:
        cells = [f"{score.sets[name]['probability']:.3f}" for score in scores]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    report = "\n".join([f"# {uri}", "", "Mean answer probability.", "", *lines])
    create_markdown_artifact(report, key="unlearn-report", description="before and after")
    rows = [
        {
            "condition": condition.name,
            "value": "nan" if math.isnan(condition.value) else round(condition.value, 4),
            "limit": condition.limit,
            "passed": condition.passed,
        }
        for condition in conditions
    ]
    create_table_artifact(rows, key="gate-table", description="gate")
