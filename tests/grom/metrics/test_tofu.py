"""TOFU's numbers by hand: the pencil triple, both variants, and what a destroyed model scores."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.metric import Variant
from grom.metrics.tofu import (
    TruthRatio,
    forget_quality,
    forget_truth_ratio,
    model_utility,
    normalised_probability,
    probability,
    retain_truth_ratio,
    truth_ratio,
)

PARAPHRASED = -math.log(0.25)
PERTURBED = (-math.log(0.5), -math.log(0.125))
LOSS = st.floats(0, 12)
LOSSES = st.lists(LOSS, min_size=1, max_size=6)
KINDS: tuple[TruthRatio, ...] = ("geometric", "arithmetic", "prob_mean")
FULL = (0.854, 0.772, 0.512, 0.430, 0.820, 0.552, 0.431, 0.831, 0.596)
RETAIN90 = (0.867, 0.792, 0.512, 0.407, 0.847, 0.523, 0.423, 0.794, 0.590)
NINE = [
    f"{split} {measure}"
    for split in ("retain", "real authors", "world facts")
    for measure in ("probability", "ROUGE", "truth ratio")
]


@pytest.mark.parametrize(
    ("kind", "ratio", "forget", "retain"),
    [("geometric", 1, 1, 0), ("arithmetic", 1.25, 0.8, 0), ("prob_mean", 0.5, 0.5, 0.5)],
)
def test_the_pencil_triple(kind: TruthRatio, ratio: float, forget: float, retain: float) -> None:
    value = truth_ratio(PARAPHRASED, PERTURBED, kind)
    assert value == pytest.approx(ratio)
    assert forget_truth_ratio([value], kind, "correct").value == pytest.approx(forget)
    kept = retain_truth_ratio([value], [PARAPHRASED], "retain", kind, "correct")
    assert kept.value == pytest.approx(retain, abs=1e-12)


@given(right=LOSS, wrong=LOSSES)
def test_compat_and_correct_agree_where_probabilities_are_not_tiny(
    right: float, wrong: list[float]
) -> None:
    for kind in KINDS:
        exact, compat = (
            truth_ratio(right, wrong, kind, variant) for variant in ("correct", "compat")
        )
        # 1e-10 against e^-12.
        assert compat == pytest.approx(exact, rel=2e-5)


@given(right=LOSS, wrong=LOSSES, shift=st.floats(0, 500))
def test_the_correct_ratio_depends_on_the_difference_of_losses_only(
    right: float, wrong: list[float], shift: float
) -> None:
    moved = [loss + shift for loss in wrong]
    for kind in KINDS:
        value = truth_ratio(right + shift, moved, kind)
        assert value == pytest.approx(truth_ratio(right, wrong, kind), rel=1e-9)
        assert truth_ratio(right, wrong[::-1], kind) == pytest.approx(
            truth_ratio(right, wrong, kind)
        )


@given(right=LOSS, wrong=LOSSES)
def test_probabilities_average_to_no_less_than_losses(right: float, wrong: list[float]) -> None:
    """Jensen: the arithmetic mean is never below the geometric one."""
    arithmetic = truth_ratio(right, wrong, "arithmetic")
    geometric = truth_ratio(right, wrong, "geometric")
    assert arithmetic >= geometric * (1 - 1e-12)
    assert truth_ratio(right, wrong, "prob_mean") == pytest.approx(1 / (1 + geometric))


def test_a_destroyed_model_is_perfect_in_compat_and_noted_in_both() -> None:
    right, wrong = 40.0, [39.0, 39.0]
    scores: dict[Variant, float] = {"compat": 1, "correct": 0}
    for variant, expected in scores.items():
        ratio = truth_ratio(right, wrong, "geometric", variant)
        found = retain_truth_ratio([ratio], [right], "retain", "geometric", variant)
        assert found.value == pytest.approx(expected, abs=1e-5)
        (note,) = found.notes
        assert note.startswith("1 of 1 losses exceed 23 nats")


def test_a_healthy_model_has_no_note() -> None:
    assert not retain_truth_ratio([0.5], [2.0], "retain", "geometric", "correct").notes


def test_extreme_ratios_do_not_overflow() -> None:
    assert truth_ratio(800.0, [0.0], "geometric") == math.inf
    assert truth_ratio(0.0, [800.0], "geometric") == 0
    assert forget_truth_ratio([math.inf, 0.0], "geometric", "correct").value == 0
    assert forget_truth_ratio([0.0], "geometric", "compat").value == 0


def test_what_is_unknown_stays_unknown() -> None:
    assert math.isnan(truth_ratio(1.0, [], "geometric"))
    assert math.isnan(normalised_probability(1.0, [], "compat"))
    unknown = [0.5, math.nan]
    for found in (
        forget_truth_ratio(unknown, "geometric", "correct"),
        retain_truth_ratio(unknown, [1.0, 1.0], "retain", "geometric", "correct"),
    ):
        assert found.missing == "not computed: 1 of 2 values are not numbers"


def test_the_three_truth_ratios_have_three_names() -> None:
    assert len({forget_truth_ratio([0.5], kind, "correct").name for kind in KINDS}) == 3


@given(right=LOSS, wrong=LOSSES)
def test_normalised_probability_is_a_share(right: float, wrong: list[float]) -> None:
    value = normalised_probability(right, wrong, "correct")
    shares = [math.exp(-loss) for loss in (right, *wrong)]
    assert value == pytest.approx(shares[0] / sum(shares))
    assert 0 < value < 1


def test_a_destroyed_model_is_at_chance_not_at_zero() -> None:
    assert normalised_probability(60.0, [60.0] * 3, "correct") == pytest.approx(0.25)
    assert normalised_probability(60.0, [60.0] * 3, "compat") == pytest.approx(0, abs=1e-12)


def test_probability_is_the_mean_over_answers() -> None:
    found = probability([0.0, math.log(2)], "forget", variant="compat", better="lower")
    assert (found.name, found.value, found.num) == ("forget probability", 0.75, 2)


def test_forget_quality_of_four_disjoint_values_is_two_in_seventy() -> None:
    found = forget_quality([1, 2, 3, 4], [5, 6, 7, 8], variant="compat")
    assert found.value == pytest.approx(2 / 70)
    assert found.details["log10 p"] == pytest.approx(math.log10(2 / 70))
    assert found.details["floor"] == pytest.approx(2 / 70)
    assert found.details["statistic"] == 1
    assert any(note.startswith("floor of n = 4") for note in found.notes)


def test_forty_disjoint_values_are_flagged_as_the_floor() -> None:
    values = [float(value) for value in range(40)]
    found = forget_quality(values, [value + 40 for value in values], variant="correct")
    assert found.value == pytest.approx(1.86e-23, rel=1e-3)
    assert found.notes == (
        "floor of n = 40, log10 p = -22.73",
        "n = 40: too few to find a damaged model out",
    )


def test_equal_ratios_have_forget_quality_one_and_no_note() -> None:
    values = [float(value) for value in range(200)]
    found = forget_quality(values, values, variant="correct")
    assert (found.value, found.details["statistic"], found.notes) == (1, 0, ())


@pytest.mark.parametrize(
    ("ratios", "reference", "why"),
    [
        ([0.5], None, "no retrained reference"),
        ([0.5], [], "no retrained reference"),
        ([], [0.5], "no items"),
        ([math.nan, 1], [0.5], "1 of 2 truth ratios of the model are not numbers"),
        ([0.5], [math.nan], "1 of 1 truth ratios of the reference are not numbers"),
    ],
)
def test_forget_quality_says_why_it_is_not_computed(
    ratios: list[float], reference: list[float] | None, why: str
) -> None:
    found = forget_quality(ratios, reference, variant="compat")
    assert math.isnan(found.value)
    assert found.missing == f"not computed: {why}"


@pytest.mark.parametrize(("nine", "expected"), [(FULL, 0.601), (RETAIN90, 0.591)])
def test_model_utility_of_the_published_numbers(nine: tuple[float, ...], expected: float) -> None:
    found = model_utility(dict(zip(NINE, nine, strict=True)), variant="compat")
    assert found.value == pytest.approx(expected, abs=5e-4)
    assert found.worst is not None
    assert found.worst[1] == min(nine)


def test_a_zero_in_model_utility_is_explained() -> None:
    parts = dict.fromkeys(NINE, 0.9) | {"world facts ROUGE": 0.0}
    found = model_utility(parts, variant="compat")
    assert found.value == 0
    assert found.notes == ("0 (component world facts ROUGE = 0)",)


def test_model_utility_needs_all_nine() -> None:
    parts = dict.fromkeys(NINE, 0.9)
    unknown = model_utility(parts | {"retain ROUGE": math.nan}, variant="compat")
    assert unknown.missing == "not computed: no value of retain ROUGE"
    del parts["retain ROUGE"]
    few = model_utility(parts, variant="compat")
    assert few.missing == "not computed: 8 components instead of 9"
    assert math.isnan(few.value)
