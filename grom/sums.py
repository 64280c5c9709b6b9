"""Sums of keys by token, and by pair of tokens; only what occurs takes memory.

Shapes: T tokens, N inputs of W, V vocabulary, K distinct tokens or pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BLOCK_ROWS = 1024
"""Rows that are weighted at once."""


class _Rows:
    """float64 rows (N,) by integer code, in the order in which the codes came up."""

    __slots__ = ("_rows", "slots")

    def __init__(self, num_inputs: int, device: torch.device | str) -> None:
        self.slots: dict[int, int] = {}
        self._rows = torch.zeros(0, num_inputs, dtype=torch.float64, device=device)

    @property
    def codes_K(self) -> Tensor:
        return torch.tensor(list(self.slots), dtype=torch.int64, device=self._rows.device)

    @property
    def rows_KN(self) -> Tensor:
        return self._rows[: len(self.slots)]

    def add_(self, codes_T: Tensor, rows_TN: Tensor) -> Tensor:
        """Add each row to that of its code; returns the place of each code's row."""
        found_U, inverse_T = torch.unique(codes_T, return_inverse=True)
        places = [self.slots.setdefault(code, len(self.slots)) for code in found_U.tolist()]
        self._grow(len(self.slots))
        place_T = torch.tensor(places, dtype=torch.int64, device=codes_T.device)[inverse_T]
        self._rows.index_add_(0, place_T, rows_TN.double())
        return place_T

    def _grow(self, size: int) -> None:
        if size > len(self._rows):
            capacity = max(size, len(self._rows) + len(self._rows) // 2)
            rows = self._rows.new_zeros(capacity, self._rows.shape[1])
            rows[: len(self._rows)] = self._rows
            self._rows = rows


class TokenSums(Mapping[int, Tensor]):
    """Sums of keys by token: a mapping from token id to a float64 vector (N,).

    Only tokens that occur take memory.  `ids_K` and `rows_KN` are the compact form.
    """

    __slots__ = ("_table", "vocab_size")

    def __init__(
        self, num_inputs: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self._table = _Rows(num_inputs, device)

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
        return self._table.codes_K

    @property
    def rows_KN(self) -> Tensor:
        """Their sums, float64, in the same order."""
        return self._table.rows_KN

    def add_(self, ids_T: Tensor, rows_TN: Tensor) -> None:
        """Add each row to the sum of its token."""
        self._table.add_(ids_T, rows_TN)

    def combined(self, other: TokenSums, sign: float) -> TokenSums:
        """self + sign * other, as a new object."""
        result = self.to(self.rows_KN.device)
        result.add_(other.ids_K, sign * other.rows_KN)
        return result

    def only(self, kept_V: Tensor) -> TokenSums:
        """The sums of the tokens v with kept_V[v]."""
        kept_K = kept_V[self.ids_K]
        result = TokenSums(self.rows_KN.shape[1], self.vocab_size, self.rows_KN.device)
        result.add_(self.ids_K[kept_K], self.rows_KN[kept_K])
        return result

    def columns(self, start: int, stop: int) -> TokenSums:
        """The same sums of inputs start ... stop-1 only."""
        result = TokenSums(stop - start, self.vocab_size, self.rows_KN.device)
        result.add_(self.ids_K, self.rows_KN[:, start:stop])
        return result

    def to(self, device: torch.device | str) -> TokenSums:
        """The same sums on a device, as a new object."""
        result = TokenSums(self.rows_KN.shape[1], self.vocab_size, device)
        result.add_(self.ids_K.to(device), self.rows_KN.to(device))
        return result

    def dense_VN(self) -> Tensor:
        """All rows, zero for tokens that do not occur; (V, N) float64."""
        dense = self.rows_KN.new_zeros(self.vocab_size, self.rows_KN.shape[1])
        dense[self.ids_K] = self.rows_KN
        return dense

    def __getitem__(self, token: int) -> Tensor:
        return self.rows_KN[self._table.slots[token]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table.slots)

    def __len__(self) -> int:
        return len(self._table.slots)


class PairSums(Mapping[tuple[int, int], Tensor]):
    """Sums of keys by pair: (gold token, what to say instead) -> a float64 vector (N,).

        sums[g, a] = sum of k_j with g_j = g and a_j = a

    The weight alpha[g] of a position depends on its gold token alone, so it can be put in at any
    later time (`by_alternative`).  Each pair is counted: one that was wholly subtracted is gone,
    not a row of rounding errors.  There are never more pairs than positions.
    """

    __slots__ = ("_counts", "_table", "vocab_size")

    def __init__(
        self, num_inputs: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self._table = _Rows(num_inputs, device)
        self._counts = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def gold_K(self) -> Tensor:
        """Gold token of each pair, in the order in which the pairs came up."""
        return self._table.codes_K // self.vocab_size

    @property
    def alt_K(self) -> Tensor:
        """Alternative of each pair, in the same order."""
        return self._table.codes_K % self.vocab_size

    @property
    def counts_K(self) -> Tensor:
        """Positions of each pair, int64, in the same order."""
        return self._counts

    @property
    def rows_KN(self) -> Tensor:
        """Their sums, float64, in the same order."""
        return self._table.rows_KN

    def add_(
        self, gold_T: Tensor, alt_T: Tensor, rows_TN: Tensor, counts_T: Tensor | None = None
    ) -> None:
        """Add each row to the sum of its pair; a row stands for one position unless counted."""
        place_T = self._table.add_(gold_T * self.vocab_size + alt_T, rows_TN)
        counts_T = torch.ones_like(gold_T) if counts_T is None else counts_T
        new = len(self._table.slots) - len(self._counts)
        self._counts = torch.cat([self._counts, self._counts.new_zeros(new)])
        self._counts.index_add_(0, place_T, counts_T)

    def combined(self, other: PairSums, sign: int) -> PairSums:
        """self + sign * other, as a new object, without the pairs that no position is left of."""
        result = self.to(self.rows_KN.device)
        result.add_(other.gold_K, other.alt_K, sign * other.rows_KN, sign * other.counts_K)
        return result._left() if bool((result.counts_K == 0).any()) else result

    def _left(self) -> PairSums:
        """The pairs that some position is left of."""
        left_K = self.counts_K != 0
        result = PairSums(self.rows_KN.shape[1], self.vocab_size, self.rows_KN.device)
        parts = (self.gold_K, self.alt_K, self.rows_KN, self.counts_K)
        result.add_(*(part[left_K] for part in parts))
        return result

    def columns(self, start: int, stop: int) -> PairSums:
        """The same sums of inputs start ... stop-1 only."""
        result = PairSums(stop - start, self.vocab_size, self.rows_KN.device)
        result.add_(self.gold_K, self.alt_K, self.rows_KN[:, start:stop], self.counts_K)
        return result

    def to(self, device: torch.device | str) -> PairSums:
        """The same sums on a device, as a new object."""
        result = PairSums(self.rows_KN.shape[1], self.vocab_size, device)
        parts = (self.gold_K, self.alt_K, self.rows_KN, self.counts_K)
        result.add_(*(part.to(device) for part in parts))
        return result

    def by_alternative(self, alpha_V: Tensor) -> TokenSums:
        """{ a : sum over g of alpha[g] sums[g, a] }, without the pairs of alpha 0."""
        result = TokenSums(self.rows_KN.shape[1], self.vocab_size, self.rows_KN.device)
        weight_K = alpha_V.to(self.rows_KN)[self.gold_K]
        for index in torch.split((weight_K > 0).nonzero().squeeze(1), BLOCK_ROWS):
            rows_TN = self.rows_KN[index].mul_(weight_K[index].unsqueeze(1))
            result.add_(self.alt_K[index], rows_TN)
        return result

    def __getitem__(self, pair: tuple[int, int]) -> Tensor:
        gold, alt = pair
        if not 0 <= alt < self.vocab_size:
            raise KeyError(pair)
        return self.rows_KN[self._table.slots[gold * self.vocab_size + alt]]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return (divmod(code, self.vocab_size) for code in self._table.slots)

    def __len__(self) -> int:
        return len(self._table.slots)


def compact(sums: Mapping[int, Tensor]) -> TokenSums:
    """The sums of a `KeyMoments` as the compact type that its constructor made of them."""
    assert isinstance(sums, TokenSums)
    return sums
