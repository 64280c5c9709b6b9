"""Asking a model the items of a benchmark: likelihoods, generations and letters.

Results are numbers and digests; no text of an item or of an answer is kept.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from grom.batches import Batch, batches
from grom.config import CollectConfig
from grom.errors import ExampleTooLong
from grom.evaluate import ExampleScore, score_stream
from grom.examples import Rendered, Rendering
from grom.generate import BATCH_PROMPTS, Generated, Limits, generate_stream
from grom.items import LETTER_COLUMNS, Item, ItemResult, example_of
from grom.letters import LETTERS, letter_ids, letter_stream
from grom.metrics.health import is_degenerate, rep_4
from grom.metrics.membership import zlib_score
from grom.metrics.text import Rouge, rouge_l, until_stop

SORTED_ITEMS = 4096
"""Items that are sorted by length together; more would only fill the memory."""


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
    finished = set(done)
    left = [position for position in range(len(items)) if position not in finished]
    for at in left:  # before the likelihoods, which may take hours
        _check_prompt(rendering, items[at])
    for plain in (False, True):
        asked = replace(rendering, plain=plain)
        for ask, run in (("likelihood", _likelihoods), ("letters", _letters)):
            chosen = [at for at in left if (items[at].ask, items[at].plain) == (ask, plain)]
            yield from run(model, asked, items, chosen, config, pad_id)
        chosen = [at for at in left if (items[at].ask, items[at].plain) == ("generation", plain)]
        yield from _generations(model, asked, items, chosen)


def _check_prompt(rendering: Rendering, item: Item) -> None:
    if item.ask != "generation":
        return
    num_tokens = len(replace(rendering, plain=item.plain).prompt_ids(item.prompt))
    if num_tokens >= rendering.max_tokens:
        raise ExampleTooLong(example_of(item).place, num_tokens + 1, rendering.max_tokens)


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
        yield chosen[at], _likelihood_result(rendering, item, score)


def _batched(
    rendering: Rendering,
    items: Sequence[Item],
    chosen: Sequence[int],
    config: CollectConfig,
    pad_id: int,
) -> Iterator[Batch]:
    return batches(
        (_rendered(rendering, items[at]) for at in chosen),
        batch_tokens=config.batch_tokens,
        window_examples=max(config.window_examples, SORTED_ITEMS),
        pad_id=pad_id,
    )


def _rendered(rendering: Rendering, item: Item) -> Rendered:
    """One window: running text is measured up to the context's length, as MUSE does."""
    if item.text:
        return rendering.whole(example_of(item))
    return rendering.render(example_of(item))


def _likelihood_result(rendering: Rendering, item: Item, score: ExampleScore) -> ItemResult:
    numbers = asdict(score)
    for name in ("digest", "group"):
        del numbers[name]
    if math.isnan(score.mean_logprob):  # no first choice is right then, which is no forgetting
        numbers |= dict.fromkeys(numbers.keys() - {"num_tokens"}, math.nan)
    said = item.answer
    if item.text:  # of a long one only the beginning was measured
        ids = _rendered(rendering, item).ids
        said = str(rendering.tokenizer.decode(ids, skip_special_tokens=True))
    size = len(zlib.compress(said.encode()))
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
        where = (item.split, item.row, item.role, item.ask, item.digest, 1)
        asked = slice(item.num_options)
        by_letter: dict[str, Any] = dict(zip(LETTER_COLUMNS[asked], logprobs[asked], strict=True))
        right = LETTERS.index(item.answer)
        yield chosen[at], ItemResult(*where, right=right, **by_letter)


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
        length_ratio=len(said.ids) / len(answer_ids) if answer_ids else math.nan,
    )
