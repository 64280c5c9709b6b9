"""Figures of a run: which layers, and what each strength costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grom.calibrate import Calibration, CurvePoint
from grom.select import LayerScore

INK, FORGET, KEEP, FAINT = "#222222", "#c0392b", "#2166ac", "#b8b8b8"
WIDTH, HEIGHT = 7.2, 4.2


def draw_layer_scores(scores: Sequence[LayerScore], chosen: Collection[int], path: Path) -> None:
    """Bars of S = F - R by layer, the edited band in colour; a PNG at `path`."""
    figure, axes = _blank()
    colours = [FORGET if score.layer in chosen else FAINT for score in scores]
    axes.bar([score.layer for score in scores], [score.score for score in scores], color=colours)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("layer")
    axes.set_ylabel("S = F - R, nats per token")
    axes.set_title("Where the forget tokens are written (edited layers in red)", loc="left")
    _save(figure, path)


def draw_trade_off(found: Calibration, path: Path) -> None:
    """Forget probability against what is kept, for every strength that was tried; a PNG."""
    assert found.before is not None
    figure, axes = _blank()
    points = list(found.curve)
    forget = [point.forget_probability for point in points]
    kept = [point.held_out_probability for point in points]
    axes.plot(forget, kept, "o-", color=KEEP, markersize=3.5, label="retain, held out")
    _mark(axes, next(point for point in points if point.nats == found.nats), found)
    axes.set_xlabel("mean answer probability, forget set (before the edit on the right)")
    axes.set_ylabel("mean answer probability, retain set")
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(0, 1.03)
    axes.set_title("What each strength forgets and what it costs", loc="left")
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def _mark(axes: Axes, chosen: CurvePoint, found: Calibration) -> None:
    axes.plot(
        chosen.forget_probability,
        chosen.held_out_probability,
        "o",
        markersize=11,
        markerfacecolor="none",
        markeredgecolor=FORGET,
        label=f"chosen: {chosen.nats:.1f} nats, stopped by {found.stopped_by}",
    )
    if found.target_probability is not None:
        level = found.target_probability
        axes.axvline(level, color=FORGET, linewidth=0.8, linestyle=":", label="level to reach")
    if found.floor_probability is not None:
        floor = found.floor_probability
        axes.axhline(floor, color=KEEP, linewidth=0.8, linestyle=":", label="utility floor")


def _blank() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
