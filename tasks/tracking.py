"""Door 3, runs: one in MLflow per flow run, with settings, numbers, figures and data.

The registry is behind `registry.py`, `aliases.py` and `versions.py`; nothing else imports MLflow.
All do so inside functions, since that takes 1.5 s.  Every function names the tracking server and
the run: MLflow's active run and its global address belong to a thread, so that a submitted task
would open a stray run.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

from pydantic import field_validator

from grom.config import Config
from grom.errors import ConfigError
from tasks.shown import shown_settings

if TYPE_CHECKING:
    from mlflow import MlflowClient

SERVED = "mlflow-artifacts"
"""Scheme of files that only the server that took them can find."""
logger = logging.getLogger(__name__)
RUN_TAG, KEY_TAG = "prefect.flow_run_id", "grom.run"
METRIC_NAME = re.compile(r"[\w\- :][\w.\- :]*(/[\w\- :][\w.\- :]*)*", re.ASCII)
LIMITS = {"params": 100, "metrics": 1000, "param_chars": 6000, "digest_chars": 36}
"""What MLflow takes in one request or one field."""


class Tracking(Config):
    """Where runs and models are recorded."""

    uri: str | None = None
    """Tracking server or database.  Not given: `MLFLOW_TRACKING_URI`, or `mlflow.db` and
    `mlartifacts` in the work folder."""
    experiment: str = "unlearning"
    """Name of the experiment; made if it is not there."""
    model_name: str | None = None
    """Name of the registered model.  Not given: `grom-` and the name of the run."""
    copy_below_gb: float = 5.0
    """Checkpoints smaller than this are copied to MLflow's artifacts, others referred to."""

    @field_validator("uri")
    @classmethod
    def _not_a_folder(cls, uri: str | None) -> str | None:
        if uri is not None and (uri.startswith("file:") or "://" not in uri):
            raise ValueError(
                f"uri {uri!r}: MLflow no longer keeps runs in folders. Use a server, "
                "`sqlite:///path/mlflow.db`, or leave it out."
            )
        return uri


def open_run(
    tracking: Tracking,
    work: Path,
    *,
    name: str,
    tags: Mapping[str, str],
    flow_run_id: str,
    run_key: str | None = None,
) -> str:
    """The run of this flow run, reopened if there is one, for a resumed flow continues its run.

    Args:
        tracking, work: where runs are recorded.
        name: of the run.
        tags: for the run.
        flow_run_id: of Prefect.
        run_key: what is being done, if more than one flow run may work on it one after another:
            then that decides which run is continued.

    Raises:
        ConfigError: the experiment was deleted, or its files are with a server that was not named.
    """
    client = client_of(tracking, work)
    experiment_id = _experiment(client, tracking, work)
    tags = {**tags, RUN_TAG: flow_run_id, **({KEY_TAG: run_key} if run_key else {})}
    tag = KEY_TAG if run_key else RUN_TAG
    quoted = tags[tag].replace("'", "")
    found = client.search_runs([experiment_id], f"tags.`{tag}` = '{quoted}'", max_results=1)
    if not found:
        run_id: str = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
        return run_id
    run_id = found[0].info.run_id
    client.update_run(run_id, status="RUNNING", name=name)
    for key, value in tags.items():
        client.set_tag(run_id, key, value)
    return run_id


def close_run(tracking: Tracking, work: Path, run_id: str, status: str = "FINISHED") -> None:
    """End the run: FINISHED, FAILED or KILLED."""
    client_of(tracking, work).set_terminated(run_id, status)


def log_params(tracking: Tracking, work: Path, run_id: str, params: Mapping[str, Any]) -> None:
    """Log settings, nested ones as `outer.inner`, without passwords and names of groups.  A value
    that is there already stays.

    MLflow refuses a second value, so a resumed run keeps its first one and a warning names the key.
    """
    from mlflow.entities import Param

    client = client_of(tracking, work)
    known = client.get_run(run_id).data.params
    texts = {
        key: str(value)[: LIMITS["param_chars"]] for key, value in _flat(shown_settings(params))
    }
    for key in sorted(key for key in texts if known.get(key, texts[key]) != texts[key]):
        logger.warning("register: parameter %s of run %s keeps its first value", key, run_id)
    new = [Param(key, text) for key, text in texts.items() if key not in known]
    for start in range(0, len(new), LIMITS["params"]):
        client.log_batch(run_id, params=new[start : start + LIMITS["params"]])


