"""Overlap of a generated text with a reference: ROUGE as others compute it, and in any script."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from grom.errors import ConfigError
from grom.metrics.metric import Variant

UNSPACED = (
    "CJK UNIFIED IDEOGRAPH",
    "CJK COMPATIBILITY IDEOGRAPH",
    "IDEOGRAPHIC ITERATION",
    "HIRAGANA",
    "KATAKANA",
    "BOPOMOFO",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
    "TIBETAN",
)
"""Unicode names of letters whose scripts put no blanks between words."""

_Kind = Literal["letter", "alone", "mark", "ignored", "gap"]


@dataclass(frozen=True, slots=True)
class Rouge:
    """Overlap with a reference, each number from 0 to 1, or NaN if the reference has no words."""

    recall: float
    """Share of the reference's words that were said; rewards saying much."""
    precision: float
    """Share of the said words that are the reference's."""
    f1: float
    """Harmonic mean of both; 0 if both are."""


def rouge_l(prediction: str, reference: str, variant: Variant, *, stemmer: bool = True) -> Rouge:
    """ROUGE-L: the longest common subsequence of words over the number of words.

    `compat` is rouge_score as OpenUnlearning and TOFU call it.  It keeps runs of a-z and 0-9 only,
    so that an answer in another script scores 0 against itself and looks forgotten.  `correct`
    compares the words of `words`, without stems.

    Args:
        prediction: what the model said.
        reference: what it should have said.
        variant: whose tokenizer.
        stemmer: Porter stems in `compat`; on in TOFU and OpenUnlearning, off in MUSE's own code.
    """
    return _rouge("rougeL", prediction, reference, variant, stemmer)


def rouge1(prediction: str, reference: str, variant: Variant, *, stemmer: bool = True) -> Rouge:
    """ROUGE-1: common words, each as often as in both; variants and arguments as in `rouge_l`."""
    return _rouge("rouge1", prediction, reference, variant, stemmer)


def until_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the earliest stop string; all of it if there is none.

    Raises:
        ConfigError: a stop string is empty, and would leave nothing of any text.
    """
    listed = list(stops)
    if "" in listed:
        raise ConfigError("an empty stop string would cut every answer to nothing. Leave it out.")
    return text[: min((at for stop in listed if (at := text.find(stop)) >= 0), default=None)]


def words(text: str) -> list[str]:
    """Words in any script, without case, compatibility forms, punctuation and symbols.

    NFKC and casefold; runs of letters, digits and their combining marks.  In scripts without
    blanks between words each letter with its marks is a word.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    found, run, whole = [], "", False
    for character in folded:
        kind = _kind(character)
        if kind == "mark":
            run += character if run else ""
        if kind in ("mark", "ignored"):
            continue
        if run and (kind != "letter" or whole):
            found.append(run)
            run = ""
        run += character if kind != "gap" else ""
        whole = kind == "alone"
    return [*found, run] if run else found


@lru_cache(maxsize=65_536)
def _kind(character: str) -> _Kind:
    category = unicodedata.category(character)
    if category[0] == "M":
        return "mark"
    if category == "Cf":  # joiners and soft hyphens stand inside words
        return "ignored"
    if category[0] not in "LN":
        return "gap"
    return "alone" if unicodedata.name(character, "").startswith(UNSPACED) else "letter"


class _UnicodeTokenizer:
    """`words`, under the name by which rouge_score calls it."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


@cache
def _scorer(measure: str, variant: Variant, stemmer: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # takes a second: it imports nltk

    if variant == "correct":
        return RougeScorer([measure], tokenizer=_UnicodeTokenizer())
    return RougeScorer([measure], use_stemmer=stemmer)


def _rouge(measure: str, prediction: str, reference: str, variant: Variant, stemmer: bool) -> Rouge:
    if variant == "correct" and not words(reference):
        return Rouge(math.nan, math.nan, math.nan)
    score = _scorer(measure, variant, stemmer).score(reference, prediction)[measure]
    return Rouge(float(score.recall), float(score.precision), float(score.fmeasure))
