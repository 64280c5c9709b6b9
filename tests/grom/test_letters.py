"""A letter's log-probability is the model's own, after the question and nothing else."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from grom.batches import batches
from grom.errors import ConfigError
from grom.examples import Example, Rendering
from grom.letters import letter_ids, letter_stream
from tests.grom.test_generate import rendering
from tests.reference import PAD, tiny_model

QUESTIONS = ["w5 w9 w11", "w33", "w12 w3 w40 w8", "w20"]


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
def test_letters_have_the_log_probability_of_the_next_token(family: str, tied: bool) -> None:
    model, asked = tiny_model(family, tied=tied), rendering()
    letters = (30, 31, 32, 33)
    rendered = [
        asked.render(Example("here", "g", 0, prompt=question, answer="w30"))
        for question in QUESTIONS
    ]
    stream = batches(rendered, batch_tokens=30, window_examples=9, pad_id=PAD)
    found = dict(letter_stream(model, stream, letters))
    for position, question in enumerate(QUESTIONS):
        logits_V = model(input_ids=torch.tensor([asked.prompt_ids(question)])).logits[0, -1]
        expected_C = logits_V.log_softmax(0)[list(letters)].double()
        assert_close(torch.tensor(found[position]).double(), expected_C, rtol=1e-5, atol=1e-5)


def test_where_the_blank_is_a_token_of_its_own_letters_are_compared_after_it() -> None:
    model = tiny_model("llama")
    core = Tokenizer(models.WordLevel({"?": 3, " ": 4, "A": 5, "B": 6, "w9": 9}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)  # type: ignore[no-untyped-call]
    asked = Rendering(tokenizer, max_tokens=64, plain=True)
    assert letter_ids(asked, 2) == (5, 6)
    question = asked.render(Example("here", "g", 0, prompt="w9 Answer:", answer="B"))
    assert question.ids == (9, 4, 3, 4, 6)
    stream = batches([question], batch_tokens=30, window_examples=9, pad_id=PAD)
    found = dict(letter_stream(model, stream, letter_ids(asked, 2)))
    logits_V = model(input_ids=torch.tensor([[9, 4, 3, 4]])).logits[0, -1]
    expected_C = logits_V.log_softmax(0)[[5, 6]].double()
    assert_close(torch.tensor(found[0]).double(), expected_C, rtol=1e-5, atol=1e-5)


def test_a_tokenizer_without_letters_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="no letter of its own"):
        letter_ids(rendering(), 4)  # all letters are the unknown word
