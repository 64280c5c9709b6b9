"""Composites reproduce the printed rows, and never hide the component they hang on."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.composite import (
    distance_to_reference,
    final_muse,
    final_tofu,
    final_wmdp,
    harmonic,
    harmonic_mean,
    memorisation_score,
    overall_score,
    privacy_score,
    utility_rel,
)
from grom.metrics.metric import Metric

SHARES = st.lists(st.floats(0.01, 1), min_size=1, max_size=6)
NAN = math.nan
FULL = (0.601, 0.873)
"""Model utility and fluency of the published full model."""


@pytest.mark.parametrize(
    ("printed", "expected", "final"),
    [
        ((0.61, 0.85, 0.93, 0.62), 0.708, 0.71),  # retain 5 %
        ((0.74, 0.97, 0.92, 0.58), 0.728, 0.73),  # SimNPO 5 %
        ((0.95, 1.00, 0.97, 0.62), 0.797, 0.79),  # GROM 5 %
        ((0.62, 0.88, 0.94, 0.59), 0.702, 0.70),  # retain 10 %
        ((0.65, 0.94, 0.94, 0.56), 0.702, 0.70),  # SimNPO 10 %
        ((0.78, 1.00, 0.94, 0.60), 0.753, 0.75),  # GROM 10 %
    ],
)
def test_the_printed_finals_of_tofu(
    printed: tuple[float, ...], expected: float, final: float
) -> None:
    rouge, probability, extraction, utility = printed  # the tables print 1 - each of the first
    found = final_tofu(
        rouge=1 - rouge,
        probability=1 - probability,
        extraction_strength=1 - extraction,
        model_utility=utility,
        variant="compat",
    )
    assert found.value == pytest.approx(expected, abs=6e-4)
    assert found.value == pytest.approx(final, abs=0.01)  # from parts of two digits
    assert found.worst is not None
    assert found.worst[1] == pytest.approx(min(printed))


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ((20.75, 33.32, 0, 53.79), 67.88),  # News retain
        ((15.68, 24.01, -3.80, 26.37), 55.94),  # News GROM
        ((2.34, 44.84, 72.93, 39.65), 49.81),  # News SimNPO
        ((2.40, 36.89, -0.22, 65.56), 76.20),  # Books GROM
        ((0, 0, -19.82, 48.27), 70.83),  # Books SimNPO
        ((14.30, 28.90, 0, 74.50), 80.05),  # Books retain
    ],
)
def test_the_printed_finals_of_muse(printed: tuple[float, ...], expected: float) -> None:
    verbmem, knowmem, privleak, kept = printed
    found = final_muse(
        verbmem_forget=verbmem,
        knowmem_forget=knowmem,
        privleak=privleak,
        knowmem_retain=kept,
        variant="compat",
    )
    assert found.value == pytest.approx(expected, abs=6e-3)


def test_the_worst_part_of_groms_news_row_is_its_utility() -> None:
    found = final_muse(
        verbmem_forget=15.68,
        knowmem_forget=24.01,
        privleak=-3.8,
        knowmem_retain=26.37,
        variant="compat",
    )
    assert found.worst == ("KnowMem retain", 26.37)


@pytest.mark.parametrize(
    ("forgot", "mmlu", "expected"),
    [(0.75, 0.44, 0.595), (0.71, 0.55, 0.63), (0.73, 0.51, 0.62), (0.27, 0.65, 0.46)],
)
def test_the_printed_finals_of_wmdp(forgot: float, mmlu: float, expected: float) -> None:
    found = final_wmdp(accuracy=1 - forgot, mmlu=mmlu, variant="compat")
    assert found.value == pytest.approx(expected, abs=1e-9)


def test_a_final_without_one_number_names_it() -> None:
    found = final_muse(
        verbmem_forget=2, knowmem_forget=3, privleak=NAN, knowmem_retain=50, variant="compat"
    )
    assert math.isnan(found.value)
    assert found.missing == "not computed: no value of 100 - |PrivLeak|"
    assert found.parts["KnowMem retain"] == 50


ROWS = [
    # overall, memorisation, privacy, utility, model utility, fluency
    (0.807, 0.582, 1.0, 1.0, 0.591, 0.899),  # retain
    (0.784, 0.589, 0.952, 0.926, 0.530, 0.873),  # AltPO
    (0.752, 0.547, 0.875, 0.983, 0.561, 0.930),  # NPO
    (0.733, 0.539, 0.816, 0.988, 0.576, 0.903),  # SimNPO
    (0.720, 0.550, 0.757, 0.975, 0.559, 0.916),  # IdkDPO
    (0.686, 0.501, 0.789, 0.901, 0.594, 0.698),  # GradDiff
    (0.631, 0.666, 0.711, 0.542, 0.282, 0.609),  # RMU
    (0.088, 0.594, 0.091, 0.047, 0.017, 0.892),  # UNDIAL
]


@pytest.mark.parametrize("row", ROWS)
def test_the_published_openunlearning_rows(row: tuple[float, ...]) -> None:
    total, memorised, private, useful, utility, fluency = row
    overall = overall_score(
        memorisation=memorised, privacy=private, utility=useful, variant="compat"
    )
    # From inputs of three digits; the small ones of UNDIAL carry an error of 1 %.
    assert overall.value == pytest.approx(total, abs=1.5e-3)
    relative = utility_rel(
        model_utility=utility,
        fluency=fluency,
        full_model_utility=FULL[0],
        full_fluency=FULL[1],
        variant="compat",
    )
    assert relative.value == pytest.approx(useful, abs=2e-3)


def test_no_unlearning_is_zero_because_of_its_privacy() -> None:
    found = overall_score(memorisation=0.103, privacy=0.0, utility=1.0, variant="compat")
    assert found.value == 0
    assert found.notes == ("0 (component privacy = 0)",)


def test_memorisation_of_the_full_model() -> None:
    """Published: 1 - extraction .321, 1 - exact .032, paraphrase probability .105, total .103."""
    found = memorisation_score(
        extraction_strength=1 - 0.321,
        exact_memorisation=1 - 0.032,
        paraphrase_probability=0.105,
        truth_ratio_prob_mean=0.5,
        variant="compat",
    )
    assert found.value == pytest.approx(4 / (1 / 0.321 + 1 / 0.032 + 1 / 0.895 + 1 / 0.5))
    assert found.worst is not None
    assert found.worst[0] == "1 - exact memorisation"


def test_privacy_is_the_harmonic_mean_of_its_attacks() -> None:
    attacks = {"loss": 0.5, "zlib": 1.0, "min-k": 0.5, "min-k++": 1.0}
    assert privacy_score(attacks, variant="compat").value == pytest.approx(4 / 6)


def test_utility_without_a_full_model_is_not_computed() -> None:
    def against(full_utility: float) -> Metric:
        return utility_rel(
            model_utility=0.6,
            fluency=0.9,
            full_model_utility=full_utility,
            full_fluency=0.9,
            variant="compat",
        )

    assert against(NAN).missing == "not computed: no value of full model utility"
    assert against(0.0).missing == "not computed: the full model's utility is 0"
    assert math.isnan(against(0.0).value)


@given(values=SHARES)
def test_the_harmonic_mean_lies_between_the_least_and_the_mean(values: list[float]) -> None:
    found = harmonic_mean(*values)
    assert min(values) * (1 - 1e-12) <= found <= sum(values) / len(values) * (1 + 1e-12)
    assert harmonic_mean(*values[::-1]) == pytest.approx(found)


@given(values=SHARES, factor=st.floats(1, 3))
def test_the_harmonic_mean_grows_with_each_component(values: list[float], factor: float) -> None:
    assert harmonic_mean(values[0] * factor, *values[1:]) >= harmonic_mean(*values) * (1 - 1e-12)


def test_a_zero_or_nearly_is_explained() -> None:
    zero = harmonic("m", {"a": 0.5, "X": 0.0}, variant="correct")
    assert (zero.value, zero.notes) == (0, ("0 (component X = 0)",))
    tiny = harmonic("m", {"a": 0.5, "X": 1e-12}, variant="correct")
    assert tiny.notes == ("near 0 (component X = 1.0e-12)",)
    assert not harmonic("m", {"a": 0.5, "X": 0.01}, variant="correct").notes


def test_what_has_no_harmonic_mean() -> None:
    assert harmonic("m", {}, variant="correct").missing == "not computed: no components"
    negative = harmonic("m", {"a": 0.5, "X": -0.1}, variant="correct")
    assert negative.missing == "not computed: component X is negative"
    unknown = harmonic("m", {"a": NAN, "b": 1.0, "c": NAN}, variant="correct")
    assert unknown.missing == "not computed: no value of a, c"
    assert math.isnan(unknown.value)


VALUES = st.dictionaries(st.sampled_from("abcde"), st.floats(0, 1), min_size=1)


@given(values=VALUES, shift=st.floats(-1, 1))
def test_the_distance_is_the_size_of_a_common_shift(values: dict[str, float], shift: float) -> None:
    moved = {name: value + shift for name, value in values.items()}
    found = distance_to_reference(moved, values, variant="correct")
    assert found.value == pytest.approx(abs(shift))
    assert found.value == distance_to_reference(values, moved, variant="correct").value


def test_the_furthest_metric_is_named() -> None:
    found = distance_to_reference(
        {"ROUGE": 0.1, "probability": 0.0}, {"ROUGE": 0.4, "probability": 0.1}, variant="correct"
    )
    assert found.value == pytest.approx(0.2)
    assert found.notes == ("furthest: ROUGE, by 0.3",)
    assert found.worst is not None
    assert found.worst[0] == "ROUGE"


def test_a_distance_needs_the_same_metrics_of_both() -> None:
    none = distance_to_reference({"a": 1.0}, {}, variant="correct")
    assert none.missing == "not computed: no retrained reference"
    for values, reference in (
        ({"a": 1.0, "b": 1.0}, {"a": 1.0}),
        ({"a": 1.0}, {"a": 1.0, "b": 1.0}),
    ):
        found = distance_to_reference(values, reference, variant="correct")
        assert found.missing == "not computed: no value of b"
