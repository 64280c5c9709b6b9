"""Moments are sums: they do not know how the keys came, and they add and subtract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import grom.moments
from grom.moments import KeyMoments, product
from tests.reference import Keys, Tolerance, cross_of, dense_VVN, random_keys

seeds = st.integers(0, 10_000)
TIGHT: Tolerance = {"rtol": 0.0, "atol": 1e-12}
"""Sums of at most 40 float64 products of order 1: rounding of some 1e-15 each."""


def assert_same(one: KeyMoments, other: KeyMoments) -> None:
    assert one.num_tokens == other.num_tokens
    assert torch.equal(one.counts_V, other.counts_V)
    assert_close(one.gram_NN, other.gram_NN, **TIGHT)
    assert_close(one.sums_dense(), other.sums_dense(), **TIGHT)
    assert_close(one.alt_sums_dense(), other.alt_sums_dense(), **TIGHT)
    assert set(one.sums) == set(other.sums)
    assert set(one.pair_sums) == set(other.pair_sums)
    assert_close(dense_VVN(one.pair_sums), dense_VVN(other.pair_sums), **TIGHT)


@given(seed=seeds)
def test_moments_equal_the_sums_written_as_loops(seed: int) -> None:
    keys = random_keys(seed, 30)
    moments = keys.moments()
    sums_VN, pairs_VVN = torch.zeros(8, 5).double(), torch.zeros(8, 8, 5).double()
    for key_N, gold, alt in keys.rows:
        sums_VN[gold] += key_N
        pairs_VVN[gold, alt] += key_N
    assert_close(moments.gram_NN, cross_of(keys.keys_TN, keys.keys_TN), **TIGHT)
    assert_close(moments.sums_dense(), sums_VN, **TIGHT)
    assert_close(dense_VVN(moments.pair_sums), pairs_VVN, **TIGHT)
    assert moments.counts_V.tolist() == [keys.gold_T.tolist().count(v) for v in range(8)]
    assert moments.num_tokens == 30


@given(seed=seeds, size=st.integers(1, 40))
def test_moments_do_not_depend_on_the_batch_size(seed: int, size: int) -> None:
    keys = random_keys(seed, 40)
    batched = KeyMoments.zeros(5, 8)
    for start in range(0, 40, size):
        batch = keys.part(slice(start, start + size))
        batched.update_(batch.keys_TN, batch.gold_T, batch.alt_T)
    assert_same(batched, keys.moments())


@given(seed=seeds)
def test_moments_do_not_depend_on_the_order(seed: int) -> None:
    keys = random_keys(seed, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    assert_same(keys.part(order).moments(), keys.moments())


@given(seed=seeds, cut=st.integers(0, 40))
def test_shards_add_up_to_the_whole(seed: int, cut: int) -> None:
    keys = random_keys(seed, 40)
    first, second = keys.part(slice(cut)), keys.part(slice(cut, None))
    assert_same(first.moments() + second.moments(), keys.moments())


@given(seed=seeds, cut=st.integers(0, 40))
def test_a_subtracted_request_was_never_there(seed: int, cut: int) -> None:
    """Nor are its tokens and pairs, which it may have had alone."""
    keys = random_keys(seed, 40)
    request = keys.part(slice(cut, None)).moments()
    assert_same(keys.moments() - request, keys.part(slice(cut)).moments())


def test_adding_leaves_the_summands_alone() -> None:
    one, other = random_keys(0, 10).moments(), random_keys(1, 10).moments()
    total = one + other
    total.update_(torch.ones(1, 5), torch.tensor([3]), torch.tensor([4]))
    assert_same(one, random_keys(0, 10).moments())
    assert_same(other, random_keys(1, 10).moments())


def test_weighted_alternatives_are_summed_with_their_weights_and_not_by_pair() -> None:
    moments = KeyMoments.zeros(2, 8)
    alt_T, weight_T = torch.tensor([4, 5]), torch.tensor([0.0, 0.5])
    moments.update_(torch.eye(2), torch.tensor([0, 1]), alt_T, weight_T)
    assert list(moments.alt_sums) == [5]
    assert moments.alt_sums[5].tolist() == [0.0, 0.5]
    assert not moments.pair_sums
    assert ((moments + moments) - moments).alt_sums[5].tolist() == [0.0, 0.5]


def test_without_alternatives_there_are_no_pairs() -> None:
    moments = KeyMoments.zeros(2, 8).update_(torch.eye(2), torch.tensor([0, 1]))
    assert len(moments.sums) == 2
    assert not moments.pair_sums


@given(seed=seeds, cut=st.integers(1, 4))
def test_a_block_is_the_moments_of_those_inputs_alone(seed: int, cut: int) -> None:
    keys = random_keys(seed, 30)
    moments = keys.moments()
    for start, stop in ((0, cut), (cut, 5)):
        alone = Keys(keys.keys_TN[:, start:stop], keys.gold_T, keys.alt_T).moments()
        assert_same(moments.block(start, stop), alone)


@pytest.mark.parametrize("strip", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gram_made_in_strips_is_the_plain_product(
    monkeypatch: pytest.MonkeyPatch, strip: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(grom.moments, "STRIP_INPUTS", strip)
    keys, more = random_keys(0, 30), random_keys(1, 7)
    moments = KeyMoments.zeros(5, 8, keeps_sums=False)
    moments.update_(keys.keys_TN.to(dtype), keys.gold_T)
    moments.update_(more.keys_TN.to(dtype), more.gold_T)
    keys_TN = torch.cat([keys.keys_TN, more.keys_TN]).to(dtype).double()
    # bfloat16: exact products, summed in float32: 37 * 6e-8 at size 40.
    assert_close(moments.gram_NN, keys_TN.mT @ keys_TN, rtol=0, atol=1e-4)
    if dtype == torch.float64:
        assert_close(moments.gram_NN, keys_TN.mT @ keys_TN, **TIGHT)
    assert torch.equal(moments.gram_NN, moments.gram_NN.mT)


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


@pytest.mark.parametrize("exact_inputs", [0, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_floats_are_multiplied_exactly_and_summed_in_float64(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, exact_inputs: int
) -> None:
    """Of forget keys at every width; of many retain inputs products are summed in float32 first."""
    monkeypatch.setattr(grom.moments, "EXACT_INPUTS", exact_inputs)
    keys = random_keys(0, 40)
    short_TN = keys.keys_TN.to(dtype)
    forget = KeyMoments.zeros(5, 8).update_(short_TN, keys.gold_T)
    assert_same(forget, KeyMoments.zeros(5, 8).update_(short_TN.double(), keys.gold_T))
    assert_close(forget.gram_NN, cross_of(short_TN, short_TN), **TIGHT)
    retain = KeyMoments.zeros(5, 8, keeps_sums=False).update_(short_TN, keys.gold_T)
    # Products are exact (float32: rounded once); their sum is in float32: 40 * 6e-8 at size 40.
    assert_close(retain.gram_NN, forget.gram_NN, rtol=0, atol=1e-4)


@pytest.mark.parametrize("exact_inputs", [0, 4096])
@given(seed=seeds, cut=st.integers(0, 40))
def test_forget_moments_of_float32_keys_do_not_depend_on_how_these_are_cut(
    exact_inputs: int, seed: int, cut: int
) -> None:
    keys = random_keys(seed, 40)
    short = Keys(keys.keys_TN.float(), keys.gold_T, keys.alt_T)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grom.moments, "EXACT_INPUTS", exact_inputs)
        parts = short.part(slice(cut)).moments(), short.part(slice(cut, None)).moments()
        assert_same(parts[0] + parts[1], short.moments())


def test_blocks_of_keys_are_added_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grom.moments, "BLOCK_TOKENS", 1)
    monkeypatch.setattr(grom.moments, "EXACT_INPUTS", 0)
    keys_TN = torch.tensor([[4096.0], [1.0]])  # 2^24 + 1 does not exist in float32
    moments = KeyMoments.zeros(1, 8, keeps_sums=False).update_(keys_TN, torch.tensor([0, 0]))
    assert moments.gram_NN.item() == 2**24 + 1


def test_a_bfloat16_product_is_not_rounded_to_bfloat16() -> None:
    key_TN = torch.tensor([[1 + 2**-7]], dtype=torch.bfloat16)
    assert product(key_TN, key_TN).item() == (1 + 2**-7) ** 2
