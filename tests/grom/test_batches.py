"""Batches hold every example once, padded and masked, within their budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from hypothesis import given
from hypothesis import strategies as st

from grom.batches import batches, make_batch
from grom.examples import Rendered
from tests.reference import random_rendered

PAD = 0


def test_gold_tokens_follow_the_positions_that_predict_them() -> None:
    rendered = random_rendered(seed=3, num_examples=5)
    batch = make_batch(enumerate(rendered), PAD)
    rows, columns = batch.predicts_BL.nonzero(as_tuple=True)
    assert torch.equal(batch.ids_BL[rows, columns + 1], batch.gold_T)
    assert torch.equal(rows, batch.example_T)
    for row, example in enumerate(rendered):
        at = columns[rows == row].tolist()
        assert at == list(range(example.start - 1, len(example.ids) - 1))
        assert tuple(batch.gold_T[rows == row].tolist()) == example.ids[example.start :]


def test_examples_are_padded_on_the_right_and_masked() -> None:
    short, long = Rendered((5, 6), 1, "a", "g"), Rendered((7, 8, 9, 10), 2, "b", "g")
    batch = make_batch([(4, short), (1, long)], PAD)
    assert batch.ids_BL.tolist() == [[5, 6, PAD, PAD], [7, 8, 9, 10]]
    assert batch.mask_BL.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.gold_T.tolist() == [6, 9, 10]
    assert batch.positions == (4, 1)


@given(
    seed=st.integers(0, 10_000),
    num_examples=st.integers(0, 30),
    window=st.integers(1, 40),
    budget=st.integers(16, 100),
)
def test_every_example_is_in_exactly_one_batch(
    seed: int, num_examples: int, window: int, budget: int
) -> None:
    rendered = random_rendered(seed, num_examples)
    stream = list(batches(rendered, batch_tokens=budget, window_examples=window, pad_id=PAD))
    pairs = [pair for batch in stream for pair in zip(batch.positions, batch.examples, strict=True)]
    assert sorted(pairs, key=lambda pair: pair[0]) == list(enumerate(rendered))
    assert all(batch.ids_BL.numel() <= budget for batch in stream)


def test_batches_are_filled_to_the_budget() -> None:
    lengths = [3, 9, 4, 8, 3, 4, 20]
    rendered = [Rendered((5,) * length, 1, str(length), "g") for length in lengths]
    stream = list(batches(rendered, batch_tokens=16, window_examples=9, pad_id=PAD))
    shapes = [tuple(batch.ids_BL.shape) for batch in stream]
    # 3, 3, 4, 4 fill 4 * 4; 8 and 9 do not fit together; 20 is over the budget and goes alone.
    assert shapes == [(4, 4), (1, 8), (1, 9), (1, 20)]


def test_no_more_than_a_window_is_read_ahead() -> None:
    read: Counter[str] = Counter()

    def source() -> Iterator[Rendered]:
        for example in random_rendered(0, 20):
            read["examples"] += 1
            yield example

    next(batches(source(), batch_tokens=16, window_examples=5, pad_id=PAD))
    assert read["examples"] == 5
