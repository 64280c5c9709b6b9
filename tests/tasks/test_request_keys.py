"""Keys on disk come back to the bit, request by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grom.collect import ExampleStatistics, RequestKeys
from grom.errors import MissingInput
from tasks.request_keys import KeySource, KeyWriter, StoredKeys, has_keys

SIZES = {"joint": 5, "model.layers.3.mlp.down_proj": 3}


def batch(sizes: dict[str, int], dtype: torch.dtype, *, alone: bool = False) -> RequestKeys:
    """A batch of examples, by group and number of tokens."""
    total = sum(sizes.values())
    return RequestKeys(
        {name: torch.randn(total, width).to(dtype) for name, width in SIZES.items()},
        torch.randint(40, (total,)),
        None if alone else torch.randint(40, (total,)),
        None if alone else torch.rand(total),
        tuple(ExampleStatistics(f"d-{group}", group, size) for group, size in sizes.items()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("alone", [False, True])
def test_keys_come_back_to_the_bit(tmp_path: Path, dtype: torch.dtype, alone: bool) -> None:
    written = [
        batch({"a": 2}, dtype, alone=alone),
        batch({"b": 4}, dtype, alone=alone),
        batch({"a": 1}, dtype, alone=alone),
    ]
    with KeyWriter(tmp_path) as write:
        for one in written:
            write(one)
    stored = StoredKeys(tmp_path)
    assert (stored.groups, stored.sizes) == (["a", "b"], SIZES)
    expected = {"a": [written[0], written[2]], "b": [written[1]]}
    for group, parts in expected.items():
        for found, part in zip(stored.of(group), parts, strict=True):
            for name, keys_TN in part.keys.items():
                assert found.keys[name].dtype == dtype
                assert torch.equal(found.keys[name], keys_TN)
            for column in ("gold_T", "alt_T", "rms_T"):
                mine, theirs = getattr(found, column), getattr(part, column)
                assert (mine is None) == (theirs is None)
                assert mine is None or torch.equal(mine, theirs)
            assert found.examples == part.examples


def test_examples_of_one_batch_are_told_apart(tmp_path: Path) -> None:
    one = batch({"a": 2, "b": 3}, torch.float32)
    with KeyWriter(tmp_path) as write:
        write(one)
    (found,) = StoredKeys(tmp_path).of("b")
    assert torch.equal(found.keys["joint"], one.keys["joint"][2:])
    assert torch.equal(found.gold_T, one.gold_T[2:])


def test_the_arrays_are_plain_npy_of_any_length(tmp_path: Path) -> None:
    parts = [batch({"a": 7}, torch.float32) for _ in range(150)]
    with KeyWriter(tmp_path) as write:
        for one in parts:
            write(one)
    array = np.load(tmp_path / "joint.keys.npy", allow_pickle=False)
    assert array.shape == (1050, 5)
    assert np.array_equal(array, torch.cat([one.keys["joint"] for one in parts]).numpy())


def test_a_request_of_several_batches_is_one(tmp_path: Path) -> None:
    parts = []
    for folder in ("one", "two"):
        parts.append(batch({"a": 2, folder: 1}, torch.float32))
        with KeyWriter(tmp_path / folder) as write:
            write(parts[-1])
    source = KeySource([StoredKeys(tmp_path / "one"), StoredKeys(tmp_path / "two")])
    assert source.requests == ["a", "one", "two"]
    assert source.num_positions == 6
    whole = source.of("a", "joint")
    assert torch.equal(whole.keys_TN, torch.cat([part.keys["joint"][:2] for part in parts]))
    assert torch.equal(whole.gold_T, torch.cat([part.gold_T[:2] for part in parts]))
    assert len(source.of("two", "joint").gold_T) == 1


def test_nothing_written_is_nothing_read(tmp_path: Path) -> None:
    with KeyWriter(tmp_path):
        pass
    assert has_keys(tmp_path)
    stored = StoredKeys(tmp_path)
    assert (stored.groups, list(stored.of("a")), stored.request("a", "joint")) == ([], [], None)


def test_absent_keys_are_named(tmp_path: Path) -> None:
    assert not has_keys(tmp_path)
    with pytest.raises(MissingInput, match=r"keys\.json"):
        StoredKeys(tmp_path)
