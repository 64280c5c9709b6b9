"""Two runs side by side: the facts in which they differ, what they came to, how far apart P is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.codecs import read_json, read_table
from tasks.distance import relative_difference
from tasks.provenance import all_published
from tasks.run_facts import TOPICS, run_facts
from tasks.runs import Run
from tasks.shown import shown_settings
from tasks.solver import SiteReport
from tasks.store import Store
from tasks.updates import StoredUpdates


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two runs differ."""

    facts: tuple[tuple[str, Any, Any], ...]
    """In the order of the pipeline; the first one comes first."""
    numbers: tuple[tuple[str, float, float], ...]
    """What they came to; NaN where one has none."""
    sites: tuple[tuple[str, float], ...]
    """|P - Q| / |P| of the sites that both edit."""
    alone: tuple[str, ...]
    """Sites that only one of them edits."""


def compare(one: Run, other: Run, store: Store) -> Comparison:
    """Compare two runs of a store.

    Raises:
        CorruptArtifact: something is not as it was published.
        MissingInput: something is no longer there.
    """
    first, second = run_facts(one, store), run_facts(other, store)
    names = [*first, *(name for name in second if name not in first)]
    differing = [name for name in names if first.get(name) != second.get(name)]
    differing.sort(key=lambda name: TOPICS.index(name.partition(":")[0]))
    facts = tuple((name, _shown(name, first), _shown(name, second)) for name in differing)
    measured = [dict(_numbers(run, store)) for run in (one, other)]
    numbers = tuple(
        (name, measured[0].get(name, math.nan), measured[1].get(name, math.nan))
        for name in dict.fromkeys([*measured[0], *measured[1]])
    )
    P, Q = (StoredUpdates(store.fetch(run.made.applied.artifact) / "edit") for run in (one, other))
    shared = [site for site in P.sites if site in Q.sites]
    sites = tuple((site.name, relative_difference(P, Q, site)) for site in shared)
    names_of = [{site.name for site in edit.sites} for edit in (P, Q)]
    return Comparison(facts, numbers, sites, tuple(sorted(names_of[0] ^ names_of[1])))


def _shown(name: str, facts: dict[str, Any]) -> Any:
    """A value as it may be shown: groups by their number, addresses without a password."""
    key = name.rpartition(".")[2]
    return shown_settings({key: facts.get(name)})[key]


def _numbers(run: Run, store: Store) -> Iterator[tuple[str, float]]:
    """Strength, solves and scores of a run."""
    made = run.made
    folder = store.fetch(made.applied.artifact)
    yield "strength, nats", float(read_json(folder / "edit" / "edit.json")["facts"]["nats"])
    yield "strength, beta", float(made.applied.facts["beta"])
    for report in read_table(store.fetch(made.solved.artifact) / "sites.parquet", SiteReport):
        for measure in ("condition", "mu", "relative_norm", "num_forget", "num_retain"):
            yield f"{report.site}, {measure}", float(getattr(report, measure))
    for one in all_published("evaluate", store):
        if one.facts.get("model") == made.applied.key and "sets" in one.facts:
            scores = read_json(store.fetch(one.artifact) / "scores.json")["sets"]
            load = one.facts.get("quantisation") or "edited"
            for name, values in scores.items():
                for measure, value in values.items():
                    if measure != "name":
                        yield f"{load}: {name}, {measure}", float(value)
