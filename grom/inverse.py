"""An inverse of the retain part of a ridge system, made once for many small forget sets.

Shapes: S forget positions, R retain tokens, N inputs of W, Q probes, V vocabulary.

mu is a share of the diagonal of A, so it changes with the batch: little, for the forget part of A
is small (w_f beside w_r).  C = (w_r/r X_r X_rT + mu_0 I)^-1 is made at mu_0, the ridge for forget
keys of the size of retain keys; the rest E = mu - mu_0 is one number for each site.  Then

    B^-1 = (w_r/r X_r X_rT + mu I)^-1 = C (I + E C)^-1 = C p(E C)

with the polynomial p that is nearest to 1/(1+t) where the eigenvalues of E C are: between 0 and the
extremes of E/mu_0, since C <= 1/mu_0.  Each degree takes another product with C: none with an
absolute mu, two where E is a thousandth of mu_0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from grom.config import RidgeConfig
from grom.errors import EmptySet, NonFiniteKeys, NotPositiveDefinite
from grom.moments import KeyMoments
from grom.solve import POWER_STEPS

MAX_DEGREE = 6
TOLERANCE = 1e-10
"""Relative error of p."""
NUM_PROBES = 2


@dataclass(frozen=True, slots=True)
class RetainInverse:
    """C, and what of the retain part is needed besides; float64."""

    inverse_NN: Tensor
    """C = (w_r/r X_r X_rT + mu_0 I)^-1."""
    diagonal_N: Tensor
    """Of w_r/r X_r X_rT."""
    mus: tuple[float, ...]
    """mu_0 of each site."""
    widths: tuple[int, ...]
    """Inputs of each site."""
    counts_V: Tensor
    """How often each gold token occurs in the retain set, int64."""
    num_retain: int
    """r."""
    extremes_2N: Tensor
    """Where the retain part with mu_0 is largest and smallest, nearly: unit vectors."""
    high: float
    """Its largest eigenvalue, nearly ..."""
    low: float
    """... and its smallest."""
    probes_NQ: Tensor
    """Random vectors v ..."""
    answers_NQ: Tensor
    """... and w_r/r X_r X_rT v: A is checked without the gram."""

    def to(self, device: torch.device) -> RetainInverse:
        """The same on a device."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("inverse_NN", "diagonal_N", "extremes_2N", "probes_NQ", "answers_NQ")
        }
        return replace(self, counts_V=self.counts_V.to(device), **moved)


@dataclass(frozen=True, slots=True)
class Shift:
    """How the ridge of a batch differs from the one that was inverted."""

    mus: tuple[float, ...]
    """Ridge of each site, as `grom.solve.factorise` has it."""
    peak_ratios: tuple[float, ...]
    mu_N: Tensor
    """The same for each input."""
    extra_N: Tensor
    """Diagonal of E = mu - mu_0."""
    coefficients: tuple[float, ...] | None
    """Of p, from the constant on; None: no polynomial of a degree worth having is near enough."""

    def load(self, num_forget: int) -> float:
        """Rows that are multiplied by C, as a share of N."""
        if self.coefficients is None:
            return math.inf
        return len(self.coefficients) * num_forget / len(self.extra_N)


