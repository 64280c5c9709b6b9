"""Greedy generation in batches that end as soon as every answer has.

Shapes: B prompts, L positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grom.errors import ExampleTooLong
from grom.examples import Rendering
from grom.sites import config_of, device_of

BATCH_PROMPTS = 16
STOP_WINDOW = 16
"""Last tokens that are decoded after each step to look for a stop string."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What a model said.  The text is personal: measure it, never store it."""

    ids: tuple[int, ...]
    """New tokens without the one that ended them."""
    text: str
    """Decoded without special tokens; a stop string is still in it."""
    ended: bool
    """By its own end token or a stop string, not by the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an answer ends."""

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    """Strings that end an answer."""


def generate_stream(
    model: nn.Module,
    rendering: Rendering,
    prompts: Sequence[str],
    limits: Limits,
    *,
    batch_prompts: int = BATCH_PROMPTS,
) -> Iterator[tuple[int, Generated]]:
    """Position and greedy answer of each prompt, batch by batch, similar lengths together.

    The checkpoint's own settings (sampling, penalties) do not count; its end tokens do.
    """
    rendered = [rendering.prompt_ids(prompt) for prompt in prompts]
    for positions, room in _groups(rendered, rendering.max_tokens, limits, batch_prompts):
        asked = [rendered[at] for at in positions]
        answers = _generate(model, rendering, asked, replace(limits, max_new_tokens=room))
        yield from zip(positions, answers, strict=True)


def _groups(
    rendered: Sequence[Sequence[int]], context: int, limits: Limits, batch_prompts: int
) -> Iterator[tuple[list[int], int]]:
    """Prompts of one batch, and how many tokens their answers may have.

    Where the context leaves less room than the limit, only prompts of one length go together: an
    answer must not depend on its neighbours.

    Raises:
        ExampleTooLong: a prompt leaves no room for an answer.
    """
    group: list[int] = []
    room = 0
    for at in sorted(range(len(rendered)), key=lambda position: len(rendered[position])):
        own = min(limits.max_new_tokens, context - len(rendered[at]))
        if own < 1:
            raise ExampleTooLong(f"prompt {at + 1}", len(rendered[at]) + 1, context)
        if group and (own != room or len(group) == batch_prompts):
            yield group, room
            group = []
        group, room = [*group, at], own
    if group:
        yield group, room


def generate(
    model: nn.Module,
    rendering: Rendering,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    stops: Iterable[str] = (),
    batch_prompts: int = BATCH_PROMPTS,
) -> list[Generated]:
    """Greedy answers in the order of the prompts."""
    limits = Limits(max_new_tokens, tuple(stops))
    found = dict(generate_stream(model, rendering, prompts, limits, batch_prompts=batch_prompts))
    return [found[position] for position in range(len(prompts))]


def _generate(
    model: nn.Module, rendering: Rendering, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[Generated]:
    from transformers import GenerationConfig

    device, ends = device_of(model), end_tokens(model, rendering)
    length = max(len(ids) for ids in prompts)
    ids_BL = torch.full((len(prompts), length), ends[0] if ends else 0)
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids in enumerate(prompts):  # on the left, so that new tokens follow the prompt
        ids_BL[row, length - len(ids) :] = torch.tensor(ids)
        mask_BL[row, length - len(ids) :] = 1
    # Every field stated: transformers fills fields of None from the checkpoint's own settings.
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=limits.max_new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        use_cache=True,
    )
    criteria = [_stopped_by(rendering, limits.stops, length)] if limits.stops else []
    with torch.inference_mode():
        output_BL: Tensor = model.generate(  # type: ignore[operator]
            ids_BL.to(device),
            attention_mask=mask_BL.to(device),
            generation_config=settings,
            stopping_criteria=criteria,
        )
    return [_answer(rendering, row[length:].tolist(), ends, limits) for row in output_BL]


def _answer(rendering: Rendering, new: list[int], ends: Sequence[int], limits: Limits) -> Generated:
    end = next((at for at, token in enumerate(new) if token in ends), None)
    ids = new if end is None else new[:end]
    text = str(rendering.tokenizer.decode(ids, skip_special_tokens=True))
    stopped = any(stop in text for stop in limits.stops)
    return Generated(tuple(ids), text, end is not None or stopped)


def _stopped_by(rendering: Rendering, stops: Sequence[str], length: int) -> Any:
    def stopped(ids_BL: Tensor, scores: Any, **_: Any) -> Tensor:
        tails = ids_BL[:, max(length, ids_BL.shape[1] - STOP_WINDOW) :].tolist()
        texts = [rendering.tokenizer.decode(tail, skip_special_tokens=True) for tail in tails]
        found = [any(stop in text for stop in stops) for text in texts]
        return torch.tensor(found, device=ids_BL.device)

    return stopped


def end_tokens(model: nn.Module, rendering: Rendering) -> list[int]:
    """Every token that ends an answer: the tokenizer's and the checkpoint's."""
    settings = getattr(model, "generation_config", None)
    named = (
        rendering.tokenizer.eos_token_id,
        getattr(config_of(model), "eos_token_id", None),
        getattr(settings, "eos_token_id", None),
    )
    lists = [value if isinstance(value, list | tuple) else [value] for value in named]
    return sorted({int(token) for tokens in lists for token in tokens if token is not None})
