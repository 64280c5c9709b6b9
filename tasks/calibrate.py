"""Stage calibrate: how hard to push."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefect import task

from grom.calibrate import (
    BandModel,
    Calibration,
    Search,
    given_strength,
    search_strength,
)
from grom.config import AutoStrength, CollectConfig, StrengthConfig
from grom.errors import AlreadyForgotten, FloorTooHigh, SolveError
from grom.evaluate import mean_score, score_examples
from tasks.codecs import load_edit, read_json, write_json
from tasks.models import OpenModel, open_model
from tasks.place import (
    CalibrationRef,
    CountRef,
    DataRef,
    EditRef,
    ModelRef,
    Part,
    Place,
    SitesRef,
)
from tasks.progress import tracked
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)
EARLIER = "earlier batches"


@task(tags=["gpu"])
def calibrate(
    model: ModelRef,
    edit: EditRef,
    forget: DataRef,
    retain: DataRef,
    sites: SitesRef,
    counted: CountRef,
    strength: StrengthConfig,
    collect: CollectConfig,
    place: Place,
    reference: ModelRef | None = None,
    at_least_nats: float | None = None,
) -> CalibrationRef:
    """Find the strength, or take the one that is given.  Returns it with its curve's reference.

    Args:
        at_least_nats: strength that batches without text at hand were forgotten with; a search
            goes no lower, and may find that the text at hand needs none.
    """
    auto = strength.search
    facts: dict[str, Any] = {
        "edit": edit.artifact.key,
        "strength": strength.model_dump(mode="json"),
        "forget": forget.facts,
        "retain": retain.facts,
        "reference": reference and reference.fingerprint,
    }
    if auto is not None and at_least_nats is not None:
        facts["at_least_nats"] = at_least_nats

    def write(folder: Path) -> None:
        if edit.nats_per_beta <= 0:
            raise SolveError(
                f"the edit does not lower the forget tokens' logits ({edit.nats_per_beta:.2e} nats "
                "per unit strength). Choose other layers, or give `strength.beta`."
            )
        if auto is None:
            found = given_strength(strength, edit.nats_per_beta)
        else:
            probes = Probes(model, forget, retain, counted, auto, collect)
            found = probes.search(edit, sites, place, reference)
            if at_least_nats is None:
                _refuse_no_strength(found)
            elif found.nats < at_least_nats:
                beta = at_least_nats / edit.nats_per_beta
                found = replace(found, nats=at_least_nats, beta=beta, stopped_by=EARLIER)
        write_json(folder / "calibration.json", asdict(found))

    artifact, _ = place.cached("calibrate", facts, write)
    found = read_json(place.fetch(artifact) / "calibration.json")
    logger.info(
        "calibrate: %.2f nats (beta %.4g), stopped by %s",
        found["nats"],
        found["beta"],
        found["stopped_by"],
    )
    return CalibrationRef(
        artifact=artifact, beta=found["beta"], nats=found["nats"], stopped_by=found["stopped_by"]
    )


def _refuse_no_strength(found: Calibration) -> None:
    """Raise if the search ended with no strength at all.

    Raises:
        AlreadyForgotten: the forget set is at its level without an edit.
        FloorTooHigh: no strength keeps held-out retain above the floor.
    """
    assert found.before is not None
    assert found.target_probability is not None
    if found.before.forget_probability <= found.target_probability:
        raise AlreadyForgotten(found.before.forget_probability, found.target_probability)
    if found.nats == 0:
        assert found.floor_probability is not None
        raise FloorTooHigh(found.floor_probability, found.before.held_out_probability)


class Probes:
    """A sample of each set to measure strengths on."""

    def __init__(
        self,
        model: ModelRef,
        forget: DataRef,
        retain: DataRef,
        counted: CountRef,
        auto: AutoStrength,
        collect: CollectConfig,
    ) -> None:
        self.model, self.auto, self.collect = model, auto, collect
        self.sets: list[tuple[DataRef, Part, int]] = [
            (forget, "all", counted.num_forget),
            (retain, "held out", counted.num_held_out),
        ]

    def stream(self, opened: OpenModel, number: int, phase: str) -> Any:
        """Batches of one probe."""
        data, part, total = self.sets[number]
        size = self.auto.probe_examples
        stream = batch_stream(opened.rendering, data, self.collect, part=part, sample=(size, total))
        return tracked(stream, f"calibrate {phase}", min(size, total))

    def search(
        self, edit: EditRef, sites: SitesRef, place: Place, reference: ModelRef | None
    ) -> Calibration:
        """Bisect the strength, running only the layers from the first edited one on."""
        level = None if reference is None else self._level(reference)
        opened = open_model(Path(self.model.folder), text_window=self.collect.text_window)
        band = BandModel(opened.model, sites.layers[0] if sites.layers else None)
        forget, held_out = (
            band.probe(self.stream(opened, number, phase))
            for number, phase in enumerate(("forget", "held-out retain"))
        )
        search = Search(
            model=opened.model,
            edit=load_edit(place.fetch(edit.artifact)),
            nats_per_beta=edit.nats_per_beta,
            forget=forget,
            held_out=held_out,
            band=band,
        )
        return search_strength(search, self.auto, level)

    def _level(self, reference: ModelRef) -> float:
        opened = open_model(Path(reference.folder), text_window=self.collect.text_window)
        scores = score_examples(opened.model, self.stream(opened, 0, "reference"))
        return mean_score("reference", scores).probability


def read_calibration(ref: CalibrationRef, place: Place) -> dict[str, Any]:
    """The calibration with its curve."""
    found: dict[str, Any] = read_json(place.fetch(ref.artifact) / "calibration.json")
    return found
