"""Figures are pictures of a sensible size, whatever the run measured."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import grom.report
from grom.calibrate import Calibration, CurvePoint
from grom.report import FORGET, draw_layer_scores, draw_trade_off
from grom.select import LayerScore

SCORES = [LayerScore(layer, 0.1 * layer, 0.3) for layer in range(12)]


def calibration(*, held_out: float = 0.9, floor: float | None = 0.8) -> Calibration:
    """A search of four strengths that ended at 6 nats."""
    curve = tuple(
        CurvePoint(nats, nats / 2, 0.9 / (1 + nats), held_out - nats / 100)
        for nats in (0.0, 4.0, 6.0, 8.0)
    )
    return Calibration(3.0, 6.0, "forget level", 0.2, floor, curve[0], curve)


def assert_is_a_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1080, 630)  # 7.2 x 4.2 inches at 150 dpi
    assert 10_000 < len(content) < 300_000


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved from here on."""
    figures: list[Figure] = []
    save = grom.report._save

    def keep(figure: Figure, path: Path) -> None:
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(grom.report, "_save", keep)
    return figures


def xy(line: Line2D) -> list[tuple[float, float]]:
    """The points of a line."""
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def test_layer_scores_are_a_picture_with_a_bar_for_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch)
    draw_layer_scores(SCORES, (7, 8), tmp_path / "layers.png")
    assert_is_a_picture(tmp_path / "layers.png")
    bars = figures[0].axes[0].patches
    colours = [bar.get_facecolor() for bar in bars]
    assert [bar.get_height() for bar in bars] == [score.score for score in SCORES]  # type: ignore[attr-defined]
    assert [layer for layer in range(12) if colours[layer] == to_rgba(FORGET)] == [7, 8]


@pytest.mark.parametrize("floor", [None, 0.8])
@pytest.mark.parametrize("held_out", [0.9, math.nan])
def test_the_trade_off_is_a_picture_also_without_held_out_examples(
    tmp_path: Path, held_out: float, floor: float | None
) -> None:
    draw_trade_off(calibration(held_out=held_out, floor=floor), tmp_path / "trade_off.png")
    assert_is_a_picture(tmp_path / "trade_off.png")


def test_the_trade_off_shows_every_strength_and_names_the_chosen_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, found = drawn(monkeypatch), calibration()
    draw_trade_off(found, tmp_path / "trade_off.png")
    axes = figures[0].axes[0]
    points = [(point.forget_probability, point.held_out_probability) for point in found.curve]
    assert xy(axes.lines[0]) == points
    (mark,) = (line for line in axes.lines if "chosen" in str(line.get_label()))
    assert mark.get_label() == "chosen: 6.0 nats, stopped by forget level"
    assert xy(mark) == points[2:3]
