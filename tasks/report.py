"""Report of a run, for the disk, MLflow and Prefect.  Numbers, digests and settings only.

The text of examples and the names of groups never get into it.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from grom.gate import FORGET, Condition
from grom.pictures import EDITED, UNEDITED
from grom.report import Headline, MetricTable, Picture, ReportPage, TableRow, render_report
from tasks.calibrate import read_calibration
from tasks.codecs import write_json
from tasks.pictures import CAPTIONS, ORDER, Findings, calibration_of, draw_pictures
from tasks.place import Place, ScoreRef
from tasks.shown import shown_settings
from tasks.tracking import Tracking, log_figure_file, log_page_file, log_table_file

logger = logging.getLogger(__name__)

Where = tuple[Tracking, Path, str]
"""Tracking server, work folder and id of the MLflow run."""
MEASURES = {
    "probability": "mean answer probability",
    "token_accuracy": "token accuracy",
    "extraction_strength": "extraction strength",
}
VERSIONS = ("grom-pipeline", "torch", "transformers", "bitsandbytes", "mlflow")


def write_report(where: Where, found: Findings, place: Place) -> Path:
    """Draw, write and log the report of a run.

    Returns:
        `<work>/reports/<name>-<run>/report.html`, with its pictures beside it.
    """
    _, work, run_id = where
    folder = work / "reports" / f"{found.name}-{run_id[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    calibration = read_calibration(found.calibrated, place)
    write_json(folder / "calibration.json", calibration)
    log_table_file(*where, folder / "calibration.json")
    drawn = draw_pictures(found, calibration_of(calibration), folder, place)
    for name in drawn:
        log_figure_file(*where, folder / name)
    facts = {name.replace("_", " "): value for name, value in found.facts.items()}
    page = ReportPage(
        title=f"{found.name}: what was forgotten, and at what cost",
        facts={**facts, "mlflow run": run_id, "versions": _versions()},
        headlines=_headlines(found),
        conditions=found.conditions,
        warnings=[*found.warnings, *_warnings(found)],
        pictures=[Picture(CAPTIONS[name], (folder / name).read_bytes()) for name in drawn],
        tables=[*found.tables, *_set_tables(found), *_health_table(found.scores)],
        config=shown_settings(found.settings),
    )
    path = folder / "report.html"
    path.write_text(render_report(page), encoding="utf-8")
    log_page_file(*where, path)
    logger.info("report: %s", path)
    return path


def _headlines(found: Findings) -> list[Headline]:
    return [
        Headline(name, found.probability(UNEDITED, name), after, should_fall=name == FORGET)
        for name in ORDER
        if not math.isnan(after := found.probability(EDITED, name))
    ]


def _warnings(found: Findings) -> list[str]:
    stopped = found.calibrated.stopped_by
    warnings = []
    if stopped.startswith(("utility floor", "search limit")):
        warnings.append(f"The forget level was not reached: the {stopped} stopped the search.")
    edited = found.score(EDITED)
    warnings += [
        f"{name}: no examples, so nothing was measured on this set."
        for name, values in (edited.sets.items() if edited else ())
        if math.isnan(values["probability"])
    ]
    return warnings


def _set_tables(found: Findings) -> list[MetricTable]:
    """A table for each measure: sets down, models across."""
    scores = found.scores
    columns = tuple(score.label for score in scores)
    quantised = [
        f"{score.label}: {len(score.quantised_modules)} modules quantised"
        for score in scores
        if score.quantised_modules
    ]
    tables = []
    for measure, title in MEASURES.items():
        rows = []
        for name in found.sets:
            measured = [score.sets.get(name, {}) for score in scores]
            cells = tuple(values.get(measure, math.nan) for values in measured)
            num = next((f"{values['num_examples']:,.0f}" for values in measured if values), "")
            rows.append(TableRow(name, cells, num=num))
        tables.append(MetricTable(f"By set: {title}", columns, tuple(rows), "; ".join(quantised)))
    return tables


def _health_table(scores: Sequence[ScoreRef]) -> list[MetricTable]:
    """Rates of free answers to forget prompts: measures down, models across."""
    asked = [score for score in scores if score.health]
    names = dict.fromkeys(name for score in asked for name in score.health)
    rows = tuple(TableRow(name, tuple(score.health.get(name) for score in asked)) for name in names)
    columns = tuple(score.label for score in asked)
    return [MetricTable("Free answers to forget prompts", columns, rows)] if rows else []


def _versions() -> str:
    return ", ".join(
        [f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in VERSIONS)]
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
