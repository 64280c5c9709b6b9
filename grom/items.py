"""What can be asked of a model, one thing at a time, and the numbers of its answer.

An item holds text; a result holds numbers and a digest, no text of an item or of an answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Literal

from grom.examples import Example

Ask = Literal["likelihood", "generation", "letters"]
NAN = math.nan


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to ask about one row of a benchmark."""

    split: str
    """Part of the benchmark: forget, retain, real authors..."""
    row: int
    """Row of the split, from 0."""
    role: str
    """What is asked about it: answer, paraphrase, perturbed 0, rewrite..."""
    ask: Ask
    prompt: str
    answer: str
    """The right answer; for letters, the right letter."""
    plain: bool = False
    """Without chat template and end of answer."""
    text: bool = False
    """The answer is running text without a prompt."""
    max_new_tokens: int = 0
    stops: tuple[str, ...] = ()
    num_options: int = 0
    cut_reference: bool = False
    """`correct` ROUGE compares with no more tokens of the answer than the model may say, as MUSE
    does; `compat` with all of it, as OpenUnlearning does."""

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked, 16 hexadecimal digits."""
        content = json.dumps(asdict(self), ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ItemResult:
    """All numbers of one item; NaN where they do not belong to what was asked.

    One flat row, so that a run is one table and one journal.
    """

    split: str
    row: int
    role: str
    ask: str
    digest: str
    num_tokens: int
    mean_logprob: float = NAN
    probability: float = NAN
    token_accuracy: float = NAN
    extraction_strength: float = NAN
    extraction_compat: float = NAN
    exact_memorisation: float = NAN
    min_k: float = NAN
    min_k_plus_plus: float = NAN
    min_k_compat: float = NAN
    zlib: float = NAN
    rouge_l_recall: float = NAN
    rouge_l_f1: float = NAN
    rouge_l_recall_correct: float = NAN
    rouge_l_f1_correct: float = NAN
    rep_4: float = NAN
    ended: float = NAN
    empty: float = NAN
    degenerate: float = NAN
    length_ratio: float = NAN
    right: int = -1
    """Index of the right option."""
    logprob_a: float = NAN
    logprob_b: float = NAN
    logprob_c: float = NAN
    logprob_d: float = NAN

    @property
    def letter_logprobs(self) -> tuple[float, ...]:
        """Log-probability of each letter."""
        return (self.logprob_a, self.logprob_b, self.logprob_c, self.logprob_d)


LETTER_COLUMNS = ("logprob_a", "logprob_b", "logprob_c", "logprob_d")


def example_of(item: Item) -> Example:
    """The item as an example; its place is its split and row."""
    place = f"{item.split}, row {item.row + 1} ({item.role})"
    if item.text:
        return Example(place, item.split, item.row, text=item.answer)
    return Example(place, item.split, item.row, prompt=item.prompt, answer=item.answer)
