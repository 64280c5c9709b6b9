"""Running a model: no further than needed, watching or replacing what flows through it.

Shapes: B examples, L positions, T answer tokens, D hidden size, V vocabulary, N inputs of W.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grom.batches import Batch
from grom.sites import answer_logits_TV, decoder_layers, is_known, trunk

LOGIT_BLOCK = 128
"""Answer positions whose logits are held at once."""


class _Stop(Exception):
    """Ends a forward pass whose rest nobody needs."""


@contextmanager
def recorded_inputs(
    modules: Sequence[nn.Module], *, stop: bool = False
) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the first input of each module while the context is open.

    Args:
        modules: modules in the order in which the model calls them.
        stop: end the pass when the last of them is reached; only within `run`.
    """
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[module] = args[0].detach()
        if stop and module is modules[-1]:
            raise _Stop

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(record).remove)
        yield seen


@contextmanager
def recorded_outputs(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, Tensor]]:
    """Record the output of each module while the context is open."""
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen[module] = output.detach()

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(record).remove)
        yield seen


@contextmanager
def starting_at(model: nn.Module, layer: int, hidden_BLD: Tensor) -> Iterator[None]:
    """Skip the layers below `layer` and feed it these hidden states.

    The model still builds masks and position embeddings itself, so this holds for every family.
    """
    layers = decoder_layers(model)

    def feed(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (hidden_BLD, *args[1:])

    def skip(hidden_BLD: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_BLD

    # A wrapper that somebody put around a layer's forward lies in the instance; it comes back.
    wrapped = [vars(below).get("forward") for below in layers[:layer]]
    handle = layers[layer].register_forward_pre_hook(feed)
    try:
        for below in layers[:layer]:
            below.forward = skip
        yield
    finally:
        handle.remove()
        for below, original in zip(layers[:layer], wrapped, strict=True):
            del below.forward
            if original is not None:
                below.forward = original


def run(model: nn.Module, batch: Batch) -> Tensor | None:
    """Final normed hidden states (B, L, D) of a batch; None if a recorder ended the pass."""
    try:
        with torch.inference_mode():
            output = trunk(model)(
                input_ids=batch.ids_BL,
                attention_mask=batch.mask_BL,
                position_ids=places_BL(batch),
                use_cache=False,
            )
    except _Stop:
        return None
    hidden_BLD: Tensor = output.last_hidden_state
    return hidden_BLD


def places_BL(batch: Batch) -> Tensor:
    """Place of each token, from the mask: padding on either side changes no place."""
    return (batch.mask_BL.cumsum(1) - 1).clamp(min=0)


def answer_hidden_TD(model: nn.Module, batch: Batch) -> Tensor:
    """Final normed hidden states at the positions that predict answer tokens."""
    hidden_BLD = run(model, batch)
    assert hidden_BLD is not None
    return hidden_BLD[batch.predicts_BL]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the model thinks of each answer token."""

    logprob_T: Tensor
    """Log-probability of the gold token, float32, nats."""
    first_T: Tensor
    """Whether it is the model's first choice."""
    mean_T: Tensor
    """Mean of log p over the model's own distribution; NaN unless `spread` was asked for."""
    variance_T: Tensor
    """Its variance; NaN likewise."""

    def rows(self, chosen_T: Tensor) -> TokenScores:
        """Those of some positions."""
        return TokenScores(
            self.logprob_T[chosen_T],
            self.first_T[chosen_T],
            self.mean_T[chosen_T],
            self.variance_T[chosen_T],
        )


LogitsOf = Callable[[slice], Tensor]
"""Logits of some answer positions, (T, V) float32, freshly made."""


def answer_logits(model: nn.Module, batch: Batch) -> LogitsOf:
    """The logits of a batch at its answer positions, a block at a time.

    In families without a rule nobody knows where the head is and what comes after it, so the
    whole model is run, and its logits of all positions are held.
    """
    if is_known(model):
        return logits_from(model, answer_hidden_TD(model, batch))
    arguments = {"input_ids": batch.ids_BL, "attention_mask": batch.mask_BL, "use_cache": False}
    takes = inspect.signature(model.forward).parameters
    if "position_ids" in takes:
        arguments["position_ids"] = places_BL(batch)
    if "attention_mask" not in takes:  # a state space model: what follows never matters
        del arguments["attention_mask"]
    with torch.inference_mode():
        logits_TV = model(**arguments).logits[batch.predicts_BL]
    return lambda block: logits_TV[block].float().clone()


def logits_from(model: nn.Module, hidden_TD: Tensor) -> LogitsOf:
    """The same from final normed hidden states."""
    return lambda block: answer_logits_TV(model, hidden_TD[block])


def token_scores(logits_of: LogitsOf, gold_T: Tensor, *, spread: bool = False) -> TokenScores:
    """Score gold tokens; logits are held for one block at a time.

    Args:
        logits_of: logits at the predicting positions.
        gold_T: tokens to predict.
        spread: also take mean and variance of log p under the model, which min-k++ needs.
    """
    columns = torch.full((3, len(gold_T)), torch.nan, dtype=torch.float32, device=gold_T.device)
    first_T = torch.empty(len(gold_T), dtype=torch.bool, device=gold_T.device)
    for start in range(0, len(gold_T), LOGIT_BLOCK):
        block = slice(start, start + LOGIT_BLOCK)
        with torch.inference_mode():
            logits_TV = logits_of(block)
            first_T[block] = logits_TV.argmax(1) == gold_T[block]
            logprobs_TV = logits_TV.sub_(logits_TV.logsumexp(1, keepdim=True))
            columns[0, block] = logprobs_TV.gather(1, gold_T[block].unsqueeze(1)).squeeze(1)
            if spread:
                columns[1:, block] = _spread(logprobs_TV)
    return TokenScores(columns[0], first_T, columns[1], columns[2])


def _spread(logprobs_TV: Tensor) -> Tensor:
    """Mean and variance of log p under p, (2, T); tokens of no probability count nothing."""
    p_TV = logprobs_TV.exp()
    # A padded vocabulary has logits of -inf, and 0 · -inf is not a number.
    finite_TV = logprobs_TV.masked_fill(p_TV == 0, 0.0)
    mean_T = torch.linalg.vecdot(p_TV, finite_TV)
    # Centred first: the difference of two large squares has no digits left in float32.
    centred_TV = finite_TV.sub_(mean_T.unsqueeze(1)).square_()
    return torch.stack((mean_T, torch.linalg.vecdot(p_TV, centred_TV)))


def best_other_T(model: nn.Module, hidden_TD: Tensor, gold_T: Tensor) -> Tensor:
    """The most likely token other than the gold one, at each position."""
    other_T = torch.empty_like(gold_T)
    for start in range(0, len(gold_T), LOGIT_BLOCK):
        block = slice(start, start + LOGIT_BLOCK)
        with torch.inference_mode():
            logits_TV = answer_logits_TV(model, hidden_TD[block])
            logits_TV.scatter_(1, gold_T[block].unsqueeze(1), -torch.inf)
            other_T[block] = logits_TV.argmax(1)
    return other_T
