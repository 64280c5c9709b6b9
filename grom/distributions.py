"""Figures of many values as PNG: forgetting by request, truth ratios by model.

As in `pictures.py`, each function returns whether there was anything to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from grom.pictures import (
    EDITED,
    FAINT,
    FORGET,
    INK,
    KEEP,
    RETRAINED,
    UNEDITED,
    blank,
    label,
    save,
    whole_numbers,
)

Floats: TypeAlias = NDArray[np.float64]
MOST_LINES = 200
"""Above that many requests the lines from before to after would be a grey surface."""


def draw_forgetting(
    before: Sequence[float], after: Sequence[float], path: Path, level: float | None = None
) -> bool:
    """Mean answer probability of each request before and after, the best forgotten first.

    Args:
        before: one value per request, 0 to 1.
        after: the same requests in the same order.
        path: the PNG.
        level: the probability that was to be reached on average, as a line.

    Nothing to draw: no request with both values.

    Raises:
        ValueError: the two differ in length.
    """
    pairs = np.array(list(zip(before, after, strict=True)), dtype=float).reshape(-1, 2)
    known = pairs[np.isfinite(pairs).all(1)]
    if not len(known):
        return False
    known = known[known[:, 1].argsort(kind="stable")]
    count, rank = len(known), np.arange(1, len(known) + 1)
    figure, axes = blank()
    size = max(2.0, min(6.0, 450 / count))
    if count <= MOST_LINES:
        axes.vlines(rank, known[:, 1], known[:, 0], color=FAINT, linewidth=min(1.5, 100 / count))
    axes.plot(rank, known[:, 0], "o", color=FAINT, markersize=size, markeredgewidth=0)
    axes.plot(rank, known[:, 1], "o", color=FORGET, markersize=size, markeredgewidth=0)
    label(axes, "before", (count, known[-1, 0]), (9, 0), va="center")
    label(axes, "after", (count, known[-1, 1]), (9, 0), FORGET, va="center")
    axes.set_xlim(0.5 - 0.03 * count, count + 0.5 + 0.07 * count)
    if level is not None:
        axes.axhline(level, color=INK, linewidth=0.8, linestyle=":")
        end = (axes.get_xlim()[1], level)
        text = label(axes, f"level to reach on average: {level:.3f}", end, (-2, 4), ha="right")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85})
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_ylim(0, 1.03)
    missing = f"; {len(pairs) - count:,} not measured" if len(pairs) > count else ""
    axes.set_xlabel(f"{count:,} request{'s' * (count > 1)}, best forgotten first{missing}")
    axes.set_ylabel("mean answer probability")
    save(figure, _forgetting_title(known), path)
    return True


def _forgetting_title(pairs: Floats) -> str:
    if len(pairs) == 1:
        return f"The request's answers: {pairs[0, 0]:.3f} before, {pairs[0, 1]:.3f} after"
    start, end = np.median(pairs, axis=0)
    return f"Median request {start:.3f} → {end:.3f}; the least forgotten keeps {pairs[-1, 1]:.3f}"


def draw_truth_ratios(
    edited: Sequence[float],
    unedited: Sequence[float],
    retrained: Sequence[float] | None,
    path: Path,
) -> bool:
    """Share of answers up to each truth ratio, by model; the gap to the retrained one drawn in.

    The gap is the Kolmogorov-Smirnov statistic, max over x of |F(x) - G(x)|, 0 to 1: the lower,
    the less the edited model can be told from one that never knew.  Ratios of 0 and Inf count.

    Args:
        edited: truth ratios, 0 or more.
        unedited: of the model before the edit; may be empty.
        retrained: of the model that was trained without the forget set, if there is one.
        path: the PNG.

    Nothing to draw: no truth ratio of the edited model.
    """
    given = {UNEDITED: unedited, EDITED: edited, RETRAINED: retrained or ()}
    shown = {name: ranked for name, values in given.items() if len(ranked := _ranked(values))}
    if EDITED not in shown:
        return False
    figure, axes = blank()
    low, high = _limits(np.concatenate(list(shown.values())))
    colours = {UNEDITED: FAINT, EDITED: FORGET, RETRAINED: KEEP}
    for name, ranked in shown.items():
        x = np.concatenate([[low], np.clip(ranked, low, high), [high]])
        y = np.concatenate([[0], np.arange(1, len(ranked) + 1) / len(ranked), [1]])
        style = "--" if name == RETRAINED else "-"
        told = f"{name} (n = {len(ranked):,})"
        axes.step(x, y, style, where="post", color=colours[name], label=told)
    title = f"Median truth ratio {np.median(shown[EDITED]):.3f} after the edit; no retrained model"
    if RETRAINED in shown:
        title = _draw_gap(axes, shown, (low, high))
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}" if high < 10 * low else NullFormatter())
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("truth ratio")
    axes.set_ylabel("share of answers up to it")
    axes.legend(frameon=False, loc="lower right")
    save(figure, title, path)
    return True


def _draw_gap(axes: Axes, shown: Mapping[str, Floats], limits: tuple[float, float]) -> str:
    """Mark where the edited model is farthest from the retrained one; what to say of it."""
    where, ends = _widest_gap(shown[EDITED], shown[RETRAINED])
    place, distance = float(np.clip(where, *limits)), abs(ends[0] - ends[1])
    axes.plot([place, place], ends, "-", color=INK, linewidth=1.6)
    label(axes, f"KS {distance:.3f}", (place, sum(ends) / 2), (6, 0), va="center")
    title = f"KS distance to the retrained model: {distance:.3f} after the edit"
    if UNEDITED in shown:
        _, ends = _widest_gap(shown[UNEDITED], shown[RETRAINED])
        title += f", {abs(ends[0] - ends[1]):.3f} before"
    return title


def _widest_gap(ranked: Floats, other: Floats) -> tuple[float, tuple[float, float]]:
    """Where two distribution functions differ most, and their values there."""
    at = np.concatenate([ranked, other])
    first, second = (values.searchsorted(at, "right") / len(values) for values in (ranked, other))
    widest = int(np.abs(first - second).argmax())
    return float(at[widest]), (float(first[widest]), float(second[widest]))


def _limits(values: Floats) -> tuple[float, float]:
    """Ends of a log axis that shows all values which have a place on one."""
    inside = values[(values > 0) & np.isfinite(values)]
    return (float(inside.min()) / 1.5, float(inside.max()) * 1.5) if len(inside) else (0.1, 10.0)


def _ranked(values: Sequence[float]) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    return np.sort(numbers[~np.isnan(numbers)])