def invert_retain(
    retain: KeyMoments, ridge: RidgeConfig, *, site: str, widths: Sequence[int] | None = None
) -> RetainInverse:
    """C and its companions; three times the work of a Cholesky factor, once for all batches.

    Memory: four matrices (N, N), the gram among them.

    Args:
        retain: moments of the retain tokens.
        ridge: w_r, w_f and rho or mu.
        site: for error messages only.
        widths: inputs of the sites whose keys stand side by side.

    Raises:
        EmptySet: there are no retain tokens, or they have no weight: there is nothing to keep.
        NonFiniteKeys: NaN or Inf in the moments.
        NotPositiveDefinite: mu is too small for these keys.
    """
    if retain.num_tokens <= 0 or ridge.w_retain == 0:
        raise EmptySet("retain", site)
    if not bool(torch.isfinite(retain.gram_NN.diagonal()).all()):
        raise NonFiniteKeys(site, "the retain set")
    B_NN = retain.gram_NN * (ridge.w_retain / retain.num_tokens)
    diagonal_N = B_NN.diagonal().clone()
    generator = torch.Generator().manual_seed(0)
    probes_NQ = torch.randn(len(B_NN), NUM_PROBES, generator=generator, dtype=torch.float64)
    probes_NQ = probes_NQ.to(B_NN.device)
    answers_NQ = B_NN @ probes_NQ
    sizes = tuple(widths or [len(B_NN)])
    usual = 1 + ridge.w_forget / ridge.w_retain
    mus = tuple(ridge.ridge(float(d.mean()) * usual) for d in torch.split(diagonal_N, list(sizes)))
    B_NN.diagonal().add_(_by_input(mus, sizes).to(B_NN))
    high_N, high = _largest(B_NN)
    lower_NN, info = torch.linalg.cholesky_ex(B_NN)
    if pivot := int(info):
        raise NotPositiveDefinite(site, pivot, len(B_NN), min(mus))
    del B_NN
    inverse_NN = torch.cholesky_inverse(lower_NN)
    low_N, low = _largest(inverse_NN)
    extremes_2N = torch.stack([high_N, low_N])
    return RetainInverse(
        inverse_NN, diagonal_N, mus, sizes, retain.counts_V, retain.num_tokens, extremes_2N, high,
        1 / low, probes_NQ, answers_NQ,
    )  # fmt: skip


def shift_of(inverse: RetainInverse, keys_SN: Tensor, ridge: RidgeConfig) -> Shift:
    """The ridge for these forget keys (float64), and p for it."""
    c = ridge.w_forget / len(keys_SN)
    diagonal_N = inverse.diagonal_N + c * keys_SN.square().sum(0)
    means, peak_ratios = [], []
    for part_N in torch.split(diagonal_N, list(inverse.widths)):
        means.append(float(part_N.mean()))
        peak_ratios.append(float(part_N.max()) / means[-1] if means[-1] > 0 else math.nan)
    mus = tuple(map(ridge.ridge, means))
    ratios = [mu / mu_0 - 1 for mu, mu_0 in zip(mus, inverse.mus, strict=True)]
    extras = [mu - mu_0 for mu, mu_0 in zip(mus, inverse.mus, strict=True)]
    return Shift(
        mus=mus,
        peak_ratios=tuple(peak_ratios),
        mu_N=_by_input(mus, inverse.widths).to(diagonal_N),
        extra_N=_by_input(extras, inverse.widths).to(diagonal_N),
        coefficients=reciprocal(min(0.0, *ratios), max(0.0, *ratios)),
    )


def reciprocal(low: float, high: float) -> tuple[float, ...] | None:
    """Coefficients, from the constant on, of the polynomial of least degree that is within
    `TOLERANCE` of 1/(1+t), relative, for t from `low` to `high`; None beyond `MAX_DEGREE`."""
    if low == high == 0:
        return (1.0,)
    if not -1 < low <= high < math.inf:
        return None
    grid = np.linspace(low, high, 101)
    for degree in range(MAX_DEGREE + 1):
        fit = Chebyshev.interpolate(lambda t: 1 / (1 + t), degree, domain=[low, high])
        if float(np.abs(fit(grid) * (1 + grid) - 1).max()) <= TOLERANCE:
            return tuple(fit.convert(kind=Polynomial).coef.tolist())
    return None


def _largest(matrix_NN: Tensor) -> tuple[Tensor, float]:
    """Eigenvector and eigenvalue by power steps."""
    vector_N = matrix_NN.new_ones(len(matrix_NN)) / math.sqrt(len(matrix_NN))
    value = 1.0
    for _ in range(POWER_STEPS):
        vector_N = matrix_NN @ vector_N
        value = float(vector_N.norm())
        vector_N = vector_N / value
    return vector_N, value


def _by_input(values: Sequence[float], widths: Sequence[int]) -> Tensor:
    """One value per site -> one per input."""
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(widths))
