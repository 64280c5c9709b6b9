"""Figures show every number that is one, say what was found, and are not made of nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from grom.calibrate import Calibration, CurvePoint
from grom.pictures import FAINT, FORGET, KEEP, draw_bars, draw_layer_scores, draw_trade_off
from grom.select import LayerScore
from tests.figures import drawn, size_of, title_of, words_on, xy

NAN = math.nan
SCORES = [LayerScore(layer, 0.1 * layer, 0.3) for layer in range(12)]
SETS = {
    "forget": {"unedited": 0.992, "edited": 0.198, "edited nf4": 0.25, "retrained": 0.059},
    "forget, asked otherwise": {"unedited": 0.681, "edited": 0.123},
    "retain, held out": {"unedited": 0.992, "edited": 0.971, "edited nf4": 0.906},
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    return drawn(monkeypatch)


def calibration(held_out: float = 0.9, **changes: Any) -> Calibration:
    """A search of four strengths that ended at 6 nats."""
    curve = tuple(
        CurvePoint(nats, nats / 2, 0.9 / (1 + nats), held_out - nats / 100)
        for nats in (0.0, 4.0, 6.0, 8.0)
    )
    return replace(Calibration(3.0, 6.0, "forget level", 0.2, 0.8, curve[0], curve), **changes)


def bars_of(figure: Figure, panel: int = 0) -> list[tuple[float, Any]]:
    """Length and colour of each bar."""
    patches: list[Any] = list(figure.axes[panel].patches)
    return [(bar.get_width(), bar.get_facecolor()) for bar in patches]


def test_layer_scores_have_a_bar_for_each_layer_and_name_the_finding(
    tmp_path: Path, figures: list[Figure]
) -> None:
    assert draw_layer_scores(SCORES, (7, 8), tmp_path / "layers.png")
    assert size_of(tmp_path / "layers.png") == (1080, 630)  # 7.2 x 4.2 inches at 150 dpi
    bars: list[Any] = list(figures[0].axes[0].patches)
    assert [bar.get_height() for bar in bars] == [score.score for score in SCORES]
    colours = [bar.get_facecolor() for bar in bars]
    assert [layer for layer in range(12) if colours[layer] == to_rgba(FORGET)] == [7, 8]
    assert title_of(figures[0]).endswith("mean S 0.45, elsewhere 0.21")


def test_the_trade_off_shows_every_strength_and_rings_the_chosen_one(
    tmp_path: Path, figures: list[Figure]
) -> None:
    found = calibration()
    assert draw_trade_off(found, tmp_path / "trade_off.png")
    size_of(tmp_path / "trade_off.png")
    axes = figures[0].axes[0]
    points = [(point.forget_probability, point.held_out_probability) for point in found.curve]
    assert xy(axes.lines[0]) == points
    (ring,) = (line for line in axes.lines if line.get_markerfacecolor() == "none")
    assert xy(ring) == points[2:3]
    assert {"before", "6.0 nats", "level to reach: 0.200", "utility floor: 0.800"} <= set(
        words_on(axes)
    )
    assert "6.0 nats: forget 0.900 → 0.129, held-out retain 0.900 → 0.840" in title_of(figures[0])
    assert "stopped by forget level" in title_of(figures[0])


def test_the_retrained_model_is_a_point_of_the_trade_off_if_it_was_measured(
    tmp_path: Path, figures: list[Figure]
) -> None:
    for retrained in ((0.06, 0.88), (0.06, NAN), None):
        assert draw_trade_off(calibration(), tmp_path / "trade_off.png", retrained)
    stars = [
        [xy(line) for line in figure.axes[0].lines if line.get_marker() == "*"]
        for figure in figures
    ]
    assert stars == [[[(0.06, 0.88)]], [], []]


def test_a_strength_that_is_not_on_the_curve_is_not_ringed(
    tmp_path: Path, figures: list[Figure]
) -> None:
    found = calibration(nats=5.0, floor_probability=None, target_probability=None)
    assert draw_trade_off(found, tmp_path / "trade_off.png")
    assert len(figures[0].axes[0].lines) == 1


def test_bars_have_a_panel_for_each_set_and_a_number_for_each_model(
    tmp_path: Path, figures: list[Figure]
) -> None:
    forgotten = ("forget", "forget, asked otherwise")
    assert draw_bars(SETS, tmp_path / "bars.png", forgotten)
    assert size_of(tmp_path / "bars.png")[0] == 1080
    panels = figures[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == list(SETS)
    assert bars_of(figures[0]) == [
        (0.992, to_rgba(FAINT)),
        (0.198, to_rgba(FORGET)),
        (0.25, to_rgba(FORGET, 0.6)),
    ]
    assert bars_of(figures[0], 2)[1] == (0.971, to_rgba(KEEP))
    assert words_on(panels[0]) == ["0.992", "0.198", "0.250", "retrained 0.059"]
    assert words_on(panels[1]) == ["0.681", "0.123", "n/a"]
    (aim,) = panels[0].lines
    assert {x for x, _ in xy(aim)} == {0.059}


@pytest.mark.parametrize(
    ("row", "title"),
    [
        (SETS["forget"], "Forget set: 0.992 before, 0.198 after the edit, at most 0.250 under"),
        ({"unedited": 0.9, "edited": 0.1}, "Forget set: 0.900 before, 0.100 after the edit"),
        ({"unedited": NAN, "edited": 0.1}, "Mean answer probability by set and model"),
        ({"retrained": 0.1}, "Mean answer probability by set and model"),
    ],
)
def test_bars_say_what_was_forgotten_only_if_it_was_measured(
    row: Mapping[str, float], title: str, tmp_path: Path, figures: list[Figure]
) -> None:
    assert draw_bars({"forget": row}, tmp_path / "bars.png")
    assert title_of(figures[0]).startswith(title)


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_any_number_of_sets_has_its_panels(
    count: int, tmp_path: Path, figures: list[Figure]
) -> None:
    sets = {f"set {number}": {"unedited": 0.5, "edited": 0.4} for number in range(count)}
    assert draw_bars(sets, tmp_path / "bars.png")
    assert len(figures[0].axes) == count


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nothing.png"
    assert not draw_layer_scores([], (), path)
    assert not draw_layer_scores([LayerScore(0, NAN, 0.1)], (0,), path)
    assert not draw_trade_off(calibration(curve=()), path)
    assert not draw_trade_off(calibration(held_out=NAN), path, (0.1, 0.9))
    assert not draw_bars({}, path)
    assert not draw_bars({"forget": {"unedited": NAN}, "retain": {}}, path)
    assert not path.exists()


def test_one_layer_and_one_strength_are_enough(tmp_path: Path) -> None:
    assert draw_layer_scores(SCORES[:1], (0,), tmp_path / "layers.png")
    assert draw_trade_off(calibration(curve=calibration().curve[2:3]), tmp_path / "trade_off.png")
    assert {size_of(path) for path in tmp_path.iterdir()} == {(1080, 630)}
