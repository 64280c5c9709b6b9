"""Rows of multiple-choice benchmarks as items, in lm-eval's wording."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence

from grom.benchmarks.benchmark import Answers, Row, text_of
from grom.errors import DataError
from grom.items import Item
from grom.letters import LETTERS
from grom.metrics.choice import choice_accuracy, shuffled_agreement
from grom.metrics.metric import Better, Metric

NUM_OPTIONS = 4
BETWEEN_TEXTS = re.compile(r"(['\"])\s+(['\"])")
"""NumPy prints no commas: the end of one text, blanks, the start of the next."""


def choice_items(split: str, number: int, row: Row, head: str) -> list[Item]:
    """A question as it stands, and with its options turned round by a seeded number of
    places.

    Args:
        split: part of the benchmark.
        number: row of the split.
        row: `question`; `choices` or `choice0`...; `answer`, counted from 0, or a letter.
        head: text before the question: what it is about, worked examples.
    """
    question, options, right = parsed(row, split, number)
    # Not the identity: a turn by one to three places.
    turn = random.Random(f"{split} {number}").randrange(1, NUM_OPTIONS)
    order = [(at + turn) % NUM_OPTIONS for at in range(NUM_OPTIONS)]
    shuffled = [options[at] for at in order]
    asked = ((options, right, "as given"), (shuffled, order.index(right), "shuffled"))
    return [
        Item(
            split,
            number,
            role,
            "letters",
            head + asked_as(question, listed),
            LETTERS[letter],
            plain=True,
            num_options=NUM_OPTIONS,
        )
        for listed, letter, role in asked
    ]


def worked(split: str, rows: Sequence[Row]) -> str:
    """Questions with their right letters, to stand before another one."""
    parts = []
    for number, row in enumerate(rows):
        question, options, right = parsed(row, split, number)
        parts.append(f"{asked_as(question, options)} {LETTERS[right]}\n\n")
    return "".join(parts)


def asked_as(question: str, options: Sequence[str]) -> str:
    """The question, its lettered options, and the word that a letter follows."""
    lines = [
        f"{letter}. {option}" for letter, option in zip(LETTERS[:NUM_OPTIONS], options, strict=True)
    ]
    return "\n".join([question.strip(), *lines, "Answer:"])


def parsed(row: Row, split: str, number: int) -> tuple[str, list[str], int]:
    """Question, four options, and the index of the right one.

    Raises:
        DataError: there are not four options, or the answer is not one of them.
    """
    question = text_of(row, "question", split, number)
    options = _options(row)
    if len(options) != NUM_OPTIONS:
        raise DataError(
            f"{split}, row {number + 1}: {len(options)} options; exactly {NUM_OPTIONS} are needed, "
            "as a list in `choices` or as `choice0` to `choice3`. Correct or remove the row."
        )
    answer = str(row.get("answer")).strip().removesuffix(".0")  # a column of floats
    letters = LETTERS[:NUM_OPTIONS]
    for named in (list(letters), [str(at) for at in range(NUM_OPTIONS)]):
        if answer in named:
            return question, options, named.index(answer)
    raise DataError(
        f"{split}, row {number + 1}: `answer` is neither 0 to {NUM_OPTIONS - 1}, counted from 0, "
        f"nor a letter {letters[0]} to {letters[-1]}. Correct or remove the row."
    )


def _options(row: Row) -> list[str]:
    """Options that are there; blank ones are not."""
    listed = row.get("choices")
    if isinstance(listed, str):  # a list that a CSV holds as text
        listed = _listed(listed)
    elif listed is None:
        names = LETTERS[:NUM_OPTIONS] if "A" in row else [f"choice{at}" for at in range(4)]
        listed = [row.get(name) for name in names]
    if not isinstance(listed, list):
        return []
    return [str(option) for option in listed if option is not None and str(option).strip()]


def _listed(text: str) -> list[str]:
    """Texts of a printed Python or NumPy list; empty if it is neither."""
    for spelling in (text, BETWEEN_TEXTS.sub(r"\1, \2", text)):
        try:
            found = ast.literal_eval(spelling.strip())
        except (ValueError, SyntaxError):
            continue
        if isinstance(found, list) and len(found) == NUM_OPTIONS:
            return found
    return []


def choice_metrics(answers: Answers, split: str, name: str, better: Better) -> list[Metric]:
    """Accuracy as given and with the options turned round, and how often the choice is the same."""
    given = answers.of(split, "as given", "letters")
    turned = answers.of(split, "shuffled", "letters")
    accuracy = [
        choice_accuracy(
            [result.letter_logprobs for result in results],
            [result.right for result in results],
            name=label,
            better=better,
            variant="compat",
        )
        for results, label in ((given, name), (turned, f"{name}, options turned"))
    ]
    order = [
        [(at + first.right - second.right) % NUM_OPTIONS for at in range(NUM_OPTIONS)]
        for first, second in zip(given, turned, strict=True)
    ]
    agreement = shuffled_agreement(
        [result.letter_logprobs for result in given],
        [result.letter_logprobs for result in turned],
        order,
        name=f"{name}, same choice",
    )
    return [*accuracy, agreement]
