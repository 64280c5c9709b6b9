"""Taking requests out again: their moments are subtracted, and the base model is solved anew.

Needs the keys of these requests: those that were kept (`collect.keep_request_keys`), or those of
their text, supplied again.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from grom.apply import Edit
from grom.calibrate import given_strength
from grom.collect import Collected, ExampleStatistics, RequestKeys
from grom.config import StrengthConfig
from grom.errors import DataError
from grom.merge import DigitsLost, without
from grom.withdraw import moments_of_keys
from tasks.checkpoint import checkpoint_bytes
from tasks.codecs import read_json, read_table, save_edit, write_json
from tasks.place import (
    CalibrationRef,
    CheckpointRef,
    CollectRef,
    EditRef,
    ModelRef,
    Place,
)
from tasks.request_keys import KeyWriter, StoredKeys
from tasks.statistics import load_collected, save_collected

logger = logging.getLogger(__name__)
KEPT_KEYS = "keys.json"


class TextNeeded(DataError):
    """The keys of a request were not kept."""

    def __init__(self, batch: str) -> None:
        super().__init__(
            f"batch {batch}: the keys of its requests were not kept (`collect.keep_request_keys` "
            "was off), so nothing says what this one added. Supply its rows again, as they were, "
            "with `--rows FILE`."
        )


@task
def take_out(
    batch: str,
    whole: CollectRef,
    requests: tuple[str, ...],
    place: Place,
    texts: tuple[CollectRef, ...] = (),
) -> CollectRef | None:
    """A batch's forget moments without some of its requests.  Returns their reference.

    What is subtracted is exact; where so little remains that digits would be lost, the keys of
    the others are added up instead.

    Args:
        batch: its name, for messages.
        whole: its moments.
        requests: groups to take out.
        place: store.
        texts: moments of these requests alone, if their keys were not kept; of each batch's own
            rows, of which those of this batch are taken.

    Returns:
        None if nothing remains.

    Raises:
        TextNeeded: neither kept keys nor text.
        DataError: the text is not what was collected.
        DigitsLost: too little remains, and there are no keys to add up.
    """
    folder = place.fetch(whole.artifact)
    examples = examples_in(folder)
    if {group for group, _ in examples} <= set(requests):
        return None
    facts = read_json(folder / "collected.json")["facts"]
    gone = sorted({*requests, *(name for one in facts["data"] for name in one.get("without", []))})
    facts = facts | {"data": [one | {"without": gone} for one in facts["data"]]}

    def write(out: Path) -> None:
        collected = load_collected(folder)
        if (folder / KEPT_KEYS).is_file():
            keys = StoredKeys(folder)
            left = [group for group in keys.groups if group not in requests]
            save_collected(out, _less(collected, keys, requests, left), facts)
            with KeyWriter(out) as writer:  # its examples are in the order of its positions
                for found in _keys_of(keys, left):
                    writer(found)
            return
        if not texts:
            raise TextNeeded(batch)
        own = [ref for ref in texts if examples_in(place.fetch(ref.artifact)) <= examples]
        try:
            part = load_collected(place.fetch((own or texts)[0].artifact))
            save_collected(out, without(collected, part), facts)
        except ValueError as error:
            raise DataError(
                f"batch {batch}: the rows that were supplied are not those that were collected. "
                "Supply the request's rows exactly as they were submitted."
            ) from error

    artifact, reused = place.cached("collect", facts, write)
    return CollectRef(artifact=artifact, reused=reused, seconds=0.0)


def groups_in(folder: Path) -> set[str]:
    """Requests, by their hash, that the moments in a folder are of."""
    return {group for group, _ in examples_in(folder)}


def examples_in(folder: Path) -> set[tuple[str, str]]:
    """Request and digest of each row that the moments in a folder are of."""
    found = read_table(folder / "examples.parquet", ExampleStatistics)
    return {(one.group, one.digest) for one in found}


def _less(
    collected: Collected, keys: StoredKeys, requests: Collection[str], left: list[str]
) -> Collected:
    some = next(iter(collected.moments.values()))
    vocab_size = len(some.counts_V)
    try:
        part = moments_of_keys(_keys_of(keys, requests), keys.sizes, vocab_size)
        return without(collected, part)
    except DigitsLost:
        return moments_of_keys(_keys_of(keys, left), keys.sizes, vocab_size)


def _keys_of(keys: StoredKeys, groups: Iterable[str]) -> Iterable[RequestKeys]:
    return chain.from_iterable(keys.of(group) for group in groups)


@task
def set_strength(edit: EditRef, strength: StrengthConfig, place: Place) -> CalibrationRef:
    """A strength that is given, for an edit that no text is at hand for."""
    facts: dict[str, Any] = {
        "edit": edit.artifact.key,
        "strength": strength.model_dump(mode="json"),
    }
    found = given_strength(strength, edit.nats_per_beta)

    def write(folder: Path) -> None:
        write_json(folder / "calibration.json", {"beta": found.beta, "nats": found.nats})

    artifact, _ = place.cached("calibrate", facts, write)
    return CalibrationRef(
        artifact=artifact, beta=found.beta, nats=found.nats, stopped_by=found.stopped_by
    )


@task(cache_policy=NO_CACHE)
def copy_base(model: ModelRef, place: Place) -> CheckpointRef:
    """The base model as a checkpoint like any other: what is left when nothing is to be forgotten.

    Its files are those of the base, byte for byte.
    """
    base, facts = Path(model.folder), {"model": model.fingerprint, "edit": None}

    def write(folder: Path) -> None:
        shutil.copytree(base, folder, dirs_exist_ok=True)
        for marker in ("_SUCCESS.json", "facts.json"):
            (folder / marker).unlink(missing_ok=True)
        (folder / "edit").mkdir(exist_ok=True)
        save_edit(folder / "edit", Edit({}), facts)

    artifact, _ = place.cached("apply", facts, write, expected_bytes=checkpoint_bytes(base))
    return CheckpointRef(artifact=artifact, fingerprint=artifact.key, num_changed=0, seconds=0.0)
