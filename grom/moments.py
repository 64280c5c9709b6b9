"""Key moments: all that the solve needs to know about a set of keys.

Shapes: T tokens, N inputs of W, V vocabulary, K distinct tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

BLOCK_TOKENS = 4096
"""Keys multiplied in their own precision before the product joins the float64 sum."""
EXACT_INPUTS = 4096
"""Up to here products on CPU are formed in float64, which costs a few per cent of the pass."""
STRIP_INPUTS = 512
"""Rows of the gram that are multiplied at once; only those right of the diagonal are."""


class TokenSums(Mapping[int, Tensor]):
    """Sums of keys by token: a mapping from token id to a float64 vector (N,).

    Only tokens that occur take memory.  `ids_K` and `rows_KN` are the compact form.
    """

    __slots__ = ("_ids", "_rows", "_slot_V", "vocab_size")

    def __init__(
        self, num_inputs: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self._ids: list[int] = []
        self._rows = torch.zeros(0, num_inputs, dtype=torch.float64, device=device)
        self._slot_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)

    @classmethod
    def of(
        cls, values: Mapping[int, Tensor], num_inputs: int, vocab_size: int, device: torch.device
    ) -> TokenSums:
        """The same sums in compact form; a `TokenSums` is returned as it is."""
        if isinstance(values, TokenSums):
            return values
        sums = cls(num_inputs, vocab_size, device)
        for token, row_N in values.items():
            sums.add_(torch.tensor([token], device=device), row_N.to(device).unsqueeze(0))
        return sums

    @property
    def ids_K(self) -> Tensor:
        """Token ids that occur, in the order in which they came up."""
        return torch.tensor(self._ids, dtype=torch.int64, device=self._rows.device)

    @property
    def rows_KN(self) -> Tensor:
        """Their sums, float64, in the same order."""
        return self._rows[: len(self._ids)]

    def add_(self, ids_T: Tensor, rows_TN: Tensor) -> None:
        """Add each row to the sum of its token."""
        new = torch.unique(ids_T[self._slot_V[ids_T] < 0])
        if len(new):
            first = len(self._ids)
            self._ids += new.tolist()
            self._slot_V[new] = torch.arange(first, len(self._ids), device=new.device)
            self._grow(len(self._ids))
        self._rows.index_add_(0, self._slot_V[ids_T], rows_TN.double())

    def _grow(self, size: int) -> None:
        if size > len(self._rows):
            capacity = max(size, len(self._rows) + len(self._rows) // 2)
            rows = self._rows.new_zeros(capacity, self._rows.shape[1])
            rows[: len(self._rows)] = self._rows
            self._rows = rows

    def combined(self, other: TokenSums, sign: float) -> TokenSums:
        """self + sign * other, as a new object."""
        result = TokenSums(self._rows.shape[1], self.vocab_size, self._rows.device)
        result.add_(self.ids_K, self.rows_KN)
        result.add_(other.ids_K, sign * other.rows_KN)
        return result

    def dense_VN(self) -> Tensor:
        """All rows, zero for tokens that do not occur; (V, N) float64."""
        dense = self._rows.new_zeros(self.vocab_size, self._rows.shape[1])
        dense[self.ids_K] = self.rows_KN
        return dense

    def __getitem__(self, token: int) -> Tensor:
        slot = int(self._slot_V[token]) if 0 <= token < self.vocab_size else -1
        if slot < 0:
            raise KeyError(token)
        return self._rows[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


@dataclass(slots=True)
class KeyMoments:
    """Sums over the keys of a set, never means.

    With key k_j (N,) and gold token g_j at position j:

        gram = sum_j k_j k_jT      sums[v] = sum of k_j with g_j = v      counts[v] = their number

    Moments add: moments(a + b) == moments(a) + moments(b).  So a batch, a shard, a deletion
    request and a whole corpus are the same type, and a withdrawn request is subtracted.
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
    """Token id a -> sum of weight_j k_j over positions whose alternative is a, (N,) float64."""
    keeps_sums: bool = True
    """False for retain moments, whose sums nothing needs: the memory is saved."""

    def __post_init__(self) -> None:
        num_inputs, vocab_size = self.gram_NN.shape[0], self.counts_V.shape[0]
        device = self.gram_NN.device
        self.sums = TokenSums.of(self.sums, num_inputs, vocab_size, device)
        self.alt_sums = TokenSums.of(self.alt_sums, num_inputs, vocab_size, device)

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
            sums=TokenSums(num_inputs, vocab_size, device),
            counts_V=torch.zeros(vocab_size, dtype=torch.int64, device=device),
            num_tokens=0,
            alt_sums=TokenSums(num_inputs, vocab_size, device),
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
            keys_TN: one key per row, any float dtype; products are formed in that precision
                (bfloat16: with float32 accumulation) and summed in float64.
            gold_T: the token that each position has to predict.
            alt_T: what the model should say there instead (replacement targets).
            alt_weight_T: alpha of the gold token, frozen here; 1 if not given.

        Raises:
            ValueError: the lengths differ, or a token is outside the vocabulary.
        """
        self._check(keys_TN, gold_T, alt_T)
        for block_TN in torch.split(keys_TN, BLOCK_TOKENS):
            add_outer_(self.gram_NN, block_TN)
        self.counts_V += torch.bincount(gold_T, minlength=len(self.counts_V))
        self.num_tokens += len(keys_TN)
        if self.keeps_sums:
            compact(self.sums).add_(gold_T, keys_TN)
        if alt_T is not None:
            weight_T = torch.ones_like(alt_T) if alt_weight_T is None else alt_weight_T
            active = weight_T != 0
            rows_TN = keys_TN[active].double() * weight_T[active].double().unsqueeze(1)
            compact(self.alt_sums).add_(alt_T[active], rows_TN)
        return self

    def block(self, start: int, stop: int) -> KeyMoments:
        """Moments of the same positions with inputs start ... stop-1 only: of one site, where the
        keys of several stand side by side."""
        num_inputs, vocab_size = stop - start, len(self.counts_V)
        parts = []
        for sums in (compact(self.sums), compact(self.alt_sums)):
            part = TokenSums(num_inputs, vocab_size, self.gram_NN.device)
            part.add_(sums.ids_K, sums.rows_KN[:, start:stop])
            parts.append(part)
        return KeyMoments(
            gram_NN=self.gram_NN[start:stop, start:stop],
            sums=parts[0],
            counts_V=self.counts_V,
            num_tokens=self.num_tokens,
            alt_sums=parts[1],
            keeps_sums=self.keeps_sums,
        )

    def to(self, device: torch.device | str) -> KeyMoments:
        """The same moments on a device; themselves if they are there."""
        if self.gram_NN.device == torch.device(device):
            return self
        moved = []
        for sums in (compact(self.sums), compact(self.alt_sums)):
            there = TokenSums(len(self.gram_NN), len(self.counts_V), device)
            there.add_(sums.ids_K.to(device), sums.rows_KN.to(device))
            moved.append(there)
        return KeyMoments(
            gram_NN=self.gram_NN.to(device),
            sums=moved[0],
            counts_V=self.counts_V.to(device),
            num_tokens=self.num_tokens,
            alt_sums=moved[1],
            keeps_sums=self.keeps_sums,
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
            (self.gram_NN.shape[0], len(self.counts_V), self.keeps_sums),
            (
                other.gram_NN.shape[0],
                len(other.counts_V),
                other.keeps_sums,
            ),
        )
        if mine != theirs:
            raise ValueError(
                f"moments of different kinds: (inputs, vocabulary, keeps sums) {mine} and {theirs}"
            )
        return KeyMoments(
            gram_NN=self.gram_NN + sign * other.gram_NN,
            sums=compact(self.sums).combined(compact(other.sums), sign),
            counts_V=self.counts_V + sign * other.counts_V,
            num_tokens=self.num_tokens + sign * other.num_tokens,
            alt_sums=compact(self.alt_sums).combined(compact(other.alt_sums), sign),
            keeps_sums=self.keeps_sums,
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


def compact(sums: Mapping[int, Tensor]) -> TokenSums:
    """The sums of a `KeyMoments` as the compact type that its constructor made of them."""
    assert isinstance(sums, TokenSums)
    return sums


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
