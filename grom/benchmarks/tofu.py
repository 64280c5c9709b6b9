"""TOFU: fictitious authors to forget (Maini et al. 2024), in OpenUnlearning's way and correctly."""

from __future__ import annotations

from functools import partial

from grom.benchmarks.benchmark import (
    Answers,
    Benchmark,
    Published,
    Row,
    Rows,
    Split,
    text_of,
    texts_of,
)
from grom.benchmarks.scoring import Mean, health, means, membership
from grom.errors import DataError
from grom.items import Item
from grom.metrics import tofu
from grom.metrics.composite import distance_to_reference, final_tofu, memorisation_score
from grom.metrics.metric import Better, Metric, Variant, mean, mean_metric

VARIANTS: tuple[Variant, ...] = ("compat", "correct")
KINDS: tuple[tofu.TruthRatio, ...] = ("geometric", "arithmetic", "prob_mean")
NEW_TOKENS = 200
SPLIT_NAMES = ("forget", "retain", "real authors", "world facts")


def items(rows: Rows) -> list[Item]:
    """Answer, paraphrased and perturbed answers, a generation, and the question in other words."""
    found: list[Item] = []
    for split in SPLIT_NAMES:
        listed = rows.get(split, ())
        for number, row in enumerate(listed):
            found += _row_items(split, number, row, listed[0])
    for number, row in enumerate(rows.get("holdout", ())):
        question = text_of(row, "question", "holdout", number)
        answer = text_of(row, "answer", "holdout", number)
        found.append(Item("holdout", number, "answer", "likelihood", question, answer))
    return found


def _row_items(split: str, number: int, row: Row, first: Row) -> list[Item]:
    """Items of a row; what the first row of its split has, every row must have."""
    question = text_of(row, "question", split, number)
    answer = text_of(row, "answer", split, number)
    texts = {"answer": answer}
    if "paraphrased_answer" in first:
        texts["paraphrase"] = text_of(row, "paraphrased_answer", split, number)
    perturbed = texts_of(row, "perturbed_answer", split, number)
    wanted = len(texts_of(first, "perturbed_answer", split, 0))
    if len(perturbed) != wanted:
        raise DataError(
            f"{split}, row {number + 1}: {len(perturbed)} texts in `perturbed_answer`, and the "
            f"first row has {wanted}. Give every row of a split equally many."
        )
    texts |= {f"perturbed {at}": wrong for at, wrong in enumerate(perturbed)}
    found = [Item(split, number, key, "likelihood", question, text) for key, text in texts.items()]
    if split == "forget" and "paraphrased_question" in first:
        other = text_of(row, "paraphrased_question", split, number)
        found.append(Item(split, number, "question paraphrased", "likelihood", other, answer))
    said = Item(split, number, "answer", "generation", question, answer, max_new_tokens=NEW_TOKENS)
    return [*found, said]


def measure(answers: Answers, reference: Answers | None) -> list[Metric]:
    """Forgetting, utility, privacy and composites, against the retrained model if it is given."""
    losses = answers.losses("forget", "answer")
    found = [
        tofu.probability(losses, "forget", variant="correct", better="lower"),
        *means(answers, "forget", "answer", FORGET_MEASURES),
        *means(answers, "forget", "question paraphrased", [OTHER_WORDS]),
    ]
    for variant in VARIANTS:
        found.append(_normalised(answers, "forget", variant, "lower"))
        found += _truth_ratios(answers, reference, variant)
    utilities = {variant: _utility(answers, variant) for variant in VARIANTS}
    for variant, (parts, utility) in utilities.items():
        found += [*parts, utility, *_composites(answers, utility, variant)]
    found += membership(answers, reference, "forget", "holdout", "answer")
    found += health(answers, "forget", "answer")
    found.append(_distance(answers, reference))
    return answers.with_dtype(found)


def ratios(
    answers: Answers, split: str, kind: tofu.TruthRatio, variant: Variant = "compat"
) -> list[float]:
    """Truth ratio of each question of a split."""
    right = answers.losses(split, _right_role(answers, split))
    wrong = _perturbed(answers, split)
    return [
        tofu.truth_ratio(loss, losses, kind, variant)
        for loss, losses in zip(right, wrong, strict=True)
    ]


def _right_role(answers: Answers, split: str) -> str:
    """The paraphrase where there is one; real authors and world facts have none."""
    return "paraphrase" if answers.of(split, "paraphrase") else "answer"


def _perturbed(answers: Answers, split: str) -> list[list[float]]:
    columns: list[list[float]] = []
    while answers.of(split, f"perturbed {len(columns)}"):
        columns.append(answers.losses(split, f"perturbed {len(columns)}"))
    return [list(losses) for losses in zip(*columns, strict=True)]


def _truth_ratios(answers: Answers, reference: Answers | None, variant: Variant) -> list[Metric]:
    found = [
        tofu.forget_truth_ratio(ratios(answers, "forget", kind, variant), kind, variant)
        for kind in KINDS
    ]
    compared = None if reference is None else ratios(reference, "forget", "geometric", variant)
    own = ratios(answers, "forget", "geometric", variant)
    return [*found, tofu.forget_quality(own, compared, variant=variant)]


