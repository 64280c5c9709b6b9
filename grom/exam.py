"""Asking a model the items of a benchmark: likelihoods, generations and letters.

Results are numbers and digests; no text of an item or of an answer is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from grom.config import CollectConfig
from grom.evaluate import ExampleScore, score_stream
from grom.examples import Example, Rendered, Rendering, batches
from grom.generate import BATCH_PROMPTS, Generated, Limits, generate_stream
from grom.letters import letter_ids, letter_stream
from grom.metrics.health import is_degenerate, rep_4
from grom.metrics.membership import zlib_score
from grom.metrics.text import Rouge, rouge_l, until_stop

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


def take_exam(
    model: nn.Module,
    rendering: Rendering,
    items: Sequence[Item],
    config: CollectConfig,
    *,
    pad_id: int,
    done: Collection[int] = (),
) -> Iterator[tuple[int, ItemResult]]:
    """Position and result of each item that is not done yet, as they become known.

    Likelihoods of all splits share batches of similar length and one forward pass each; then come
    letters, then generations.

    Raises:
        ExampleTooLong, EmptyAnswer: an item does not fit; its place is named.
    """
    left = [position for position in range(len(items)) if position not in set(done)]
    for plain in (False, True):
        asked = replace(rendering, plain=plain)
        for ask, run in (("likelihood", _likelihoods), ("letters", _letters)):
            chosen = [at for at in left if (items[at].ask, items[at].plain) == (ask, plain)]
            yield from run(model, asked, items, chosen, config, pad_id)
        chosen = [at for at in left if (items[at].ask, items[at].plain) == ("generation", plain)]
        yield from _generations(model, asked, items, chosen)


def example_of(item: Item) -> Example:
    """The item as an example; its place is its split and row."""
    place = f"{item.split}, row {item.row + 1} ({item.role})"
    if item.text:
        return Example(place, item.split, item.row, text=item.answer)
    return Example(place, item.split, item.row, prompt=item.prompt, answer=item.answer)


def _likelihoods(
    model: nn.Module,
    rendering: Rendering,
    items: Sequence[Item],
    chosen: Sequence[int],
    config: CollectConfig,
    pad_id: int,
) -> Iterator[tuple[int, ItemResult]]:
    stream = _batched(rendering, items, chosen, config, pad_id)
    for at, score in score_stream(model, stream, spread=True):
        item = items[chosen[at]]
        yield chosen[at], _likelihood_result(item, score)


def _batched(
    rendering: Rendering,
    items: Sequence[Item],
    chosen: Sequence[int],
    config: CollectConfig,
    pad_id: int,
) -> Any:
    return batches(
        (_rendered(rendering, items[at]) for at in chosen),
        batch_tokens=config.batch_tokens,
        window_examples=max(config.window_examples, len(chosen)),
        pad_id=pad_id,
    )


def _rendered(rendering: Rendering, item: Item) -> Rendered:
    """One window: running text is measured up to the context's length, as MUSE does."""
    if item.text:
        whole = replace(rendering, text_window=rendering.max_tokens)
        return next(whole.windows(example_of(item)))
    return rendering.render(example_of(item))


def _likelihood_result(item: Item, score: ExampleScore) -> ItemResult:
    numbers = asdict(score)
    for name in ("digest", "group"):
        del numbers[name]
    size = len(zlib.compress(item.answer.encode()))
    return ItemResult(
        item.split,
        item.row,
        item.role,
        item.ask,
        item.digest,
        zlib=zlib_score(-score.mean_logprob, size),
        **numbers,
    )


def _letters(
    model: nn.Module,
    rendering: Rendering,
    items: Sequence[Item],
    chosen: Sequence[int],
    config: CollectConfig,
    pad_id: int,
) -> Iterator[tuple[int, ItemResult]]:
    if not chosen:
        return
    stream = _batched(rendering, items, chosen, config, pad_id)
    ids = letter_ids(rendering, max(items[at].num_options for at in chosen))
    for at, logprobs in letter_stream(model, stream, ids):
        item = items[chosen[at]]
        padded = (*logprobs, NAN, NAN, NAN)[:4]
        right = "ABCD".index(item.answer)
        where = (item.split, item.row, item.role, item.ask, item.digest, 1)
        yield chosen[at], _with_letters(ItemResult(*where, right=right), padded)


def _with_letters(result: ItemResult, logprobs: tuple[float, ...]) -> ItemResult:
    first, second, third, fourth = logprobs
    return replace(result, logprob_a=first, logprob_b=second, logprob_c=third, logprob_d=fourth)


def _generations(
    model: nn.Module, rendering: Rendering, items: Sequence[Item], chosen: Sequence[int]
) -> Iterator[tuple[int, ItemResult]]:
    kinds = sorted({(items[at].max_new_tokens, items[at].stops) for at in chosen})
    for max_new_tokens, stops in kinds:
        alike = [
            at
            for at in chosen
            if (items[at].max_new_tokens, items[at].stops) == (max_new_tokens, stops)
        ]
        stream = generate_stream(
            model,
            rendering,
            [items[at].prompt for at in alike],
            Limits(max_new_tokens, stops),
            batch_prompts=BATCH_PROMPTS,
        )
        for at, said in stream:
            yield alike[at], _generation_result(rendering, items[alike[at]], said)


def _generation_result(rendering: Rendering, item: Item, said: Generated) -> ItemResult:
    text = until_stop(said.text, item.stops).strip()
    answer_ids, answer = rendering.answer_ids(item.prompt, item.answer), item.answer
    compat: Rouge = rouge_l(text, answer, "compat")
    if item.cut_reference:
        answer_ids = answer_ids[: item.max_new_tokens]
        answer = str(rendering.tokenizer.decode(answer_ids)).strip()
    correct: Rouge = rouge_l(text, answer, "correct")
    return ItemResult(
        item.split,
        item.row,
        item.role,
        item.ask,
        item.digest,
        len(said.ids),
        rouge_l_recall=compat.recall,
        rouge_l_f1=compat.f1,
        rouge_l_recall_correct=correct.recall,
        rouge_l_f1_correct=correct.f1,
        rep_4=rep_4(said.ids),
        ended=float(said.ended),
        empty=float(not text),
        degenerate=float(is_degenerate(said)),
        length_ratio=len(said.ids) / len(answer_ids) if answer_ids else NAN,
    )
