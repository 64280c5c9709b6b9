"""Door 3, registry: edited checkpoints become versions of a registered MLflow model, and their
files are fetched.

Aliases, not stages, say what a version is for, and the alias is set last: a version without one is
not finished.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse
from urllib.request import url2pathname
from uuid import uuid4

from grom.errors import ConfigError, MissingInput
from tasks.aliases import (
    CHAMPION,
    CHECKPOINT_TAG,
    GONE,
    NOT_FOUND,
    PURGED,
    ROLLED_BACK,
    PurgedVersion,
    aliases_of,
    point_alias,
)
from tasks.tracking import Tracking, address_of, client_of, need_server
from tasks.version_info import downloaded

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion


@dataclass(frozen=True, slots=True)
class Version:
    """A registered version of a model."""

    name: str
    version: str
    uri: str
    """`models:/<name>/<version>`."""


def register_checkpoint(
    tracking: Tracking,
    work: Path,
    run_id: str,
    folder: Path,
    *,
    tags: Mapping[str, str],
    uri: str,
    name: str,
    alias: str = "candidate",
    deserved: bool = True,
) -> Version:
    """Register a checkpoint folder as a version of the model, the alias last.

    A version that was made from the same `uri` is used again, so that a resumed or repeated run
    does not make a second one; unless it is older than the champion, or was rolled back.

    Args:
        tracking, work, run_id: the run that made the checkpoint.
        folder: the files, as `save_pretrained` writes them.
        tags: for the version.
        uri: where the store keeps them; content-addressed.
        name: of the registered model.
        alias: name to move to the version.
        deserved: False for a version that failed its gate: it does not get the alias, and loses
            it if an earlier, milder judgement gave it.

    Raises:
        MissingInput: `folder` is no checkpoint.
        ConfigError: a server would have to refer to a local folder.
        MlflowException: MLflow failed; then there is no new version.
    """
    if not (folder / "config.json").is_file():
        raise MissingInput(str(folder), "no config.json, so this is no checkpoint")
    client = client_of(tracking, work)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    tags = {**tags, CHECKPOINT_TAG: uri, "bytes": str(size)}
    version = _version_of(client, name, uri)
    with _undone_on_error(client) as made:
        if version is None:
            source = uri
            if size < tracking.copy_below_gb * 1e9:
                source = _copy(client, name, run_id, folder, tags, made)
            elif urlparse(uri).scheme in ("", "file"):
                _refuse_local(uri, address_of(tracking, work))
            # With `model_id`, a server lets the source lie outside the run's own artifacts.
            version = client.create_model_version(
                name, source, run_id, tags=tags, model_id=made.get("model_id")
            )
            made["version"] = version
            if "model_id" in made:
                link = json.dumps([{"name": name, "version": version.version}])
                client.set_logged_model_tags(made["model_id"], {"mlflow.modelVersions": link})
        for key, value in tags.items():
            client.set_model_version_tag(name, str(version.version), key, value)
        _grant(client, name, str(version.version), alias, deserved)
    number = str(version.version)
    return Version(name, number, f"models:/{name}/{number}")


def _grant(client: MlflowClient, name: str, number: str, alias: str, deserved: bool) -> None:
    if deserved:
        if not point_alias(client, name, alias, number):
            raise PurgedVersion(name, number)
    elif alias in client.get_model_version(name, number).aliases:
        client.delete_registered_model_alias(name, alias)


def registered_folder(tracking: Tracking, work: Path, uri: str) -> Path:
    """A local folder with a registered checkpoint, for plain transformers.

    Args:
        tracking, work: where the registry is; downloads go to `work/registered`.
        uri: `models:/name@alias` or `models:/name/3`.

    Raises:
        ConfigError: another form of address; or the files are with a server that was not named.
        MissingInput: no such version, or its files are gone.
    """
    from mlflow.exceptions import MlflowException

    match = re.fullmatch(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))", uri)
    if match is None:
        raise ConfigError(f"{uri}: write `models:/name@alias` or `models:/name/3`.")
    client, (name, alias, number) = client_of(tracking, work), match.groups()
    try:
        if alias:
            number = str(client.get_model_version_by_alias(name, alias).version)
        version = client.get_model_version(name, number)
        source = client.get_model_version_download_uri(name, number)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        raise MissingInput(uri, "no such version in the registry") from error
    if PURGED in version.tags:
        raise PurgedVersion(name, number)
    scheme, address = urlparse(source).scheme, address_of(tracking, work)
    need_server(uri, source, address)
    if scheme == "file":
        folder = Path(url2pathname(urlparse(source).path))
    elif not scheme:
        folder = Path(source)
    else:
        folder = downloaded(work, version)
        _download(source, folder, address)
    if not (folder / "config.json").is_file():
        raise MissingInput(uri, f"its files are not in {folder}")
    return folder


def _download(source: str, folder: Path, address: str) -> None:
    """Fill `folder` by MLflow's own means, unless it is there already; it appears when complete."""
    if folder.exists():
        return
    from mlflow.artifacts import download_artifacts

    draft = folder.with_name(f".{uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        files = download_artifacts(source, dst_path=str(draft), tracking_uri=address)
        with suppress(FileExistsError):
            Path(files).rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _version_of(client: MlflowClient, name: str, uri: str) -> ModelVersion | None:
    """The version that was made from this address, if it may still become the champion."""
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):  # it is there already
        client.create_registered_model(name)
    oldest = int(aliases_of(client, name).get(CHAMPION, 0))
    return next(
        (
            version
            for version in client.search_model_versions(f"name = '{name}'")
            if version.tags.get(CHECKPOINT_TAG) == uri
            and int(version.version) >= oldest
            and not (GONE | {ROLLED_BACK}) & set(version.tags)
        ),
        None,
    )


def _refuse_local(uri: str, address: str) -> None:
    if address.startswith("http"):
        raise ConfigError(
            f"{uri}: an MLflow server takes no local folder by reference. Put `store` into an "
            "object store, or raise `tracking.copy_below_gb` above the checkpoint's size."
        )


def _copy(
    client: MlflowClient,
    name: str,
    run_id: str,
    folder: Path,
    tags: Mapping[str, str],
    made: dict[str, Any],
) -> str:
    """Upload the folder as a LoggedModel; where its files are."""
    model = client.create_logged_model(
        client.get_run(run_id).info.experiment_id,
        name=name,
        source_run_id=run_id,
        tags=dict(tags),
        model_type="checkpoint",
    )
    made["model_id"] = model.model_id
    client.log_model_artifacts(model.model_id, str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    # Not `models:/<id>`: the database store would look it up at MLflow's global address.
    return str(model.artifact_location)


@contextmanager
def _undone_on_error(client: MlflowClient) -> Iterator[dict[str, Any]]:
    made: dict[str, Any] = {}
    try:
        yield made
    except BaseException:
        if version := made.get("version"):
            client.delete_model_version(version.name, str(version.version))
        if model_id := made.get("model_id"):
            client.finalize_logged_model(model_id, "FAILED")
        raise
