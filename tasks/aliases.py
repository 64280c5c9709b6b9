"""Door 3, aliases and tags: what a version is for; and that none without files has an alias."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from grom.errors import ConfigError, DataError, MissingInput

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
"""The newest that passed its gate, the one that serves, and the one that served before."""
CHECKPOINT_TAG = "checkpoint_uri"
"""Tag of a version: the artifact in the store that it was made from."""
PURGING, PURGED = "purging", "purged"
"""Tags of a version whose files are about to go, and are gone; when, ISO 8601."""
GONE = frozenset({PURGING, PURGED})
REPLACES, PROMOTED = "replaces", "promoted"
"""Tags of a champion: the version that served before it, and since when it serves."""
ROLLED_BACK = "rolled_back_to"
"""Tag of a version that served, or was about to, until an older one was restored; its number."""
NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for a missing model or version, and for a missing alias."""


class PurgedVersion(DataError):
    """The files of a version were removed under the retention rule."""

    def __init__(self, name: str, number: str) -> None:
        super().__init__(
            f"{name}, version {number}: its files were purged, since they held data that was to be "
            "forgotten. Choose another version; `grom models` lists them."
        )


def aliases_of(client: MlflowClient, name: str) -> dict[str, str]:
    """Aliases of a registered model, with the numbers of their versions.

    Raises:
        MissingInput: there is no such model.
    """
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        raise MissingInput(name, "no such registered model") from error
    return {alias: str(number) for alias, number in found.items()}


def point_alias(
    client: MlflowClient,
    name: str,
    alias: str,
    number: str,
    barred: frozenset[str] = GONE,
) -> bool:
    """Let an alias point to a version, unless it has one of the `barred` tags.

    Who bars a version writes the tag and then looks for aliases; here it is the other way round.
    So of the two at least one sees the other, and gives way.

    Returns:
        False if it is barred; then the alias is where it was.
    """
    before = aliases_of(client, name).get(alias)
    client.set_registered_model_alias(name, alias, number)
    if not barred & set(client.get_model_version(name, number).tags):
        return True
    if before is None or before == number:
        client.delete_registered_model_alias(name, alias)
    else:
        client.set_registered_model_alias(name, alias, before)
    return False


def version_of(client: MlflowClient, name: str, number: str) -> ModelVersion:
    """A version.

    Raises:
        MissingInput: there is none.
    """
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        raise MissingInput(
            f"{name}, version {number}", "no such version in the registry"
        ) from error


def check_fit(version: ModelVersion) -> None:
    """Check that a version may serve.

    Raises:
        PurgedVersion: its files are gone, or about to go.
        ConfigError: its gate did not pass.
    """
    if GONE & set(version.tags):
        raise PurgedVersion(version.name, str(version.version))
    if (gate := version.tags.get("gate")) != "passed":
        raise ConfigError(
            f"{version.name}, version {version.version}: its gate says {gate or 'nothing'}, and "
            "only what passed may serve. Choose another version; `grom models` lists them."
        )


def replaced_by(version: ModelVersion) -> str | None:
    """Number of the version that served before this one, if it served."""
    number: str | None = version.tags.get(REPLACES)
    return number


def iso_now() -> str:
    """The time of this machine, ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
