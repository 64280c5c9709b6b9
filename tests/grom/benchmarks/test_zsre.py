"""Facts: four public layouts, read as things to forget and as things to rewrite."""

from __future__ import annotations

from typing import Any

import pytest

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.zsre import counterfact_items, zsre_items
from grom.errors import DataError
from grom.items import Item
from tasks.tables import table_rows
from tests.exams import (
    DATA,
    Numbers,
    answered,
    destroyed,
    likely,
    measured,
    needs_data,
    perfect,
    shared_rows,
    without_value,
)
from tests.tiny import CANARY

ZSRE, COUNTERFACT = BENCHMARKS["zsre"], BENCHMARKS["counterfact"]
MEND = {"src": "s", "rephrase": "r", "answers": ["a", "b"], "alt": "n", "loc": "l", "loc_ans": "u"}
KNOWEDIT = {
    "prompt": "s",
    "rephrase_prompt": "r",
    "ground_truth": ["a", "b"],
    "target_new": "n",
    "locality": {"Relation_Specificity": [{"prompt": "l", "ground_truth": [["u"]]}]},
}
REWRITE = {"prompt": "{} is in", "subject": "X{}", "target_true": {"str": "T"},
           "target_new": {"str": "N"}}  # fmt: skip
CASE = {
    "requested_rewrite": REWRITE,
    "paraphrase_prompts": ["p0", "p1"],
    "neighborhood_prompts": ["n0", "n1", "n2"],
}
FLAT = {"prompt": "X is in", "rephrase_prompt": "p0", "locality_prompt": "n0", "target_new": "N",
        "ground_truth": "T"}  # fmt: skip


def asked(items: list[Item]) -> dict[str, tuple[str, str]]:
    assert all(item.plain and item.ask == "likelihood" for item in items)
    return {item.role: (item.prompt, item.answer) for item in items}


@pytest.mark.parametrize("row", [MEND, KNOWEDIT])
def test_both_layouts_of_zsre_ask_the_same(row: dict[str, Any]) -> None:
    assert asked(zsre_items({"facts": [row]})) == {
        "rewrite true": ("s", "a"),
        "rephrase true": ("r", "a"),
        "rewrite new": ("s", "n"),
        "rephrase new": ("r", "n"),
        "unrelated true": ("l", "u"),
    }


def test_a_fact_without_a_new_answer_is_only_asked_for_the_true_one() -> None:
    for empty in ("", " ", None):
        roles = asked(zsre_items({"facts": [{**MEND, "alt": empty}]}))
        assert set(roles) == {"rewrite true", "rephrase true", "unrelated true"}
    without = {key: value for key, value in KNOWEDIT.items() if key != "locality"}
    assert "unrelated true" not in asked(zsre_items({"facts": [without]}))


def test_both_layouts_of_counterfact_ask_for_the_true_and_the_new_object() -> None:
    found = asked(counterfact_items({"facts": [CASE]}))
    prompts = {"rewrite 0": "X{} is in", "paraphrase 0": "p0", "paraphrase 1": "p1"}
    prompts |= {f"neighbour {at}": f"n{at}" for at in range(3)}
    assert found == {
        f"{role} {which}": (prompt, answer)
        for role, prompt in prompts.items()
        for which, answer in (("true", "T"), ("new", "N"))
    }
    flat = asked(counterfact_items({"facts": [FLAT]}))
    assert flat["rewrite 0 true"] == ("X is in", "T")
    assert flat["neighbour 0 new"] == ("n0", "N")
    assert len(flat) == 6


@needs_data
def test_the_shared_files_are_read_with_their_oddities() -> None:
    rows = shared_rows("zsre")["facts"]
    items = zsre_items({"facts": rows})
    new = {item.row for item in items if item.role == "rewrite new"}
    assert set(range(1000)) - new == {534, 723}
    several = [number for number, row in enumerate(rows) if len(row["answers"]) > 1]
    assert len(several) == 22
    true = {item.row: item.answer for item in items if item.role == "rewrite true"}
    assert all(true[number] == rows[number]["answers"][0] for number in several)
    knowedit = list(table_rows(str(DATA / "zsre" / "knowedit_zsre_test_all.json")))
    assert len(zsre_items({"facts": knowedit})) == 5 * 1301


