"""Sequential keys (stages collect and solve in one): the published order, as a sweep."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, MutableMapping
from itertools import chain
from pathlib import Path
from uuid import uuid4

from prefect import task
from safetensors.torch import load_file, save_file
from torch import Tensor

from grom.batches import Batch
from grom.collect import ForgetPlan
from grom.config import CollectConfig, RidgeConfig, TargetConfig
from grom.moments import KeyMoments
from grom.sites import Site
from grom.sweep import Held, sweep
from grom.target import LowRank
from tasks.codecs import read_json
from tasks.collect import common_facts, forget_plan, read_rms
from tasks.models import OpenModel, open_model, scratch_folder
from tasks.place import (
    CalibrationRef,
    CollectRef,
    CountRef,
    DataRef,
    EditRef,
    ModelRef,
    Part,
    Place,
    SitesRef,
)
from tasks.progress import tracked
from tasks.select import chosen_sites
from tasks.solve import save_solved
from tasks.solver import SiteReport, Solver
from tasks.streams import batch_stream

logger = logging.getLogger(__name__)


class HiddenFiles(MutableMapping[int, Tensor]):
    """Hidden states by batch number, in files: memory does not grow with the set."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.numbers = folder, set[int]()
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def __setitem__(self, number: int, hidden: Tensor) -> None:
        save_file({"hidden": hidden.contiguous()}, self._path(number), metadata={"format": "pt"})
        self.numbers.add(number)

    def __getitem__(self, number: int) -> Tensor:
        if number not in self.numbers:
            raise KeyError(number)
        return load_file(self._path(number))["hidden"]

    def __delitem__(self, number: int) -> None:
        self.numbers.remove(number)
        self._path(number).unlink()

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@task(tags=["gpu"])
def sweep_sequential(
    model: ModelRef,
    retain: tuple[DataRef, ...],
    forget: DataRef,
    forget_moments: CollectRef,
    calibrated: CalibrationRef,
    sites: SitesRef,
    counted: CountRef,
    ridge: RidgeConfig,
    target: TargetConfig,
    collect: CollectConfig,
    place: Place,
    reference: ModelRef | None = None,
) -> EditRef:
    """Edit layer by layer at the calibrated strength, collecting each layer's keys from the model
    with the layers below edited.  Returns the reference of the edit, at unit strength.

    The exact audit holds at the first edited site only: later keys depend on earlier edits.
    """
    facts = common_facts(model, sites, collect) | collect.facts
    facts |= {
        "keys": "sequential",
        "beta": calibrated.beta,
        "retain": [data.facts for data in retain],
        "forget": forget.facts,
        "ridge": ridge.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
        "reference": reference and reference.fingerprint,
    }

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=collect.text_window)
        plan = forget_plan(opened, target, collect, reference)
        solver = Solver(opened, ridge, target, read_rms(forget_moments, place))
        reports: list[SiteReport] = []
        unit: dict[Site, LowRank] = {}

        def solve(site: Site, kept: KeyMoments, moved: KeyMoments) -> LowRank:
            solved = solver.whole([site], kept, moved)
            unit.update(solved.updates)
            reports.extend(solved.reports)
            return unit[site].scaled(calibrated.beta)

        started = time.perf_counter()
        with scratch_folder(Path(place.work) / "scratch", f"sweep-{uuid4().hex}") as scratch:
            total = counted.num_seen + counted.num_background
            retained = _held(opened, retain, "seen", collect, scratch / "retain", None, total)
            total = counted.num_forget
            forgotten = _held(opened, (forget,), "all", collect, scratch / "forget", plan, total)
            sweep(opened.model, chosen_sites(opened.model, sites), retained, forgotten, solve)
        seconds = time.perf_counter() - started
        save_solved(folder, unit, reports, target, seconds, facts)

    artifact, _ = place.cached("solve", facts, write)
    solved = read_json(place.fetch(artifact) / "solve.json")
    logger.info(
        "solve: sequential sweep over %d layers in %.1f s", len(sites.layers), solved["seconds"]
    )
    return EditRef(artifact=artifact, **solved)


def _held(
    opened: OpenModel,
    sets: tuple[DataRef, ...],
    part: Part,
    collect: CollectConfig,
    scratch: Path,
    plan: ForgetPlan | None,
    total: int,
) -> Held:
    def stream() -> Iterator[Batch]:
        streams = (batch_stream(opened.rendering, data, collect, part=part) for data in sets)
        yield from tracked(chain.from_iterable(streams), f"collect {scratch.name}", total)

    return Held(
        stream,
        HiddenFiles(scratch / "hidden"),
        plan,
        HiddenFiles(scratch / "alternatives"),
    )
