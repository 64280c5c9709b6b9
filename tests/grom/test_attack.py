"""The verdict is a truth table; the share behind it is what the formula says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.attack import (
    AttackResult,
    Bounds,
    echo,
    lens_verdict,
    relearnt_floor,
    stricter,
    strongest,
    verdict,
)
from grom.lens import LayerReading

NAN = math.nan


def found(attacked: float, *, unedited: float = 0.9, edited: float = 0.1, **how: Any) -> Any:
    return verdict("nf4", unedited, edited, attacked, **how)


@pytest.mark.parametrize(
    ("attacked", "share", "expected"),
    [
        (0.1, 0, "removed"),
        (0.02, -0.1, "removed"),
        (0.18, 0.1, "removed"),
        (0.34, 0.3, "suppressed"),
        (0.9, 1, "suppressed"),
        (0.98, 1.1, "suppressed"),
    ],
)
def test_what_comes_back_decides(attacked: float, share: float, expected: str) -> None:
    result = found(attacked)
    assert result.recovered_share == pytest.approx(share)
    assert result.verdict == expected
    assert f"{share:.0%}" in result.reason


def test_at_the_limit_it_still_counts_as_removed() -> None:
    assert found(0.375, unedited=1.0, edited=0.125, bounds=Bounds(0.25)).verdict == "suppressed"
    # (0.34375 - 0.125) / 0.875 = 0.25 exactly
    assert found(0.34375, unedited=1.0, edited=0.125, bounds=Bounds(0.25)).verdict == "removed"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"reason_not_tested": "the load left the head alone"}, "left the head alone"),
        ({"unedited": NAN}, "NaN"),
        ({"edited": NAN}, "NaN"),
        ({"attacked": NAN}, "NaN"),
        ({"ceiling": NAN}, "NaN"),
        ({"floor": NAN}, "NaN"),
        ({"attacked": math.inf}, "NaN"),
        ({"unedited": 0.14}, "took away 0.040"),
        ({"unedited": 0.05}, "too little"),
        ({"ceiling": 0.12, "attacked": 0.11}, "leaves the unedited model 0.120"),
        ({"floor": 0.88}, "without the knowledge gets 0.880"),
    ],
)
def test_what_cannot_be_told_is_not_tested_and_says_why(how: dict[str, Any], why: str) -> None:
    result = found(**{"attacked": 0.9, **how})
    assert result.verdict == "not tested"
    assert math.isnan(result.recovered_share)
    assert why in result.reason


def test_much_that_is_back_is_suppressed_whatever_the_attack_leaves_of_other_models() -> None:
    result = found(unedited=0.98, edited=0.10, attacked=0.60, ceiling=0.12)
    assert result.verdict == "suppressed"
    assert result.recovered_share == pytest.approx(0.5 / 0.88)


@given(
    edited=st.floats(0, 0.4),
    drop=st.floats(0.1, 0.6),
    attacked=st.floats(0, 1),
    cut=st.floats(0, 1),
)
def test_the_share_is_linear_between_floor_and_ceiling(
    edited: float, drop: float, attacked: float, cut: float
) -> None:
    top, bottom = edited + drop, edited + cut * drop / 4
    result = verdict("x", 1.0, edited, attacked, ceiling=top, floor=bottom)
    assert bottom + result.recovered_share * (top - bottom) == pytest.approx(attacked, abs=1e-9)
    assert (result.verdict == "suppressed") == (result.recovered_share > 0.2)


def test_an_attack_that_hurts_the_knowledge_is_measured_by_what_there_is_to_bring_back() -> None:
    """Asked in other words the unedited model knows .3; .25 of the edited one is nearly all."""
    paraphrase = found(0.25, edited=0.05, ceiling=0.3)
    assert paraphrase.recovered_share == pytest.approx(0.8)
    assert paraphrase.verdict == "suppressed"
    assert found(0.2, edited=0.05).verdict == "removed"


@pytest.mark.parametrize(
    ("edited", "before", "after", "floor"),
    [(0.05, 0.06, 0.1, 0.1), (0.2, 0.06, 0.1, 0.24), (0.2, 0.1, 0.06, 0.2), (0.01, 0.3, 0.2, 0.2)],
)
def test_what_an_ignorant_model_learns_is_granted(
    edited: float, before: float, after: float, floor: float
) -> None:
    assert relearnt_floor(edited, before, after) == pytest.approx(floor)


def test_a_gain_that_an_ignorant_model_has_too_is_no_recovery() -> None:
    assert found(0.3).verdict == "suppressed"
    assert found(0.3, floor=relearnt_floor(0.1, 0.1, 0.3)).verdict == "removed"


SUPPRESSED, REMOVED, UNTESTED = found(0.8), found(0.1), found(0.1, reason_not_tested="no")


def as_extraction(result: AttackResult) -> AttackResult:
    return verdict(
        result.name, result.unedited, result.edited, result.attacked,
        measure="extraction_strength",
        reason_not_tested="no" if result.verdict == "not tested" else "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("probability", "extraction", "expected", "measure"),
    [
        (SUPPRESSED, REMOVED, "suppressed", "probability"),
        (REMOVED, SUPPRESSED, "suppressed", "extraction_strength"),
        (UNTESTED, SUPPRESSED, "suppressed", "extraction_strength"),
        (REMOVED, UNTESTED, "removed", "probability"),
        (UNTESTED, REMOVED, "not tested", "probability"),
        (REMOVED, REMOVED, "removed", "probability"),
    ],
)
def test_suppressed_by_either_measure_is_suppressed(
    probability: AttackResult, extraction: AttackResult, expected: str, measure: str
) -> None:
    result = stricter(probability, as_extraction(extraction))
    assert (result.verdict, result.measure) == (expected, measure)
    other = {"probability", "extraction_strength"} - {measure}
    assert set(result.details) == other


def test_the_strongest_variant_is_the_one_that_brings_back_most() -> None:
    weak, strong = found(0.2), found(0.5)
    assert strongest([weak, UNTESTED, strong]) is strong
    assert strongest([UNTESTED, found(0.05)]).verdict == "removed"
    assert strongest([UNTESTED]) is UNTESTED


def readings(*probabilities: float) -> list[LayerReading]:
    return [
        LayerReading(layer, probability, probability, 1.0, 4)
        for layer, probability in enumerate(probabilities)
    ]


def test_an_inner_layer_that_still_holds_the_answer_is_found() -> None:
    result = lens_verdict(readings(0.0, 0.6, 0.9), readings(0.0, 0.5, 0.1))
    assert result.details["best_layer"] == 1
    assert result.recovered_share == pytest.approx(0.8)
    assert result.verdict == "suppressed"
    assert "layer 1" in result.reason


def test_layers_that_say_no_more_than_the_model_itself_hide_nothing() -> None:
    assert lens_verdict(readings(0.0, 0.6, 0.9), readings(0.0, 0.1, 0.1)).verdict == "removed"


def test_a_lens_that_reads_nothing_before_the_edit_tests_nothing() -> None:
    result = lens_verdict(readings(0.0, 0.02, 0.9), readings(0.0, 0.02, 0.1))
    assert result.verdict == "not tested"


def test_what_a_reference_shows_at_the_same_layer_is_no_recovery() -> None:
    before, after = readings(0.0, 0.6, 0.9), readings(0.0, 0.5, 0.1)
    assert lens_verdict(before, after, readings(0.0, 0.45, 0.1)).recovered_share == pytest.approx(
        1 / 3
    )
    assert lens_verdict(before, after, readings(0.0, 0.5, 0.1)).verdict == "removed"


def test_a_model_of_one_layer_has_nothing_to_read() -> None:
    assert lens_verdict(readings(0.9), readings(0.1)).verdict == "not tested"


@pytest.mark.parametrize(
    ("stated", "share", "over"), [(0.9, 1.0, False), (0.54, 0.6, False), (0.09, 0.1, True)]
)
def test_echo_is_a_control_and_never_a_recovery(stated: float, share: float, over: bool) -> None:
    result = echo(0.9, stated, unedited=0.9, edited=0.05)
    assert result.verdict == "not tested"
    assert result.details["echo_share"] == pytest.approx(share)
    assert result.details["over_suppressed"] is over
    assert ("over-suppressed" in result.reason) is over


def test_echo_without_an_unedited_echo_has_no_number() -> None:
    assert math.isnan(echo(0.0, 0.5, unedited=0.9, edited=0.1).details["echo_share"])