@needs_data
def test_the_shared_counterfact_files_are_read() -> None:
    assert len(counterfact_items(shared_rows("counterfact"))) == 2 * 13 * 500
    flat = list(table_rows(str(DATA / "counterfact" / "counterfact_edit_1k.json")))
    assert len(counterfact_items({"facts": flat})) == 2 * 3 * 1000
    assert all(row["locality_ground_truth"] == row["ground_truth"] for row in flat)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**MEND, "src": ""}, "facts, row 2: `src` is empty"),
        ({**MEND, "answers": []}, "facts, row 2: `answers`"),
        ({**MEND, "loc_ans": None}, "facts, row 2: `loc_ans`"),
        ({**KNOWEDIT, "rephrase_prompt": 7}, "facts, row 2: `rephrase_prompt`"),
        ({**KNOWEDIT, "locality": {"Relation_Specificity": [CANARY]}}, "row 2: `prompt` is empty"),
        ({**KNOWEDIT, "locality": {"Relation_Specificity": [{"prompt": CANARY}]}},
         "Relation_Specificity`, row 2: `ground_truth`"),
        ({"other": CANARY}, "facts, row 2: `prompt` is missing"),
    ],
)  # fmt: skip
def test_a_zsre_row_in_another_layout_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        zsre_items({"facts": [MEND, {**row, "subject": CANARY}]})
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**CASE, "requested_rewrite": CANARY}, "row 2: `requested_rewrite` is not in"),
        ({**CASE, "requested_rewrite": {**REWRITE, "target_true": "T"}}, "`requested_rewrite`"),
        ({**CASE, "requested_rewrite": {**REWRITE, "target_new": {"str": ""}}}, "`requested_rew"),
        ({**CASE, "requested_rewrite": {**REWRITE, "subject": None}}, "row 2: `requested_rewrite`"),
        ({**CASE, "paraphrase_prompts": []}, "row 2: `paraphrase_prompts`"),
        ({"requested_rewrite": REWRITE}, "row 2: `paraphrase_prompts` is missing"),
        ({**FLAT, "locality_prompt": ""}, "row 2: `locality_prompt` is empty"),
    ],
)
def test_a_counterfact_row_in_another_layout_is_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        counterfact_items({"facts": [CASE, {**row, "note": CANARY}]})
    assert CANARY not in str(caught.value)


def zsre_of(true: float, new: float, unrelated: float) -> dict[str, float]:
    def numbers(item: Item) -> Numbers:
        share = {"unrelated true": unrelated}.get(item.role, true if "true" in item.role else new)
        return {**likely(-1), "token_accuracy": share}

    rows = [MEND, {**MEND, "alt": ""}]
    found = measured(ZSRE, answered(zsre_items({"facts": rows}), numbers))
    return {name: metric.value for (name, _), metric in found.items()}


def test_zsre_is_read_as_forgetting_and_as_rewriting() -> None:
    assert zsre_of(0.5, 0.25, 0.75) == {
        "ZsRE efficacy (unlearning)": 0.5,
        "ZsRE generalisation (unlearning)": 0.5,
        "ZsRE specificity (unlearning)": 0.75,
        "ZsRE efficacy (editing)": 0.25,
        "ZsRE generalisation (editing)": 0.25,
    }


def test_a_fact_without_a_new_answer_counts_for_forgetting_alone() -> None:
    items = zsre_items({"facts": [MEND, {**MEND, "alt": ""}]})
    found = measured(ZSRE, answered(items, perfect))
    assert found["ZsRE efficacy (unlearning)", "correct"].num == 2
    assert found["ZsRE efficacy (editing)", "correct"].num == 1


@pytest.mark.parametrize(
    ("near_too", "score"), [(False, 1.0), (True, 0.0)], ids=["specific", "unspecific"]
)
def test_counterfact_counts_the_prompts_where_one_object_is_likelier(
    near_too: bool, score: float
) -> None:
    def edited(item: Item) -> Numbers:
        true = item.role.startswith("neighbour") and not near_too
        return likely(-1 if item.role.endswith("true") == true else -3)

    found = measured(COUNTERFACT, answered(counterfact_items({"facts": [CASE, FLAT]}), edited))
    for reading, efficacy in (("unlearning", 0), ("editing", 1)):
        assert found[f"CounterFact efficacy ({reading})", "correct"].value == efficacy
        assert found[f"CounterFact paraphrase ({reading})", "correct"].value == efficacy
        assert found[f"CounterFact neighbourhood ({reading})", "correct"].value == 1 - near_too
        assert found[f"CounterFact score ({reading})", "correct"].value == pytest.approx(score)


def test_a_fact_s_prompts_are_averaged_before_the_facts_are() -> None:
    def numbers(item: Item) -> Numbers:  # of the first fact's neighbours one of three is kept
        kept = item.row == 1 or item.role.startswith("neighbour 0")
        return likely(-1 if item.role.endswith("true") == kept else -3)

    found = measured(COUNTERFACT, answered(counterfact_items({"facts": [CASE, FLAT]}), numbers))
    near = found["CounterFact neighbourhood (editing)", "correct"]
    assert near.value == pytest.approx((1 / 3 + 1) / 2)
    assert near.num == 2


@needs_data
def test_a_perfect_and_a_destroyed_model_are_at_the_ends_of_the_scales() -> None:
    items = counterfact_items(shared_rows("counterfact"))
    knows = measured(COUNTERFACT, answered(items, perfect))
    assert knows["CounterFact efficacy (unlearning)", "correct"].value == 1
    assert knows["CounterFact score (unlearning)", "correct"].value == 0
    # All losses are infinite: neither object is likelier, so nothing is kept or rewritten.
    broken = measured(COUNTERFACT, answered(items, destroyed))
    assert without_value(broken) == {}
    assert broken["CounterFact efficacy (editing)", "correct"].value == 0
    assert broken["CounterFact score (unlearning)", "correct"].value == 0
    facts = zsre_items(shared_rows("zsre"))
    assert measured(ZSRE, answered(facts, destroyed))[
        "ZsRE specificity (unlearning)", "correct"
    ].value == 0  # fmt: skip
