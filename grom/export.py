"""What an update is made of: its rank, and the two thin matrices that a LoRA adapter stores.

Shapes: N inputs of W, M outputs of W, K rank or edited rows of the update as it is kept,
R rank of the adapter.

An adapter adds B A with A (R, N) and B (M, R).  P has rank K at most, so it is exact from some R
on; below, the truncated singular value decomposition is the nearest matrix of rank R (Eckart and
Young), and it leaves sqrt(sum_{i > R} sigma_i^2) of |P| = sqrt(sum_i sigma_i^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.target import LowRank

ROWS = 512
"""Of a product that are formed at once."""
EXACT = 1e-7
"""Singular values below this share of the largest vanish in float32, in which adapters are kept."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The singular values of an update, the largest first."""

    sigma_K: Tensor
    """float64; at most min(M, N) of them."""

    def rank(self, tolerance: float = EXACT) -> int:
        """Numerical rank: singular values above this share of the largest."""
        if len(self.sigma_K) == 0:
            return 0
        return int((self.sigma_K > tolerance * self.sigma_K[0]).sum())

    @property
    def norm(self) -> float:
        """Frobenius norm."""
        return float(torch.linalg.vector_norm(self.sigma_K))

    @property
    def spectral_norm(self) -> float:
        """The largest singular value."""
        return float(self.sigma_K[0]) if len(self.sigma_K) else 0.0

    def error(self, rank: int) -> float:
        """|P - P_rank| / |P| of the nearest matrix of that rank, 0 to 1."""
        norm = self.norm
        return float(torch.linalg.vector_norm(self.sigma_K[rank:])) / norm if norm else 0.0


@dataclass(frozen=True, slots=True)
class Adapter:
    """P as B A, exact or truncated."""

    A_RN: Tensor
    B_MR: Tensor
    spectrum: Spectrum
    """Of P whole."""
    kept: int
    """Singular values of P that it has; R, unless it was padded."""
    rounding: float = 0.0
    """What a lower precision lost, as a share of |P|."""

    @property
    def rank(self) -> int:
        """R."""
        return len(self.A_RN)

    @property
    def is_exact(self) -> bool:
        """Whether no singular value was left out."""
        return self.kept >= self.spectrum.rank()

    @property
    def error(self) -> float:
        """|P - B A| / |P|: what was left out, and what rounding lost."""
        left_out = 0.0 if self.is_exact else self.spectrum.error(self.kept)
        return math.hypot(left_out, self.rounding)

    def padded(self, rank: int) -> Adapter:
        """The same product with rows and columns of zeros up to a rank."""
        missing = rank - self.rank
        if missing <= 0:
            return self
        A_RN = torch.cat([self.A_RN, self.A_RN.new_zeros(missing, self.A_RN.shape[1])])
        B_MR = torch.cat([self.B_MR, self.B_MR.new_zeros(len(self.B_MR), missing)], 1)
        return replace(self, A_RN=A_RN, B_MR=B_MR)

    def to(self, dtype: torch.dtype) -> Adapter:
        """Both matrices in another precision, and what that loses."""
        A_RN, B_MR = self.A_RN.to(dtype), self.B_MR.to(dtype)
        lost, norm = 0.0, self.spectrum.norm
        blocks = (torch.split(matrix_MR, ROWS) for matrix_MR in (self.B_MR, B_MR))
        for exact_KR, now_KR in zip(*blocks, strict=True):
            missing_KN = exact_KR @ self.A_RN - now_KR.double() @ A_RN.double()
            lost += float(missing_KN.square().sum())
        rounding = lost**0.5 / norm if norm else 0.0
        return replace(self, A_RN=A_RN, B_MR=B_MR, rounding=math.hypot(self.rounding, rounding))

    def update(self) -> LowRank:
        """What the adapter adds, as an update in float64."""
        return LowRank(self.A_RN.double(), left_MK=self.B_MR.double())


def spectrum(update: LowRank) -> Spectrum:
    """Singular values of an update, without forming it where it is kept as factors or rows."""
    _, core, _ = _reduced(update)
    return Spectrum(torch.linalg.svdvals(core))


def adapter(update: LowRank, rank: int | None = None) -> Adapter:
    """A and B of an update, float64: the nearest product of that rank.

    The singular values are shared out evenly, |A| = |B|, so that neither loses digits in a lower
    precision.

    Args:
        update: P.
        rank: R at most; not given: the numerical rank, which is exact.  An R above it is not used.

    Raises:
        ValueError: a rank below 1.
    """
    if rank is not None and rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    left_MJ, core, right_JN = _reduced(update)
    U_JK, sigma_K, V_KJ = torch.linalg.svd(core, full_matrices=False)
    found = Spectrum(sigma_K)
    size = max(1, min(found.rank(), found.rank() if rank is None else rank))
    root_R = sigma_K[:size].sqrt()
    A_RN, B_MR = root_R.unsqueeze(1) * V_KJ[:size], U_JK[:, :size] * root_R
    if right_JN is not None:
        A_RN = A_RN @ right_JN
    if left_MJ is not None:
        B_MR = left_MJ @ B_MR
    if update.rows_K is not None:
        assert update.num_outputs is not None
        B_MR = B_MR.new_zeros(update.num_outputs, size).index_add_(0, update.rows_K, B_MR)
    return Adapter(A_RN, B_MR, found, size)


def total_error(adapters: list[Adapter]) -> float:
    """|P - B A| / |P| over all sites together."""
    lost = sum((part.error * part.spectrum.norm) ** 2 for part in adapters)
    whole = sum(part.spectrum.norm**2 for part in adapters)
    return float((lost / whole) ** 0.5) if whole else 0.0


def inner(one: LowRank, other: LowRank) -> float:
    """<P, Q>, the sum over products of entries; thin factors are not multiplied out."""
    if one.left_MK is not None and other.left_MK is not None:
        left, right = one.left_MK.mT @ other.left_MK, one.right_KN @ other.right_KN.mT
        return float((left * right).sum())
    if one.rows_K is not None and other.rows_K is not None:
        at_one, at_other = (one.rows_K.unsqueeze(1) == other.rows_K).nonzero(as_tuple=True)
        return float((one.right_KN[at_one] * other.right_KN[at_other]).sum())
    return float((one.dense() * other.dense()).sum())


def _reduced(update: LowRank) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """P = left core right with orthonormal columns of left and rows of right; None: identity.

    Of an update that is kept as rows, only those rows.
    """
    if update.left_MK is None:
        return None, update.right_KN, None
    num_outputs, rank = update.left_MK.shape
    if rank >= min(num_outputs, update.right_KN.shape[1]):
        return None, update.dense(), None
    left_MJ, left_core = torch.linalg.qr(update.left_MK)
    right_NJ, right_core = torch.linalg.qr(update.right_KN.mT)
    return left_MJ, left_core @ right_core.mT, right_NJ.mT
