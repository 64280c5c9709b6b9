"""TOFU: items of the real rows, and the published logs put through `measure`."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.benchmark import Answers
from grom.benchmarks.tofu import NEW_TOKENS, VARIANTS, items, ratios
from grom.errors import DataError
from grom.items import Item
from grom.metrics import Metric
from grom.metrics.metric import Variant
from tests.exams import (
    DATA,
    answered,
    destroyed,
    likely,
    measured,
    needs_data,
    perfect,
    shared_rows,
    spoken,
    without_value,
)
from tests.tiny import CANARY

TOFU = BENCHMARKS["tofu_forget10"]
LISTS = "llama2_7b_retain90"
FULL_2024, RETAIN_2024 = "llama2_7b_full_2024", "llama2_7b_retain90_2024"
LOGS = {
    "forget": "eval_log_forget.json",
    "retain": "eval_log.json",
    "real authors": "eval_real_author_wo_options.json",
    "world facts": "eval_real_world_wo_options.json",
}
ROW = {
    "question": "q",
    "answer": "a",
    "perturbed_answer": ["b", "c"],
    "paraphrased_answer": "d",
    "paraphrased_question": "e",
}


@cache
def published(name: str) -> Answers:
    """The rows of a published log as results; its losses and ROUGE are all they need."""
    log = json.loads((DATA / "tofu_eval_logs" / f"{name}_eval_log_aggregated.json").read_text())
    asked: list[tuple[Item, dict[str, Any]]] = []
    for split, file in LOGS.items():
        columns = {measure: in_order(values) for measure, values in log[file].items()}
        for row, loss in enumerate(columns["avg_gt_loss"]):
            roles = {"answer": loss, "paraphrase": columns["avg_paraphrased_loss"][row]}
            wrong = columns["average_perturb_loss"][row]
            roles |= {f"perturbed {at}": value for at, value in enumerate(wrong)}
            for role, value in roles.items():
                asked.append((Item(split, row, role, "likelihood", "", ""), likely(-value)))
            rouge = columns["rougeL_recall"][row]
            asked.append((Item(split, row, "answer", "generation", "", ""), spoken(rouge)))
    numbers = dict(asked)
    return answered(list(numbers), lambda item: numbers[item])


def in_order(values: Any) -> list[Any]:
    """A column of either layout: a list, or an object keyed by the row's number."""
    return values if isinstance(values, list) else [values[key] for key in sorted(values, key=int)]


@cache
def of_logs(name: str, reference: str | None = None) -> dict[tuple[str, Variant], Metric]:
    return measured(TOFU, published(name), published(reference) if reference else None)


@needs_data
def test_the_published_logs_give_the_published_summary() -> None:
    path = DATA / "tofu_eval_logs" / f"{LISTS}_aggregated_stat.csv"
    with path.open() as file:
        (stored,) = csv.DictReader(file)
    found = of_logs(LISTS)
    for name, theirs in (
        ("forget normalised probability", "Forget Probability"),
        ("retain probability", "Retain Probability"),
        ("real authors normalised probability", "Real Authors Probability"),
        ("world facts normalised probability", "Real World Probability"),
        ("forget truth ratio (geometric)", "Forget Truth Ratio"),
        ("retain truth ratio (geometric)", "Retain Truth Ratio"),
        ("real authors truth ratio (geometric)", "Real Authors Truth Ratio"),
        ("world facts truth ratio (geometric)", "Real World Truth Ratio"),
        ("forget ROUGE-L recall", "Forget ROUGE"),
        ("retain ROUGE-L recall", "Retain ROUGE"),
        ("real authors ROUGE-L recall", "Real Authors ROUGE"),
        ("world facts ROUGE-L recall", "Real World ROUGE"),
        ("model utility", "Model Utility"),
    ):
        assert found[name, "correct"].value == pytest.approx(float(stored[theirs]), abs=1e-12), name
    utility = found["model utility", "correct"]
    assert utility.value == pytest.approx(0.6203436494291608, abs=1e-14)
    assert utility.num == len(utility.parts) == 9
    # 1e-10 in its denominators is what compat adds.
    assert found["model utility", "compat"].value == pytest.approx(utility.value, abs=1e-4)


@needs_data
@pytest.mark.parametrize("variant", ["compat", "correct"])
def test_the_published_logs_give_the_published_forget_quality(variant: Variant) -> None:
    quality = of_logs(FULL_2024, RETAIN_2024)["forget quality", variant]
    assert quality.num == 300
    assert quality.details["statistic"] == pytest.approx(0.3966666666666667, abs=1e-12)
    assert quality.value == pytest.approx(1.834e-21, rel=3e-4)
    same = of_logs(RETAIN_2024, RETAIN_2024)
    assert same["forget quality", variant].value == 1
    assert same["distance to reference", "correct"].value == 0


@needs_data
def test_truth_ratios_for_the_picture_are_those_of_forget_quality() -> None:
    assert TOFU.truth_ratios is not None
    drawn = TOFU.truth_ratios(published(FULL_2024))
    assert drawn == ratios(published(FULL_2024), "forget", "geometric", "correct")
    assert len(drawn) == 300


@needs_data
def test_without_a_reference_or_held_out_rows_comparisons_say_why() -> None:
    found = of_logs(FULL_2024)
    for variant in VARIANTS:
        assert found["forget quality", variant].missing == "not computed: no retrained reference"
    assert found["distance to reference", "correct"].missing == (
        "not computed: no retrained reference"
    )
    attacks = {name: metric for (name, _), metric in found.items() if name.startswith("AUC of")}
    assert len(attacks) == 4
    for metric in attacks.values():
        assert metric.missing == "not computed: no 'holdout' split to tell 'forget' from"


