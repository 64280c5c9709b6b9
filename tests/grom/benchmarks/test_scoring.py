"""Metrics that several benchmarks share: direction, counts, and why they are missing."""

from __future__ import annotations

import math

import pytest

from grom.benchmarks.benchmark import Answers
from grom.benchmarks.scoring import ATTACKS, Mean, health, means, membership
from grom.items import Item, ItemResult
from tests.exams import answered, likely, spoken

NAMES = [name for name, _, _ in ATTACKS]


def items(split: str, count: int) -> list[Item]:
    return [Item(split, row, "text", "likelihood", "", f"{split} {row}") for row in range(count)]


def model(forget: float, holdout: float) -> Answers:
    """Mean log-probabilities of four forget and six held-out texts, a little apart from each
    other."""
    return answered(
        [*items("forget", 4), *items("holdout", 6)],
        lambda item: likely((forget if item.split == "forget" else holdout) - item.row / 1000),
    )


def attacks(answers: Answers, reference: Answers | None) -> dict[str, tuple[float, str]]:
    found = membership(answers, reference, "forget", "holdout", "text")
    return {metric.name: (metric.value, metric.missing) for metric in found}


@pytest.mark.parametrize("name", NAMES)
def test_every_attack_is_near_one_when_forget_texts_are_recognised(name: str) -> None:
    recognised, reversed_ = model(-1, -3), model(-3, -1)
    assert attacks(recognised, None)[f"AUC of {name}"][0] == 1
    assert attacks(reversed_, None)[f"AUC of {name}"][0] == 0
    blind = attacks(recognised, model(-2, -2))
    assert 0.4 < attacks(model(-2, -2), None)[f"AUC of {name}"][0] < 0.7
    assert blind[f"s-{name}"][0] < 0.7
    assert attacks(recognised, recognised)[f"s-{name}"][0] == 1


def test_each_metric_counts_its_texts() -> None:
    for metric in membership(model(-1, -3), model(-2, -2), "forget", "holdout", "text"):
        # The composite counts its components.
        assert metric.num == (4 if metric.name == "OpenUnlearning privacy" else 10)


def test_the_reference_attack_looks_at_what_the_model_learnt_beyond_the_reference() -> None:
    # Held-out texts are easier for both; forget texts became easier for the model alone.
    assert attacks(model(-2, -1), None)["AUC of loss"][0] == 0
    assert attacks(model(-2, -1), model(-4, -1))["AUC of reference"][0] == 1


def test_without_a_reference_the_comparisons_say_why() -> None:
    found = attacks(model(-1, -3), None)
    assert len(found) == 2 * len(NAMES) + 2
    assert found["OpenUnlearning privacy"][1].startswith("not computed: no value of s-loss")
    for name in [*(f"s-{name}" for name in NAMES), "AUC of reference"]:
        assert math.isnan(found[name][0])
        assert found[name][1] == "not computed: no retrained reference"


def test_without_held_out_texts_no_attack_has_a_number() -> None:
    alone = answered(items("forget", 3), lambda item: likely(-1))
    for value, missing in attacks(alone, alone).values():
        assert math.isnan(value)
        assert missing == "not computed: no 'holdout' split to tell 'forget' from"


def test_health_is_the_mean_of_the_generations_rates() -> None:
    asked = [Item("forget", row, "answer", "generation", "p", "a") for row in range(4)]
    answers = answered(
        asked,
        lambda item: {**spoken(0), "empty": float(item.row == 0), "length_ratio": item.row + 0.5},
    )
    found = {metric.name: metric for metric in health(answers, "forget", "answer")}
    assert found["forget empty rate"].value == 0.25
    assert found["forget EOS rate"].value == 1
    assert found["forget length ratio"].value == 2
    assert found["forget length ratio"].better == "reference"
    assert {metric.num for metric in found.values()} == {4}
    empty = health(Answers([]), "forget", "answer")
    assert {metric.missing for metric in empty} == {"not computed: no items"}


def test_means_are_named_after_the_split_and_keep_variant_and_direction() -> None:
    wanted = [Mean("probability", "probability", "compat", "lower"),
              Mean("ROUGE", "rouge_l_recall", "correct", "higher", "generation")]  # fmt: skip
    answers = Answers(
        [
            ItemResult("forget", 0, "answer", "likelihood", "d", 3, probability=0.25),
            ItemResult("forget", 0, "answer", "generation", "d", 3, rouge_l_recall=0.5),
        ]
    )
    first, second = means(answers, "forget", "answer", wanted)
    assert (first.name, first.value, first.variant) == ("forget probability", 0.25, "compat")
    assert (second.name, second.value, second.better) == ("forget ROUGE", 0.5, "higher")
