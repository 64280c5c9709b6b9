"""MUSE: verbatim and knowledge memorisation and privacy leakage (Shi et al. 2024).

Also the same measures on any text of one's own: one to forget, one to retain, one held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

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
from grom.exam import Item
from grom.metrics import muse
from grom.metrics.composite import final_muse
from grom.metrics.membership import auc
from grom.metrics.metric import Better, Metric, Variant

VARIANTS: tuple[Variant, ...] = ("compat", "correct")
VERBATIM_TOKENS, KNOWLEDGE_TOKENS = 128, 32
STOPS = ("\n\n", "\nQuestion", "Question:")
SHOTS = 10
PASSAGE_CHARACTERS = 2_000
"""Of a text of one's own: cut in two halves, prompt and continuation."""
MAX_PASSAGES = 100


def news_items(rows: Rows) -> list[Item]:
    """Knowledge questions after ten examples, passages to continue, texts to score."""
    found: list[Item] = []
    for kind in ("forget", "retain"):
        shots = "".join(
            _asked(row, f"{kind} examples", number) + f" {_answers(row, kind, number)[0]}\n\n"
            for number, row in enumerate(rows.get(f"{kind} examples", ())[:SHOTS])
        )
        for number, row in enumerate(rows.get(f"{kind} knowledge", ())):
            found.append(_question(f"{kind} knowledge", number, row, shots))
    for number, row in enumerate(rows.get("forget verbatim", ())):
        halves = [text_of(row, name, "forget verbatim", number) for name in ("prompt", "gt")]
        found.append(_continuation("forget verbatim", number, *halves))
    for split in ("forget text", "retain text", "holdout text"):
        for number, row in enumerate(rows.get(split, ())):
            found.append(_whole(split, number, text_of(row, "text", split, number)))
    return found


def own_items(rows: Rows) -> list[Item]:
    """Passages of one's own texts: to continue, and to score."""
    found: list[Item] = []
    for split in ("forget", "retain", "holdout"):
        cut = passages(
            text_of(row, "text", split, at) for at, row in enumerate(rows.get(split, ()))
        )
        for number, passage in enumerate(islice(cut, MAX_PASSAGES)):
            half = passage.rfind(" ", 0, len(passage) // 2) + 1
            found.append(_continuation(f"{split} verbatim", number, passage[:half], passage[half:]))
            found.append(_whole(f"{split} text", number, passage))
    return found


def passages(texts: Iterator[str] | Sequence[str]) -> Iterator[str]:
    """Passages of about `PASSAGE_CHARACTERS`, cut at blanks; the last, shorter one is left out."""
    for text in texts:
        start = 0
        while start + PASSAGE_CHARACTERS <= len(text):
            end = text.rfind(" ", start, start + PASSAGE_CHARACTERS)
            end = end if end > start + PASSAGE_CHARACTERS // 2 else start + PASSAGE_CHARACTERS
            yield text[start:end].strip()
            start = end


def _asked(row: Row, split: str, number: int) -> str:
    return f"Question: {text_of(row, 'question', split, number)}\nAnswer:"


def _answers(row: Row, split: str, number: int) -> list[str]:
    return texts_of(row, "answer", split, number)


def _question(split: str, number: int, row: Row, shots: str) -> Item:
    return Item(
        split,
        number,
        "answer",
        "generation",
        shots + _asked(row, split, number),
        _answers(row, split, number)[0],
        plain=True,
        max_new_tokens=KNOWLEDGE_TOKENS,
        stops=STOPS,
    )


def _continuation(split: str, number: int, prompt: str, rest: str) -> Item:
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


def _whole(split: str, number: int, text: str) -> Item:
    return Item(split, number, "text", "likelihood", "", text, plain=True, text=True)


def measure_news(answers: Answers, reference: Answers | None) -> list[Metric]:
    """VerbMem, KnowMem, PrivLeak, membership and GROM's Final."""
    knowledge = {
        (split, variant): muse.knowmem(
            _f1(answers, f"{split} knowledge", "answer", variant), variant=variant, split=split
        )
        for split in ("forget", "retain")
        for variant in VARIANTS
    }
    found = [*knowledge.values()]
    for variant in VARIANTS:
        verbatim = muse.verbmem(
            _f1(answers, "forget verbatim", "continuation", variant), variant=variant
        )
        leak = _privacy(answers, reference, variant)
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


def measure_own(answers: Answers, reference: Answers | None) -> list[Metric]:
    """VerbMem, extraction strength and probability of each text; PrivLeak and membership."""
    found = []
    for split in ("forget", "retain", "holdout"):
        for variant in VARIANTS:
            f1s = _f1(answers, f"{split} verbatim", "continuation", variant)
            found.append(muse.verbmem(f1s, variant=variant, split=split))
        better: Better = "lower" if split == "forget" else "higher"
        for name in ("probability", "extraction_strength", "exact_memorisation"):
            one = Mean(name.replace("_", " "), name, "correct", better)
            found += means(answers, f"{split} text", "text", [one])
    found += [_privacy(answers, reference, variant) for variant in VARIANTS]
    found += membership(answers, reference, "forget text", "holdout text", "text")
    found += health(answers, "forget verbatim", "continuation")
    return answers.with_dtype(found)


def _f1(answers: Answers, split: str, role: str, variant: Variant) -> list[float]:
    measure = "rouge_l_f1" if variant == "compat" else "rouge_l_f1_correct"
    return answers.values(split, role, measure, "generation")


def _privacy(answers: Answers, reference: Answers | None, variant: Variant) -> Metric:
    compared = None if reference is None else _min_k_auc(reference)
    return muse.priv_leak(_min_k_auc(answers), compared, variant)


def _min_k_auc(answers: Answers) -> float:
    return auc(
        *(answers.values(f"{split} text", "text", "min_k") for split in ("forget", "holdout"))
    )


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
VERBATIM = Benchmark(
    name="verbatim",
    version=1,
    folder="books",
    splits=(
        Split("forget", ("forget", "alice_in_wonderland"), "muse-bench/MUSE-Books:raw:forget"),
        Split(
            "retain", ("retain", "pride_and_prejudice"), "muse-bench/MUSE-Books:raw:retain1", False
        ),
        Split(
            "holdout",
            ("holdout", "adventures_of_sherlock_holmes"),
            "muse-bench/MUSE-Books:raw:holdout",
            False,
        ),
    ),
    items=own_items,
    measure=measure_own,
)
