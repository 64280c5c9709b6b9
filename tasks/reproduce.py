"""Whether a run's edit comes out again: solved from the stored statistics, in a store of its own.

    collect artifacts ─ merge ─ solve ─ strength ─ apply      nothing of the last four is read

The base is the edited checkpoint with its edit taken back, which is checked byte by byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from grom.calibrate import given_strength
from grom.config import RidgeConfig, StrengthConfig, TargetConfig
from grom.errors import ConfigError, DataError
from tasks.apply import apply
from tasks.artifacts import canonical_json
from tasks.collect import merge_forget
from tasks.distance import relative_difference
from tasks.models import scratch_folder
from tasks.place import CalibrationRef, CollectRef, EditRef, ModelRef, Place, SitesRef
from tasks.provenance import Published, published
from tasks.recorded import Difference, in_order, recorded_differences, software_differences
from tasks.revert import revert
from tasks.run_facts import calibration_of
from tasks.runs import Run
from tasks.solve import solve
from tasks.store import MARKER, Store
from tasks.tensors import content_of
from tasks.updates import FACTORS, StoredUpdates

logger = logging.getLogger(__name__)
TOLERANCE = 1e-9
"""Largest |P - P'| / |P| of a site between two kinds of machine."""
Outcome = Literal["same bytes", "within tolerance", "different", "not solved"]


@dataclass(frozen=True, slots=True)
class Reproduced:
    """What came out."""

    outcome: Outcome
    detail: str
    sites: tuple[tuple[str, float], ...]
    """|P - P'| / |P| of each site."""
    differences: tuple[Difference, ...]
    """In the order of the pipeline."""
    seconds: float

    @property
    def first(self) -> Difference | None:
        """The first fact that differs."""
        return self.differences[0] if self.differences else None


def reproduce(
    run: Run, store: Store, work: Path, differences: Sequence[Difference] = ()
) -> Reproduced:
    """Solve a run's edit again and compare.

    Args:
        run: what is over.
        store: its artifacts.
        work: where the scratch store is made and removed again.
        differences: further facts that are known to differ.

    Raises:
        ConfigError: keys were sequential, so there are no statistics to solve from.
    """
    if run.made.is_sequential:
        raise ConfigError(
            f"{run.name}: its keys were collected layer by layer, so there are no statistics that "
            "it could be solved from again. Run its configuration again and compare: `grom diff`."
        )
    started = time.perf_counter()
    found = [*differences, *recorded_differences(run, store), *software_differences(run)]
    outcome: Outcome = "not solved"
    detail, sites = "what it was solved from is not as it was", list[tuple[str, float]]()
    if not any(one.topic in ("statistics", "edit") for one in found):
        with scratch_folder(work / "scratch", f"reproduce-{uuid4().hex}") as scratch:
            try:
                again = Again(run, store, scratch)
                found += again.differences
                outcome, detail, sites = again.compare()
            except DataError as error:
                found.append(Difference("edit", run.made.applied.name, "as published", str(error)))
    return Reproduced(outcome, detail, tuple(sites), in_order(found), time.perf_counter() - started)


class Again:
    """The stages after collecting, once more, in a store that has the statistics alone."""

    def __init__(self, run: Run, store: Store, scratch: Path) -> None:
        """Solve, set the strength, apply.

        Raises:
            DataError: the checkpoint or its edit are not as they were written.
        """
        made = run.made
        self.differences: list[Difference] = []
        self.place = Place(work=str(scratch), store=str(scratch / "store"))
        self.then = store.fetch(made.applied.artifact)
        revert(self.then, scratch / "base")
        model = ModelRef(
            folder=str(scratch / "base"),
            fingerprint=str(made.applied.facts["model"]),
            source=run.name,
        )
        retain = tuple(_shared(one, store, self.place) for one in made.retain)
        parts = tuple(_shared(one, store, self.place) for one in made.parts)
        forget = merge_forget.fn(parts, self.place)
        self._compare_merged(made.forget, forget)
        facts = made.solved.facts
        edit = solve.fn(
            model, retain, forget, _sites(made.retain[0]), RidgeConfig(**facts["ridge"]),
            TargetConfig(**facts["target"]), self.place,
        )  # fmt: skip
        beta = self._beta(run, edit, store)
        strength = CalibrationRef(artifact=edit.artifact, beta=beta, nats=0.0, stopped_by="again")
        self.now = self.place.fetch(apply.fn(model, edit, strength, self.place).artifact)

    def _compare_merged(self, then: Published | None, forget: CollectRef) -> None:
        now = published(f"collect/{forget.artifact.key}", self.place.open())
        if then is not None and (then.key, then.files) != (now.key, now.files):
            what = "union of the forget moments"
            self.differences.append(Difference("statistics", what, then.sha256, now.sha256))

    def _beta(self, run: Run, edit: EditRef, store: Store) -> float:
        """The strength: a given one anew, a searched one as it was found."""
        beta = float(run.made.applied.facts["beta"])
        calibrated = calibration_of(run.made, store)
        if calibrated is None:
            return beta
        given = StrengthConfig(**calibrated[0].facts["strength"])
        if given.search is not None:
            return beta
        again = given_strength(given, edit.nats_per_beta).beta
        if abs(again - beta) > TOLERANCE * beta:
            self.differences.append(Difference("strength", "beta", repr(beta), repr(again)))
        return again

    def compare(self) -> tuple[Outcome, str, list[tuple[str, float]]]:
        """How the new edit stands to the old one."""
        then, now = (folder / "edit" / FACTORS for folder in (self.then, self.now))
        one, other = StoredUpdates(then.parent), StoredUpdates(now.parent)
        sites = [(site.name, relative_difference(one, other, site)) for site in one.sites]
        if content_of(then) == content_of(now):
            return "same bytes", f"{FACTORS}: {content_of(now).sha256}", sites
        worst = max(relative for _, relative in sites)
        if worst <= TOLERANCE:
            return "within tolerance", f"other bytes, P differs by {worst:.1e} at most", sites
        return "different", f"P differs by {worst:.1e}, and {TOLERANCE:.0e} may be", sites


def _sites(collected: Published) -> SitesRef:
    facts: Any = collected.facts
    return SitesRef(
        artifact=collected.artifact,
        kind=facts["kind"],
        layers=tuple(facts["layers"]),
        joint=facts["joint"],
    )


def _shared(one: Published, store: Store, place: Place) -> CollectRef:
    """An artifact of the store, by links, in another one."""
    folder, target = store.fetch(one.artifact), Path(place.store) / one.name
    if not target.exists():
        for name in one.files:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to((folder / name).resolve())
        marker = {"facts": dict(one.facts), "files": dict(one.files), "folder": ""}
        (target / MARKER).write_bytes(canonical_json(marker))
    return CollectRef(artifact=one.artifact, reused=True, seconds=0.0)
