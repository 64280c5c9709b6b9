"""MUSE's numbers: PrivLeak at its ends and against its two published forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.metrics.membership import auc
from grom.metrics.metric import Variant
from grom.metrics.muse import AUC_RETRAIN, knowmem, priv_leak, verbmem

REFERENCES = st.floats(0.01, 0.89)
AUCS = st.floats(0, 1)
VARIANTS: tuple[Variant, ...] = ("compat", "correct")


@pytest.mark.parametrize(
    ("forget", "holdout", "expected"),
    [([1, 2], [3, 4], -100), ([3, 4], [1, 2], 100), ([1, 1], [1, 1], 0)],
)
def test_leakage_by_hand(forget: list[float], holdout: list[float], expected: float) -> None:
    for variant in VARIANTS:
        found = priv_leak(auc(forget, holdout), 0.5, variant)
        assert found.value == pytest.approx(expected)
        assert not found.notes


@given(value=AUCS, reference=REFERENCES)
def test_leakage_is_muses_formula_with_its_labels(value: float, reference: float) -> None:
    chance, chance_reference = 1 - value, 1 - reference  # MUSE takes forget texts as positive
    muse = (chance - chance_reference) / chance_reference * 100
    assert priv_leak(value, reference, "correct").value == pytest.approx(muse, abs=1e-9)


@given(value=AUCS, reference=REFERENCES)
def test_compat_is_openunlearnings_formula(value: float, reference: float) -> None:
    theirs = ((1 - value) - (1 - reference)) / ((1 - reference) + 1e-10) * 100
    assert priv_leak(value, reference, "compat").value == pytest.approx(theirs, abs=1e-9)


@given(first=AUCS, second=AUCS, reference=REFERENCES)
def test_leakage_falls_as_forget_texts_are_recognised(
    first: float, second: float, reference: float
) -> None:
    low, high = sorted((first, second))
    less, more = (priv_leak(value, reference, "correct") for value in (high, low))
    assert less.value <= more.value
    assert less.low - 1e-9 <= less.value <= less.high + 1e-9
    assert priv_leak(reference, reference, "correct").value == 0


def test_the_published_references_are_in_our_orientation() -> None:
    assert {corpus: 1 - value for corpus, value in AUC_RETRAIN.items()} == pytest.approx(
        {"news": 0.4772, "books": 0.5393}
    )
    assert priv_leak(1.0, AUC_RETRAIN["news"], "correct").value == -100
    assert priv_leak(0.0, AUC_RETRAIN["news"], "correct").value == pytest.approx(109.556, abs=1e-3)


def test_a_small_denominator_is_warned_of() -> None:
    found = priv_leak(1e-5, 0.981, "compat")
    assert found.value > 5000
    (note,) = found.notes
    assert note.startswith("denominator 0.019 is small")
    assert not priv_leak(0.5, 0.89, "compat").notes


@pytest.mark.parametrize(
    ("value", "reference", "why"),
    [
        (0.7, None, "no retrained reference"),
        (0.7, math.nan, "no retrained reference"),
        (math.nan, 0.5, "no AUC of forget against holdout"),
        (0.7, 1.0, "the retrained model's AUC is 1, so the denominator is 0"),
    ],
)
def test_leakage_says_why_it_is_not_computed(
    value: float, reference: float | None, why: str
) -> None:
    found = priv_leak(value, reference, "compat")
    assert math.isnan(found.value)
    assert found.missing == f"not computed: {why}"


def test_memorisation_is_the_mean_f1_in_percent() -> None:
    found = verbmem([0.2, 0.4], variant="correct")
    assert found.value == pytest.approx(30)
    assert (found.name, found.num, found.better) == ("VerbMem forget", 2, "lower")
    assert (found.low, found.high) == (0, 100)


def test_knowledge_of_what_is_kept_is_better_high() -> None:
    forget = knowmem([0.5], variant="compat")
    retain = knowmem([0.5], variant="compat", split="retain")
    assert (forget.better, retain.better) == ("lower", "higher")
    assert retain.name == "KnowMem retain"
    assert knowmem([], variant="compat").missing == "not computed: no items"
