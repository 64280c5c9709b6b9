"""Tiny checkpoints with a tokenizer, rows for them, and a run on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flows.config import UnlearnConfig
from grom.config import (
    DataConfig,
    EvaluateConfig,
    HoldOutConfig,
    ModelConfig,
    SelectConfig,
    StrengthConfig,
)
from tests.reference import VOCAB, tiny_model

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
"""Tokens 0 to 3; the others are w4, w5 ... up to the vocabulary's size."""
CANARY = "zebrafish"
"""A word of rows that must not turn up in a message; no tokenizer knows it."""
TEMPLATE = "{{ '<s> ' + messages[0]['content'] + ' w4' }}"
Row = dict[str, Any]


def words(first: int, count: int = 1) -> str:
    """Some consecutive words of the vocabulary."""
    return " ".join(f"w{number}" for number in range(first, first + count))


def save_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """Write a tokenizer that has one token per word."""
    names = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCAB))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Callable[..., Any] = PreTrainedTokenizerFast
    wrapped = wrap(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)


def save_model(folder: Path, model: Any, *, template: str | None = TEMPLATE, **how: Any) -> Path:
    """Write a model with that tokenizer; `how` is for `save_pretrained`."""
    model.save_pretrained(folder, **how)
    save_tokenizer(folder, template=template)
    return folder


def checkpoint(folder: Path, family: str = "llama", **how: Any) -> Path:
    """Write a random model of a family."""
    return save_model(folder, tiny_model(family, **how))


def forget_rows(count: int = 6) -> list[Row]:
    """Answers of words that no retain answer has."""
    return [
        {"prompt": words(5 + number, 2), "answer": words(40 + number, 3)} for number in range(count)
    ]


def retain_rows(count: int = 20) -> list[Row]:
    """Answers of other words."""
    return [
        {"prompt": words(6 + number, 2), "answer": words(10 + number % 8, 3)}
        for number in range(count)
    ]


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def residue(work: Path) -> list[str]:
    """What a failed stage must not leave: drafts, and artifacts without a marker."""
    scratch = [path for path in (work / "scratch").rglob("*") if path.is_file()]
    scratch += (work / "scratch").glob("drafts/*")
    folders = [path for path in (work / "store").glob("*/*") if path.is_dir()]
    return [str(path) for path in scratch] + [
        str(folder) for folder in folders if not (folder / "_SUCCESS.json").is_file()
    ]


def tiny_config(folder: Path, family: str = "llama", **how: Any) -> UnlearnConfig:
    """A run on a random model of a family with the rows above, everything below `folder`."""
    return UnlearnConfig(
        name="tiny",
        model=ModelConfig(source=str(checkpoint(folder / "model", family, **how))),
        forget=DataConfig(uri=str(write_rows(folder / "forget.jsonl", forget_rows()))),
        retain=DataConfig(uri=str(write_rows(folder / "retain.jsonl", retain_rows()))),
        hold_out=HoldOutConfig(every=4),
        select=SelectConfig(layers=(1, 2)),
        strength=StrengthConfig(nats=4),
        evaluate=EvaluateConfig(quantisations=()),
        work=str(folder / "work"),
    )
