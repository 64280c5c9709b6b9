"""Every condition passes at its limit, fails beyond it, and fails where it was not measured."""

from __future__ import annotations

import math

import pytest

from grom.config import Band, GateConfig
from grom.gate import FORGET, HELD_OUT, Condition, Evidence, judge

LIMITS = GateConfig(
    max_forget_probability=0.5,
    min_held_out_share=0.75,
    max_recovery=0.125,
    max_repetition=None,
    max_empty_rate=None,
    max_degenerate_rate=None,
)
BEFORE = {FORGET: 1.0, HELD_OUT: 0.5}
NAN = math.nan


def conditions(
    forget: float = 0.25, held_out: float = 0.5, quantised: float = 0.25, before: float = 0.5
) -> dict[str, Condition]:
    """The verdict by name, on an edited model that passes unless told otherwise."""
    evidence = Evidence(
        {FORGET: 1.0, HELD_OUT: before},
        {FORGET: forget, HELD_OUT: held_out},
        {"nf4": quantised},
    )
    found = judge(LIMITS, evidence)
    return {condition.name: condition for condition in found}


def failed(**values: float) -> list[str]:
    return [name for name, condition in conditions(**values).items() if not condition.passed]


def test_a_good_model_passes_with_each_value_beside_its_limit() -> None:
    found = conditions(forget=0.25, held_out=0.4375, quantised=0.3125)
    assert failed(forget=0.25, held_out=0.4375, quantised=0.3125) == []
    assert {name: (c.value, c.limit) for name, c in found.items()} == {
        "forget probability": (0.25, 0.5),
        "held-out retain left": (0.875, 0.75),
        "recovery under nf4": (0.0625, 0.125),
    }


@pytest.mark.parametrize(
    ("name", "at_limit", "beyond"),
    [
        ("forget probability", {"forget": 0.5, "quantised": 0.5}, {"forget": 0.51}),
        ("held-out retain left", {"held_out": 0.375}, {"held_out": 0.37}),
        ("recovery under nf4", {"quantised": 0.375}, {"quantised": 0.38}),
    ],
)
def test_a_condition_passes_at_its_limit_and_fails_beyond_it(
    name: str, at_limit: dict[str, float], beyond: dict[str, float]
) -> None:
    assert conditions(**at_limit)[name].value == conditions(**at_limit)[name].limit
    assert failed(**at_limit) == []
    assert failed(**beyond) == [name]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"forget": NAN}, ["forget probability", "recovery under nf4"]),
        ({"held_out": NAN}, ["held-out retain left"]),
        ({"before": NAN}, ["held-out retain left"]),
        ({"before": 0.0}, ["held-out retain left"]),
        ({"quantised": NAN}, ["recovery under nf4"]),
    ],
)
def test_what_is_not_a_number_fails(values: dict[str, float], names: list[str]) -> None:
    assert failed(**values) == names


def test_a_set_that_was_not_measured_fails_its_conditions() -> None:
    nothing = judge(LIMITS, Evidence({}, {}, {"nf4": NAN}))
    assert [condition.passed for condition in nothing] == [False, False, False]
    assert all(math.isnan(condition.value) for condition in nothing)
    without_forget = judge(LIMITS, Evidence(BEFORE, {HELD_OUT: 0.5}, {"nf4": 0.1}))
    assert [condition.passed for condition in without_forget] == [False, True, False]
    edited = {FORGET: 0.2, HELD_OUT: 0.5}
    without_quantised = judge(LIMITS, Evidence(BEFORE, edited, {"nf4": NAN}))
    assert [condition.passed for condition in without_quantised] == [True, True, False]


def test_each_quantised_load_is_a_condition_of_its_own() -> None:
    loads = {"nf4": 0.2, "int4": 0.9}
    found = judge(LIMITS, Evidence(BEFORE, {FORGET: 0.2, HELD_OUT: 0.5}, loads))
    assert [(c.name, c.passed) for c in found[2:]] == [
        ("recovery under nf4", True),
        ("recovery under int4", False),
    ]


def test_a_model_that_forgets_more_when_quantised_has_not_recovered() -> None:
    assert conditions(quantised=0.0)["recovery under nf4"].value < 0
    assert failed(quantised=0.0) == []


@pytest.mark.parametrize(
    ("reference", "passed"),
    [(0.125, True), (0.25, True), (0.375, True), (0.4, False), (NAN, False)],
)
def test_a_band_holds_on_both_sides_of_the_reference(reference: float, passed: bool) -> None:
    limits = LIMITS.model_copy(update={"reference_bands": (Band(set=FORGET, within=0.125),)})
    evidence = Evidence(BEFORE, {FORGET: 0.25, HELD_OUT: 0.5}, reference={FORGET: reference})
    band = judge(limits, evidence)[-1]
    assert (band.name, band.passed) == ("distance to reference, forget", passed)
    without = judge(limits, Evidence(BEFORE, {FORGET: 0.25, HELD_OUT: 0.5}))[-1]
    assert not without.passed


@pytest.mark.parametrize(
    ("health", "passed"),
    [
        ({"repetition": 0.1, "empty rate": 0.0, "degenerate rate": 0.0}, [True, True, True]),
        ({"repetition": 0.0, "empty rate": 1.0, "degenerate rate": 1.0}, [True, False, False]),
        ({"repetition": 0.0, "empty rate": 0.0, "degenerate rate": 1.0}, [True, True, False]),
        ({"repetition": 0.9, "empty rate": 0.0, "degenerate rate": 0.2}, [False, True, True]),
        ({"repetition": NAN, "empty rate": NAN, "degenerate rate": NAN}, [False] * 3),
        ({}, [False] * 3),
    ],
)
def test_a_model_that_no_longer_speaks_or_was_not_asked_fails(
    health: dict[str, float], passed: list[bool]
) -> None:
    defaults = GateConfig(max_forget_probability=0.5, min_held_out_share=0.75, max_recovery=0.125)
    found = judge(defaults, Evidence(BEFORE, {FORGET: 0.0, HELD_OUT: 0.5}, health=health))
    assert [condition.passed for condition in found[2:]] == passed
    off = judge(LIMITS, Evidence(BEFORE, {FORGET: 0.0, HELD_OUT: 0.5}, health=health))
    assert len(off) == 2


def test_the_margin_is_positive_on_the_good_side() -> None:
    assert Condition("a", 0.25, 0.5, at_most=True).margin == 0.25
    assert Condition("a", 0.25, 0.5, at_most=False).margin == -0.25
