"""Going back: an older version of the registered model serves again.

The registered model's tag `rollback` says from where to where, why and when.  It is written before
anything moves and stays open until the ledger has its lines, so whoever comes after a kill goes on
with the same step back instead of taking another one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grom.errors import ConfigError, GromError, MissingInput
from tasks.aliases import (
    CANDIDATE,
    CHAMPION,
    PREVIOUS,
    PROMOTED,
    ROLLED_BACK,
    PurgedVersion,
    aliases_of,
    check_fit,
    iso_now,
    point_alias,
    replaced_by,
    version_of,
)
from tasks.tracking import Tracking, client_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)
ROLLBACK = "rollback"
MAX_REASON = 500
"""Characters."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A step back, as the registered model's tag has it."""

    from_version: str
    to_version: str
    reason: str
    time: str
    """When it was first asked for, ISO 8601."""
    is_open: bool = True
    """The ledger may not know yet."""


def restore(
    tracking: Tracking, work: Path, name: str, reason: str, to: str | None = None
) -> Restored:
    """Make the previous version the champion again, or another one that once was.

    Then the alias `previous` points to what served before that one.  The versions in between are
    tagged as rolled back.  With the same `to` it can be repeated; without, a step that is still
    open is finished, and else another step is taken.

    Args:
        tracking, work: where the registry is.
        name: of the registered model.
        reason: why, in words without personal data; for everybody who looks at the registry.
        to: number of the version; not given: the previous one.

    Raises:
        MissingInput: no such model or version.
        PurgedVersion: its files are gone.
        ConfigError: no reason, no champion, no previous version, or `to` never served or did not
            pass its gate.
    """
    client, why = client_of(tracking, work), " ".join(reason.split())
    if not why or len(why) > MAX_REASON:
        raise ConfigError(f"reason: say why in 1 to {MAX_REASON} characters.")
    aliases = aliases_of(client, name)
    champion = aliases.get(CHAMPION)
    if champion is None:
        raise ConfigError(f"{name}: no version serves yet, so there is nothing to roll back.")
    step = _last(client, name)
    if step is None or not _goes_on(step, champion, to):
        target = to or _before(client, name, champion, aliases.get(PREVIOUS))
        _check_served(client, name, target, aliases)
        step = Restored(champion, target, why, iso_now())
    if step.is_open:
        _take(client, name, step)
    return step


def close_step(
    tracking: Tracking, work: Path, name: str, step: Restored, dead: Collection[str]
) -> None:
    """Note that the ledger knows of a step.

    Args:
        tracking, work, name: see `restore`.
        step: what `restore` gave.
        dead: numbers of versions that no request counts on any more, as the ledger says after the
            step.  If a run that had not heard of the step promoted one, it is taken back.
    """
    client = client_of(tracking, work)
    for number in sorted(dead, key=int):
        client.set_model_version_tag(name, number, ROLLED_BACK, step.to_version)
    if aliases_of(client, name).get(CHAMPION) in dead:
        _point(client, name, step.to_version)
    _note(client, name, replace(step, is_open=False))


def _last(client: MlflowClient, name: str) -> Restored | None:
    tag = client.get_registered_model(name).tags.get(ROLLBACK)
    try:
        return None if tag is None else Restored(**json.loads(tag))
    except (ValueError, TypeError) as error:
        raise GromError(
            f"{name}: the tag `{ROLLBACK}` was changed. Delete it, then roll back with `--to`."
        ) from error


def _goes_on(step: Restored, champion: str, to: str | None) -> bool:
    """Whether what is asked for is this step, open or done."""
    if step.is_open:
        return champion in (step.from_version, step.to_version) and to in (None, step.to_version)
    return champion == step.to_version == to


def _before(client: MlflowClient, name: str, champion: str, previous: str | None) -> str:
    if previous is None or previous == champion:  # killed in the middle of a promotion
        previous = replaced_by(version_of(client, name, champion))
    if previous is None:
        raise ConfigError(
            f"{name}: no version served before {champion}, so name one with `--to`; `grom models` "
            "lists them."
        )
    return previous


def _check_served(client: MlflowClient, name: str, target: str, aliases: dict[str, str]) -> None:
    """Check that a version may serve again: what nobody approved must not get in this way."""
    version = version_of(client, name, target)
    check_fit(version)
    if target == aliases[CHAMPION]:
        raise ConfigError(f"{name}: version {target} serves already.")
    if PROMOTED not in version.tags and target != aliases.get(PREVIOUS):
        raise ConfigError(
            f"{name}: version {target} never served, so it cannot be restored. Choose one that "
            "did; `grom models` lists them."
        )


def _take(client: MlflowClient, name: str, step: Restored) -> None:
    target, aliases = version_of(client, name, step.to_version), aliases_of(client, name)
    _note(client, name, step)
    for version in client.search_model_versions(f"name = '{name}'"):
        number = str(version.version)
        if int(step.to_version) < int(number) <= int(step.from_version):
            client.set_model_version_tag(name, number, ROLLED_BACK, step.to_version)
            if aliases.get(CANDIDATE) == number:
                client.delete_registered_model_alias(name, CANDIDATE)
    if ROLLED_BACK in target.tags:
        client.delete_model_version_tag(name, step.to_version, ROLLED_BACK)
    for number in (step.from_version, step.to_version):
        facts = {
            ROLLBACK: f"{step.from_version} to {step.to_version}",
            f"{ROLLBACK}_reason": step.reason,
            f"{ROLLBACK}_time": step.time,
        }
        for key, value in facts.items():
            client.set_model_version_tag(name, number, key, value)
    _point(client, name, step.to_version)
    logger.info("%s: version %s serves again, after %s", name, step.to_version, step.from_version)


def _point(client: MlflowClient, name: str, number: str) -> None:
    """Let a version serve, and `previous` point to what served before it, if that still may."""
    if not point_alias(client, name, CHAMPION, number):
        raise PurgedVersion(name, number)
    before = replaced_by(version_of(client, name, number))
    try:
        if before is not None:
            check_fit(version_of(client, name, before))
            if point_alias(client, name, PREVIOUS, before):
                return
    except (PurgedVersion, ConfigError, MissingInput):
        logger.info("%s: version %s can no longer serve", name, before)
    if PREVIOUS in aliases_of(client, name):
        client.delete_registered_model_alias(name, PREVIOUS)


def _note(client: MlflowClient, name: str, step: Restored) -> None:
    client.set_registered_model_tag(name, ROLLBACK, json.dumps(asdict(step)))
