"""Results equal their definitions, one item at a time; batches, order and resuming change nothing.

Shapes: L positions, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grom.config import CollectConfig
from grom.errors import ExampleTooLong
from grom.exam import take_exam
from grom.examples import Rendering
from grom.items import Item, ItemResult
from grom.metrics.text import rouge_l
from grom.sites import trunk
from tests.exams import FIRST_LETTER, LETTERS, lettered
from tests.reference import BOS, EOS, PAD, tiny_model
from tests.tiny import CANARY, words

both_shapes = pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
UNKNOWN = 3
MIN_K = 0.4


def token(word: str) -> int:
    """A word's token, as `lettered` numbers them."""
    if word in LETTERS:
        return FIRST_LETTER + LETTERS.index(word)
    return int(word[1:]) if word[0] == "w" and int(word[1:]) > 7 else UNKNOWN


def tokens(text: str) -> list[int]:
    return [token(word) for word in text.split()]


def rendered(item: Item) -> tuple[list[int], int, bool]:
    """Ids, where the answer starts, and whether an end of answer was added; all by hand."""
    if item.text:
        # A tokenizer that adds no beginning of text: nothing predicts the first token.
        return tokens(item.answer), 1, False
    if item.plain:
        before = tokens(item.prompt)
        return [*before, *tokens(item.answer)], len(before), False
    before = [BOS, *tokens(item.prompt), UNKNOWN]
    return [*before, *tokens(item.answer), EOS], len(before), True


def next_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Log-probabilities (V,) of the token after these, float64."""
    logits_LV: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits_LV[-1].double().log_softmax(0)


def suffix(hits: Sequence[bool]) -> int:
    length = 0
    while length < len(hits) and hits[-1 - length]:
        length += 1
    return length


def lowest_mean(values: Sequence[float]) -> float:
    count = max(1, int(MIN_K * len(values)))
    return -sum(sorted(values)[:count]) / count


def likelihood(model: PreTrainedModel, item: Item) -> dict[str, float]:
    """Every likelihood measure from its definition, token by token."""
    ids, start, ends = rendered(item)
    golds, hits, standard = [], [], []
    for at in range(start, len(ids)):
        logprobs_V = next_logprobs(model, ids[:at])
        mean = float((logprobs_V.exp() * logprobs_V).sum())
        square = float((logprobs_V.exp() * logprobs_V.square()).sum())
        golds.append(float(logprobs_V[ids[at]]))
        hits.append(int(logprobs_V.argmax()) == ids[at])
        standard.append((golds[-1] - mean) / math.sqrt(square - mean**2))
    content = hits[: len(hits) - ends]
    mean = sum(golds) / len(golds)
    return {
        "num_tokens": len(golds),
        "mean_logprob": mean,
        "probability": math.exp(mean),
        "token_accuracy": sum(hits) / len(hits),
        "extraction_strength": suffix(content) / len(content),
        "extraction_compat": max(1, suffix(hits[:-1])) / (len(hits) - 1),
        "exact_memorisation": sum(content) / len(content),
        "min_k": lowest_mean(golds),
        "min_k_compat": lowest_mean(golds[:-1]) if len(golds) > 1 else 0.0,
        "min_k_plus_plus": lowest_mean(standard),
        "zlib": -mean / len(zlib.compress(item.answer.encode())),
    }


def letters(model: PreTrainedModel, item: Item) -> dict[str, float]:
    logprobs_V = next_logprobs(model, tokens(item.prompt))
    chosen = LETTERS[: item.num_options]
    by_letter = {f"logprob_{name.lower()}": float(logprobs_V[token(name)]) for name in chosen}
    return {"num_tokens": 1, "right": LETTERS.index(item.answer), **by_letter}


def continuation(model: PreTrainedModel, item: Item) -> tuple[list[int], bool]:
    """Greedy tokens one at a time, and whether they ended by themselves."""
    before = tokens(item.prompt) if item.plain else [BOS, *tokens(item.prompt), UNKNOWN]
    said: list[int] = []
    while len(said) < item.max_new_tokens:
        said.append(int(next_logprobs(model, before + said).argmax()))
        if said[-1] == EOS:
            return said[:-1], True
        if any(stop in text_of(said) for stop in item.stops):
            return said, True
    return said, False


def text_of(ids: Sequence[int]) -> str:
    names = {number: name for name, number in lettered().tokenizer.get_vocab().items()}
    return " ".join(names[each] for each in ids if each > UNKNOWN)


def generation(model: PreTrainedModel, item: Item) -> dict[str, float]:
    said, ended = continuation(model, item)
    text = text_of(said)
    for stop in item.stops:
        text = text.split(stop)[0]
    cut = item.answer.split()[: item.max_new_tokens if item.cut_reference else None]
    compat, correct = (
        rouge_l(text.strip(), item.answer, "compat"),
        rouge_l(text.strip(), " ".join(cut), "correct"),
    )
    grams = [tuple(said[at : at + 4]) for at in range(len(said) - 3)]
    repeated = 1 - len(set(grams)) / len(grams) if grams else 0.0
    return {
        "num_tokens": len(said),
        "rouge_l_recall": compat.recall,
        "rouge_l_f1": compat.f1,
        "rouge_l_recall_correct": correct.recall,
        "rouge_l_f1_correct": correct.f1,
        "rep_4": repeated,
        "ended": float(ended),
        "empty": float(not text.strip()),
        "degenerate": float(not text_of(said) or repeated > 0.5),
        "length_ratio": len(said) / len(cut),
    }


BY_DEFINITION = {"likelihood": likelihood, "letters": letters, "generation": generation}


def known(model: PreTrainedModel, item: Item, count: int) -> Item:
    """The item with the model's own continuation as the start of its answer."""
    said, _ = continuation(model, replace(item, max_new_tokens=count, stops=()))
    return replace(item, answer=f"{text_of(said)} {item.answer}")


