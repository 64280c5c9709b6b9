"""Multiple choice: log-likelihood of each option's letter right after the question.

Shapes: T questions of a batch, C options, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from grom.batches import Batch
from grom.errors import ConfigError
from grom.examples import Rendering
from grom.forward import answer_logits
from grom.sites import device_of

LETTERS = "ABCDEFGHIJ"


def letter_ids(rendering: Rendering, num_options: int) -> tuple[int, ...]:
    """Token of each letter as it follows "Answer:", with a leading blank.

    Raises:
        ConfigError: too many options, or two letters do not differ in their last token alone.
    """
    tokens = [rendering.answer_ids("Answer:", letter) for letter in LETTERS[:num_options]]
    ids = tuple(answer[-1] for answer in tokens)
    before = {tuple(answer[:-1]) for answer in tokens}
    if len(set(ids)) < num_options or len(before) > 1:
        raise ConfigError(
            f"{num_options} options: this tokenizer has no letter of its own for each of them. "
            "Use a benchmark with fewer options, or another tokenizer."
        )
    return ids


def letter_stream(
    model: nn.Module, stream: Iterable[Batch], letters: Sequence[int]
) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Position of each question, and the log-probability of each letter right after it.

    Where a tokenizer splits the blank from the letter, after that blank, which all letters share.

    Args:
        model: model to ask.
        stream: batches of questions that end in one letter, which stands for all of them.
        letters: token of each letter, (C,).
    """
    device = device_of(model)
    columns = torch.tensor(letters, device=device)
    for cpu_batch in stream:
        batch = cpu_batch.to(device)
        logprobs_TC = _letter_logprobs(answer_logits(model, batch)(slice(None)), columns)
        last_of = {row: at for at, row in enumerate(batch.example_T.tolist())}
        for row, position in enumerate(batch.positions):
            letter = last_of[row] - batch.examples[row].ends
            yield position, tuple(logprobs_TC[letter].tolist())


def _letter_logprobs(logits_TV: Tensor, columns: Tensor) -> Tensor:
    with torch.inference_mode():
        return (logits_TV[:, columns] - logits_TV.logsumexp(1, keepdim=True)).double().cpu()
