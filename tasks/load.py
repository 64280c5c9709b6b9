"""Stage load: models as plain checkpoints, data sets checked from the first row to the last."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from grom.config import DataConfig, HoldOutConfig, ModelConfig
from grom.errors import EmptySet, MalformedRow
from tasks import models
from tasks.artifacts import canonical_json
from tasks.codecs import read_json, write_json
from tasks.place import DataRef, ModelRef, Place
from tasks.registry import registered_folder
from tasks.rows import HUB, digest, read_examples, source_files
from tasks.tracking import Tracking

logger = logging.getLogger(__name__)
SHOWN_BAD_ROWS = 5
REGISTERED = "models:/"


@task(cache_policy=NO_CACHE)  # what it looks at lies outside of its arguments
def load_model(
    config: ModelConfig,
    place: Place,
    tracking: Tracking | None = None,
    *,
    editable: bool = True,
) -> ModelRef:
    """Find a model and make a plain checkpoint of it unless it is one.  Returns its reference.

    A model that is only measured (`editable=False`) may be quantised.
    """
    if config.source.startswith(REGISTERED):
        folder = registered_folder(tracking or Tracking(), Path(place.work), config.source)
    else:
        folder = models.locate(config)
    if editable:
        models.refuse_quantised(folder)
    fingerprint = models.fingerprint(config, folder)
    if config.gguf_file and config.adapter:
        # Parsing GGUF takes longest: models that differ in the adapter alone share the result.
        folder = _plain(config.model_copy(update={"adapter": None}), folder, place)
        adapted = config.model_copy(update={"gguf_file": None, "chat_template": None})
        folder = _plain(adapted, folder, place)
    elif not models.is_plain(config, folder):
        folder = _plain(config, folder, place)
    return ModelRef(folder=str(folder), fingerprint=fingerprint, source=config.source)


def _plain(config: ModelConfig, folder: Path, place: Place) -> Path:
    """Folder of the plain checkpoint that the store has, or now gets, of this source."""
    artifact, reused = place.cached(
        "load",
        {"model": models.fingerprint(config, folder)},
        lambda out: models.materialise(config, folder, out),
    )
    logger.info("load %s: %s", config.source, "found in the store" if reused else "written")
    return place.fetch(artifact)


@task(cache_policy=NO_CACHE)
def load_data(
    config: DataConfig, place: Place, role: str, hold_out: HoldOutConfig | None = None
) -> DataRef:
    """Read a set once from end to end: check each row, count, hash.  Returns its reference.

    Raises:
        MissingInput, MalformedRow, EmptySet: as their messages say.
    """
    files = [] if config.uri.startswith(HUB) else source_files(config.uri)
    versions = tuple((file.path, file.version) for file in files)
    facts = {
        "rows": config.model_dump(mode="json", exclude={"uri"}),
        "files": hashlib.sha256(canonical_json(versions)).hexdigest(),
    }

    def write(folder: Path) -> None:
        bad: list[MalformedRow] = []
        quarantine = bad.append if config.bad_rows == "quarantine" else None
        num_rows = sum(1 for _ in read_examples(config, quarantine))
        if num_rows == 0:
            raise EmptySet(role, config.uri)
        _warn(role, bad)
        found = {"num_rows": num_rows, "num_bad": len(bad), "digest": digest(config)}
        write_json(folder / "rows.json", found)
        if bad:
            # Where they are and why; what they say stays where it was.
            rows = [{"file": row.file, "line": row.line, "reason": row.reason} for row in bad]
            (folder / "quarantine.json").write_text(json.dumps(rows, indent=1))

    if files:
        artifact, reused = place.cached("load", facts, write)
        found = read_json(place.fetch(artifact) / "rows.json")
        if found["num_bad"]:
            logger.warning(
                "load %s: %d rows left out, listed in %s", role, found["num_bad"], artifact.uri
            )
    else:
        with tempfile.TemporaryDirectory() as folder:  # a hub set has no versions to go by
            write(Path(folder))
            found, reused = read_json(Path(folder) / "rows.json"), False
    how = "unchanged since it was checked" if reused else "checked"
    logger.info("load %s: %d rows, %d left out, %s", role, found["num_rows"], found["num_bad"], how)
    return DataRef(role=role, config=config, hold_out=hold_out, versions=versions, **found)


def _warn(role: str, bad: list[MalformedRow]) -> None:
    for row in bad[:SHOWN_BAD_ROWS]:
        logger.warning("load %s: left out %s, line %d: %s", role, *_where(row))


def _where(row: MalformedRow) -> tuple[str, int, str]:
    return row.file, row.line, row.reason
