"""Stage solve: moments in, the edit at unit strength out."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task

from grom.apply import Edit
from grom.collect import JOINT
from grom.config import RidgeConfig, TargetConfig
from grom.sites import Site
from grom.target import LowRank
from tasks.codecs import read_json, save_edit, write_json, write_table
from tasks.collect import read_moments, read_rms
from tasks.models import open_model
from tasks.place import CollectRef, EditRef, ModelRef, Place, SitesRef
from tasks.request_keys import KeySource
from tasks.select import chosen_sites
from tasks.small import load_factor, retain_factor, small_keys
from tasks.solver import SiteReport, Solved, Solver

logger = logging.getLogger(__name__)
ALPHA, WOODBURY = "alpha.npy", "woodbury"


@task(tags=["gpu"])
def solve(
    model: ModelRef,
    retain: tuple[CollectRef, ...],
    forget: CollectRef,
    sites: SitesRef,
    ridge: RidgeConfig,
    target: TargetConfig,
    place: Place,
) -> EditRef:
    """Solve in float64, each site alone or all as one system.  Returns the unit edit's reference.

    The moments of several retain sets are added first.  alpha comes from the counts of the moments:
    those of a forget set that was merged from batches give the alpha of all of them.

    With `ridge.cache_retain` a small forget set is solved from its keys and the stored factor of
    the retain part; the facts say so, for the last digits differ.

    Raises:
        NotPositiveDefinite, NonFiniteKeys: a system cannot be solved; names the site.
    """
    facts: dict[str, Any] = {
        "retain": [ref.artifact.key for ref in retain],
        "forget": forget.artifact.key,
        "ridge": ridge.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
    }
    keys = small_keys(forget, ridge, place)
    if keys is not None:
        facts["how"] = WOODBURY

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=512)
        solver = Solver(opened, ridge, target, read_rms(forget, place))
        chosen = chosen_sites(opened.model, sites)
        systems = {JOINT: chosen} if sites.joint else {site.name: (site,) for site in chosen}
        if keys is None:
            parts = list(_whole(solver, systems, retain, forget, place))
        else:
            parts = list(_small(solver, systems, retain, keys, place))
        alpha_V = parts[-1].alpha_V.cpu()  # the same at every site
        np.save(folder / ALPHA, alpha_V.numpy(), allow_pickle=False)
        updates = {site: update for part in parts for site, update in part.updates.items()}
        reports = [report for part in parts for report in part.reports]
        seconds = sum(part.seconds for part in parts)
        save_solved(folder, updates, reports, target, seconds, facts)

    artifact, _ = place.cached("solve", facts, write)
    solved = read_json(place.fetch(artifact) / "solve.json")
    logger.info("solve: %d sites in %.2f s", len(sites.layers) or 1, solved["seconds"])
    return EditRef(artifact=artifact, **solved)


def _whole(
    solver: Solver,
    systems: Mapping[str, Sequence[Site]],
    retain: tuple[CollectRef, ...],
    forget: CollectRef,
    place: Place,
) -> Iterator[Solved]:
    """Factorise each system; the moments of one are in memory at a time."""
    for name, members in systems.items():
        kept = reduce(operator.add, (read_moments(ref, name, place) for ref in retain))
        moved = read_moments(forget, name, place).to(solver.device)
        yield solver.whole(members, kept.to(solver.device), moved)


def _small(
    solver: Solver,
    systems: Mapping[str, Sequence[Site]],
    retain: tuple[CollectRef, ...],
    keys: KeySource,
    place: Place,
) -> Iterator[Solved]:
    """Solve each system from the retain part's factor and the forget keys."""
    widths = {name: solver.widths(members) for name, members in systems.items()}
    folder = retain_factor(retain, widths, solver.ridge, place, solver.device)
    for name, members in systems.items():
        factor = load_factor(folder, name).to(solver.device)
        yield solver.small(members, factor, keys.whole(name).to(solver.device))


def save_solved(
    folder: Path,
    updates: dict[Site, LowRank],
    reports: list[SiteReport],
    target: TargetConfig,
    seconds: float,
    facts: dict[str, Any],
) -> None:
    """Write the unit edit, the numbers of its sites, and what one unit of strength drops."""
    save_edit(folder, Edit(updates), facts)
    write_table(folder / "sites.parquet", reports)
    drop = sum(report.drop_nats for report in reports)
    unit = 1.0 if target.kind == "corruption" else drop
    write_json(folder / "solve.json", {"seconds": seconds, "nats_per_beta": unit})
