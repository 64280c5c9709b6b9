"""Stage register: what was measured and made goes to MLflow, the model becomes a version."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from grom.apply import Rounding
from grom.config import Config, GateConfig
from grom.gate import Condition, judge
from tasks.audit import AuditRef
from tasks.codecs import read_table
from tasks.exam import Exams, exam_tables, truth_ratios_of
from tasks.influence_tables import influence_tables, read_influence
from tasks.judge import attack_results, attack_table, evidence_of
from tasks.pictures import Findings
from tasks.place import (
    CalibrationRef,
    CheckpointRef,
    DataRef,
    EditRef,
    ModelRef,
    Part,
    Place,
    ScoreRef,
    SitesRef,
)
from tasks.registry import register_checkpoint
from tasks.report import Where, show_in_prefect, write_report
from tasks.shown import shown_settings
from tasks.solver import SiteReport
from tasks.tracking import (
    Tracking,
    close_run,
    log_dataset,
    log_metrics,
    log_params,
    open_run,
)
from tasks.versions import model_of

logger = logging.getLogger(__name__)
Sets = dict[str, tuple[DataRef, Part]]
ALIAS = "candidate"
SHOWN_REQUESTS = 3


class TrackedRun(Config):
    """The MLflow run of a flow run."""

    name: str
    tracking: Tracking
    work: str
    run_id: str
    settings: dict[str, Any]
    """Of the flow run, as JSON has them."""

    @property
    def where(self) -> Where:
        """The first arguments of most functions of `tracking` and `registry`."""
        return self.tracking, Path(self.work), self.run_id


class Registered(Config):
    """The registered version, and what the gate said."""

    model_name: str
    version: str
    uri: str
    run_id: str
    alias: str | None
    """None if the gate failed."""
    passed: bool
    conditions: tuple[dict[str, Any], ...]
    attacks: tuple[dict[str, Any], ...] = ()
    """Verdict on each attack."""


@contextmanager
def tracked_run(
    name: str,
    tracking: Tracking,
    place: Place,
    settings: Mapping[str, Any],
    run_key: str | None = None,
) -> Iterator[TrackedRun]:
    """The MLflow run of this flow run, or of `run_key`, whichever flow run works on it.

    It ends as FAILED if the block does, and waits as SCHEDULED while the flow run is suspended.
    """
    work, run_id = Path(place.work), str(flow_run.get_id() or name)
    tags = {"prefect.flow_run_name": str(flow_run.get_name()), "grom.name": name}
    mlflow_id = open_run(tracking, work, name=name, tags=tags, flow_run_id=run_id, run_key=run_key)
    run = TrackedRun(
        name=name,
        tracking=tracking,
        work=place.work,
        run_id=mlflow_id,
        settings=dict(settings),
    )
    log_params(*run.where, settings)
    try:
        yield run
    except Pause:
        close_run(*run.where, "SCHEDULED")
        raise
    except BaseException:
        close_run(*run.where, "FAILED")
        raise
    close_run(*run.where)


@task(cache_policy=NO_CACHE)  # done again, it finds its version
def register(
    run: TrackedRun,
    model: ModelRef,
    sets: Sets,
    sites: SitesRef,
    edit: EditRef,
    calibrated: CalibrationRef,
    edited: CheckpointRef,
    scores: tuple[ScoreRef, ...],
    gate: GateConfig,
    place: Place,
    exams: Exams | None = None,
    about: dict[str, str] | None = None,
    influence: AuditRef | None = None,
) -> Registered:
    """Log the run and register the edited checkpoint as a model version.

    The alias comes last, and only if the gate passed: what serves traffic by an alias never gets
    a version that failed.
    """
    log_data(run, sets)
    log_sites(run, edit, edited, calibrated, place)
    log_scores(run, scores)
    reports = read_table(place.fetch(edit.artifact) / "sites.parquet", SiteReport)
    attacks = attack_results(scores, [report.site for report in reports])
    conditions = judge(gate, evidence_of(scores, attacks))
    passed = all(condition.passed for condition in conditions)
    tags = {
        "gate": "passed" if passed else "failed",
        "batch": sets["forget"][0].digest[:16],
        **_origin(model, edit, calibrated),
        **(about or {}),
    }
    rows = [] if influence is None else read_influence(influence, place)
    tables = [attack_table(attacks), *(exam_tables(exams, place) if exams else ())]
    tables += influence_tables(rows, SHOWN_REQUESTS) if rows else []
    found = Findings(
        name=run.name,
        settings=run.settings,
        facts=tags,
        sites=sites,
        calibrated=calibrated,
        scores=scores,
        conditions=conditions,
        tables=tables,
        influence=rows,
        warnings=() if influence is None else influence.warnings,
        truth_ratios=truth_ratios_of(exams, place) if exams else {},
    )
    write_report(run.where, found, place)
    name = model_of(run.tracking, run.name)
    folder, uri = place.fetch(edited.artifact), edited.artifact.uri
    version = register_checkpoint(
        *run.where, folder, tags=tags, uri=uri, name=name, alias=ALIAS, deserved=passed
    )
    show_in_prefect(scores, conditions, version.uri)
    logger.info("register: %s, gate %s", version.uri, tags["gate"])
    return Registered(
        model_name=version.name,
        version=version.version,
        uri=version.uri,
        run_id=run.run_id,
        alias=ALIAS if passed else None,
        passed=passed,
        conditions=shown_conditions(conditions),
        attacks=tuple(asdict(attack) for attack in attacks),
    )


def shown_conditions(conditions: Sequence[Condition]) -> tuple[dict[str, Any], ...]:
    """Conditions with their verdicts, as JSON has them."""
    return tuple(
        asdict(condition) | {"passed": condition.passed, "margin": condition.margin}
        for condition in conditions
    )


def _origin(model: ModelRef, edit: EditRef, calibrated: CalibrationRef) -> dict[str, str]:
    """What a version was made from and how, as tags."""
    return {
        "base_model": str(shown_settings({"source": model.source})["source"]),
        "base_fingerprint": model.fingerprint,
        "git_sha": git_sha(),
        "prefect.flow_run_id": str(flow_run.get_id()),
        "edit": edit.artifact.key,
        "nats": f"{calibrated.nats:.4g}",
        "stopped_by": calibrated.stopped_by,
    }


def log_data(run: TrackedRun, sets: Sets) -> None:
    """Data sets by address and digest; no row is copied."""
    for name, (data, part) in sets.items():
        log_dataset(
            *run.where,
            name=f"{name} ({part})" if part == "all" else name,
            uri=data.address,
            digest=data.digest,
            context=data.role,
            num_rows=data.num_rows,
        )


def log_sites(
    run: TrackedRun,
    edit: EditRef,
    edited: CheckpointRef,
    calibrated: CalibrationRef,
    place: Place,
) -> None:
    """Numbers of each site with the layer as the step, and of the edit as a whole."""
    beta = calibrated.beta
    reports = read_table(place.fetch(edit.artifact) / "sites.parquet", SiteReport)
    for report in reports:
        values = {
            "site/condition": report.condition,
            "site/mu": report.mu,
            "site/peak_ratio": report.peak_ratio,
            "site/relative_norm": report.relative_norm * beta,
            "site/drop_nats": report.drop_nats * beta,
            "site/num_forget": report.num_forget,
            "site/num_retain": report.num_retain,
            "site/update_norm": report.update_norm * beta,
            "site/suppressed_share": report.suppressed_share,
        }
        log_metrics(*run.where, values, step=report.layer)
    steps = {report.site: report.layer for report in reports}
    for rounding in read_table(
        place.fetch(edited.artifact) / "edit" / "rounding.parquet", Rounding
    ):
        lost = {"site/rounding_lost": rounding.lost, "site/num_changed": rounding.num_changed}
        log_metrics(*run.where, lost, step=steps[rounding.site])
    whole = {
        "edit/nats": calibrated.nats,
        "edit/beta": calibrated.beta,
        "edit/solve_seconds": edit.seconds,
    }
    log_metrics(*run.where, whole)


def log_scores(run: TrackedRun, scores: tuple[ScoreRef, ...]) -> None:
    """Every measure of every set, named `set/measure/load`."""
    for score in scores:
        values = {
            f"{name.replace(',', '')}/{measure}/{score.label}": float(value)
            for name, measures in score.sets.items()
            for measure, value in measures.items()
        }
        log_metrics(*run.where, values)


def git_sha() -> str:
    """Commit of the code, or `unknown` outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
