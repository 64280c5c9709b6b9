"""Sums by token and by pair: what occurs, in few numbers, and gone when it is wholly subtracted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import grom.sums
from grom.sums import PairSums, TokenSums
from tests.reference import Keys, Tolerance, dense_VVN, random_keys

seeds = st.integers(0, 10_000)
V, N = 8, 5
TIGHT: Tolerance = {"rtol": 0.0, "atol": 1e-12}
"""Sums of at most 60 float64 numbers of order 1."""


def test_token_sums_are_a_mapping_of_the_tokens_that_occur() -> None:
    sums = TokenSums(2, 6)
    sums.add_(torch.tensor([4, 1, 4]), torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
    assert len(sums) == 2
    assert set(sums) == {4, 1} == set(sums.ids_K.tolist())
    assert sums[4].tolist() == [2.0, 1.0]
    assert [token for token in range(-9, 99) if token in sums] == [1, 4]
    with pytest.raises(KeyError):
        sums[3]


def test_token_sums_stay_right_while_they_grow() -> None:
    sums = TokenSums(1, 50)
    for token in range(49, -1, -1):
        sums.add_(torch.tensor([token, 7]), torch.tensor([[float(token)], [1.0]]))
    expected_V = torch.arange(50.0, dtype=torch.float64)
    expected_V[7] += 50
    assert torch.equal(sums.dense_VN().squeeze(1), expected_V)
    assert torch.equal(sums.rows_KN.squeeze(1), expected_V[sums.ids_K])


def pairs_of(keys: Keys) -> PairSums:
    sums = PairSums(N, V)
    sums.add_(keys.gold_T, keys.alt_T, keys.keys_TN)
    return sums


def counts_VV(keys: Keys) -> Tensor:
    counts = torch.zeros(V, V, dtype=torch.int64)
    for _, gold, alt in keys.rows:
        counts[gold, alt] += 1
    return counts


def test_pair_sums_are_a_mapping_of_the_pairs_that_occur() -> None:
    sums = PairSums(2, 6)
    gold_T, alt_T = torch.tensor([4, 1, 4, 4]), torch.tensor([5, 4, 5, 0])
    sums.add_(gold_T, alt_T, torch.tensor([[1.0, 0], [0, 1], [1, 1], [7, 7]]))
    assert dict(zip(sums, sums.counts_K.tolist(), strict=True)) == {(1, 4): 1, (4, 0): 1, (4, 5): 2}
    assert len(sums) == 3
    assert list(sums) == list(zip(sums.gold_K.tolist(), sums.alt_K.tolist(), strict=True))
    assert sums[4, 5].tolist() == [2.0, 1.0]
    assert sums[4, 0].tolist() == [7.0, 7.0]
    # (3, 10) and (5, -2) have the codes of pairs that occur.
    for absent in ((5, 4), (3, 10), (5, -2), (0, 0)):
        assert absent not in sums
        with pytest.raises(KeyError):
            sums[absent]


@given(seed=seeds, cut=st.integers(0, 40))
def test_pairs_of_parts_add_up_and_subtract_with_their_counts(seed: int, cut: int) -> None:
    keys = random_keys(seed, 40)
    first, second = pairs_of(keys.part(slice(cut))), pairs_of(keys.part(slice(cut, None)))
    whole = first.combined(second, 1)
    assert_close(dense_VVN(whole), dense_VVN(pairs_of(keys)), **TIGHT)
    for sums, rows in ((whole, keys), (whole.combined(second, -1), keys.part(slice(cut)))):
        expected_VV = counts_VV(rows)
        assert torch.equal(expected_VV[sums.gold_K, sums.alt_K], sums.counts_K)
        assert len(sums) == int((expected_VV > 0).sum())
    assert_close(dense_VVN(whole.combined(second, -1)), dense_VVN(first), **TIGHT)


@pytest.mark.parametrize("block", [1, 7, 1024])
@given(seed=seeds)
def test_alpha_is_put_in_by_gold_token(block: int, seed: int) -> None:
    keys, alpha_V = random_keys(seed, 60), torch.linspace(0, 1, V).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grom.sums, "BLOCK_ROWS", block)
        found = pairs_of(keys).by_alternative(alpha_V)
    expected_VN = torch.zeros(V, N).double()
    for key_N, gold, alt in keys.rows:
        expected_VN[alt] += alpha_V[gold] * key_N
    assert_close(found.dense_VN(), expected_VN, **TIGHT)
    assert set(found) == {alt for _, gold, alt in keys.rows if alpha_V[gold] > 0}


@given(seed=seeds, cut=st.integers(1, N - 1))
def test_columns_are_those_inputs_of_the_same_pairs(seed: int, cut: int) -> None:
    keys = random_keys(seed, 30)
    sums = pairs_of(keys)
    parts = sums.columns(0, cut), sums.columns(cut, N)
    assert_close(torch.cat([dense_VVN(part) for part in parts], dim=2), dense_VVN(sums), **TIGHT)
    assert all(part.counts_K.sum() == 30 for part in parts)


@given(seed=seeds)
def test_only_the_tokens_that_are_asked_for_are_left(seed: int) -> None:
    keys = random_keys(seed, 30)
    sums, kept_V = TokenSums(N, V), torch.arange(V) % 2 == 0
    sums.add_(keys.gold_T, keys.keys_TN)
    left = sums.only(kept_V)
    assert set(left) == {token for token in sums if token % 2 == 0}
    assert_close(left.dense_VN(), sums.dense_VN() * kept_V.unsqueeze(1), **TIGHT)


def test_large_vocabularies_do_not_mix_up_pairs() -> None:
    vocab_size = 262_144
    tokens = torch.tensor([0, 1, 65_535, 262_143])
    gold_T, alt_T = torch.cartesian_prod(tokens, tokens).mT
    sums = PairSums(1, vocab_size)
    sums.add_(gold_T, alt_T, torch.arange(16.0).unsqueeze(1))
    for number, (gold, alt) in enumerate(zip(gold_T.tolist(), alt_T.tolist(), strict=True)):
        assert sums[gold, alt].item() == number