def log_metrics(
    tracking: Tracking,
    work: Path,
    run_id: str,
    metrics: Mapping[str, float],
    step: int | None = None,
) -> None:
    """Log numbers; names are words joined by `/`, as `forget/rougeL/nf4`.

    NaN and Inf are logged, too.  MLflow shows NaN as a gap and Inf as 1.8e308, so the run's tag
    `non_finite` names them.

    Raises:
        ValueError: MLflow would refuse a name.
    """
    from mlflow.entities import Metric

    if bad := sorted(name for name in metrics if not METRIC_NAME.fullmatch(name)):
        raise ValueError(f"metric names {bad}: use letters, digits, `_ - . :`, blanks, and `/`")
    client, now = client_of(tracking, work), int(time.time() * 1000)
    batch = [Metric(name, float(value), now, step or 0) for name, value in metrics.items()]
    for start in range(0, len(batch), LIMITS["metrics"]):
        client.log_batch(run_id, metrics=batch[start : start + LIMITS["metrics"]])
    if strange := {metric.key for metric in batch if not math.isfinite(metric.value)}:
        before = client.get_run(run_id).data.tags.get("non_finite", "")
        client.set_tag(run_id, "non_finite", ", ".join(sorted(strange | set(_names(before)))))


def log_figure_file(
    tracking: Tracking, work: Path, run_id: str, path: Path, folder: str = "figures"
) -> None:
    """Copy a figure into the run's artifacts."""
    client_of(tracking, work).log_artifact(run_id, str(path), folder)


def log_table_file(
    tracking: Tracking, work: Path, run_id: str, path: Path, folder: str = "tables"
) -> None:
    """Copy a table into the run's artifacts; it must not hold the text of an example."""
    client_of(tracking, work).log_artifact(run_id, str(path), folder)


def log_page_file(tracking: Tracking, work: Path, run_id: str, path: Path) -> None:
    """Copy an HTML page into the run's artifacts, at their root, where MLflow shows it."""
    client_of(tracking, work).log_artifact(run_id, str(path))


def log_dataset(
    tracking: Tracking,
    work: Path,
    run_id: str,
    *,
    name: str,
    uri: str,
    digest: str,
    context: str,
    num_rows: int,
) -> None:
    """Record which data the run used, by address and digest; no text is read or copied."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    scheme = urlparse(uri).scheme or "file"
    dataset = Dataset(
        name=name,
        digest=digest[: LIMITS["digest_chars"]],
        source_type="local" if scheme == "file" else scheme,
        source=json.dumps(shown_settings({"uri": uri})),
        profile=json.dumps({"num_rows": num_rows, "digest": digest}),
    )
    tags = [InputTag("mlflow.data.context", context)]
    client_of(tracking, work).log_inputs(run_id, [DatasetInput(dataset, tags)])


def address_of(tracking: Tracking, work: Path) -> str:
    """Address of the tracking server or database, and of the model registry with it."""
    return (
        tracking.uri
        or os.environ.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{work.resolve() / 'mlflow.db'}"
    )


def client_of(tracking: Tracking, work: Path) -> MlflowClient:
    """A client of that server, with MLflow's telemetry and progress bars off unless asked for."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    if tracking.uri is None:
        work.mkdir(parents=True, exist_ok=True)
    address = address_of(tracking, work)
    return MlflowClient(address, registry_uri=address)


def need_server(name: str, uri: str, address: str) -> None:
    """Refuse to go on where files are with an MLflow server and only its database was named.

    Raises:
        ConfigError: so it is.
    """
    if urlparse(uri).scheme == SERVED and not address.startswith("http"):
        raise ConfigError(
            f"{name}: its files are with an MLflow server, and this command knows a database "
            "alone. Set MLFLOW_TRACKING_URI to the server's http address; it has to run."
        )


def _experiment(client: MlflowClient, tracking: Tracking, work: Path) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(tracking.experiment)
    if found is None:
        # A server knows where its artifacts go; a plain database says `./mlruns`.
        served = address_of(tracking, work).startswith("http")
        location = None if served else (work.resolve() / "mlartifacts").as_uri()
        with suppress(MlflowException):  # another run may make it first
            return client.create_experiment(tracking.experiment, artifact_location=location)
        found = client.get_experiment_by_name(tracking.experiment)
    if found is None or found.lifecycle_stage != "active":
        raise ConfigError(
            f"experiment {tracking.experiment!r} was deleted or cannot be made. Restore it in "
            "MLflow, or name another one."
        )
    where = str(found.artifact_location)
    need_server(f"experiment {tracking.experiment!r}", where, address_of(tracking, work))
    return str(found.experiment_id)


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _names(text: str) -> list[str]:
    return [name for name in text.split(", ") if name]
