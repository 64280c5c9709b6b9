"""Published evaluation logs, recomputed: every summary statistic from its per-example numbers."""

from __future__ import annotations

import csv
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from grom.metrics.metric import Variant, mean
from grom.metrics.text import rouge1, rouge_l
from grom.metrics.tofu import (
    forget_quality,
    forget_truth_ratio,
    model_utility,
    normalised_probability,
    probability,
    retain_truth_ratio,
    truth_ratio,
)

ROOT = Path(__file__).resolve().parents[3]
LOGS = Path(os.environ.get("GROM_SHARED", ROOT.parent / "shared")) / "data" / "tofu_eval_logs"
LISTS = "llama2_7b_retain90"
FULL_2024, RETAIN_2024 = "llama2_7b_full_2024", "llama2_7b_retain90_2024"
SPLITS = {
    "Retain": "eval_log.json",
    "Real Authors": "eval_real_author_wo_options.json",
    "Real World": "eval_real_world_wo_options.json",
    "Forget": "eval_log_forget.json",
}
VARIANTS: tuple[Variant, ...] = ("compat", "correct")
pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason="needs the benchmark data, GROM_SHARED")


@cache
def log(name: str) -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads(
        (LOGS / f"{name}_eval_log_aggregated.json").read_text()
    )
    return read


def column(name: str, split: str, measure: str) -> list[Any]:
    """One measure by row, in both layouts: a list, or an object keyed by the row's number."""
    values = log(name)[SPLITS[split]][measure]
    if isinstance(values, list):
        return values
    return [values[key] for key in sorted(values, key=int)]


def published() -> dict[str, float]:
    with (LOGS / f"{LISTS}_aggregated_stat.csv").open() as file:
        (row,) = csv.DictReader(file)
    return {key: float(value) for key, value in row.items()}


def ratios(name: str, split: str, variant: Variant = "correct") -> list[float]:
    rows = zip(
        column(name, split, "avg_paraphrased_loss"),
        column(name, split, "average_perturb_loss"),
        strict=True,
    )
    return [truth_ratio(right, wrong, "geometric", variant) for right, wrong in rows]


def split_probability(name: str, split: str) -> float:
    losses = column(name, split, "avg_gt_loss")
    if split == "Retain":
        return probability(losses, split, variant="correct", better="higher").value
    wrong = column(name, split, "average_perturb_loss")
    return mean(
        normalised_probability(right, others, "correct")
        for right, others in zip(losses, wrong, strict=True)
    )


def split_truth_ratio(name: str, split: str) -> float:
    values = ratios(name, split)
    if split == "Forget":
        return forget_truth_ratio(values, "geometric", "correct").value
    losses = column(name, split, "avg_paraphrased_loss")
    return retain_truth_ratio(values, losses, split, "geometric", "correct").value


@pytest.mark.parametrize("split", SPLITS)
def test_the_published_summary_to_twelve_digits(split: str) -> None:
    expected = published()
    assert split_probability(LISTS, split) == pytest.approx(
        expected[f"{split} Probability"], abs=1e-12
    )
    assert split_truth_ratio(LISTS, split) == pytest.approx(
        expected[f"{split} Truth Ratio"], abs=1e-12
    )
    rouge = mean(column(LISTS, split, "rougeL_recall"))
    assert rouge == pytest.approx(expected[f"{split} ROUGE"], abs=1e-12)


def test_the_published_model_utility() -> None:
    parts: dict[str, float] = {}
    for split in ("Retain", "Real Authors", "Real World"):
        parts[f"{split} probability"] = split_probability(LISTS, split)
        parts[f"{split} ROUGE"] = mean(column(LISTS, split, "rougeL_recall"))
        parts[f"{split} truth ratio"] = split_truth_ratio(LISTS, split)
    found = model_utility(parts, variant="correct").value
    assert found == pytest.approx(0.6203436494291608, abs=1e-14)
    assert found == pytest.approx(published()["Model Utility"], abs=1e-14)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", [FULL_2024, RETAIN_2024])
def test_the_stored_truth_ratio_of_every_row(name: str, split: str) -> None:
    stored = column(name, split, "truth_ratio")
    assert ratios(name, split) == pytest.approx(stored, rel=1e-5)  # stored in single precision


@pytest.mark.parametrize("split", ["Real Authors", "Real World"])
def test_the_compat_ratio_differs_by_epsilon_only(split: str) -> None:
    # The least likely paraphrase has p = 7e-6, and 1e-10 is added to it.
    assert ratios(LISTS, split, "compat") == pytest.approx(ratios(LISTS, split), rel=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_published_forget_quality(variant: Variant) -> None:
    full, retain = ratios(FULL_2024, "Forget", variant), ratios(RETAIN_2024, "Forget", variant)
    found = forget_quality(full, retain, variant=variant)
    assert found.num == 300
    assert found.details["statistic"] == pytest.approx(0.3966666666666667, abs=1e-12)
    assert found.value == pytest.approx(1.834e-21, rel=3e-4)
    same = forget_quality(retain, retain, variant=variant)
    assert (same.value, same.details["statistic"]) == (1, 0)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", [LISTS, FULL_2024, RETAIN_2024])
def test_the_stored_rouge_of_every_generated_text(name: str, split: str) -> None:
    """Stored as prompt, answer, truth.  Recall with stems, as TOFU's own code computes it."""
    texts = [(said, truth) for _, said, truth in column(name, split, "generated_text")]
    long = [rouge_l(said, truth, "compat").recall for said, truth in texts]
    assert long == pytest.approx(column(name, split, "rougeL_recall"), abs=1e-12)
    single = [rouge1(said, truth, "compat").recall for said, truth in texts]
    assert single == pytest.approx(column(name, split, "rouge1_recall"), abs=1e-12)


def test_without_stems_the_stored_rouge_is_missed() -> None:
    texts = column(LISTS, "Forget", "generated_text")
    plain = [rouge_l(said, truth, "compat", stemmer=False).recall for _, said, truth in texts[:40]]
    assert plain != pytest.approx(column(LISTS, "Forget", "rougeL_recall")[:40], abs=1e-12)
