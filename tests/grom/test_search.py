"""The search for the strength ends where the level or the floor says, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from grom.apply import Edit
from grom.calibrate import (
    FIRST_NATS,
    BandModel,
    CurvePoint,
    Probe,
    Search,
    given_strength,
    search_strength,
)
from grom.config import AutoStrength, StrengthConfig


@dataclass(frozen=True, slots=True)
class Known(Search):
    """A search whose probabilities fall off exponentially, at known rates."""

    forget_scale: float
    """Nats after which the forget probability has fallen to 1/e."""
    keep_scale: float
    """The same for held-out retain; NaN: there is none."""

    def point(self, nats: float) -> CurvePoint:
        forget, keep = (math.exp(-nats / scale) for scale in (self.forget_scale, self.keep_scale))
        return CurvePoint(nats, nats / self.nats_per_beta, forget, 0.5 * keep)


def known(forget_scale: float, keep_scale: float) -> Known:
    model, probe = nn.Identity(), Probe()
    band = BandModel(model, None)
    return Known(model, Edit({}), 2.0, probe, probe, band, forget_scale, keep_scale)


SCALES = st.floats(0.5, 200)


@example(forget_scale=5, keep_scale=100, tolerance=0.02)  # 16 nats, tried first, pass both
@example(forget_scale=7, keep_scale=100, tolerance=0.02)
@example(forget_scale=0.5, keep_scale=100, tolerance=0.02)
@given(forget_scale=SCALES, keep_scale=SCALES, tolerance=st.sampled_from([0.3, 0.02, 0.001]))
def test_the_search_ends_beside_what_stops_it(
    forget_scale: float, keep_scale: float, tolerance: float
) -> None:
    auto = AutoStrength(forget_probability=0.2, utility_floor=0.9, tolerance=tolerance)
    found = search_strength(known(forget_scale, keep_scale), auto, reference_probability=None)
    level, floor = forget_scale * math.log(1 / 0.2), keep_scale * math.log(1 / 0.9)
    width = tolerance * max(found.nats / (1 - tolerance), 1)
    if level < floor:
        assert found.stopped_by == "forget level"
        assert level * (1 - 1e-9) <= found.nats <= level + width  # the level is reached
    elif floor < min(level, auto.max_nats):
        assert found.stopped_by == "utility floor"
        assert floor - width <= found.nats <= floor * (1 + 1e-9)  # the floor is kept
    else:
        assert (found.stopped_by, found.nats) == ("search limit", auto.max_nats)
    assert found.beta == found.nats / 2


@pytest.mark.parametrize("utility_floor", [None, 0.9])
@pytest.mark.parametrize("keep_scale", [1.0, math.nan])
def test_without_a_floor_or_without_held_out_examples_only_the_level_stops(
    utility_floor: float | None, keep_scale: float
) -> None:
    found = search_strength(known(10, keep_scale), AutoStrength(utility_floor=utility_floor), None)
    floored = utility_floor is not None and not math.isnan(keep_scale)
    assert found.stopped_by == ("utility floor" if floored else "forget level")
    assert (found.floor_probability is not None) == floored


def test_a_held_out_probability_that_becomes_nan_is_below_the_floor() -> None:
    class Overflowing(Known):
        def point(self, nats: float) -> CurvePoint:
            return known(10, math.nan if nats > 7 else 1e9).point(nats)

    base = known(10, 1)
    search = Overflowing(*(getattr(base, name) for name in Known.__dataclass_fields__))
    found = search_strength(search, AutoStrength(), None)
    assert found.stopped_by == "utility floor"
    assert 0.97 * 7 < found.nats <= 7


@pytest.mark.parametrize("max_nats", [0.5 * FIRST_NATS, FIRST_NATS, 3 * FIRST_NATS])
def test_the_search_never_goes_past_its_limit(max_nats: float) -> None:
    found = search_strength(known(1e6, math.nan), AutoStrength(max_nats=max_nats), None)
    assert found.stopped_by == "search limit"
    assert found.nats == max_nats == max(point.nats for point in found.curve)


@pytest.mark.parametrize(
    ("stated", "reference", "target"), [(0.4, 0.3, 0.4), (None, 0.3, 0.3), (None, None, 0.2)]
)
def test_a_stated_level_goes_before_the_reference_and_that_before_the_default(
    stated: float | None, reference: float | None, target: float
) -> None:
    auto = AutoStrength(forget_probability=stated)
    assert search_strength(known(10, 1e9), auto, reference).target_probability == target


def test_the_curve_holds_every_point_once_by_strength_and_starts_unedited() -> None:
    found = search_strength(known(10, 1e9), AutoStrength(), None)
    tried = [point.nats for point in found.curve]
    assert tried == sorted(set(tried))
    assert found.before == found.curve[0]
    assert tried[0] == 0
    assert {4.0, 8.0, 16.0, 32.0} <= set(tried)  # doubled, then bisected between the last two
    assert all(16 < nats < 32 for nats in set(tried) - {0.0, 4.0, 8.0, 16.0, 32.0})


@pytest.mark.parametrize(("forgotten", "floor"), [(0.999, None), (0.2, 1.0)])
def test_a_search_that_any_strength_stops_ends_near_zero(
    forgotten: float, floor: float | None
) -> None:
    auto = AutoStrength(forget_probability=forgotten, utility_floor=floor)
    found = search_strength(known(0.001, 10), auto, None)
    assert found.nats <= auto.tolerance
    assert len(found.curve) < 12


@given(beta=st.floats(0.01, 1e4), nats_per_beta=st.floats(1e-3, 10))
def test_given_nats_and_the_beta_that_they_mean_are_the_same(
    beta: float, nats_per_beta: float
) -> None:
    by_beta = given_strength(StrengthConfig(beta=beta), nats_per_beta)
    by_nats = given_strength(StrengthConfig(nats=by_beta.nats), nats_per_beta)
    assert by_nats.beta == pytest.approx(beta, rel=1e-12)
    assert by_nats.nats == by_beta.nats == beta * nats_per_beta
    assert by_beta.stopped_by == by_nats.stopped_by == "given"
