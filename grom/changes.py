"""What P would be without some keys, as factors: nothing of the size of P for a request.

With X = K_eT A^-1 (t, N) and Y from `downdate` (t, C) the change is P - P_-e = YT X, and the
request's part of P is P_e = c D_e X.  The work that grows with N^2 is done for many requests at
once.  A request with more keys than inputs, or whose downdate would lose digits, is taken out of A
before A is factorised again, with the same s, mu and alpha:

    P - P_-e = c (D_e K_eT - P K_e K_eT) (A - c K_e K_eT)^-1

Shapes: T tokens of all requests of a chunk, N inputs of W, C outputs that are kept: all M, or the
rows of the LM head that the edit writes.  V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grom.audit import MIN_GAP, downdate, shifts_TC
from grom.errors import SolveError
from grom.moments import BLOCK_TOKENS
from grom.target import LowRank
from grom.withdraw import System

CHUNK_BYTES = 2**27
"""Keys (float64) that go through the N^2 work together."""
DOWNDATE, SOLVED_AGAIN = "downdate", "solved again"
POWER_STEPS = 30


class ForeignKeys(SolveError):
    """Keys that were never added to a system cannot be taken out of it."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__(
            f"{sites[0]}: keys of a request are not part of the system. Collect the request again "
            "with the model, sites and reference of the run."
        )


