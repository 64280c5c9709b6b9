"""MMLU: general knowledge by multiple choice (Hendrycks et al. 2021), in lm-eval's wording."""

from __future__ import annotations

from collections.abc import Mapping

from grom.benchmarks.benchmark import Answers, Benchmark, Published, Row, Rows, Split
from grom.benchmarks.choices import choice_items, choice_metrics, worked
from grom.errors import DataError
from grom.items import Item
from grom.metrics.metric import Metric

SHOTS = 5


def subject_of(row: Row) -> str:
    """Subject of a question: its own column, or the name of the CSV it came from."""
    named = row.get("subject") or str(row.get("file", "")).rsplit(".", 1)[0]
    for ending in ("_test", "_dev", "_val"):
        named = str(named).removesuffix(ending)
    return str(named).replace("_", " ").strip()


def items(rows: Rows) -> list[Item]:
    """Each question once as given and once with its options turned round, without examples."""
    return [
        item
        for number, row in enumerate(rows.get("test", ()))
        for item in choice_items("test", number, row, _head(subject_of(row)))
    ]


def items_after_examples(rows: Rows) -> list[Item]:
    """The same after the first five development questions of the subject.

    Raises:
        DataError: a subject has fewer than five.
    """
    by_subject: dict[str, list[Row]] = {}
    for row in rows.get("dev", ()):
        by_subject.setdefault(subject_of(row), []).append(row)
    shown = {
        subject: worked("dev", listed[:SHOTS])
        for subject, listed in by_subject.items()
        if len(listed) >= SHOTS
    }
    return [
        item
        for number, row in enumerate(rows.get("test", ()))
        for item in choice_items("test", number, row, _with_examples(number, row, shown))
    ]


def _with_examples(number: int, row: Row, shown: Mapping[str, str]) -> str:
    subject = subject_of(row)
    if subject not in shown:
        raise DataError(
            f"test, row {number + 1}: fewer than {SHOTS} `dev` rows are on its subject. Add the "
            "subject's dev file, or use `mmlu`, which shows no examples."
        )
    return _head(subject) + shown[subject]


def _head(subject: str) -> str:
    about = f" about {subject}" if subject else ""
    return f"The following are multiple choice questions (with answers){about}.\n\n"


def measure(answers: Answers, reference: Answers | None) -> list[Metric]:
    """Accuracy with its interval, and whether the option counts or its letter."""
    return answers.with_dtype(choice_metrics(answers, "test", "MMLU accuracy", "higher"))


TEST = Split("test", ("test/*_test", "*_test", "test", "mmlu"), "cais/mmlu:all:test")
DEV = Split("dev", ("dev/*_dev", "*_dev", "dev"), "cais/mmlu:all:dev")
LLAMA = (
    Published("Llama-3-8B-Instruct", {"MMLU": 0.65}, "arXiv 2608.05783"),
    Published("Llama-3-8B-Instruct, GROM on WMDP-bio", {"MMLU": 0.55}, "arXiv 2608.05783"),
)
MMLU = Benchmark("mmlu", 1, "mmlu", (TEST,), items, measure, LLAMA)
MMLU_5_SHOT = Benchmark("mmlu_5shot", 1, "mmlu", (TEST, DEV), items_after_examples, measure)
