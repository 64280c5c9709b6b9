"""A few greedy answers of two checkpoints side by side, for a terminal.  Nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from grom.config import DataConfig
from grom.generate import generate
from tasks.models import open_model
from tasks.place import CheckpointRef, ModelRef, Place
from tasks.rows import read_examples

MAX_NEW_TOKENS = 48
STRIDE = 5
"""Take every fifth row, so that the samples are about several subjects."""


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One prompt with the answers before and after the edit."""

    prompt: str
    before: str
    after: str


def before_and_after(
    data: DataConfig, place: Place, unedited: ModelRef, edited: CheckpointRef, samples: int
) -> list[AnswerPair]:
    """Answers of the unedited and the edited checkpoint to some prompts of a set."""
    examples = islice(read_examples(data), 0, samples * STRIDE, STRIDE)
    prompts = [example.prompt for example in examples if example.prompt is not None]
    answers = []
    for folder in (Path(unedited.folder), place.fetch(edited.artifact)):
        opened = open_model(folder, text_window=512)
        said = generate(opened.model, opened.rendering, prompts, max_new_tokens=MAX_NEW_TOKENS)
        answers.append([answer.text.strip() for answer in said])
    return [AnswerPair(*row) for row in zip(prompts, *answers, strict=True)]
