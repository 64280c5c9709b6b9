"""What a run found, and its pictures.  Numbers only; names of requests are not shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grom.calibrate import Calibration, CurvePoint
from grom.distributions import draw_forgetting, draw_truth_ratios
from grom.evaluate import ExampleScore
from grom.gate import FORGET, HELD_OUT, Condition
from grom.influence import WHOLE, Influence
from grom.metrics.metric import mean
from grom.pictures import (
    EDITED,
    RETRAINED,
    UNEDITED,
    draw_bars,
    draw_influence,
    draw_layer_scores,
    draw_trade_off,
)
from grom.report import MetricTable
from grom.select import LayerScore
from tasks.codecs import read_json, read_table
from tasks.place import CalibrationRef, Place, ScoreRef, SitesRef

CAPTIONS = {
    "bars.png": "Mean answer probability by set and model; n/a: not measured. Dashed: the model "
    "that was trained without the forget set, where there is one.",
    "trade_off.png": "Every strength that the search tried on its probe; the ring is the chosen "
    "one, the star the retrained model.",
    "forgetting.png": "Mean answer probability of each request before (grey) and after (red).",
    "truth_ratios.png": "Truth ratios on the forget set: the closer to the retrained model, the "
    "less can be told apart.",
    "influence.png": "How much of the edit each request changes, with all else frozen (dots) or "
    "solved anew (rings). Requests are not named.",
    "layer_scores.png": "Mean direct effect of each layer on forget tokens minus that on retain "
    "tokens.",
}
"""File of each picture, in the order of the page, and what is said below it."""

ORDER = (FORGET, "retain, seen", HELD_OUT)
"""Sets that every run measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run was made of and what it found."""

    name: str
    settings: Mapping[str, Any]
    facts: Mapping[str, str]
    """What identifies the run: fingerprints, digests, commit."""
    sites: SitesRef
    calibrated: CalibrationRef
    scores: Sequence[ScoreRef]
    """`unedited`, `edited`, attacks by name, `retrained` if there is one."""
    conditions: Sequence[Condition]
    warnings: Sequence[str] = ()
    tables: Sequence[MetricTable] = ()
    """Tables of benchmarks."""
    truth_ratios: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`unedited`, `edited` and, if there is one, `retrained`: of each forget example."""
    influence: Sequence[Influence] = ()
    """Of each request, where it was audited."""

    @property
    def sets(self) -> list[str]:
        """Names of the measured sets: what is forgotten, what is kept, further ones."""
        names = dict.fromkeys(name for score in self.scores for name in score.sets)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def score(self, label: str) -> ScoreRef | None:
        """The scores of one model, if it was measured."""
        return next((score for score in self.scores if score.label == label), None)

    def probability(self, label: str, name: str) -> float:
        """Mean answer probability of one model on one set; NaN if it was not measured."""
        score = self.score(label)
        return score.sets.get(name, {}).get("probability", math.nan) if score else math.nan


def draw_pictures(
    found: Findings, calibration: Calibration, folder: Path, place: Place
) -> list[str]:
    """Draw what there is something to draw for, into a folder.  Returns the names of the files."""
    bars = {
        name: {score.label: found.probability(score.label, name) for score in found.scores}
        for name in found.sets
    }
    retrained = found.probability(RETRAINED, FORGET), found.probability(RETRAINED, HELD_OUT)
    before, after = (request_means(found.score(label), place) for label in (UNEDITED, EDITED))
    pairs = [(before[group], after.get(group, math.nan)) for group in sorted(before)]
    ratios = {label: found.truth_ratios.get(label, ()) for label in (EDITED, UNEDITED)}
    chosen = read_json(place.fetch(found.sites.artifact) / "sites.json")
    layers = [
        LayerScore(score["layer"], float(score["forget_effect"]), float(score["retain_effect"]))
        for score in chosen["scores"]
    ]
    drawn = {
        "bars.png": draw_bars(
            bars, folder / "bars.png", [name for name in found.sets if name.startswith(FORGET)]
        ),
        "trade_off.png": draw_trade_off(calibration, folder / "trade_off.png", retrained),
        "forgetting.png": draw_forgetting(
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            folder / "forgetting.png",
            calibration.target_probability,
        ),
        "truth_ratios.png": draw_truth_ratios(
            ratios[EDITED],
            ratios[UNEDITED],
            found.truth_ratios.get(RETRAINED),
            folder / "truth_ratios.png",
        ),
        "influence.png": influence_picture(found.influence, folder / "influence.png"),
        "layer_scores.png": draw_layer_scores(
            layers, found.sites.layers, folder / "layer_scores.png"
        ),
    }
    return [name for name in CAPTIONS if drawn[name]]


def influence_picture(rows: Sequence[Influence], path: Path) -> bool:
    """Draw the influence of all requests on all sites together."""
    wholes = [row for row in rows if row.site == WHOLE]
    return draw_influence([row.frozen for row in wholes], [row.refit for row in wholes], path)


def request_means(score: ScoreRef | None, place: Place) -> dict[str, float]:
    """Mean answer probability of each forget request (group) of one model."""
    if score is None:
        return {}
    by_group: dict[str, list[float]] = {}
    for row in read_table(place.fetch(score.artifact) / f"{FORGET}.parquet", ExampleScore):
        by_group.setdefault(row.group, []).append(row.probability)
    return {group: mean(values) for group, values in by_group.items()}


def calibration_of(found: dict[str, Any]) -> Calibration:
    """The calibration with numbers where JSON has none."""

    def point(values: dict[str, Any]) -> CurvePoint:
        return CurvePoint(**{name: float(value) for name, value in values.items()})

    return Calibration(
        **found
        | {
            "before": point(found["before"]) if found["before"] else None,
            "curve": tuple(point(values) for values in found["curve"]),
        }
    )
