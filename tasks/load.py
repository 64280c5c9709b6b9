"""Stage load: models as plain checkpoints, data sets checked from the first row to the last."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from prefect import task

from grom.config import DataConfig, HoldOutConfig, ModelConfig
from grom.errors import EmptySet, MalformedRow
from tasks import models
from tasks.place import DataRef, ModelRef, Place
from tasks.registry import registered_folder
from tasks.rows import HUB, digest, read_examples, source_files
from tasks.tracking import Tracking

logger = logging.getLogger(__name__)
SHOWN_BAD_ROWS = 5
REGISTERED = "models:/"


@task
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


@task
def load_data(
    config: DataConfig, place: Place, role: str, hold_out: HoldOutConfig | None = None
) -> DataRef:
    """Read a set once from end to end: check each row, count, hash.  Returns its reference.

    Raises:
        MissingInput, MalformedRow, EmptySet: as their messages say.
    """
    bad: list[MalformedRow] = []
    quarantine = bad.append if config.bad_rows == "quarantine" else None
    num_rows = sum(1 for _ in read_examples(config, quarantine))
    if num_rows == 0:
        raise EmptySet(role, config.uri)
    files = [] if config.uri.startswith(HUB) else source_files(config.uri)
    reference = DataRef(
        role=role,
        config=config,
        digest=digest(config),
        num_rows=num_rows,
        num_bad=len(bad),
        hold_out=hold_out,
        versions=tuple((file.path, file.version) for file in files),
    )
    if bad:
        _quarantine(reference, bad, place)
    logger.info("load %s: %d rows, %d left out", role, num_rows, len(bad))
    return reference


def _quarantine(reference: DataRef, bad: list[MalformedRow], place: Place) -> None:
    """Publish where the bad rows are and why; what they say stays where it was."""

    def write(folder: Path) -> None:
        rows = [{"file": row.file, "line": row.line, "reason": row.reason} for row in bad]
        (folder / "quarantine.json").write_text(json.dumps(rows, indent=1))

    artifact, _ = place.cached("load", {"quarantine of": reference.facts}, write)
    for row in bad[:SHOWN_BAD_ROWS]:
        logger.warning("load %s: left out %s, line %d: %s", reference.role, *_where(row))
    logger.warning(
        "load %s: %d rows left out, listed in %s", reference.role, len(bad), artifact.uri
    )


def _where(row: MalformedRow) -> tuple[str, int, str]:
    return row.file, row.line, row.reason