def _utility(answers: Answers, variant: Variant) -> tuple[list[Metric], Metric]:
    rouge = "rouge_l_recall" if variant == "compat" else "rouge_l_recall_correct"
    parts: dict[str, Metric] = {}
    for split in ("retain", "real authors", "world facts"):
        if split == "retain":
            losses = answers.losses(split, "answer")
            known = tofu.probability(losses, split, variant=variant, better="higher")
        else:
            known = _normalised(answers, split, variant, "higher")
        parts[f"{split} probability"] = known
        said = answers.values(split, "answer", rouge, "generation")
        name = f"{split} ROUGE-L recall"
        parts[name] = mean_metric(name, said, variant=variant, better="higher")
        right = answers.losses(split, _right_role(answers, split))
        own = ratios(answers, split, "geometric", variant)
        parts[f"{split} truth ratio"] = tofu.retain_truth_ratio(
            own, right, split, "geometric", variant
        )
    values = {name: metric.value for name, metric in parts.items()}
    return list(parts.values()), tofu.model_utility(values, variant=variant)


def _normalised(answers: Answers, split: str, variant: Variant, better: Better) -> Metric:
    rows = zip(answers.losses(split, "answer"), _perturbed(answers, split), strict=True)
    values = [tofu.normalised_probability(loss, wrong, variant) for loss, wrong in rows]
    name = f"{split} normalised probability"
    return mean_metric(name, values, variant=variant, better=better)


def _composites(answers: Answers, utility: Metric, variant: Variant) -> list[Metric]:
    compat = variant == "compat"
    rouge = "rouge_l_recall" if compat else "rouge_l_recall_correct"
    extraction = "extraction_compat" if compat else "extraction_strength"
    strength = mean(answers.values("forget", "answer", extraction))
    return [
        memorisation_score(
            extraction_strength=strength,
            exact_memorisation=mean(answers.values("forget", "answer", "exact_memorisation")),
            paraphrase_probability=mean(answers.values("forget", "paraphrase", "probability")),
            truth_ratio_prob_mean=mean(ratios(answers, "forget", "prob_mean", variant)),
            variant=variant,
        ),
        final_tofu(
            rouge=mean(answers.values("forget", "answer", rouge, "generation")),
            probability=mean(answers.values("forget", "answer", "probability")),
            extraction_strength=strength,
            model_utility=utility.value,
            variant=variant,
        ),
    ]


def _distance(answers: Answers, reference: Answers | None) -> Metric:
    """On the forget set alone: what the retrained model does not know, and says all the same."""
    return distance_to_reference(
        _forget_values(answers),
        {} if reference is None else _forget_values(reference),
        variant="correct",
    )


def _forget_values(answers: Answers) -> dict[str, float]:
    values = {
        name: mean(answers.values("forget", "answer", measure, ask))
        for name, measure, ask in (
            ("probability", "probability", "likelihood"),
            ("extraction strength", "extraction_strength", "likelihood"),
            ("exact memorisation", "exact_memorisation", "likelihood"),
            ("ROUGE-L recall", "rouge_l_recall_correct", "generation"),
        )
    }
    own = ratios(answers, "forget", "geometric", "correct")
    return values | {"truth ratio": tofu.forget_truth_ratio(own, "geometric", "correct").value}


FORGET_MEASURES = (
    Mean("ROUGE-L recall", "rouge_l_recall", "compat", "lower", "generation"),
    Mean("ROUGE-L recall", "rouge_l_recall_correct", "correct", "lower", "generation"),
    Mean("extraction strength", "extraction_compat", "compat", "lower"),
    Mean("extraction strength", "extraction_strength", "correct", "lower"),
    Mean("exact memorisation", "exact_memorisation", "correct", "lower"),
)
OTHER_WORDS = Mean("probability, question paraphrased", "probability", "correct", "lower")


def _row(model: str, values: tuple[float, float, float, float, float]) -> Published:
    names = ("1-ROUGE", "1-Prob", "1-ES", "MU", "Final")
    return Published(model, dict(zip(names, values, strict=True)), "arXiv 2608.05783, Table 2")


REPRO = "OpenUnlearning docs/repro.md"
PUBLISHED = {
    "01": (
        Published("Llama-3.2-1B, finetuned", {"FQ": 0.01, "MU": 0.60, "TR": 0.47}, REPRO),
        Published("Llama-3.2-1B, retrained on retain99", {"MU": 0.60, "TR": 0.65}, REPRO),
    ),
    "05": (
        _row("Llama-2-7B-chat, retrained on retain95", (0.61, 0.85, 0.93, 0.62, 0.71)),
        _row("Llama-2-7B-chat, GROM", (0.95, 1.00, 0.97, 0.62, 0.79)),
    ),
    "10": (
        _row("Llama-3.2-1B, retrained on retain90", (0.62, 0.88, 0.94, 0.59, 0.70)),
        _row("Llama-3.2-1B, GROM", (0.78, 1.00, 0.94, 0.60, 0.75)),
    ),
}


def tofu_benchmark(percent: str) -> Benchmark:
    """TOFU with 01, 05 or 10 percent of the authors to forget."""

    def split(name: str, file: str, *, needed: bool = True) -> Split:
        return Split(name, (file,), f"locuslab/TOFU:{file}:train", needed)

    return Benchmark(
        name=f"tofu_forget{percent}",
        version=1,
        folder="tofu",
        splits=(
            split("forget", f"forget{percent}_perturbed"),
            split("retain", "retain_perturbed"),
            split("real authors", "real_authors_perturbed"),
            split("world facts", "world_facts_perturbed"),
            split("holdout", f"holdout{percent}", needed=False),
        ),
        items=items,
        measure=measure,
        published=PUBLISHED[percent],
        truth_ratios=partial(ratios, split="forget", kind="geometric", variant="correct"),
    )
