"""MUSE: verbatim and knowledge memorisation and privacy leakage (Shi et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

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
from grom.benchmarks.scoring import health, membership
from grom.errors import DataError
from grom.items import Item
from grom.metrics import muse
from grom.metrics.composite import final_muse
from grom.metrics.membership import auc
from grom.metrics.metric import Metric, Variant, not_computed

VARIANTS: tuple[Variant, ...] = ("compat", "correct")
VERBATIM_TOKENS, KNOWLEDGE_TOKENS = 128, 32
STOPS = ("\n\n", "\nQuestion", "Question:")
SHOTS = 10


def news_items(rows: Rows) -> list[Item]:
    """Knowledge questions after ten examples, passages to continue, texts to score.

    Raises:
        DataError: a row lacks a column, or there are fewer than ten examples.
    """
    found: list[Item] = []
    for kind in ("forget", "retain"):
        shots = _shots(f"{kind} examples", rows.get(f"{kind} examples", ()))
        for number, row in enumerate(rows.get(f"{kind} knowledge", ())):
            found.append(_question(f"{kind} knowledge", number, row, shots))
    for number, row in enumerate(rows.get("forget verbatim", ())):
        halves = [text_of(row, name, "forget verbatim", number) for name in ("prompt", "gt")]
        found.append(continuation_item("forget verbatim", number, *halves))
    for split in ("forget text", "retain text", "holdout text"):
        for number, row in enumerate(rows.get(split, ())):
            found.append(text_item(split, number, text_of(row, "text", split, number)))
    return found


def _shots(split: str, rows: Sequence[Row]) -> str:
    if len(rows) < SHOTS:
        raise DataError(f"{split}: {len(rows)} rows, and {SHOTS} are shown. Add the others.")
    return "".join(
        f"{_asked(row, split, number)} {_answer(row, split, number)}\n\n"
        for number, row in enumerate(rows[:SHOTS])
    )


def _asked(row: Row, split: str, number: int) -> str:
    return f"Question: {text_of(row, 'question', split, number)}\nAnswer:"


def _answer(row: Row, split: str, number: int) -> str:
    return texts_of(row, "answer", split, number)[0]


def _question(split: str, number: int, row: Row, shots: str) -> Item:
    return Item(
        split,
        number,
        "answer",
        "generation",
        shots + _asked(row, split, number),
        _answer(row, split, number),
        plain=True,
        max_new_tokens=KNOWLEDGE_TOKENS,
        stops=STOPS,
    )


def continuation_item(split: str, number: int, prompt: str, rest: str) -> Item:
    """A passage to continue; `correct` compares with as many tokens as the model may say."""
    return Item(
        split,
        number,
        "continuation",
        "generation",
        prompt.strip(),
        rest,
        plain=True,
        max_new_tokens=VERBATIM_TOKENS,
        cut_reference=True,
    )


def text_item(split: str, number: int, text: str) -> Item:
    """A text to score as it stands."""
    return Item(split, number, "text", "likelihood", "", text, plain=True, text=True)


def measure_news(answers: Answers, reference: Answers | None) -> list[Metric]:
    """VerbMem, KnowMem, PrivLeak, membership and GROM's Final."""
    knowledge = {
        (split, variant): muse.knowmem(
            f1_values(answers, f"{split} knowledge", "answer", variant),
            variant=variant,
            split=split,
        )
        for split in ("forget", "retain")
        for variant in VARIANTS
    }
    found = [*knowledge.values()]
    for variant in VARIANTS:
        verbatim = muse.verbmem(
            f1_values(answers, "forget verbatim", "continuation", variant), variant=variant
        )
        leak = privacy_leak(answers, reference, variant)
        final = final_muse(
            verbmem_forget=verbatim.value,
            knowmem_forget=knowledge["forget", variant].value,
            privleak=leak.value,
            knowmem_retain=knowledge["retain", variant].value,
            variant=variant,
        )
        found += [verbatim, leak, final]
    found += membership(answers, reference, "forget text", "holdout text", "text")
    found += health(answers, "forget knowledge", "answer")
    return answers.with_dtype(found)


def f1_values(answers: Answers, split: str, role: str, variant: Variant) -> list[float]:
    """ROUGE-L F1 of each generation."""
    measure = "rouge_l_f1" if variant == "compat" else "rouge_l_f1_correct"
    return answers.values(split, role, measure, "generation")


def privacy_leak(answers: Answers, reference: Answers | None, variant: Variant) -> Metric:
    """PrivLeak by Min-40% of forget against held-out texts."""
    forget, holdout = _min_k(answers, variant)
    if not forget or not holdout:
        why = "no 'forget text' and 'holdout text' to tell apart"
        return not_computed(
            "PrivLeak", why, variant=variant, better="reference", low=-100, high=float("inf")
        )
    compared = None if reference is None else auc(*_min_k(reference, variant))
    return muse.priv_leak(auc(forget, holdout), compared, variant, num=len(forget) + len(holdout))


def _min_k(answers: Answers, variant: Variant) -> tuple[list[float], list[float]]:
    measure = "min_k_compat" if variant == "compat" else "min_k"
    forget, holdout = (
        answers.values(f"{split} text", "text", measure) for split in ("forget", "holdout")
    )
    return forget, holdout


def _muse(name: str, hub: str, folder: str, published: tuple[Published, ...]) -> Benchmark:
    """MUSE's own layout on disk (folders) or the same names joined by underscores."""

    def split(name: str, group: str, file: str, *, needed: bool = False) -> Split:
        return Split(name, (f"{group}_{file}", f"{group}/{file}"), f"{hub}:{group}:{file}", needed)

    return Benchmark(
        name=name,
        version=1,
        folder=folder,
        splits=(
            split("forget knowledge", "knowmem", "forget_qa", needed=True),
            split("forget examples", "knowmem", "forget_qa_icl", needed=True),
            split("retain knowledge", "knowmem", "retain_qa", needed=True),
            split("retain examples", "knowmem", "retain_qa_icl", needed=True),
            split("forget verbatim", "verbmem", "forget"),
            split("forget text", "privleak", "forget"),
            split("retain text", "privleak", "retain"),
            split("holdout text", "privleak", "holdout"),
        ),
        items=news_items,
        measure=measure_news,
        published=published,
    )


def _row(model: str, values: tuple[float, float, float, float], source: str) -> Published:
    names = ("VerbMem_f", "KnowMem_f", "PrivLeak", "KnowMem_r")
    return Published(model, dict(zip(names, values, strict=True)), source)


TABLE = "arXiv 2608.05783, Table 4"
NEWS = _muse(
    "muse_news",
    "muse-bench/MUSE-News",
    "muse_news",
    (
        _row("retrained", (20.75, 33.32, 0, 53.79), TABLE),
        _row("GROM", (15.68, 24.01, -3.80, 26.37), TABLE),
    ),
)
BOOKS = _muse(
    "muse_books",
    "muse-bench/MUSE-Books",
    "muse_books",
    (
        _row("retrained", (14.30, 28.90, 0, 74.50), TABLE),
        _row("GROM", (2.40, 36.89, -0.22, 65.56), TABLE),
    ),
)