@needs_data
def test_every_row_is_asked_once_in_each_way() -> None:
    rows = {name: list(listed) for name, listed in shared_rows("tofu_forget05").items()}
    kinds = Counter((item.split, item.role, item.ask) for item in items(rows))
    for split, count, perturbed in (
        ("forget", 200, 5),
        ("retain", 400, 5),
        ("real authors", 100, 3),
        ("world facts", 117, 3),
    ):
        roles = ["answer", *(f"perturbed {at}" for at in range(perturbed))]
        roles += ["paraphrase"] if perturbed == 5 else []
        roles += ["question paraphrased"] if split == "forget" else []
        expected = {(split, role, "likelihood"): count for role in roles}
        expected[split, "answer", "generation"] = count
        assert {key: value for key, value in kinds.items() if key[0] == split} == expected
    first = rows["forget"][0]
    asked = {(item.role, item.ask): item for item in items({"forget": [first]})}
    assert asked["paraphrase", "likelihood"].answer == first["paraphrased_answer"]
    assert asked["perturbed 4", "likelihood"].answer == first["perturbed_answer"][4]
    assert asked["question paraphrased", "likelihood"].prompt == first["paraphrased_question"]
    assert asked["question paraphrased", "likelihood"].answer == first["answer"]
    assert asked["answer", "generation"].max_new_tokens == NEW_TOKENS
    assert not any(item.plain for item in asked.values())


def test_held_out_rows_are_scored_for_membership_alone() -> None:
    held = items({"holdout": [{"question": "q", "answer": "a"}]})
    assert [(item.split, item.role, item.ask) for item in held] == [
        ("holdout", "answer", "likelihood")
    ]
    asked = [*items({"forget": [ROW]}), *held]
    known = measured(
        TOFU, answered(asked, lambda item: likely(-2.0 if item.split == "holdout" else -0.5)
                       if item.ask == "likelihood" else spoken(1.0)),
        answered(asked, lambda item: likely(-1.0) if item.ask == "likelihood" else spoken(0.3)),
    )  # fmt: skip
    for attack in ("loss", "zlib", "min-k", "min-k++", "reference"):
        assert known[f"AUC of {attack}", "correct"].value == 1  # all forget texts are recognised
        if attack != "reference":
            s = known[f"s-{attack}", "correct"]
            assert (s.value, s.num) == (0, 2)  # the reference's own AUC is .5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": None}, "retain, row 2: `question` is empty"),
        ({"answer": 3}, "retain, row 2: `answer` is empty or not a text"),
        ({"perturbed_answer": None}, "retain, row 2: `perturbed_answer`"),
        ({"perturbed_answer": [CANARY]}, "retain, row 2: 1 texts in `perturbed_answer`.* has 2"),
        ({"paraphrased_answer": ""}, "retain, row 2: `paraphrased_answer` is empty"),
    ],
)
def test_a_row_in_another_layout_is_refused_by_split_row_and_column(
    change: dict[str, Any], said: str
) -> None:
    good = {**ROW, "question": CANARY}
    with pytest.raises(DataError, match=said) as caught:
        items({"retain": [good, {**good, **change}]})
    assert CANARY not in str(caught.value)


def test_a_row_that_lacks_what_the_first_one_has_is_refused() -> None:
    without = {name: value for name, value in ROW.items() if name != "paraphrased_answer"}
    with pytest.raises(DataError, match="retain, row 2: `paraphrased_answer` is missing"):
        items({"retain": [ROW, without]})
    assert len(items({"retain": [without, without]})) == 8


@needs_data
def test_a_model_that_knows_everything_has_all_utility_and_forgot_nothing() -> None:
    asked = items(shared_rows("tofu_forget01"))
    answers = answered(asked, perfect)
    found = measured(BENCHMARKS["tofu_forget01"], answers, answers)
    for variant in VARIANTS:
        assert found["model utility", variant].value == pytest.approx(1)
        assert found["OpenUnlearning memorisation", variant].value == 0
        assert found["GROM final", variant].value == pytest.approx(0.5)
        assert found["forget quality", variant].value == 1
        assert found["forget extraction strength", variant].value == 1
    assert found["forget probability, question paraphrased", "correct"].value == 1


@needs_data
@pytest.mark.parametrize("logprob", [-1000.0, -math.inf])
def test_a_destroyed_model_has_no_utility_and_no_forget_quality(logprob: float) -> None:
    asked = items(shared_rows("tofu_forget05"))
    broken = answered(
        asked, lambda item: likely(logprob) if item.ask == "likelihood" else destroyed(item)
    )
    reference = answered(asked, lambda item: likely(-0.01 * (item.row + 1))
                         if item.ask == "likelihood" else spoken(0.4))  # fmt: skip
    found = measured(BENCHMARKS["tofu_forget05"], broken, reference)
    absent = without_value(found)
    compat = found["model utility", "compat"]
    assert compat.value == 0
    assert compat.notes == ("0 (component retain probability = 0)",)
    utility = found["model utility", "correct"]
    assert utility.value == 0 if logprob > -math.inf else ("model utility", "correct") in absent
    assert found["forget quality", "compat"].value < 1e-50  # D = 1: R is 0 there, 1 here
    assert any("floor" in note for note in found["forget quality", "compat"].notes)
    for split in ("retain", "real authors", "world facts"):
        (note,) = found[f"{split} truth ratio (geometric)", "compat"].notes
        assert "the model is destroyed there" in note
