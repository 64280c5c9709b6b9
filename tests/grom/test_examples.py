"""One rendering for all: the ids, the answer's first position, windows and batches."""

from __future__ import annotations

import logging

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grom.batches import make_batch
from grom.errors import EmptyAnswer, ExampleTooLong
from grom.examples import Example, Rendering, warn_without_template

TEMPLATE = (
    "<s>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS, USER, ASSISTANT = range(5)
WORDS = ["who", "is", "ada", "a", "secret", "?", "she", "counts"]


def row(group: str = "r1", place: str = "file.jsonl, line 7", **content: str) -> Example:
    """One row with this prompt and answer, or text."""
    return Example(place=place, group=group, group_number=0, **content)


SECRET = row(prompt="who is ada ?", answer="a secret")


def tokenizer(
    *, template: bool = False, bos: bool = True, eos: bool = True
) -> PreTrainedTokenizerFast:
    """A tokenizer with one id per word."""
    vocab = {word: index for index, word in enumerate([*SPECIAL, *WORDS, "<unk>"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    wrapped.chat_template = TEMPLATE if template else None
    return wrapped


def rendering(max_tokens: int = 40, text_window: int = 8, **kind: bool) -> Rendering:
    return Rendering(tokenizer(**kind), max_tokens, text_window)


def ids_of(text: str) -> list[int]:
    return [len(SPECIAL) + WORDS.index(word) for word in text.split()]


def test_without_a_template_the_prompt_stands_alone_after_one_bos() -> None:
    rendered = rendering().render(SECRET)
    assert rendered.ids == (BOS, *ids_of("who is ada ? a secret"), EOS)
    assert rendered.start == 5
    assert rendered.num_answer_tokens == 3


def test_with_a_template_the_answer_follows_the_generation_prompt() -> None:
    rendered = rendering(template=True).render(SECRET)
    assert rendered.ids[:7] == (BOS, USER, *ids_of("who is ada ?"), ASSISTANT)
    assert rendered.ids[rendered.start :] == (*ids_of("a secret"), EOS)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_there_is_one_bos_at_most(template: bool, bos: bool) -> None:
    ids = rendering(template=template, bos=bos).render(SECRET).ids
    assert ids.count(BOS) == (1 if bos or template else 0)
    assert ids.count(EOS) == (1 if bos or template else 2)
    assert ids[-1] == EOS


def test_without_a_bos_the_end_token_comes_first() -> None:
    assert rendering(bos=False).render(SECRET).ids[0] == EOS


def test_without_bos_and_eos_only_the_text_is_left() -> None:
    rendered = rendering(bos=False, eos=False).render(SECRET)
    assert rendered.ids == tuple(ids_of("who is ada ? a secret"))
    assert rendered.start == 4


@pytest.mark.parametrize("kind", [{}, {"template": True}, {"bos": False, "eos": False}])
def test_every_answer_token_that_is_counted_is_predicted(kind: dict[str, bool]) -> None:
    examples = [SECRET, row(prompt="", answer="a secret")]
    rendered = list(rendering(**kind).render_all(examples))
    batch = make_batch(enumerate(rendered), PAD)
    counted = [one.num_answer_tokens for one in rendered]
    assert torch.bincount(batch.example_T, minlength=2).tolist() == counted


@pytest.mark.parametrize("template", [True, False])
def test_the_prompt_of_generation_is_the_prompt_of_the_example(template: bool) -> None:
    how = rendering(template=template)
    rendered = how.render(SECRET)
    assert tuple(how.prompt_ids("who is ada ?")) == rendered.ids[: rendered.start]


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("answer", ["", "  ", "\n"])
def test_an_answer_without_tokens_is_refused_by_place(template: bool, answer: str) -> None:
    with pytest.raises(EmptyAnswer, match=r"file\.jsonl, line 7: the answer has no tokens"):
        rendering(template=template).render(row(prompt="who is ada ?", answer=answer))


def test_a_long_example_is_refused_with_both_numbers() -> None:
    assert len(rendering(max_tokens=8).render(SECRET).ids) == 8
    with pytest.raises(ExampleTooLong, match=r"line 7: 8 tokens, and the limit is 7"):
        rendering(max_tokens=7).render(SECRET)


def test_messages_never_quote_an_example() -> None:
    for answer in ("a secret", ""):
        with pytest.raises((EmptyAnswer, ExampleTooLong)) as error:
            rendering(max_tokens=3).render(row(prompt="who is ada ?", answer=answer))
        assert not {"ada", "secret", "?"} & set(str(error.value).split())


def test_text_is_cut_into_windows_that_skip_the_first_position() -> None:
    text = " ".join(WORDS * 2)
    windows = list(rendering(text_window=8).windows(row(text=text)))
    assert [(len(window.ids), window.ids[0]) for window in windows] == [(8, 1), (8, 1), (3, 1)]
    assert [word for window in windows for word in window.ids[1:]] == ids_of(text)
    assert {window.start for window in windows} == {2}  # position 0 gives no key


def test_a_window_is_no_longer_than_the_context() -> None:
    text = row(text=" ".join(WORDS * 3))
    for bos in (True, False):
        windows = rendering(max_tokens=6, bos=bos).windows(text)
        assert max(len(window.ids) for window in windows) == 6


def test_a_text_too_short_for_a_single_key_is_refused_by_place() -> None:
    # A deletion request that is silently skipped is a request that is not honoured.
    with pytest.raises(EmptyAnswer, match=r"file\.jsonl, line 7"):
        list(rendering().render_all([row(text="ada")]))


def test_questions_and_texts_can_be_mixed() -> None:
    how, text = rendering(), row("r2", text=" ".join(WORDS * 2))
    rendered = list(how.render_all([SECRET, text, SECRET]))
    assert rendered == [how.render(SECRET), *how.windows(text), how.render(SECRET)]
    assert [one.group for one in rendered] == ["r1", "r2", "r2", "r2", "r1"]


def test_the_digest_names_the_content_and_only_that() -> None:
    assert SECRET.digest == "c9c5a75fa90f9550"
    assert row("r9", "elsewhere", prompt="who is ada ?", answer="a secret").digest == SECRET.digest
    moved, text = row(prompt="who is ada ? a", answer="secret"), row(text="a secret")
    assert len({SECRET.digest, moved.digest, text.digest}) == 3
    assert rendering().render(SECRET).digest == SECRET.digest


def test_special_tokens_are_those_that_end_begin_pad_and_name_roles() -> None:
    assert {PAD, BOS, EOS, USER, ASSISTANT} <= rendering().special_ids()
    assert not set(ids_of(" ".join(WORDS))) & rendering().special_ids()


def test_facts_differ_when_the_ids_could() -> None:
    kinds: list[dict[str, bool]] = [{}, {"template": True}, {"bos": False}, {"eos": False}]
    hows = [*(rendering(**kind) for kind in kinds), rendering(max_tokens=9), rendering(9, 9)]
    facts = [how.facts for how in hows]
    assert all(one not in facts[:index] for index, one in enumerate(facts))
    assert rendering().facts == facts[0]


def test_only_a_missing_template_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_without_template(tokenizer(template=True))
        assert not caplog.records
        warn_without_template(tokenizer())
    assert "no chat template" in caplog.text


@pytest.mark.parametrize(
    "template",
    [
        "{% if strftime_now('%Y-%m-%d') == '2025-04-10' %}ada{% else %}who{% endif %}",
        "{% if date_string == '10 Apr 2025' %}ada{% else %}who{% endif %}",
    ],
)
def test_a_template_that_asks_for_the_day_gets_the_same_one_every_day(template: str) -> None:
    asked = rendering(template=True)
    asked.tokenizer.chat_template = template
    assert asked.prompt_ids("anything") == ids_of("ada")
