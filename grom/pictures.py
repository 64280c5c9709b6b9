"""Figures of an edit as PNG: which layers, what each strength costs, before, after and attacked.

Each function returns whether there was anything to draw; if not, no file is written.  The title
says what was found, and what is not a number is not drawn.  `distributions.py` has the figures of
many values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator

from grom.calibrate import Calibration, CurvePoint
from grom.select import LayerScore

INK, FORGET, KEEP, FAINT = "#222222", "#c0392b", "#2166ac", "#b8b8b8"
WIDTH, HEIGHT, DPI = 7.2, 4.2, 150
PER_ROW = 4
"""Most sets side by side in the bars."""
UNEDITED, EDITED, RETRAINED = "unedited", "edited", "retrained"
"""Models with a meaning of their own; other names are attacks on the edited one."""


def draw_layer_scores(scores: Sequence[LayerScore], chosen: Collection[int], path: Path) -> bool:
    """Bars of S = F - R by layer, in nats per token, the edited layers in colour.

    Nothing to draw: no finite score.
    """
    known = [score for score in scores if math.isfinite(score.score)]
    if not known:
        return False
    figure, axes = blank()
    colours = [FORGET if score.layer in chosen else FAINT for score in known]
    axes.bar([score.layer for score in known], [score.score for score in known], color=colours)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlabel("layer")
    axes.set_ylabel("S = F - R, nats per token")
    inside = [score.score for score in known if score.layer in chosen]
    outside = [score.score for score in known if score.layer not in chosen]
    title = "How much each layer writes the forget tokens"
    if inside and outside:
        title = "Edited layers (red) write the forget tokens: "
        title += f"mean S {np.mean(inside):.2f}, elsewhere {np.mean(outside):.2f}"
    save(figure, title, path)
    return True


def draw_trade_off(
    found: Calibration, path: Path, retrained: tuple[float, float] | None = None
) -> bool:
    """Forget probability against what is kept, for every strength that was tried.

    Args:
        found: the search.
        path: the PNG.
        retrained: forget and held-out probability of the model that was trained without the
            forget set, the point to aim at.

    Nothing to draw: no strength with both probabilities, as without held-out examples.
    """
    points = [point for point in found.curve if math.isfinite(sum(_xy(point)))]
    if not points:
        return False
    figure, axes = blank()
    axes.plot(*zip(*map(_xy, points), strict=True), "o-", color=KEEP, markersize=3.5)
    _levels(axes, found)
    title = "What each strength forgets and what it costs"
    chosen = next((point for point in points if point.nats == found.nats), None)
    if chosen is not None:
        axes.plot(*_xy(chosen), "o", markersize=11, markerfacecolor="none", markeredgecolor=FORGET)
        (forget, kept), (forget_left, kept_left) = _xy(points[0]), _xy(chosen)
        title = f"{chosen.nats:.1f} nats: forget {forget:.3f} → {forget_left:.3f}, held-out retain "
        title += f"{kept:.3f} → {kept_left:.3f} (stopped by {found.stopped_by})"
    lowest = min(y for _, y in map(_xy, points))
    bottom = max(0.0, min(0.6, math.floor(10 * lowest - 0.5) / 10))
    axes.set_xlim(-0.06, 1.06)
    axes.set_ylim(bottom, 1 + 0.15 * (1 - bottom))
    taken = []
    if retrained is not None and math.isfinite(sum(retrained)):
        axes.plot(*retrained, "*", color=INK, markersize=13)
        label(axes, RETRAINED, retrained, (0, 9), ha="center")
        taken.append(retrained)
    _name_strengths(axes, points, found.nats, taken)
    axes.set_xlabel("mean answer probability, forget set")
    axes.set_ylabel("mean answer probability, held-out retain")
    save(figure, title, path)
    return True


def _xy(point: CurvePoint) -> tuple[float, float]:
    return point.forget_probability, point.held_out_probability


def _levels(axes: Axes, found: Calibration) -> None:
    """The level to reach and the floor to keep, named at their ends."""
    if (level := found.target_probability) is not None:
        axes.axvline(level, color=FORGET, linewidth=0.8, linestyle=":")
        text = label(axes, f"level to reach: {level:.3f}", (level, 0), (4, 6), FORGET)
        text.xycoords = ("data", "axes fraction")
    if (floor := found.floor_probability) is not None:
        axes.axhline(floor, color=KEEP, linewidth=0.8, linestyle=":")
        label(axes, f"utility floor: {floor:.3f}", (1.06, floor), (0, -11), KEEP, ha="right")


def _name_strengths(
    axes: Axes, points: Sequence[CurvePoint], chosen: float, taken: list[tuple[float, float]]
) -> None:
    """Nats beside the points, the chosen one first; none where the place is taken."""
    bottom, top = axes.get_ylim()
    for point in sorted(points, key=lambda point: (point.nats != chosen, point.nats)):
        own, (x, y) = point.nats == chosen, _xy(point)
        if own or all(abs(x - at) > 0.09 or abs(y - up) > 0.1 * (top - bottom) for at, up in taken):
            taken.append((x, y))
            text = f"{point.nats:.1f} nats" if point.nats else "before"
            above = y > points[0].held_out_probability - 0.2 * (top - bottom)
            offset, align = ((0, 9), "center") if above else ((7, -9), "left")
            label(axes, text, (x, y), offset, FORGET if own else INK, ha=align)


def draw_bars(
    values: Mapping[str, Mapping[str, float]], path: Path, forgotten: Collection[str] = ("forget",)
) -> bool:
    """Mean answer probability of each set before, after and under attack.

    One panel per set, one bar per model; `retrained` is a line across the panel, the value to aim
    at.  n/a where a set was not measured.

    Args:
        values: set -> model -> probability, 0 to 1; models are `unedited`, `edited`, the names
            of attacks, and `retrained`.
        path: the PNG.
        forgotten: names of the sets that should fall; they are red, the others blue.

    Nothing to draw: no finite value.
    """
    known = {name: row for name, row in values.items() if any(map(math.isfinite, row.values()))}
    if not known:
        return False
    models = dict.fromkeys(model for row in known.values() for model in row)
    bars = [model for model in models if model != RETRAINED]
    down = math.ceil(len(known) / PER_ROW)
    across = math.ceil(len(known) / down)
    figure = Figure(figsize=(WIDTH, down * (0.9 + 0.27 * len(bars)) + 0.7), layout="constrained")
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    panels: list[Axes] = list(grid.flat)
    for panel in panels[len(known) :]:
        panel.remove()
    for panel, (name, row) in zip(panels, known.items(), strict=False):
        _panel(panel, row, bars, FORGET if name in forgotten else KEEP)
        panel.set_title(name, loc="left", fontsize=9)
    figure.supxlabel("mean answer probability", fontsize=9)
    save(figure, _bars_title(known, forgotten), path)
    return True


def _panel(axes: Axes, row: Mapping[str, float], bars: Sequence[str], colour: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yticks(range(len(bars)), bars, fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -1)
    axes.set_xlim(0, 1.42)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for place, model in enumerate(bars):
        value = row.get(model, math.nan)
        if math.isfinite(value):
            shade = FAINT if model == UNEDITED else colour
            attack = model not in (UNEDITED, EDITED)
            axes.barh(place, value, height=0.7, color=shade, alpha=0.6 if attack else 1)
        text = f"{value:.3f}" if math.isfinite(value) else "n/a"
        label(axes, text, (1.4, place), (0, 0), ha="right", va="center")
    if math.isfinite(level := row.get(RETRAINED, math.nan)):
        axes.axvline(level, color=INK, linewidth=1, linestyle="--")
        offset, align = (3, "left") if level < 0.6 else (-3, "right")
        label(axes, f"{RETRAINED} {level:.3f}", (level, -0.75), (offset, 0), ha=align, va="center")


def _bars_title(values: Mapping[str, Mapping[str, float]], forgotten: Collection[str]) -> str:
    row = next((values[name] for name in values if name in forgotten), {})
    before, after = row.get(UNEDITED, math.nan), row.get(EDITED, math.nan)
    if not math.isfinite(before + after):
        return "Mean answer probability by set and model"
    title = f"Forget set: {before:.3f} before, {after:.3f} after the edit"
    own = (UNEDITED, EDITED, RETRAINED)
    attacks = {name: p for name, p in row.items() if name not in own and math.isfinite(p)}
    if attacks:
        worst = max(attacks, key=lambda name: attacks[name])
        title += f", at most {attacks[worst]:.3f} under attack ({worst.removeprefix('edited ')})"
    return title


def draw_influence(frozen: Sequence[float], refit: Sequence[float | None], path: Path) -> bool:
    """How much of the edit each request changes, sorted: all else frozen (dots), solved anew
    (rings) where that was done.

    Args:
        frozen: |P - P_-e| / |P| of each request.
        refit: the same with s, mu and alpha anew; None where not computed.
        path: the PNG.

    Nothing to draw: no finite value.
    """
    known = [pair for pair in zip(frozen, refit, strict=True) if math.isfinite(pair[0])]
    if not known:
        return False
    known.sort(key=lambda pair: -pair[0])
    values = [value for value, _ in known]
    figure, axes = blank()
    axes.plot(range(1, len(known) + 1), values, "o", color=FORGET, markersize=3.5)
    rings = [(rank, again) for rank, (_, again) in enumerate(known, 1) if again is not None]
    if rings:
        (ring,) = axes.plot(*zip(*rings, strict=True), "o", color=INK, markersize=8)
        ring.set_markerfacecolor("none")
    axes.set_ylim(0, 1.08 * max(values + [again for _, again in rings]) or 1)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlabel("request, by influence")
    axes.set_ylabel("|P - P without it| / |P|")
    title = f"Without one request the edit changes by {np.median(values):.2%} in the median, "
    save(figure, f"{title}by {values[0]:.2%} at most", path)
    return True


def blank() -> tuple[Figure, Axes]:
    """An empty figure of the usual size."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def whole_numbers() -> MaxNLocator:
    """Ticks at whole numbers in round steps."""
    return MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def label(
    axes: Axes,
    text: str,
    point: tuple[float, float],
    offset: tuple[float, float],
    colour: str = INK,
    *,
    ha: str = "left",
    va: str = "baseline",
) -> Annotation:
    """Small text beside a point; the offset is in 1/72 inch."""
    shown = axes.annotate(text, point, offset, textcoords="offset points", color=colour, ha=ha)
    shown.set(fontsize=8, va=va)
    return shown


def save(figure: Figure, title: str, path: Path) -> None:
    """Write the figure as PNG, with its title."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, color=INK, wrap=True)
    figure.savefig(path, dpi=DPI)
