"""Key moments: all that the solve needs to know about a set of keys.

Shapes: T tokens, N inputs of W, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import torch
from torch import Tensor

from grom.sums import PairSums, TokenSums, compact

BLOCK_TOKENS = 4096
"""Keys multiplied in their own precision before the product joins the float64 sum."""
EXACT_INPUTS = 4096
"""Up to here products of retain keys on CPU are formed in float64, which costs a few per cent of
the pass; those of forget keys always are."""
STRIP_INPUTS = 512
"""Rows of the gram that are multiplied at once; only those right of the diagonal are."""


@dataclass(slots=True)
class KeyMoments:
    """Sums over the keys of a set, never means.

    With key k_j (N,) and gold token g_j at position j:

        gram = sum_j k_j k_jT      sums[v] = sum of k_j with g_j = v      counts[v] = their number
        pair_sums[v, a] = sum of k_j with g_j = v and a_j = a, what should be said instead

    Moments add: moments(a + b) == moments(a) + moments(b).  So a batch, a shard, a deletion
    request and a whole corpus are the same type, and a withdrawn request is subtracted.  Nothing
    in them depends on alpha, which every further batch changes, nor on the retain set.
    """

    gram_NN: Tensor
    """Sum of k kT, float64."""
    sums: Mapping[int, Tensor]
    """Token id -> sum of the keys with that gold token, (N,) float64."""
    counts_V: Tensor
    """How often each gold token occurs, int64."""
    num_tokens: int
    """Positions that were added."""
    alt_sums: Mapping[int, Tensor] = field(default_factory=dict)
    """Token id a -> sum of weight_j k_j over positions whose alternative is a, (N,) float64: those
    that were given a weight of their own, which is then fixed."""
    keeps_sums: bool = True
    """False for retain moments, whose sums nothing needs: the memory is saved."""
    pair_sums: PairSums = field(default_factory=partial(PairSums, 0, 0))
    """(Gold token, alternative) -> sum of the keys, (N,) float64; alpha is put in by the target."""

    def __post_init__(self) -> None:
        num_inputs, vocab_size = self.gram_NN.shape[0], self.counts_V.shape[0]
        device = self.gram_NN.device
        self.sums = TokenSums.of(self.sums, num_inputs, vocab_size, device)
        self.alt_sums = TokenSums.of(self.alt_sums, num_inputs, vocab_size, device)
        if not self.pair_sums:
            self.pair_sums = PairSums(num_inputs, vocab_size, device)

    @classmethod
    def zeros(
        cls,
        num_inputs: int,
        vocab_size: int,
        *,
        device: torch.device | str = "cpu",
        keeps_sums: bool = True,
    ) -> KeyMoments:
        """Moments of no keys at all."""
        return cls(
            gram_NN=torch.zeros(num_inputs, num_inputs, dtype=torch.float64, device=device),
            sums={},
            counts_V=torch.zeros(vocab_size, dtype=torch.int64, device=device),
            num_tokens=0,
            keeps_sums=keeps_sums,
        )

    def update_(
        self,
        keys_TN: Tensor,
        gold_T: Tensor,
        alt_T: Tensor | None = None,
        alt_weight_T: Tensor | None = None,
    ) -> Self:
        """Add a block of keys.

        Args:
            keys_TN: one key per row, any float dtype; products of retain keys are formed in that
                precision (bfloat16: with float32 accumulation), those of forget keys in float64,
                and summed in float64.
            gold_T: the token that each position has to predict.
            alt_T: what the model should say there instead (replacement targets).
            alt_weight_T: alpha of the gold token, which is then fixed (`alt_sums`).  Without it
                the target puts alpha in (`pair_sums`), as it must when batches are added.

        Raises:
            ValueError: the lengths differ, or a token is outside the vocabulary.
        """
        self._check(keys_TN, gold_T, alt_T)
        if self.keeps_sums:
            # Exact products: what batches add up to must not depend on how they were cut.
            keys_TN = keys_TN.double()
            compact(self.sums).add_(gold_T, keys_TN)
        for block_TN in torch.split(keys_TN, BLOCK_TOKENS):
            add_outer_(self.gram_NN, block_TN)
        self.counts_V += torch.bincount(gold_T, minlength=len(self.counts_V))
        self.num_tokens += len(keys_TN)
        if alt_T is None:
            return self
        if alt_weight_T is None:
            self.pair_sums.add_(gold_T, alt_T, keys_TN)
            return self
        active = alt_weight_T != 0
        rows_TN = keys_TN[active].double() * alt_weight_T[active].double().unsqueeze(1)
        compact(self.alt_sums).add_(alt_T[active], rows_TN)
        return self

    def block(self, start: int, stop: int) -> KeyMoments:
        """Moments of the same positions with inputs start ... stop-1 only: of one site, where the
        keys of several stand side by side."""
        return KeyMoments(
            gram_NN=self.gram_NN[start:stop, start:stop],
            sums=compact(self.sums).columns(start, stop),
            counts_V=self.counts_V,
            num_tokens=self.num_tokens,
            alt_sums=compact(self.alt_sums).columns(start, stop),
            keeps_sums=self.keeps_sums,
            pair_sums=self.pair_sums.columns(start, stop),
        )

    def to(self, device: torch.device | str) -> KeyMoments:
        """The same moments on a device; themselves if they are there."""
        if self.gram_NN.device == torch.device(device):
            return self
        return KeyMoments(
            gram_NN=self.gram_NN.to(device),
            sums=compact(self.sums).to(device),
            counts_V=self.counts_V.to(device),
            num_tokens=self.num_tokens,
            alt_sums=compact(self.alt_sums).to(device),
            keeps_sums=self.keeps_sums,
            pair_sums=self.pair_sums.to(device),
        )

    def sums_dense(self) -> Tensor:
        """`sums` as a (V, N) float64 matrix; large, for tests."""
        return compact(self.sums).dense_VN()

    def alt_sums_dense(self) -> Tensor:
        """`alt_sums` as a (V, N) float64 matrix; large, for tests."""
        return compact(self.alt_sums).dense_VN()

    def __add__(self, other: KeyMoments) -> KeyMoments:
        return self._combined(other, 1)

    def __sub__(self, other: KeyMoments) -> KeyMoments:
        return self._combined(other, -1)

    def _combined(self, other: KeyMoments, sign: int) -> KeyMoments:
        mine, theirs = (
            (len(moments.gram_NN), len(moments.counts_V), moments.keeps_sums)
            for moments in (self, other)
        )
        if mine != theirs:
            raise ValueError(
                f"moments of different kinds: (inputs, vocabulary, keeps sums) {mine} and {theirs}"
            )
        counts_V = self.counts_V + sign * other.counts_V
        sums = compact(self.sums).combined(compact(other.sums), sign)
        return KeyMoments(
            gram_NN=torch.add(self.gram_NN, other.gram_NN, alpha=sign),
            # Of a token that was wholly subtracted nothing is left, not even its rounding errors.
            sums=sums.only(counts_V != 0) if sign < 0 else sums,
            counts_V=counts_V,
            num_tokens=self.num_tokens + sign * other.num_tokens,
            alt_sums=compact(self.alt_sums).combined(compact(other.alt_sums), sign),
            keeps_sums=self.keeps_sums,
            pair_sums=self.pair_sums.combined(other.pair_sums, sign),
        )

    def _check(self, keys_TN: Tensor, gold_T: Tensor, alt_T: Tensor | None) -> None:
        num_inputs, vocab_size = self.gram_NN.shape[0], len(self.counts_V)
        if keys_TN.shape != (len(gold_T), num_inputs):
            raise ValueError(
                f"keys are {tuple(keys_TN.shape)}, expected ({len(gold_T)}, {num_inputs})"
            )
        for name, token_T in (("gold token", gold_T), ("alternative", alt_T)):
            if token_T is None or len(token_T) == 0:
                continue
            if not 0 <= int(token_T.min()) <= int(token_T.max()) < vocab_size:
                raise ValueError(f"a {name} is outside the vocabulary of {vocab_size}")


def add_outer_(gram_NN: Tensor, keys_TN: Tensor) -> None:
    """gram += keysT keys, in strips of rows, each from the diagonal on: it is symmetric."""
    num_inputs = len(gram_NN)
    if num_inputs <= EXACT_INPUTS and not keys_TN.is_cuda:
        keys_TN = keys_TN.double()
    for start in range(0, num_inputs, STRIP_INPUTS):
        stop = min(start + STRIP_INPUTS, num_inputs)
        strip = product(keys_TN[:, start:stop], keys_TN[:, start:])
        gram_NN[start:stop, start:].add_(strip)
        gram_NN[stop:, start:stop].add_(strip[:, stop - start :].mT)


def product(left_TA: Tensor, right_TB: Tensor) -> Tensor:
    """leftT right (A, B).

    float64 and float32 keys are multiplied as they are; half-precision ones exactly, with float32
    accumulation (on CUDA by the matrix unit, on CPU by widening first).
    """
    if left_TA.dtype in (torch.float32, torch.float64):
        return left_TA.mT @ right_TB
    if left_TA.is_cuda:
        return torch.mm(left_TA.mT, right_TB, out_dtype=torch.float32)
    return left_TA.float().mT @ right_TB.float()
