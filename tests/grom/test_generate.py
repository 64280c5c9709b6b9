"""Answers are the model's first choices, whatever the batch, and end where they should."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grom.examples import Rendering
from grom.generate import end_tokens, generate
from tests.reference import BOS, EOS, PAD, VOCAB, tiny_model

PROMPTS = ["w5 w9", "w33", "w12 w3 w40 w8", "w20 w21 w22 w23 w24 w25"]


def rendering() -> Rendering:
    """A tokenizer whose word w7 is token 7."""
    vocab = {f"w{token}": token for token in range(VOCAB)}
    core = Tokenizer(models.WordLevel(vocab, unk_token=f"w{PAD}"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, pad_token=f"w{PAD}", bos_token=f"w{BOS}", eos_token=f"w{EOS}"
    )
    return Rendering(tokenizer, max_tokens=64)


def continued(model: PreTrainedModel, ids: list[int], limit: int, end: int) -> list[int]:
    """The model's first choices after `ids`, up to and without `end`."""
    found: list[int] = []
    while len(found) < limit:
        logits_V = model(input_ids=torch.tensor([ids + found])).logits[0, -1]
        if int(logits_V.argmax()) == end:
            break
        found.append(int(logits_V.argmax()))
    return found


def words(ids: Sequence[int]) -> str:
    """Their text, without special tokens."""
    return " ".join(f"w{token}" for token in ids if token > EOS)


@pytest.mark.parametrize("sampling", [False, True])
def test_answers_are_the_models_first_choices_each_time(sampling: bool) -> None:
    model, asked = tiny_model("llama"), rendering()
    settings = model.generation_config
    assert settings is not None
    settings.do_sample = sampling  # what a checkpoint's own settings may say
    settings.repetition_penalty = 1.7
    expected = [continued(model, asked.prompt_ids(prompt), 6, EOS) for prompt in PROMPTS]
    for _ in range(2):
        said = generate(model, asked, PROMPTS, max_new_tokens=6)
        assert [list(answer.ids) for answer in said] == expected
        assert [answer.text for answer in said] == [words(ids) for ids in expected]


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("gemma3_text", 1)])
def test_answers_do_not_depend_on_the_batch(family: str, tied: bool) -> None:
    model, asked = tiny_model(family, tied=bool(tied)), rendering()
    alone = generate(model, asked, PROMPTS, max_new_tokens=12, batch_prompts=1)
    assert generate(model, asked, PROMPTS, max_new_tokens=12, batch_prompts=16) == alone
    expected = [continued(model, asked.prompt_ids(prompt), 12, EOS) for prompt in PROMPTS]
    assert [list(answer.ids) for answer in alone] == expected


def ending(model: PreTrainedModel, asked: Rendering) -> None:
    """The end token takes the place of what the model would have said fourth."""
    head_VD = model.get_parameter("lm_head.weight")
    fourth = continued(model, asked.prompt_ids(PROMPTS[0]), 4, EOS)[-1]
    head_VD[EOS], head_VD[fourth] = head_VD[fourth].clone(), head_VD[EOS].clone()


def test_an_answer_ends_at_the_end_token_and_without_it() -> None:
    model, asked = tiny_model("llama"), rendering()
    ending(model, asked)
    first, *_ = generate(model, asked, PROMPTS, max_new_tokens=20)
    expected = continued(model, asked.prompt_ids(PROMPTS[0]), 20, EOS)
    assert 0 < len(expected) < 4
    assert list(first.ids) == expected
    assert first.ended


def test_an_answer_that_reaches_the_limit_did_not_end() -> None:
    model, asked = tiny_model("llama"), rendering()
    ending(model, asked)
    (answer,) = generate(model, asked, PROMPTS[:1], max_new_tokens=1)
    assert len(answer.ids) == 1
    assert not answer.ended


def test_a_stop_string_ends_its_own_answer_and_no_other() -> None:
    model, asked = tiny_model("llama"), rendering()
    free = generate(model, asked, PROMPTS, max_new_tokens=12)
    stop = f"w{free[0].ids[2]}"
    stopped = generate(model, asked, PROMPTS, max_new_tokens=12, stops=[stop])
    for answer, whole in zip(stopped, free, strict=True):
        before = whole.text.split(stop)[0]
        assert answer.text.split(stop)[0] == before
        assert answer.ended == (whole.ended or stop in whole.text)
    assert len(stopped[0].ids) <= 3


def test_every_end_token_of_the_checkpoint_counts() -> None:
    model, asked = tiny_model("llama"), rendering()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [7, 9]
    assert end_tokens(model, asked) == [EOS, 7, 9]