@dataclass(frozen=True, slots=True)
class Request:
    """The keys of one request at the sites of one system."""

    name: str
    keys_TN: Tensor
    """As they were collected."""
    gold_T: Tensor
    alt_T: Tensor | None = None
    """What should be said instead; for replacement."""

    def to(self, device: torch.device) -> Request:
        """The same request on a device."""
        alt_T = None if self.alt_T is None else self.alt_T.to(device)
        return Request(self.name, self.keys_TN.to(device), self.gold_T.to(device), alt_T)

    def part(self, own: slice) -> Request:
        """Some of its positions."""
        alt_T = None if self.alt_T is None else self.alt_T[own]
        return Request(self.name, self.keys_TN[own], self.gold_T[own], alt_T)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The changes of some requests, their factors one below the other."""

    requests: tuple[Request, ...]
    rows: tuple[slice, ...]
    """Those of each request, in everything below."""
    left_TC: Tensor
    right_TN: Tensor
    """P - P_-e = leftT right, for the rows of e."""
    part_left_TC: Tensor
    part_right_TN: Tensor
    """P_e = part_leftT part_right."""
    reader_TC: Tensor
    key_TN: Tensor
    """Sum over the suppressed positions of a request of (what reads its gold logit) kT =
    readerT key."""
    leverages: tuple[float, ...]
    """Largest eigenvalue of c H of each request."""
    method: str


class Changes:
    """Takes requests out of a solved system, with s, mu and alpha frozen.

    Raises:
        ValueError: alpha is fixed in the forget moments (`alt_sums`).
        EmptySet, NonFiniteKeys, NotPositiveDefinite: as `factorise`.
    """

    def __init__(self, system: System, rms: float, beta: float = 1.0) -> None:
        """rms: of the final residual.  beta: strength of the edit."""
        if system.forget.alt_sums:
            raise ValueError("alpha is fixed in `alt_sums`, so no request's part of it is known")
        self.system, self.beta, self.rms = system, beta, rms
        self.solved = system.solved()
        update = self.solved.update.scaled(beta)
        self.rows_C = update.rows_K
        self.update = LowRank(update.right_KN, update.left_MK)
        """P at that strength, kept outputs only."""
        self.weight = system.ridge.w_forget / self.solved.factor.num_forget
        alpha_V = self.solved.alpha_V
        corrupts = system.target.kind == "corruption"
        self.suppressed_V = torch.zeros_like(alpha_V, dtype=torch.bool) if corrupts else alpha_V > 0

    @property
    def device(self) -> torch.device:
        """Where the moments are."""
        return self.system.forget.gram_NN.device

    @property
    def num_outputs(self) -> int:
        """C."""
        left_CK = self.update.left_MK
        return len(self.update.right_KN if left_CK is None else left_CK)

    def of(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """The changes of all requests; the order may change.

        Raises:
            ForeignKeys: a request's keys are not part of the system.
        """
        num_inputs = sum(self.system.widths)
        limit = max(1, CHUNK_BYTES // (8 * num_inputs))
        held: list[Request] = []
        for request in requests:
            large = len(request.gold_T) > num_inputs
            if held and (large or sum(len(one.gold_T) for one in [*held, request]) > limit):
                yield from self._chunk(held)
                held = []
            if large:
                yield self._solved_again(request)
            else:
                held.append(request)
        yield from self._chunk(held)

    def without_retain(self, group: Request) -> tuple[LowRank, float]:
        """P - P_-g, kept outputs only, and the leverage, for keys of the retain set: the D = 0
        identity, with c = w_r/r.

        Raises:
            ForeignKeys: the keys are not part of the system.
        """
        num_retain = self.solved.factor.num_retain
        weight = self.system.ridge.w_retain / num_retain if num_retain else 0.0
        keys_TN = group.to(self.device).keys_TN.double()
        solved_TN = self.solve(keys_TN)
        found = downdate(keys_TN, solved_TN, -applied(self.update, keys_TN), weight)
        if found is None:
            raise ForeignKeys(self.system.sites)
        return LowRank(solved_TN, found.left_TC.mT.contiguous()).smallest(), found.leverage

    def reader_TC(self, gold_T: Tensor) -> Tensor:
        """What reads the drop of each gold logit off P k, in nats; 0 where alpha is.

        -(gain * W_U[g]) / rms, without its mean where the final norm is a LayerNorm; at the head
        -e[g].
        """
        system, active_T1 = self.system, self.suppressed_V[gold_T].unsqueeze(1)
        if self.rows_C is not None:
            return -(gold_T.unsqueeze(1) == self.rows_C).double() * active_T1
        rows_TM = system.unembedding_VM[gold_T].double() * system.gain_M.double()
        if system.centred:
            rows_TM = rows_TM - rows_TM.mean(1, keepdim=True)
        return -rows_TM * active_T1 / self.rms

    def solve(self, keys_TN: Tensor) -> Tensor:
        """KT A^-1."""
        lower_NN = self.solved.factor.lower_NN
        return torch.cholesky_solve(keys_TN.mT, lower_NN).mT.contiguous()

    def _chunk(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Downdates of some requests, and after them those that would lose digits, one by one."""
        if not requests:
            return
        requests = [request.to(self.device) for request in requests]
        keys_TN = torch.cat([request.keys_TN.double() for request in requests])
        solved_TN = self.solve(keys_TN)
        shift_TC = torch.cat([self._shifts(request) for request in requests])
        left_TC = shift_TC - applied(self.update, keys_TN)
        made: list[tuple[Request, slice, float]] = []
        again, start = [], 0
        for request in requests:
            own = slice(start, start + len(request.gold_T))
            start = own.stop
            found = downdate(keys_TN[own], solved_TN[own], left_TC[own], self.weight)
            if found is None or 1 - found.leverage < MIN_GAP:
                again.append(request)
            else:
                left_TC[own] = found.left_TC
                made.append((request, own, found.leverage))
        if made:
            yield Chunk(
                requests=tuple(request for request, _, _ in made),
                rows=tuple(own for _, own, _ in made),
                left_TC=left_TC,
                right_TN=solved_TN,
                part_left_TC=self.weight * shift_TC,
                part_right_TN=solved_TN,
                reader_TC=self.reader_TC(torch.cat([request.gold_T for request in requests])),
                key_TN=keys_TN,
                leverages=tuple(leverage for _, _, leverage in made),
                method=DOWNDATE,
            )
        yield from map(self._solved_again, again)

    def _solved_again(self, request: Request) -> Chunk:
        """One request by a factorisation of its own; the factors are the matrices themselves."""
        system, lower_NN = self.system, self.solved.factor.lower_NN
        gram_NN = torch.zeros_like(lower_NN)
        cross_CN = lower_NN.new_zeros(self.num_outputs, len(lower_NN))
        read_CN = torch.zeros_like(cross_CN)
        for start in range(0, len(request.gold_T), BLOCK_TOKENS):
            part = request.part(slice(start, start + BLOCK_TOKENS)).to(self.device)
            keys_TN = part.keys_TN.double()
            gram_NN.addmm_(keys_TN.mT, keys_TN)
            cross_CN.addmm_(self._shifts(part).mT, keys_TN)
            read_CN.addmm_(self.reader_TC(part.gold_T).mT, keys_TN)
        left_NN = system.matrix(self.solved.factor, gram_NN)
        smaller_NN, info = torch.linalg.cholesky_ex(left_NN)
        if int(info):
            raise ForeignKeys(system.sites)
        residual_CN = self.weight * (cross_CN - applied(self.update, gram_NN).mT)
        identity_CC = torch.eye(len(cross_CN), dtype=torch.float64, device=self.device)
        leverage = _leverage(lower_NN, gram_NN, self.weight)
        return Chunk(
            requests=(request,),
            rows=(slice(0, len(cross_CN)),),
            left_TC=identity_CC,
            right_TN=torch.cholesky_solve(residual_CN.mT, smaller_NN).mT,
            part_left_TC=identity_CC,
            part_right_TN=self.solve(self.weight * cross_CN),
            reader_TC=identity_CC,
            key_TN=read_CN,
            leverages=(leverage,),
            method=SOLVED_AGAIN,
        )

    def _shifts(self, request: Request) -> Tensor:
        system = self.system
        shift_TC = shifts_TC(
            request.gold_T,
            request.alt_T,
            self.solved.alpha_V,
            system.unembedding_VM,
            system.target,
            rows_C=self.rows_C,
            redirect_token=system.redirect_token,
        )
        return self.beta * shift_TC


def applied(matrix: LowRank, keys_TN: Tensor) -> Tensor:
    """(P k)T of each key, (T, C)."""
    moved_TK = keys_TN @ matrix.right_KN.mT
    return moved_TK if matrix.left_MK is None else moved_TK @ matrix.left_MK.mT


def _leverage(lower_NN: Tensor, gram_NN: Tensor, weight: float) -> float:
    """Largest eigenvalue of c A^-1 K KT, by power steps: a lower bound, close after some dozens."""
    vector_N1 = gram_NN.new_ones(len(gram_NN), 1)
    found = 0.0
    for _ in range(POWER_STEPS):
        vector_N1 = torch.cholesky_solve(weight * (gram_NN @ vector_N1), lower_NN)
        vector_N1 = vector_N1 / (lower_NN.mT @ vector_N1).norm()
        found = weight * float((vector_N1.mT @ (gram_NN @ vector_N1)).squeeze())
    return found