def asked(model: PreTrainedModel) -> list[Item]:
    """Every kind of item in several lengths, mixed up."""
    found: list[Item] = []
    for row, length in enumerate((2, 5, 1, 9)):
        prompt, answer = words(9 + row, length), words(30 + row, 2 + row)
        spoken = Item("forget", row, "answer", "generation", prompt, answer, max_new_tokens=7)
        stop = text_of(continuation(model, replace(spoken, plain=True))[0]).split()[2]
        found += [
            Item("forget", row, "answer", "likelihood", prompt, answer),
            known(model, Item("forget", row, "known", "likelihood", prompt, answer), 4),
            Item("facts", row, "rewrite", "likelihood", prompt, answer, plain=True),
            Item("text", row, "text", "likelihood", "", words(11, 3 + length), True, True),
            Item("test", row, "as given", "letters", prompt, "C", True, num_options=4),
            Item("test", row, "pair", "letters", words(20, 3), "B", True, num_options=2),
            spoken,
            replace(known(model, spoken, 9), role="long", cut_reference=True),
            replace(spoken, role="stopped", plain=True, stops=(stop, "w3000")),
        ]
    return found


def examine(
    model: PreTrainedModel,
    items: Sequence[Item],
    *,
    batch_tokens: int = 60,
    done: Collection[int] = (),
    rendering: Rendering | None = None,
) -> dict[int, ItemResult]:
    config = CollectConfig().model_copy(update={"batch_tokens": batch_tokens})
    found = list(take_exam(model, rendering or lettered(), items, config, pad_id=PAD, done=done))
    assert len(dict(found)) == len(found)
    return dict(found)


def numbers(result: ItemResult) -> dict[str, float]:
    return {
        name: value
        for name, value in asdict(result).items()
        if not isinstance(value, str) and not math.isnan(value) and name not in ("row",)
    }


@both_shapes
def test_results_equal_their_definitions_one_item_at_a_time(family: str, tied: bool) -> None:
    model = tiny_model(family, tied=tied)
    items = asked(model)
    found = examine(model, items)
    assert sorted(found) == list(range(len(items)))
    for position, item in enumerate(items):
        result = found[position]
        assert (result.split, result.row, result.role) == (item.split, item.row, item.role)
        assert (result.ask, result.digest) == (item.ask, item.digest)
        expected = {"right": -1, **BY_DEFINITION[item.ask](model, item)}
        # float32 logits: sums in another order.
        assert numbers(result) == pytest.approx(expected, rel=1e-4, abs=1e-5), item.role


def watched(model: PreTrainedModel) -> list[Tensor]:
    """The mask of each forward pass from here on; without padding it may be all ones unsaid."""
    seen: list[Tensor] = []

    def look(_: Any, args: Any, given: dict[str, Any]) -> None:
        mask_BL = given["attention_mask"]
        ids_BL = args[0] if args else given["input_ids"]
        seen.append(torch.ones_like(ids_BL) if mask_BL is None else mask_BL)

    trunk(model).register_forward_pre_hook(look, with_kwargs=True)
    return seen


@both_shapes
def test_numbers_are_the_same_in_batches_of_1_and_of_16(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family, tied=tied)
    items = [replace(item, row=at) for at, item in enumerate(asked(model) * 4)]
    masks = watched(model)
    together = examine(model, items, batch_tokens=16 * 13)
    assert max(map(len, masks)) >= 16
    masks.clear()
    monkeypatch.setattr("grom.exam.BATCH_PROMPTS", 1)
    alone = examine(model, items, batch_tokens=1)
    assert set(map(len, masks)) == {1}
    for position in range(len(items)):
        first, second = numbers(together[position]), numbers(alone[position])
        assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(("ask", "step"), [("likelihood", -1), ("generation", 1)])
