"""ROUGE in every script, and as rouge_score has it."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.errors import ConfigError
from grom.metrics.text import Rouge, rouge1, rouge_l, until_stop, words

FOREIGN = (
    "北京是中国的首都",
    "Москва столица России",
    "القاهرة عاصمة مصر",
    "กรุงเทพเป็นเมืองหลวง",
    "दिल्ली भारत की राजधानी",
    "東京は日本の首都です",
    "서울은 대한민국의 수도",
)
ACCENTED = "Zoë's café, à côté de l'église"
LATIN = st.text("ab cde .", min_size=1, max_size=30)
ONE, ZERO = Rouge(1, 1, 1), Rouge(0, 0, 0)


@pytest.mark.parametrize("text", FOREIGN)
def test_a_text_in_another_script_matches_itself_only_in_correct(text: str) -> None:
    assert rouge_l(text, text, "correct") == rouge1(text, text, "correct") == ONE
    assert rouge_l(text, text, "compat") == ZERO


def test_accents_are_letters_in_correct_and_cut_words_in_compat() -> None:
    assert rouge_l(ACCENTED, ACCENTED, "correct") == ONE
    assert words("café") == ["café"]
    # compat drops the é: "caf" is all there is to match.
    assert rouge_l("caf", "café", "compat").recall == 1
    assert rouge_l("caf", "café", "correct") == ZERO


def test_a_wrong_answer_in_another_script_scores_between() -> None:
    score = rouge_l("上海是中国的首都", "北京是中国的首都", "correct")
    assert score == Rouge(6 / 8, 6 / 8, 6 / 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat's 2 mats!", ["the", "cat", "s", "2", "mats"]),
        ("Straße", ["strasse"]),
        ("ﬁne", ["fine"]),
        ("北京 2008", ["北", "京", "2008"]),
        ("in北京x", ["in", "北", "京", "x"]),
        ("की", ["की"]),
        ("กี่", ["กี่"]),
        ("co\u00adoperate", ["cooperate"]),
        ("snake_case", ["snake", "case"]),
        ("北 \u0301x", ["北", "x"]),
        ("?! …", []),
        ("", []),
    ],
)
def test_words_of_any_script(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(text=st.text(max_size=40))
def test_words_do_not_depend_on_case_or_composition(text: str) -> None:
    assert words(text) == words(unicodedata.normalize("NFD", text))
    assert words(text) == words(text.casefold())


@given(text=LATIN, other=LATIN)
def test_variants_agree_on_plain_words_without_stems(text: str, other: str) -> None:
    if words(other):
        assert rouge_l(text, other, "compat", stemmer=False) == rouge_l(text, other, "correct")


@given(text=LATIN, other=LATIN)
def test_recall_and_precision_change_places(text: str, other: str) -> None:
    there, back = rouge_l(text, other, "compat"), rouge_l(other, text, "compat")
    assert (there.recall, there.precision) == (back.precision, back.recall)
    assert 0 <= min(there.recall, there.precision) <= there.f1 <= 1


def test_a_hand_counted_pair() -> None:
    # Common subsequence: the cat the mat, 4 of 6 and 4 of 5 words.
    score = rouge_l("the cat ate the mat", "the cat sat on the mat", "correct")
    assert score.recall == pytest.approx(4 / 6)
    assert score.precision == pytest.approx(4 / 5)
    assert score.f1 == pytest.approx(2 * (4 / 6) * (4 / 5) / (4 / 6 + 4 / 5))
    assert rouge1("mat cat", "cat mat", "correct") == ONE
    assert rouge_l("mat cat", "cat mat", "correct").recall == 0.5


def test_stems_are_an_option_of_compat_only() -> None:
    said, truth = "she writes novels", "she writing novel"
    assert rouge_l(said, truth, "compat") == ONE
    assert rouge_l(said, truth, "compat", stemmer=False).recall == pytest.approx(1 / 3)
    assert rouge_l(said, truth, "correct").recall == pytest.approx(1 / 3)


def test_an_empty_answer_scores_zero_and_an_empty_reference_nothing() -> None:
    assert rouge_l("", "a word", "correct") == rouge_l("", "a word", "compat") == ZERO
    assert all(map(math.isnan, vars_of(rouge_l("a word", "?!", "correct"))))
    assert rouge_l("a word", "?!", "compat") == ZERO


def vars_of(score: Rouge) -> tuple[float, float, float]:
    return score.recall, score.precision, score.f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris\n\nQuestion: and", "Paris"),
        ("Paris Question: and\n\n", "Paris "),
        ("Paris", "Paris"),
        ("\n\nParis", ""),
    ],
)
def test_an_answer_ends_at_the_first_stop_string(text: str, expected: str) -> None:
    assert until_stop(text, ("\n\n", "Question:")) == expected
    assert until_stop(text, ()) == text


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty stop string"):
        until_stop("Paris", ("",))
