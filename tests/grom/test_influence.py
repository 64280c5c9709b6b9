"""What sites that were solved one by one come to together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from grom.influence import WHOLE, combined
from grom.pictures import draw_influence
from tests.figures import drawn, size_of, title_of, xy
from tests.influenced import audited, problem


def test_sites_one_by_one_combine_as_their_norms_do() -> None:
    given = problem("llama", "replacement", "alone")
    (one, *_) = audited(given).values()
    site = one.sites[0]
    other = replace(site, update_norm=2 * site.update_norm, frozen=0.5, share=0.25, refit=0.1)
    both = combined([replace(site, refit=0.3), other])
    squares = [(row.update_norm, row.frozen) for row in (site, other)]
    norm = math.hypot(*(size for size, _ in squares))
    assert both.update_norm == pytest.approx(norm)
    assert both.frozen == pytest.approx(
        math.hypot(*(size * share for size, share in squares)) / norm
    )
    assert both.share == pytest.approx((site.share + 4 * 0.25) / 5)
    assert both.own_effect_nats == pytest.approx(2 * site.own_effect_nats)
    assert (both.site, both.retain_effect) == (WHOLE, None)
    assert combined([site, other]).refit is None


def test_one_inexact_site_makes_the_whole_inexact() -> None:
    (one, *_) = audited(problem("llama", "replacement", "alone")).values()
    site = one.sites[0]
    assert combined([site, site]).exact
    assert not combined([site, replace(site, exact=False)]).exact


def test_an_edit_of_nothing_has_no_influence() -> None:
    (one, *_) = audited(problem("llama", "replacement", "alone")).values()
    nothing = replace(one.sites[0], update_norm=0.0, frozen=0.0, share=0.0, refit=0.0)
    both = combined([nothing, nothing])
    assert (both.frozen, both.share, both.refit, both.update_norm) == (0, 0, 0, 0)


def test_the_figure_sorts_requests_and_rings_what_was_solved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch)
    path = tmp_path / "influence.png"
    assert draw_influence([0.1, 0.4, math.nan, 0.2], [None, 0.5, None, 0.25], path)
    size_of(path)
    dots, rings = figures[0].axes[0].lines
    assert xy(dots) == [(1, 0.4), (2, 0.2), (3, 0.1)]
    assert xy(rings) == [(1, 0.5), (2, 0.25)]
    assert title_of(figures[0]).endswith("by 20.00% in the median, by 40.00% at most")


def test_without_requests_there_is_no_figure(tmp_path: Path) -> None:
    assert not draw_influence([], [], tmp_path / "influence.png")
    assert not draw_influence([math.nan], [None], tmp_path / "influence.png")
    assert not list(tmp_path.iterdir())
