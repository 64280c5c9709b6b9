"""Every value has its place, the gap is the Kolmogorov-Smirnov statistic, nothing gives nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy.stats import ks_2samp

from grom.distributions import _ranked, _widest_gap, draw_forgetting, draw_truth_ratios
from tests.figures import drawn, size_of, title_of, words_on, xy

NAN, INF = math.nan, math.inf
RATIOS = st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.4, INF]), min_size=1, max_size=20)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    return drawn(monkeypatch)


@pytest.mark.parametrize("count", [1, 2, 150, 5000])
def test_each_request_is_a_point_before_and_after_sorted_by_what_is_left(
    count: int, tmp_path: Path, figures: list[Figure]
) -> None:
    random = np.random.default_rng(0)
    before, after = random.uniform(0.8, 1, count), random.uniform(0, 0.5, count)
    assert draw_forgetting(before.tolist(), after.tolist(), tmp_path / "f.png", level=0.2)
    assert size_of(tmp_path / "f.png") == (1080, 630)
    first, second, _ = figures[0].axes[0].lines
    assert xy(second) == [(rank + 1, value) for rank, value in enumerate(sorted(after))]
    assert [y for _, y in xy(first)] == before[after.argsort()].tolist()
    assert f"{count:,} request" in figures[0].axes[0].get_xlabel()


def test_the_finding_names_the_median_and_the_request_that_was_forgotten_least(
    tmp_path: Path, figures: list[Figure]
) -> None:
    before, after = [0.9, 0.8, 1.0, 0.7], [0.2, 0.6, 0.1, NAN]
    assert draw_forgetting(before, after, tmp_path / "f.png")
    assert title_of(figures[0]) == ("Median request 0.900 → 0.200; the least forgotten keeps 0.600")
    assert figures[0].axes[0].get_xlabel() == "3 requests, best forgotten first; 1 not measured"
    assert draw_forgetting([0.9], [0.2], tmp_path / "f.png")
    assert title_of(figures[1]) == "The request's answers: 0.900 before, 0.200 after"


def test_requests_of_two_different_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        draw_forgetting([0.9, 0.8], [0.1], tmp_path / "f.png")


def test_truth_ratios_are_steps_of_equal_height_at_the_values(
    tmp_path: Path, figures: list[Figure]
) -> None:
    assert draw_truth_ratios([2.0, 0.5, NAN, 1.0, 0.0], [0.4], None, tmp_path / "t.png")
    assert size_of(tmp_path / "t.png") == (1080, 630)
    axes = figures[0].axes[0]
    unedited, edited = axes.lines
    low, high = axes.get_xlim()
    assert (low, high) == pytest.approx((0.4 / 1.5, 3.0))
    steps = [(low, 0), (low, 0.25), (0.5, 0.5), (1, 0.75), (2, 1), (high, 1)]
    assert np.allclose(xy(edited), steps)
    assert [line.get_label() for line in (unedited, edited)] == [
        "unedited (n = 1)",
        "edited (n = 4)",
    ]
    assert title_of(figures[0]) == "Median truth ratio 0.750 after the edit; no retrained model"


def test_the_gap_to_the_retrained_model_is_drawn_where_it_is_widest(
    tmp_path: Path, figures: list[Figure]
) -> None:
    edited, unedited, retrained = [0.5, 0.6, 0.9, 1.0], [0.1, 0.2, 0.3], [0.7, 0.8, 0.9, 1.1]
    assert draw_truth_ratios(edited, unedited, retrained, tmp_path / "t.png")
    gap = figures[0].axes[0].lines[-1]
    assert xy(gap) == [(0.6, 0.5), (0.6, 0.0)]
    assert "KS 0.500" in words_on(figures[0].axes[0])
    assert title_of(figures[0]) == (
        "KS distance to the retrained model: 0.500 after the edit, 1.000 before"
    )


@given(RATIOS, RATIOS)
def test_the_gap_is_the_kolmogorov_smirnov_statistic(
    first: list[float], second: list[float]
) -> None:
    _, (here, there) = _widest_gap(_ranked(first), _ranked(second))
    expected = ks_2samp(first, second, method="exact").statistic
    assert abs(here - there) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("edited", [[0.5], [0.0], [INF], [0.0, 1e-30, 1e30]])
def test_single_and_extreme_truth_ratios_are_drawn(edited: list[float], tmp_path: Path) -> None:
    assert draw_truth_ratios(edited, [], [0.7], tmp_path / "t.png")
    assert size_of(tmp_path / "t.png") == (1080, 630)


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nothing.png"
    assert not draw_forgetting([], [], path)
    assert not draw_forgetting([NAN, 0.9], [0.1, NAN], path)
    assert not draw_truth_ratios([], [0.5], [0.5], path)
    assert not draw_truth_ratios([NAN], [], None, path)
    assert not path.exists()
