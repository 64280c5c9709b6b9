"""Which numbers stand against each other in each attack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grom.attack_config import AttackConfig
from grom.prompts import PREFIXES
from tasks.probe import Reading
from tasks.verdicts import NO_REFERENCE, EditedParts, Judge

HERE = Path()


def reading(probability: float, extraction: float | None = None, **how: Any) -> Reading:
    strength = probability if extraction is None else extraction
    return Reading(probability=probability, extraction_strength=strength, num_examples=4, **how)


def judge(
    before: dict[str, Reading],
    after: dict[str, Reading],
    reference: dict[str, Reading] | None = None,
    **settings: Any,
) -> Judge:
    """Before the edit everything is known at .9 and after it at .1, unless told otherwise."""
    parts = EditedParts(stored=(), quantise_head=False)
    return Judge(
        {"plain": reading(0.9), **before},
        {"plain": reading(0.1), **after},
        reference or {},
        AttackConfig(**settings),
        parts,
        (HERE, HERE),
    )


def test_a_paraphrase_is_compared_with_the_unedited_models_paraphrase() -> None:
    (result,) = judge({"paraphrase": reading(0.5)}, {"paraphrase": reading(0.3)}).results(
        "paraphrase"
    )
    assert result.recovered_share == pytest.approx(0.5)
    assert result.verdict == "suppressed"


def test_extraction_alone_can_show_that_it_comes_back() -> None:
    after = {"paraphrase": reading(0.1, 0.8)}
    (result,) = judge({"paraphrase": reading(0.9)}, after).results("paraphrase")
    assert (result.verdict, result.measure) == ("suppressed", "extraction_strength")


def test_each_share_of_pruning_has_its_own_verdict() -> None:
    before = {"prune 0.1": reading(0.9), "prune 0.5": reading(0.05)}
    after = {"prune 0.1": reading(0.1), "prune 0.5": reading(0.02)}
    results = judge(before, after, prune_shares=(0.1, 0.5)).results("prune")
    assert [result.verdict for result in results] == ["removed", "not tested"]


def test_of_the_prefixes_the_strongest_counts() -> None:
    first, *others = PREFIXES
    before = {f"prefix {name}": reading(0.9) for name in PREFIXES}
    after = {f"prefix {name}": reading(0.1) for name in others}
    after[f"prefix {first}"] = reading(0.5)
    (result,) = judge(before, after).results("prefix")
    assert result.name == f"prefix {first}"
    assert result.verdict == "suppressed"


LEARNT = reading(0.4, details={"losses": [3.0, 0.1]})
RELEARNT = ({"rest": reading(0.9)}, {"rest": reading(0.1), "relearn": LEARNT})


@pytest.mark.parametrize(
    ("reference", "verdict", "share"),
    [
        ({}, "suppressed", 0.375),
        ({"rest": reading(0.1), "relearn": reading(0.15)}, "suppressed", 1 / 3),
        ({"rest": reading(0.1), "relearn": reading(0.35)}, "removed", 1 / 11),
        ({"rest": reading(0.1), "relearn": Reading(missing="no peft")}, "suppressed", 0.375),
    ],
)
def test_relearning_counts_beyond_what_a_retrained_model_gains(
    reference: dict[str, Reading], verdict: str, share: float
) -> None:
    (result,) = judge(*RELEARNT, reference).results("relearn")
    assert result.verdict == verdict
    assert result.recovered_share == pytest.approx(share)
    compared = any(not one.missing for one in reference.values()) and len(reference) == 2
    missing = any(one.missing for one in reference.values())
    assert (NO_REFERENCE in result.reason) is (missing or not compared)


def layers(*probabilities: float) -> Reading:
    listed = [
        {
            "layer": layer,
            "probability": probability,
            "token_probability": probability,
            "median_rank": 1.0,
            "num_examples": 4,
        }
        for layer, probability in enumerate(probabilities)
    ]
    return reading(probabilities[-1], details={"layers": listed})


def test_the_lens_takes_a_retrained_model_into_account() -> None:
    before, after = {"lens": layers(0.8, 0.9)}, {"lens": layers(0.5, 0.1)}
    (alone,) = judge(before, after).results("lens")
    (compared,) = judge(before, after, {"lens": layers(0.5, 0.1)}).results("lens")
    assert (alone.verdict, compared.verdict) == ("suppressed", "removed")


def test_echo_has_its_own_reading() -> None:
    (result,) = judge({"echo": reading(0.8)}, {"echo": reading(0.2)}).results("echo")
    assert result.verdict == "not tested"
    assert result.details["echo_share"] == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["echo", "paraphrase"])
def test_why_a_reading_is_missing_reaches_the_verdict(name: Any) -> None:
    missing = Reading(missing="no row has a prompt")
    (result,) = judge({name: missing}, {name: missing}).results(name)
    assert result.verdict == "not tested"
    assert result.reason == "no row has a prompt"
