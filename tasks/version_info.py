"""Door 3, one version: what its tags and aliases tell, and where MLflow keeps its files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grom.errors import GromError
from tasks.aliases import CHAMPION, CHECKPOINT_TAG, NOT_FOUND, PREVIOUS, PURGED, ROLLED_BACK
from tasks.tracking import Tracking, address_of, client_of

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

COPY = re.compile(r"/(m-[0-9a-f]{32})/artifacts/?$")
"""Where MLflow keeps the files of a LoggedModel; a version does not name it otherwise."""
State = Literal["champion", "previous", "candidate", "superseded", "failed", "purged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """A version as the registry has it."""

    name: str
    number: str
    state: State
    aliases: tuple[str, ...]
    created: float
    """Seconds since 1970, by the server's clock."""
    batches: tuple[str, ...]
    """Deletion batches that it honours."""
    requests: int | None
    """How many requests these have."""
    gate: str | None
    num_bytes: int | None
    """Size of its files."""
    source: str
    """Where its files are."""
    checkpoint: str | None
    """Where the store keeps them."""
    still_knows: bool
    """It has files, and is older than the champion: what was requested later is in them."""


def info_of(version: ModelVersion, aliases: Mapping[str, str]) -> VersionInfo:
    """What tags, and aliases by name, say about a version."""
    number, tags, champion = str(version.version), version.tags, aliases.get(CHAMPION)
    mine = tuple(sorted(alias for alias, target in aliases.items() if target == number))
    requests, num_bytes = tags.get("requests", ""), tags.get("bytes", "")
    return VersionInfo(
        name=version.name,
        number=number,
        state=_state(version, mine, champion),
        aliases=mine,
        created=version.creation_timestamp / 1000,
        batches=tuple(batch for batch in tags.get("batches", "").split(",") if batch),
        requests=int(requests) if requests.isdigit() else None,
        gate=tags.get("gate"),
        num_bytes=int(num_bytes) if num_bytes.isdigit() else None,
        source=str(version.source),
        checkpoint=tags.get(CHECKPOINT_TAG),
        still_knows=PURGED not in tags and champion is not None and int(number) < int(champion),
    )


def _state(version: ModelVersion, aliases: tuple[str, ...], champion: str | None) -> State:
    tags = version.tags
    if PURGED in tags:
        return "purged"
    if CHAMPION in aliases:
        return "champion"
    if PREVIOUS in aliases:
        return "previous"
    if tags.get("gate") == "failed":
        return "failed"
    is_new = champion is None or int(version.version) > int(champion)
    return "candidate" if is_new and ROLLED_BACK not in tags else "superseded"


def downloaded(work: Path, version: ModelVersion) -> Path:
    """Folder on this machine for the files of a version that lie elsewhere."""
    return work / "registered" / f"{version.name}-{version.version}-{version.creation_timestamp}"


def remove_files(tracking: Tracking, work: Path, version: ModelVersion) -> None:
    """Remove MLflow's copy of a version's files, wherever it keeps them, and what was downloaded
    to this machine.  The version stays; files that it refers to are not MLflow's and stay, too.

    `delete_logged_model` would only mark the copy as deleted.

    Raises:
        GromError: something is still there.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    copy = COPY.search(str(version.source))
    if copy is not None:
        address = address_of(tracking, work)
        repository: Any = get_artifact_repository(str(version.source), tracking_uri=address)
        repository.delete_artifacts()
        if repository.list_artifacts():
            raise GromError(
                f"{version.name}, version {version.version}: its files could not be removed. Check "
                "that MLflow's credentials may delete, then purge again."
            )
        try:
            client_of(tracking, work).delete_logged_model(copy[1])
        except MlflowException as error:  # deleted already
            if error.error_code not in NOT_FOUND:
                raise
    shutil.rmtree(downloaded(work, version), ignore_errors=True)
