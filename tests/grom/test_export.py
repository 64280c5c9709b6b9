"""Ranks, errors and factors of an update agree with the dense matrix, however it is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from grom.export import Adapter, Spectrum, adapter, inner, spectrum, total_error
from grom.target import LowRank
from tests.reference import Tolerance, random_matrix

KINDS = ("whole", "factors", "thick factors", "rows")
every_kind = pytest.mark.parametrize("kind", KINDS)
CLOSE: Tolerance = {"rtol": 1e-10, "atol": 1e-12}
"""float64, of matrices with entries near 1."""


def update_of(kind: str, seed: int = 0) -> LowRank:
    """A matrix (7, 9)."""
    right, left = random_matrix(seed, 3, 9), random_matrix(seed + 50, 7, 3)
    if kind == "whole":
        return LowRank(left @ right)
    if kind == "factors":
        return LowRank(right, left_MK=left)
    if kind == "thick factors":  # more of them than outputs
        return LowRank(random_matrix(seed, 8, 9), left_MK=random_matrix(seed + 50, 7, 8))
    return LowRank(right, rows_K=torch.tensor([5, 0, 2]), num_outputs=7)


@every_kind
def test_the_spectrum_is_that_of_the_matrix(kind: str) -> None:
    update = update_of(kind)
    found, P_MN = spectrum(update), update.dense()
    expected = torch.linalg.svdvals(P_MN)
    assert_close(found.sigma_K, expected[: len(found.sigma_K)], **CLOSE)
    assert expected[len(found.sigma_K) :].sum() < 1e-12
    assert found.rank() == torch.linalg.matrix_rank(P_MN)
    assert found.norm == pytest.approx(update.norm())
    assert found.spectral_norm == pytest.approx(float(torch.linalg.matrix_norm(P_MN, 2)))


@every_kind
def test_an_adapter_of_full_rank_is_the_matrix(kind: str) -> None:
    update = update_of(kind)
    for rank in (None, 7, 100):
        made = adapter(update, rank)
        assert made.rank == spectrum(update).rank()
        assert made.error == 0
        assert_close(made.B_MR @ made.A_RN, update.dense(), **CLOSE)
        assert_close(made.update().dense(), update.dense(), **CLOSE)


@every_kind
@pytest.mark.parametrize("rank", [1, 2])
def test_a_truncated_adapter_is_the_nearest_matrix_and_says_how_far_it_is(
    kind: str, rank: int
) -> None:
    P_MN = update_of(kind).dense()
    U, sigma, V = torch.linalg.svd(P_MN)
    nearest = (U[:, :rank] * sigma[:rank]) @ V[:rank]
    made = adapter(update_of(kind), rank)
    assert made.rank == rank
    assert_close(made.B_MR @ made.A_RN, nearest, **CLOSE)
    error = (P_MN - made.B_MR @ made.A_RN).norm() / P_MN.norm()
    assert made.error == pytest.approx(float(error), rel=1e-9)
    assert made.error > 0.01
    assert float(made.A_RN.norm()) == pytest.approx(float(made.B_MR.norm()))


def test_a_wide_and_a_tall_matrix_are_alike() -> None:
    P_MN = random_matrix(0, 4, 11)
    wide, tall = adapter(LowRank(P_MN), 2), adapter(LowRank(P_MN.mT), 2)
    assert_close(wide.B_MR @ wide.A_RN, (tall.B_MR @ tall.A_RN).mT, **CLOSE)


def test_the_numerical_rank_counts_what_float32_can_hold() -> None:
    sigma = torch.tensor([2.0, 1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    found = Spectrum(sigma)
    assert [found.rank(t) for t in (1e-2, 1e-4, 1e-7, 1e-12)] == [2, 3, 4, 5]
    assert found.rank() == 4
    assert found.error(0) == 1
    assert found.error(2) == pytest.approx(1e-3 / 5**0.5, rel=1e-3)


def test_an_update_of_zeros_has_no_rank_and_an_adapter_all_the_same() -> None:
    made = adapter(LowRank(torch.zeros(3, 4).double()))
    assert (made.spectrum.rank(), made.spectrum.norm, made.error) == (0, 0, 0)
    assert made.rank == 1
    assert not (made.B_MR @ made.A_RN).any()
    assert Spectrum(torch.empty(0)).rank() == 0
    assert total_error([made]) == 0


def test_padding_changes_no_product() -> None:
    made = adapter(update_of("rows"))
    wider = made.padded(6)
    assert wider.A_RN.shape == (6, 9)
    assert wider.B_MR.shape == (7, 6)
    assert torch.equal(wider.B_MR @ wider.A_RN, made.B_MR @ made.A_RN)
    assert made.padded(2) is made
    assert wider.error == made.error == 0
    short = adapter(update_of("rows"), 1)
    assert short.padded(6).error == short.error > 0


def test_the_error_of_all_sites_weighs_them_by_their_norm() -> None:
    updates = [update_of("whole"), update_of("factors", 1).scaled(3)]
    made = [adapter(update, 1) for update in updates]
    lost = sum(
        float((u.dense() - a.B_MR @ a.A_RN).square().sum())
        for u, a in zip(updates, made, strict=True)
    )
    whole = sum(update.norm() ** 2 for update in updates)
    assert total_error(made) == pytest.approx((lost / whole) ** 0.5, rel=1e-9)
    assert total_error([adapter(update) for update in updates]) == 0


def test_float32_loses_what_float32_loses() -> None:
    update = update_of("factors")
    made: Adapter = adapter(update).to(torch.float32)
    assert made.A_RN.dtype == torch.float32
    error = (made.update().dense() - update.dense()).norm() / update.norm()
    assert 0 < float(error) < 1e-6


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_the_inner_product_is_that_of_the_matrices(one: str, other: str) -> None:
    P, Q = update_of(one), update_of(other, 7)
    assert inner(P, Q) == pytest.approx(float((P.dense() * Q.dense()).sum()), rel=1e-10)
    assert inner(P, P) == pytest.approx(P.norm() ** 2, rel=1e-10)


def test_rows_that_both_have_are_matched_by_number() -> None:
    one = LowRank(random_matrix(0, 2, 4), rows_K=torch.tensor([3, 8]), num_outputs=9)
    other = LowRank(random_matrix(1, 3, 4), rows_K=torch.tensor([8, 1, 0]), num_outputs=9)
    assert inner(one, other) == pytest.approx(float(one.right_KN[1] @ other.right_KN[0]))


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        adapter(update_of("whole"), 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_errors_never_grow_with_the_rank(outputs: int, inputs: int, rank: int, seed: int) -> None:
    update = LowRank(random_matrix(seed, rank, inputs), left_MK=random_matrix(seed, outputs, rank))
    errors = [adapter(update, size).error for size in range(1, 7)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0
