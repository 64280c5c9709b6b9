"""What the scores of a run say: evidence for the gate, and a verdict for each attack."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grom.attack import AttackResult, verdict
from grom.gate import FORGET, HELD_OUT, Evidence
from grom.pictures import EDITED, RETRAINED, UNEDITED
from grom.report import MetricTable, TableRow
from tasks.place import ScoreRef

REFERENCE = "reference"
PARAPHRASED = "forget, paraphrased"
UNTOUCHED = "none of the edited weights was quantised by this load"


def attack_results(scores: Sequence[ScoreRef], edited_modules: Sequence[str]) -> list[AttackResult]:
    """A verdict for each quantised load of the edited model and for paraphrased questions.

    Args:
        scores: unedited, edited, and `edited <scheme>` for each load.
        edited_modules: names of the modules that the edit changed.
    """
    by_label = {score.label: score for score in scores}
    before, after = by_label[UNEDITED].sets, by_label[EDITED].sets
    results = []
    for label, score in by_label.items():
        if not label.startswith(f"{EDITED} "):
            continue
        touched = set(edited_modules) & set(score.quantised_modules)
        # What the load leaves of knowledge of the same kind that the edit did not touch.
        left = score.sets.get(HELD_OUT, {}).get("probability", math.nan)
        results.append(
            verdict(
                label.removeprefix(f"{EDITED} "),
                _forget(before),
                _forget(after),
                _forget(score.sets),
                ceiling=None if math.isnan(left) else left,
                reason_not_tested="" if touched else UNTOUCHED,
                num_examples=int(score.sets[FORGET]["num_examples"]),
                details={"edited_modules_quantised": len(touched)},
            )
        )
    if PARAPHRASED in after:
        results.append(
            verdict(
                "paraphrase",
                _forget(before),
                _forget(after),
                after[PARAPHRASED]["probability"],
                ceiling=before[PARAPHRASED]["probability"],
                num_examples=int(after[PARAPHRASED]["num_examples"]),
            )
        )
    return results


def evidence_of(scores: Sequence[ScoreRef], attacks: Sequence[AttackResult]) -> Evidence:
    """What the gate judges.  An attack that could not be tested counts as NaN, which fails, unless
    the edit forgot too little to tell, which the forget probability itself shows."""
    by_label = {score.label: score for score in scores}
    reference = by_label.get(RETRAINED) or by_label.get(REFERENCE)
    return Evidence(
        unedited=probabilities(by_label[UNEDITED]),
        edited=probabilities(by_label[EDITED]),
        attacked={
            attack.name: math.nan if attack.reason == UNTOUCHED else attack.attacked
            for attack in attacks
        },
        reference=probabilities(reference) if reference else {},
        health=by_label[EDITED].health,
    )


def probabilities(score: ScoreRef) -> dict[str, float]:
    """Mean answer probability by set."""
    return {name: values["probability"] for name, values in score.sets.items()}


def _forget(sets: dict[str, dict[str, float]]) -> float:
    return sets[FORGET]["probability"]


def attack_table(attacks: Sequence[AttackResult]) -> MetricTable:
    """The verdicts as a table of the report."""
    columns = ("unedited", "edited", "attacked", "recovered share")
    rows = tuple(
        TableRow(
            f"{attack.name}: {attack.verdict}",
            (attack.unedited, attack.edited, attack.attacked, attack.recovered_share),
            num=str(attack.num_examples),
            notes=(attack.reason,),
        )
        for attack in attacks
    )
    return MetricTable("Attacks: forget probability", columns, rows)
