"""Measures the influence of every request on the edit, in one pass over the forget keys.

For each request its leave-one-out change of P with s, mu and alpha frozen (`grom.changes`); what
that change does to the logits of its own answers, to those of the other requests and to the retain
keys; and the request's part of P, parts that add up to P:

    P = sum_e P_e,   P_e = c D_e K_eT A^-1,   c = w_f/s

With P - P_-e = YT X nothing of the size of P is needed for a request:

    |YT X|^2 = <Y YT, X XT>      tr(YT X G_r XT Y) = <Y YT, X G_r XT>

Work: A^-1 K and G_r A^-1 K, 4 N^2 operations a key, where adding a key to the moments takes 2 N^2.

Shapes: T tokens of all requests of a chunk, N inputs of W, C outputs that are kept, K distinct
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grom.changes import Changes, Chunk, Request, applied
from grom.influence import WHOLE, Audited, Influence, RetainChange, TokenWeight
from grom.moments import KeyMoments
from grom.sums import compact
from grom.target import LowRank
from grom.withdraw import System

TOP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class _Products:
    """Products of the rows of a chunk with what all requests share, by site."""

    on_update: list[Tensor]
    """part_right P_bT (T, C)."""
    on_forget: list[Tensor]
    """right F_bT (T, C), F = sum over suppressed positions of reader kT."""
    kept: list[Tensor]
    """right_b G_r,bb (T, N_b)."""
    kept_TN: Tensor
    """right G_r."""


class Auditor:
    """Measures one request after the other in a solved system."""

    def __init__(self, system: System, rms: float, beta: float = 1.0) -> None:
        """Solve the system; arguments and errors as `Changes`.

        Numbers in nats grow with beta, `retain_effect` with its square, relative ones not at all.
        """
        self.changes, self.system = Changes(system, rms, beta), system
        update, columns = self.changes.update, system.columns
        self.updates = [replace(update, right_KN=update.right_KN[:, part]) for part in columns]
        self.norms = [part.norm() for part in self.updates]
        self.norms.append(math.hypot(*self.norms))
        self.num_suppressed = int(system.forget.counts_V[self.changes.suppressed_V].sum())
        sums = compact(system.forget.sums)
        self._forget_CN = self.changes.reader_TC(sums.ids_K).mT @ sums.rows_KN

    def influences(
        self, requests: Iterable[Request], retained: Sequence[RetainChange] = ()
    ) -> Iterator[Audited]:
        """Each request's influence; the order may change.

        Args:
            requests: each with all its keys.
            retained: retain groups, to say what their absence would add to each request.

        Raises:
            ForeignKeys: a request's keys are not part of the system.
        """
        for chunk in self.changes.of(requests):
            shared = self._products(chunk)
            for number, request in enumerate(chunk.requests):
                *sites, whole = self._influences(chunk, number, shared)
                growth = {group.name: self._growth(chunk, number, group) for group in retained}
                yield Audited(tuple(sites), whole, self._tokens(request), growth)

    def update_without(self, request: Request) -> list[LowRank]:
        """P_-e of each site at the strength of the edit, as it would be added to W."""
        (chunk,) = self.changes.of([request])
        left_CN = self.changes.update.dense() - chunk.left_TC.mT @ chunk.right_TN
        num_outputs = self.changes.solved.update.num_outputs
        return [
            LowRank(left_CN[:, part].contiguous(), None, self.changes.rows_C, num_outputs)
            for part in self.system.columns
        ]

    def refits(self, request: Request) -> list[float]:
        """|P - P'| / |P| at each site, then of all sites, with P' solved without the request: s, mu
        and alpha anew.  Costs a solve."""
        solved, counts_V = self.changes.solved, self.system.forget.counts_V
        size = len(self.system.forget.gram_NN)
        moments = KeyMoments.zeros(size, len(counts_V), device=self.changes.device)
        own = request.to(self.changes.device)
        moments.update_(own.keys_TN, own.gold_T, own.alt_T)
        changed = [self.changes.beta * norm for norm in self.system.norms_without(solved, moments)]
        return self._relative([*changed, math.hypot(*changed)])

    def without_retain(self, group: Request) -> RetainChange:
        """What leaving a retain group out would change.

        Raises:
            ForeignKeys: the group's keys are not part of the system.
        """
        change, leverage = self.changes.without_retain(group)
        norms = [
            replace(change, right_KN=change.right_KN[:, part]).norm()
            for part in self.system.columns
        ]
        relative = tuple(self._relative([*norms, math.hypot(*norms)]))
        return RetainChange(group.name, len(group.gold_T), leverage, change, relative)

    def _products(self, chunk: Chunk) -> _Products:
        columns, gram_NN = self.system.columns, self.system.retain.gram_NN
        right_TN, part_TN = chunk.right_TN, chunk.part_right_TN
        kept_TN = right_TN @ gram_NN
        apart = [right_TN[:, own] @ gram_NN[own, own] for own in columns if len(columns) > 1]
        return _Products(
            [applied(P, part_TN[:, own]) for P, own in zip(self.updates, columns, strict=True)],
            [right_TN[:, own] @ self._forget_CN[:, own].mT for own in columns],
            apart or [kept_TN],
            kept_TN,
        )

    def _influences(self, chunk: Chunk, number: int, shared: _Products) -> list[Influence]:
        """At each site, then of all sites."""
        rows = chunk.rows[number]
        left_TC, part_TC = chunk.left_TC[rows], chunk.part_left_TC[rows]
        right_TN, part_TN = chunk.right_TN[rows], chunk.part_right_TN[rows]
        lefts_TT, parts_TT = left_TC @ left_TC.mT, part_TC @ part_TC.mT
        read_TT = left_TC @ chunk.reader_TC[rows].mT
        sums: list[list[float]] = []
        for site, own in enumerate(self.system.columns):
            X_TN, Z_TN = right_TN[:, own], part_TN[:, own]
            products = (
                lefts_TT * (X_TN @ X_TN.mT),
                read_TT * (X_TN @ chunk.key_TN[rows, own].mT),
                left_TC * shared.on_forget[site][rows],
                lefts_TT * (X_TN @ shared.kept[site][rows].mT),
                parts_TT * (Z_TN @ Z_TN.mT),
                part_TC * shared.on_update[site][rows],
            )
            sums.append([float(product.sum()) for product in products])
        whole = [math.fsum(column) for column in zip(*sums, strict=True)]
        whole[3] = float((lefts_TT * (right_TN @ shared.kept_TN[rows].mT)).sum())
        names = [*self.system.sites, WHOLE]
        return [
            self._influence(chunk, number, name, norm, found)
            for name, norm, found in zip(names, self.norms, [*sums, whole], strict=True)
        ]

    def _influence(
        self, chunk: Chunk, number: int, site: str, update_norm: float, sums: Sequence[float]
    ) -> Influence:
        change, own, drops, kept, part, inner = sums
        request = chunk.requests[number]
        num_own = self._num_suppressed(request)
        num_others = self.num_suppressed - num_own
        num_retain = self.changes.solved.factor.num_retain
        square = update_norm**2
        return Influence(
            request=request.name,
            site=site,
            num_tokens=len(request.gold_T),
            num_suppressed=num_own,
            leverage=chunk.leverages[number],
            method=chunk.method,
            update_norm=update_norm,
            frozen=math.sqrt(max(change, 0) / square) if square else 0.0,
            own_effect_nats=own / num_own if num_own else math.nan,
            others_effect_nats=(drops - own) / num_others if num_others else math.nan,
            retain_effect=max(kept, 0) / num_retain if num_retain else math.nan,
            part_norm=math.sqrt(max(part, 0) / square) if square else 0.0,
            share=inner / square if square else 0.0,
        )

    def _growth(self, chunk: Chunk, number: int, group: RetainChange) -> float:
        """How much more the request's own gold logits would drop without a retain group."""
        rows, num_own = chunk.rows[number], self._num_suppressed(chunk.requests[number])
        moved_TC = applied(group.change, chunk.key_TN[rows])
        return -float((chunk.reader_TC[rows] * moved_TC).sum()) / num_own if num_own else math.nan

    def _num_suppressed(self, request: Request) -> int:
        return int(self.changes.suppressed_V[request.gold_T.to(self.changes.device)].sum())

    def _relative(self, norms: Sequence[float]) -> list[float]:
        return [n / of if of else 0.0 for n, of in zip(norms, self.norms, strict=True)]

    def _tokens(self, request: Request) -> tuple[TokenWeight, ...]:
        """The tokens that the request suppresses most."""
        ids_K, counts_K = torch.unique(request.gold_T, return_counts=True)
        alpha_K = self.changes.solved.alpha_V.to(ids_K.device)[ids_K]
        order = (alpha_K * counts_K).argsort(descending=True, stable=True)[:TOP_TOKENS]
        return tuple(
            TokenWeight(request.name, rank, int(ids_K[k]), int(counts_K[k]), float(alpha_K[k]))
            for rank, k in enumerate(order.tolist(), 1)
            if alpha_K[k] > 0
        )
