"""The likelihood suite against one forward pass per metric, on the same batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grom.batches import Batch
from grom.evaluate import MIN_K, score_examples
from grom.metrics import exact_memorisation, extraction_strength, min_k, min_k_plus_plus, zlib_score

Metrics = dict[str, Callable[[Tensor, Tensor, Batch, int], float]]


def all_logits_BLV(model: Any, batch: Batch) -> Tensor:
    """Logits of every position, as a plain evaluation takes them."""
    with torch.inference_mode():
        logits_BLV: Tensor = model(
            input_ids=batch.ids_BL, attention_mask=batch.mask_BL, use_cache=False
        ).logits
    return logits_BLV


def one_pass_each(model: Any, batches: Sequence[Batch]) -> dict[str, list[float]]:
    """Each metric by its own forward pass over all batches; values by example."""
    found: dict[str, list[float]] = {}
    for name, metric in METRICS.items():
        scored: dict[int, float] = {}
        for batch in batches:
            logits_TV = all_logits_BLV(model, batch)[batch.predicts_BL].float()
            for row, position in enumerate(batch.positions):
                own = batch.example_T == row
                scored[position] = metric(logits_TV[own], batch.gold_T[own], batch, row)
        found[name] = [scored[position] for position in sorted(scored)]
    return found


def suite(model: Any, batches: Sequence[Batch]) -> dict[str, list[float]]:
    """All of them by one pass."""
    scores = score_examples(model, batches, spread=True)
    sizes = {
        position: text_bytes(batch, row)
        for batch in batches
        for row, position in enumerate(batch.positions)
    }
    return {
        "probability": [score.probability for score in scores],
        "extraction strength": [score.extraction_strength for score in scores],
        "exact memorisation": [score.exact_memorisation for score in scores],
        "min-k": [score.min_k for score in scores],
        "min-k++": [score.min_k_plus_plus for score in scores],
        "zlib": [zlib_score(-score.mean_logprob, sizes[at]) for at, score in enumerate(scores)],
    }


def text_bytes(batch: Batch, row: int) -> int:
    """Compressed size of an answer; its ids stand in for the text."""
    example = batch.examples[row]
    return len(zlib.compress(str(example.ids[example.start :]).encode()))


def _logprobs_T(logits_TV: Tensor, gold_T: Tensor) -> Tensor:
    return logits_TV.log_softmax(1).gather(1, gold_T.unsqueeze(1)).squeeze(1).double()


def _first_T(logits_TV: Tensor, gold_T: Tensor, batch: Batch, row: int) -> Any:
    first_T = (logits_TV.argmax(1) == gold_T).numpy()
    return first_T[: len(first_T) - batch.examples[row].ends]


def _min_k_plus_plus(logits_TV: Tensor, gold_T: Tensor, batch: Batch, row: int) -> float:
    logprobs_TV = logits_TV.log_softmax(1)
    p_TV = logprobs_TV.exp()
    means_T = (p_TV * logprobs_TV).sum(1)
    spread_T = (p_TV * logprobs_TV.square()).sum(1) - means_T.square()
    arrays = [_logprobs_T(logits_TV, gold_T), means_T.double(), spread_T.double()]
    logprob_T, mean_T, variance_T = (array.numpy() for array in arrays)
    return min_k_plus_plus(logprob_T, mean_T, variance_T, MIN_K)


METRICS: Metrics = {
    "probability": lambda logits, gold, batch, row: float(_logprobs_T(logits, gold).mean().exp()),
    "extraction strength": lambda logits, gold, batch, row: extraction_strength(
        _first_T(logits, gold, batch, row), "correct"
    ),
    "exact memorisation": lambda logits, gold, batch, row: exact_memorisation(
        _first_T(logits, gold, batch, row)
    ),
    "min-k": lambda logits, gold, batch, row: min_k(_logprobs_T(logits, gold).numpy(), MIN_K),
    "min-k++": _min_k_plus_plus,
    "zlib": lambda logits, gold, batch, row: zlib_score(
        -float(_logprobs_T(logits, gold).mean()), text_bytes(batch, row)
    ),
}
