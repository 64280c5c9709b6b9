"""Statistics on disk: what is read is what was written, to the bit, and no pickle is opened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from grom.collect import Collected, ExampleStatistics
from grom.errors import MissingInput
from grom.moments import KeyMoments
from grom.sums import compact
from tasks import statistics
from tasks.codecs import read_json
from tasks.statistics import (
    load_collected,
    load_moments,
    moment_names,
    save_collected,
    save_moments,
)

SITE = "model.layers.7.mlp.down_proj"


def moments(
    num_tokens: int = 60,
    *,
    keeps_sums: bool = True,
    alternatives: bool = True,
    weighted: bool = False,
) -> KeyMoments:
    """Moments of a few blocks of keys, N = 6 and V = 40; some replacements have weights."""
    found = KeyMoments.zeros(6, 40, keeps_sums=keeps_sums)
    for _ in range(3 if num_tokens else 0):
        keys_TN = torch.randn(num_tokens, 6)
        gold_T, alt_T = torch.randint(40, (2, num_tokens))
        found.update_(keys_TN, gold_T, alt_T if alternatives else None)
        if weighted:
            found.update_(keys_TN, gold_T, alt_T, torch.rand(num_tokens))
    return found


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor: -0.0 is not 0.0, and NaN is NaN."""
    return tensor.contiguous().numpy().tobytes()


def assert_same(left: KeyMoments, right: KeyMoments) -> None:
    """Equal to the bit, order of tokens included."""
    assert left.gram_NN.dtype == right.gram_NN.dtype
    assert bits(left.gram_NN) == bits(right.gram_NN)
    assert torch.equal(left.counts_V, right.counts_V)
    assert (left.num_tokens, left.keeps_sums) == (right.num_tokens, right.keeps_sums)
    for mine, theirs in ((left.sums, right.sums), (left.alt_sums, right.alt_sums)):
        assert list(mine) == list(theirs)
        assert compact(mine).vocab_size == compact(theirs).vocab_size
        assert bits(compact(mine).rows_KN) == bits(compact(theirs).rows_KN)
    assert list(left.pair_sums) == list(right.pair_sums)
    assert left.pair_sums.vocab_size == right.pair_sums.vocab_size
    assert torch.equal(left.pair_sums.counts_K, right.pair_sums.counts_K)
    assert bits(left.pair_sums.rows_KN) == bits(right.pair_sums.rows_KN)


@pytest.mark.parametrize("keeps_sums", [True, False])
@pytest.mark.parametrize("alternatives", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 60])
def test_moments_come_back_to_the_bit(
    tmp_path: Path, keeps_sums: bool, alternatives: bool, weighted: bool, num_tokens: int
) -> None:
    how = {"keeps_sums": keeps_sums, "alternatives": alternatives, "weighted": weighted}
    written = moments(num_tokens, **how)
    save_moments(tmp_path, SITE, written)
    assert_same(load_moments(tmp_path, SITE), written)


def test_row_groups_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = moments()
    monkeypatch.setattr(statistics, "ROW_GROUP_BYTES", 3 * 6 * 8)
    save_moments(tmp_path, SITE, written)
    for part in ("sums", "pairs"):
        assert pq.ParquetFile(tmp_path / f"{SITE}.{part}.parquet").num_row_groups > 10
    assert_same(load_moments(tmp_path, SITE), written)


def test_a_withdrawn_batch_survives_writing(tmp_path: Path) -> None:
    whole, part = moments(), moments(5)
    written = (whole + part) - part
    save_moments(tmp_path, SITE, written)
    assert_same(load_moments(tmp_path, SITE), written)


def test_loaded_moments_go_on_adding(tmp_path: Path) -> None:
    first, second = moments(), moments()
    save_moments(tmp_path, SITE, first)
    assert_same(load_moments(tmp_path, SITE) + second, first + second)


def test_the_schemas_are_the_documented_ones(tmp_path: Path) -> None:
    save_moments(tmp_path, SITE, moments(weighted=True))
    schemas = {
        part: str(pq.read_schema(tmp_path / f"{SITE}.{part}.parquet")).splitlines()
        for part in ("counts", "sums", "pairs", "alt")
    }
    assert schemas["counts"] == ["token: int32", "count: int64"]
    vector = ["vector: fixed_size_list<element: double>[6]", "  child 0, element: double"]
    assert schemas["sums"] == ["token: int32", "count: int64", *vector]
    pair = ["gold: int32", "alternative: int32", "count: int64"]
    assert schemas["pairs"] == [*pair, *vector]
    assert schemas["alt"] == ["token: int32", *vector]
    assert sorted(path.name.removeprefix(SITE) for path in tmp_path.iterdir()) == [
        ".alt.parquet", ".counts.parquet", ".gram.npy", ".json", ".pairs.parquet", ".sums.parquet",
    ]  # fmt: skip


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    save_moments(tmp_path, SITE, moments())
    np.save(tmp_path / f"{SITE}.gram.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_moments(tmp_path, SITE)


def test_absent_statistics_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=SITE):
        load_moments(tmp_path, SITE)
    with pytest.raises(MissingInput, match=r"collected\.json"):
        load_collected(tmp_path)


def collected() -> Collected:
    return Collected(
        {"model.layers.1.mlp.down_proj": moments(), "model.layers.10.mlp.down_proj": moments(9)},
        [ExampleStatistics("d", "g", 3), ExampleStatistics("e", "g", 4)],
        0.1 + 0.2,
        7,
    )


def test_statistics_of_a_set_come_back_to_the_bit(tmp_path: Path) -> None:
    written = collected()
    save_collected(tmp_path, written, {"model": "m"})
    found = load_collected(tmp_path)
    assert list(found.moments) == moment_names(tmp_path) == sorted(written.moments)
    for name, kept in written.moments.items():
        assert_same(found.moments[name], kept)
    assert found.examples == written.examples
    assert (found.rms_sum, found.rms_tokens) == (written.rms_sum, written.rms_tokens)
    assert read_json(tmp_path / "collected.json")["facts"] == {"model": "m"}


def test_one_site_can_be_read_alone(tmp_path: Path) -> None:
    written = collected()
    save_collected(tmp_path, written, {})
    name = "model.layers.1.mlp.down_proj"
    (tmp_path / "model.layers.10.mlp.down_proj.gram.npy").unlink()
    found = load_collected(tmp_path, [name])
    assert list(found.moments) == [name]
    assert_same(found.moments[name], written.moments[name])


def test_a_retain_set_has_no_examples_and_no_residual(tmp_path: Path) -> None:
    save_collected(tmp_path, Collected({SITE: moments(keeps_sums=False)}), {})
    found = load_collected(tmp_path)
    assert (found.examples, found.rms_sum, found.rms_tokens) == ([], 0.0, 0)
