"""Moments are sums: they do not know how the keys came, and they add and subtract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import grom.moments
from grom.moments import KeyMoments, TokenSums, product
from tests.reference import Keys, Tolerance, cross_of, random_keys

seeds = st.integers(0, 10_000)
ALPHA_V = torch.linspace(0, 1, 8, dtype=torch.float64)
TIGHT: Tolerance = {"rtol": 0.0, "atol": 1e-12}
"""Sums of at most 40 float64 products of order 1: rounding of some 1e-15 each."""


def assert_same(one: KeyMoments, other: KeyMoments) -> None:
    assert one.num_tokens == other.num_tokens
    assert torch.equal(one.counts_V, other.counts_V)
    assert_close(one.gram_NN, other.gram_NN, **TIGHT)
    assert_close(one.sums_dense(), other.sums_dense(), **TIGHT)
    assert_close(one.alt_sums_dense(), other.alt_sums_dense(), **TIGHT)


def part(keys: Keys, index: Tensor | slice) -> Keys:
    return Keys(keys.keys_TN[index], keys.gold_T[index], keys.alt_T[index])


@given(seed=seeds)
def test_moments_equal_the_sums_written_as_loops(seed: int) -> None:
    keys = random_keys(seed, 30)
    moments = keys.moments(ALPHA_V)
    sums_VN, alt_sums_VN = torch.zeros(2, 8, 5, dtype=torch.float64)
    for key_N, gold, alt in keys.rows:
        sums_VN[gold] += key_N
        alt_sums_VN[alt] += ALPHA_V[gold] * key_N
    assert_close(moments.gram_NN, cross_of(keys.keys_TN, keys.keys_TN), **TIGHT)
    assert_close(moments.sums_dense(), sums_VN, **TIGHT)
    assert_close(moments.alt_sums_dense(), alt_sums_VN, **TIGHT)
    assert moments.counts_V.tolist() == [keys.gold_T.tolist().count(v) for v in range(8)]
    assert moments.num_tokens == 30


@given(seed=seeds, size=st.integers(1, 40))
def test_moments_do_not_depend_on_the_batch_size(seed: int, size: int) -> None:
    keys = random_keys(seed, 40)
    batched = KeyMoments.zeros(5, 8)
    for start in range(0, 40, size):
        batch = part(keys, slice(start, start + size))
        batched.update_(batch.keys_TN, batch.gold_T, batch.alt_T, ALPHA_V[batch.gold_T])
    assert_same(batched, keys.moments(ALPHA_V))


@given(seed=seeds)
def test_moments_do_not_depend_on_the_order(seed: int) -> None:
    keys = random_keys(seed, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    assert_same(part(keys, order).moments(ALPHA_V), keys.moments(ALPHA_V))


@given(seed=seeds, cut=st.integers(0, 40))
def test_shards_add_up_to_the_whole(seed: int, cut: int) -> None:
    keys = random_keys(seed, 40)
    first, second = part(keys, slice(cut)), part(keys, slice(cut, None))
    together = first.moments(ALPHA_V) + second.moments(ALPHA_V)
    assert_same(together, keys.moments(ALPHA_V))


@given(seed=seeds, cut=st.integers(1, 39))
def test_a_subtracted_request_was_never_there(seed: int, cut: int) -> None:
    keys = random_keys(seed, 40)
    request = part(keys, slice(cut, None)).moments(ALPHA_V)
    assert_same(keys.moments(ALPHA_V) - request, part(keys, slice(cut)).moments(ALPHA_V))


def test_adding_leaves_the_summands_alone() -> None:
    one, other = random_keys(0, 10).moments(ALPHA_V), random_keys(1, 10).moments(ALPHA_V)
    total = one + other
    total.update_(torch.ones(1, 5), torch.tensor([3]))
    assert_same(one, random_keys(0, 10).moments(ALPHA_V))
    assert_same(other, random_keys(1, 10).moments(ALPHA_V))


def test_alternatives_of_weight_zero_take_no_memory() -> None:
    moments = KeyMoments.zeros(2, 8)
    alt_T, weight_T = torch.tensor([4, 5]), torch.tensor([0.0, 0.5])
    moments.update_(torch.eye(2), torch.tensor([0, 1]), alt_T, weight_T)
    assert list(moments.alt_sums) == [5]
    assert moments.alt_sums[5].tolist() == [0.0, 0.5]


def test_an_alternative_without_a_weight_counts_fully() -> None:
    moments = KeyMoments.zeros(2, 8)
    moments.update_(2 * torch.eye(2), torch.tensor([0, 1]), torch.tensor([4, 4]))
    assert moments.alt_sums[4].tolist() == [2.0, 2.0]


@given(seed=seeds, cut=st.integers(1, 4))
def test_a_block_is_the_moments_of_those_inputs_alone(seed: int, cut: int) -> None:
    keys = random_keys(seed, 30)
    moments = keys.moments(ALPHA_V)
    for start, stop in ((0, cut), (cut, 5)):
        alone = Keys(keys.keys_TN[:, start:stop], keys.gold_T, keys.alt_T).moments(ALPHA_V)
        assert_same(moments.block(start, stop), alone)


@pytest.mark.parametrize("strip", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gram_made_in_strips_is_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, strip: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(grom.moments, "STRIP_INPUTS", strip)
    keys, more = random_keys(0, 30), random_keys(1, 7)
    moments = KeyMoments.zeros(5, 8).update_(keys.keys_TN.to(dtype), keys.gold_T)
    moments.update_(more.keys_TN.to(dtype), more.gold_T)
    keys_TN = torch.cat([keys.keys_TN, more.keys_TN]).to(dtype).double()
    # bfloat16: exact products, summed in float32: 37 * 6e-8 at size 40.
    assert_close(moments.gram_NN, keys_TN.mT @ keys_TN, rtol=0, atol=1e-4)
    if dtype == torch.float64:
        assert_close(moments.gram_NN, keys_TN.mT @ keys_TN, **TIGHT)
    assert torch.equal(moments.gram_NN, moments.gram_NN.mT)


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


def test_plain_dictionaries_are_accepted_as_sums() -> None:
    row_N = torch.tensor([1.0, 2.0])
    gram_NN = torch.eye(2, dtype=torch.float64)
    moments = KeyMoments(gram_NN, {3: row_N}, torch.tensor([0, 0, 0, 1]), 1)
    moments.update_(row_N.unsqueeze(0), torch.tensor([3]))
    assert moments.sums[3].tolist() == [2.0, 4.0]


def test_retain_moments_keep_no_sums() -> None:
    keys = random_keys(0, 20)
    moments = KeyMoments.zeros(5, 8, keeps_sums=False).update_(keys.keys_TN, keys.gold_T)
    assert len(moments.sums) == 0
    assert torch.equal(moments.counts_V, keys.moments().counts_V)
    assert torch.equal(moments.gram_NN, keys.moments().gram_NN)


def test_moments_of_different_kinds_do_not_add() -> None:
    one = KeyMoments.zeros(5, 8)
    for other in (
        KeyMoments.zeros(4, 8),
        KeyMoments.zeros(5, 9),
        KeyMoments.zeros(5, 8, keeps_sums=False),
    ):
        with pytest.raises(ValueError, match="different kinds"):
            one + other
        with pytest.raises(ValueError, match="different kinds"):
            one - other


@pytest.mark.parametrize("shape", [(3, 5), (2, 4), (2, 5, 1)])
def test_keys_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \(2, 5\)"):
        KeyMoments.zeros(5, 8).update_(torch.zeros(shape), torch.tensor([0, 1]))


@pytest.mark.parametrize("token", [-1, 8])
def test_a_gold_token_outside_the_vocabulary_is_refused(token: int) -> None:
    moments = KeyMoments.zeros(5, 8)
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        moments.update_(torch.ones(2, 5), torch.tensor([0, token]))
    assert_same(moments, KeyMoments.zeros(5, 8))


@pytest.mark.parametrize("token", [-1, 8])
def test_an_alternative_outside_the_vocabulary_is_refused(token: int) -> None:
    moments = KeyMoments.zeros(5, 8)
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        moments.update_(torch.ones(1, 5), torch.tensor([0]), torch.tensor([token]))
    assert_same(moments, KeyMoments.zeros(5, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_floats_are_multiplied_exactly_and_summed_in_float64(dtype: torch.dtype) -> None:
    keys = random_keys(0, 40)
    short_TN = keys.keys_TN.to(dtype)
    moments = KeyMoments.zeros(5, 8).update_(short_TN, keys.gold_T)
    # Products are exact (float32: rounded once); their sum is in float32: 40 * 6e-8 at size 40.
    assert_close(moments.gram_NN, cross_of(short_TN, short_TN), rtol=0, atol=1e-4)
    exact = Keys(short_TN.double(), keys.gold_T, keys.alt_T).moments()
    assert_close(moments.sums_dense(), exact.sums_dense(), **TIGHT)


def test_blocks_of_keys_are_added_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grom.moments, "BLOCK_TOKENS", 1)
    keys_TN = torch.tensor([[4096.0], [1.0]])  # 2^24 + 1 does not exist in float32
    moments = KeyMoments.zeros(1, 8).update_(keys_TN, torch.tensor([0, 0]))
    assert moments.gram_NN.item() == 2**24 + 1


def test_a_bfloat16_product_is_not_rounded_to_bfloat16() -> None:
    key_TN = torch.tensor([[1 + 2**-7]], dtype=torch.bfloat16)
    assert product(key_TN, key_TN).item() == (1 + 2**-7) ** 2
