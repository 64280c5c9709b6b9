"""Stage apply: the edited checkpoint.  Untouched tensors are copied as bytes."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from prefect import task

from tasks.checkpoint import checkpoint_bytes, write_edited
from tasks.codecs import load_edit, read_json, save_edit, write_json, write_table
from tasks.place import CalibrationRef, CheckpointRef, EditRef, ModelRef, Place

logger = logging.getLogger(__name__)


@task
def apply(
    model: ModelRef, edit: EditRef, calibrated: CalibrationRef, place: Place
) -> CheckpointRef:
    """Write the edited checkpoint, the edit that made it and the exact originals.

    Raises:
        ErasedByRounding: the edit is smaller than the rounding of the checkpoint's dtype.
        NotEnoughDisk: the checkpoint does not fit.
        MissingTensor: the checkpoint has no tensor of a site's name.
    """
    facts = {
        "model": model.fingerprint,
        "edit": edit.artifact.key,
        "beta": calibrated.beta,
    }
    base = Path(model.folder)

    def write(folder: Path) -> None:
        started = time.perf_counter()
        scaled = load_edit(place.fetch(edit.artifact)).scaled(calibrated.beta)
        roundings = write_edited(base, scaled, folder)
        save_edit(folder / "edit", scaled, facts | {"nats": calibrated.nats})
        write_table(folder / "edit" / "rounding.parquet", roundings)
        seconds = time.perf_counter() - started
        summary = {"seconds": seconds, "num_changed": sum(r.num_changed for r in roundings)}
        summary["lost"] = max(rounding.lost for rounding in roundings)
        write_json(folder / "edit" / "applied.json", summary)

    artifact, _ = place.cached("apply", facts, write, expected_bytes=checkpoint_bytes(base))
    applied = read_json(place.fetch(artifact) / "edit" / "applied.json")
    logger.info(
        "apply: %d weights changed in %.1f s, at most %.1e of an update lost to rounding",
        applied["num_changed"],
        applied["seconds"],
        applied.pop("lost"),
    )
    return CheckpointRef(artifact=artifact, fingerprint=artifact.key, **applied)