def test_likelihoods_are_padded_on_the_right_and_generations_on_the_left(
    ask: str, step: int
) -> None:
    model = tiny_model("llama")
    items = [item for item in asked(model) if item.ask == ask]
    masks = watched(model)
    examine(model, items)
    assert {int(each) for mask_BL in masks for each in mask_BL.int().diff(dim=1).flatten()} == {
        0,
        step,
    }


def test_what_is_done_is_not_asked_again_and_the_rest_gets_the_same_numbers() -> None:
    model = tiny_model("llama")
    items = asked(model)
    whole, done = examine(model, items), set(range(0, len(items), 3))
    rest = examine(model, items, done=done)
    assert set(rest) == set(range(len(items))) - done
    for position, result in rest.items():
        assert numbers(result) == pytest.approx(numbers(whole[position]), abs=1e-5)
    assert examine(model, items, done=range(len(items))) == {}


def test_a_model_that_is_not_a_number_gets_no_number_of_what_it_knows() -> None:
    model = tiny_model("llama")
    items = [item for item in asked(model) if item.ask != "generation"]
    model.get_parameter("lm_head.weight").fill_(math.nan)
    for result in examine(model, items).values():
        assert set(numbers(result)) == {"num_tokens", "right"}


def test_results_hold_no_text() -> None:
    model = tiny_model("llama")
    items = asked(model)
    marks = {word for item in items for word in f"{item.prompt} {item.answer}".split()}
    for result in examine(model, items).values():
        texts = [value for value in asdict(result).values() if isinstance(value, str)]
        assert len(texts) == 4
        assert not marks & {word for text in texts for word in text.split()}
    kinds = {field.name: field.type for field in fields(ItemResult)}
    assert {name for name, kind in kinds.items() if kind == "str"} == {
        "split", "role", "ask", "digest",
    }  # fmt: skip


def test_only_correct_rouge_compares_with_a_reference_cut_to_what_may_be_said() -> None:
    model = tiny_model("llama")
    item = Item("forget verbatim", 0, "continuation", "generation", words(16, 3), words(50, 6),
                True, max_new_tokens=4, cut_reference=True)  # fmt: skip
    (result,) = examine(model, [known(model, item, 4)]).values()
    assert result.rouge_l_recall_correct == result.rouge_l_f1_correct == 1
    assert result.rouge_l_recall == pytest.approx(4 / 10)
    assert result.length_ratio == 1


def test_of_running_text_the_context_s_worth_is_measured() -> None:
    model = tiny_model("llama")
    start = words(9, 48)
    long, cut = (
        Item("text", 0, "text", "likelihood", "", text, plain=True, text=True)
        for text in (f"{start} {words(12, 40)}", start)
    )
    found = examine(model, [long, cut], rendering=lettered(max_tokens=48))
    assert found[0].num_tokens == 47
    first, second = numbers(found[0]), numbers(found[1])
    assert first == pytest.approx(second, abs=1e-5)
    assert found[0].digest != found[1].digest


@pytest.mark.parametrize("ask", ["likelihood", "letters", "generation"])
def test_too_long_an_item_is_refused_with_its_place_before_the_model_is_asked(ask: Any) -> None:
    model = tiny_model("llama")
    prompt = " ".join([CANARY] * 30)
    short = Item("forget", 0, "answer", "likelihood", "w9", "w10", plain=True)
    long = Item("retain", 6, "as given", ask, prompt, "A", True, max_new_tokens=3, num_options=4)
    masks = watched(model)
    with pytest.raises(
        ExampleTooLong, match=r"retain, row 7 \(as given\): 31 tokens.*30"
    ) as caught:
        examine(model, [long, short], rendering=lettered(max_tokens=30))
    assert CANARY not in str(caught.value)
    assert not masks or ask == "letters"


def test_an_answer_that_the_context_leaves_no_room_for_is_cut_alike_in_every_batch() -> None:
    model = tiny_model("llama")
    items = [
        Item("forget", row, "answer", "generation", words(9, length), "w40", max_new_tokens=12)
        for row, length in enumerate((2, 9, 9, 11, 3))
    ]
    rendering = lettered(max_tokens=16)
    together = examine(model, items, rendering=rendering)
    for position, item in enumerate(items):
        (alone,) = examine(model, [item], rendering=rendering).values()
        assert numbers(together[position]) == numbers(alone)
