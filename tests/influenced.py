"""The audit written naively: all keys in memory, a system for each set of requests, inverses.

Shapes: S forget keys, R retain keys, N inputs of W, M outputs of W, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from grom.auditor import Auditor
from grom.changes import Request
from grom.collect import JOINT, ForgetPlan, collect_moments, each_batch
from grom.config import RidgeConfig, TargetConfig
from grom.influence import Audited
from grom.merge import merged
from grom.moments import KeyMoments
from grom.sites import Site, final_gain_D, find_sites, norm_centres, unembedding_VD
from grom.target import random_direction, specificity
from grom.withdraw import System
from tests.reference import VOCAB, in_batches, random_rendered, tiny_model

EXACT = 1e-9
"""Relative; float64, condition of A below 1e5."""
BETA, TOWARD = 3.0, 7
RIDGE = RidgeConfig()
TARGETS = {
    "suppression": TargetConfig(kind="suppression"),
    "replacement": TargetConfig(kind="replacement"),
    "redirect": TargetConfig(kind="redirect", redirect_to="no"),
    "corruption": TargetConfig(kind="corruption", seed=3),
}
FORMS = ("alone", "joint", "head")
FAMILIES = ("llama", "gpt2")
CASES = [
    (family, kind, form)
    for family in FAMILIES
    for kind in TARGETS
    for form in FORMS
    if (kind, form) != ("corruption", "head")  # a direction has no meaning there
]
FORGET = random_rendered(1, 9)
RETAIN = random_rendered(9, 30)


def sites_of(family: str, form: str) -> tuple[Site, ...]:
    sites = find_sites(tiny_model(family))
    return tuple({"alone": sites[1:2], "joint": sites[1:3], "head": sites[-1:]}[form])


@cache
def requests_of(family: str, form: str) -> tuple[Request, ...]:
    """Each group's keys, as the pipeline collects them."""
    model, sites = tiny_model(family), sites_of(family, form)
    found: dict[str, list[Request]] = {}
    stream = in_batches(FORGET, 1)
    for part in each_batch(model, sites, stream, ForgetPlan(True), joint=form == "joint"):
        (keys_TN,) = part.keys.values()
        name = part.examples[0].group
        found.setdefault(name, []).append(Request(name, keys_TN, part.gold_T, part.alt_T))
    return tuple(joined(parts) for parts in found.values())


def joined(parts: list[Request]) -> Request:
    alts = [part.alt_T for part in parts if part.alt_T is not None]
    return Request(
        parts[0].name,
        torch.cat([part.keys_TN for part in parts]),
        torch.cat([part.gold_T for part in parts]),
        torch.cat(alts),
    )


@dataclass(frozen=True)
class Problem:
    """All keys in memory, and the system under test."""

    system: System
    requests: tuple[Request, ...]
    retain_RN: Tensor
    rms: float
    reader_VM: Tensor
    unit_VM: Tensor

    def auditor(self) -> Auditor:
        return Auditor(self.system, self.rms, BETA)

    @property
    def forget_SN(self) -> Tensor:
        return torch.cat([request.keys_TN.double() for request in self.requests])

    @property
    def mu_N(self) -> Tensor:
        """The ridge of each input, with s and r of the whole."""
        return self.ridge_N(self.forget_SN, len(self.forget_SN))

    def ridge_N(self, forget_SN: Tensor, num_forget: int) -> Tensor:
        bare_NN = RIDGE.w_retain / len(self.retain_RN) * self.retain_RN.mT @ self.retain_RN
        bare_NN = bare_NN + RIDGE.w_forget / num_forget * forget_SN.mT @ forget_SN
        parts = torch.split(bare_NN.diagonal(), list(self.system.widths))
        return torch.cat([torch.full_like(part, RIDGE.ridge(float(part.mean()))) for part in parts])

    def alpha_V(self, requests: Iterable[Request]) -> Tensor:
        gold_T = torch.cat([request.gold_T for request in requests])
        counts_V = torch.bincount(gold_T, minlength=VOCAB)
        return specificity(counts_V, self.system.retain.counts_V)

    def shifts(self, request: Request, alpha_V: Tensor) -> Tensor:
        """D of each position, one at a time."""
        rows = []
        assert request.alt_T is not None
        for gold, alt in zip(request.gold_T.tolist(), request.alt_T.tolist(), strict=True):
            kind = self.system.target.kind
            if kind == "corruption":
                rows.append(BETA * random_direction(self.unit_VM.shape[1], 3))
                continue
            shift_M = -self.unit_VM[gold]
            if kind == "replacement":
                shift_M = shift_M + self.unit_VM[alt]
            elif kind == "redirect":
                shift_M = shift_M + self.unit_VM[TOWARD]
            rows.append(BETA * alpha_V[gold] * shift_M)
        return torch.stack(rows)

    def solve(
        self,
        requests: Iterable[Request],
        num_forget: int,
        mu_N: Tensor,
        alpha_V: Tensor,
        retain_RN: Tensor | None = None,
    ) -> Tensor:
        """P (M, N) by an explicit inverse."""
        kept_RN = self.retain_RN if retain_RN is None else retain_RN
        A_NN = RIDGE.w_retain / len(self.retain_RN) * kept_RN.mT @ kept_RN + mu_N.diag()
        cross_MN = torch.zeros(self.unit_VM.shape[1], len(A_NN), dtype=torch.float64)
        scale = RIDGE.w_forget / num_forget
        for request in requests:
            keys_TN = request.keys_TN.double()
            A_NN = A_NN + scale * keys_TN.mT @ keys_TN
            cross_MN = cross_MN + self.shifts(request, alpha_V).mT @ keys_TN
        inverse_NN: Tensor = torch.linalg.inv(A_NN)
        return scale * cross_MN @ inverse_NN

    def matrix(self) -> Tensor:
        """A."""
        A_NN = RIDGE.w_retain / len(self.retain_RN) * self.retain_RN.mT @ self.retain_RN
        A_NN = A_NN + self.forget_SN.mT @ self.forget_SN / len(self.forget_SN)
        return A_NN + self.mu_N.diag()

    def whole(self) -> Tensor:
        """P."""
        return self.frozen(self.requests)

    def frozen(self, requests: Iterable[Request], retain_RN: Tensor | None = None) -> Tensor:
        """P of some requests, s, mu and alpha of all."""
        num_forget = len(self.forget_SN)
        return self.solve(requests, num_forget, self.mu_N, self.alpha_V(self.requests), retain_RN)

    def refit(self, requests: tuple[Request, ...]) -> Tensor:
        """P of a run that never had the others."""
        if not requests:
            return torch.zeros_like(self.whole())
        keys_SN = torch.cat([request.keys_TN.double() for request in requests])
        mu_N = self.ridge_N(keys_SN, len(keys_SN))
        return self.solve(requests, len(keys_SN), mu_N, self.alpha_V(requests))

    def drop(self, change_MN: Tensor, request: Request) -> tuple[float, int]:
        """Sum of what a change takes off the suppressed gold logits, and their number."""
        alpha_V, total, num = self.alpha_V(self.requests), 0.0, 0
        for key_N, gold in zip(request.keys_TN.double(), request.gold_T.tolist(), strict=True):
            if self.system.target.kind != "corruption" and alpha_V[gold] > 0:
                total -= float(self.reader_VM[gold] @ change_MN @ key_N)
                num += 1
        return total, num

    def others(self, request: Request) -> tuple[Request, ...]:
        return tuple(other for other in self.requests if other.name != request.name)


@cache
def problem(family: str, kind: str, form: str) -> Problem:
    model, sites, joint = tiny_model(family), sites_of(family, form), form == "joint"
    halves = [
        collect_moments(model, sites, in_batches(part, 1), ForgetPlan(True), joint=joint)
        for part in (FORGET[:4], FORGET[4:])
    ]
    forget = merged(halves)
    kept = collect_moments(model, sites, in_batches(RETAIN), joint=joint)
    (name,) = forget.moments
    assert (name == JOINT) == joint
    retain_RN = torch.cat(
        [
            next(iter(part.keys.values()))
            for part in each_batch(model, sites, in_batches(RETAIN), joint=joint)
        ]
    ).double()
    # In float64: float32 products of retain keys would be 1e-7 apart from these.
    gold_T = torch.cat([batch.gold_T for batch in in_batches(RETAIN)])
    exact = KeyMoments.zeros(retain_RN.shape[1], VOCAB).update_(retain_RN, gold_T)
    exact = replace(exact, counts_V=kept.moments[name].counts_V)
    system = System.of(
        model, sites, exact, forget.moments[name], RIDGE, TARGETS[kind],
        redirect_token=TOWARD if kind == "redirect" else None,
    )  # fmt: skip
    unembedding_VM = unembedding_VD(model).double()
    reader_VM = unembedding_VM * final_gain_D(model).double()
    if norm_centres(model):
        reader_VM = reader_VM - reader_VM.mean(1, keepdim=True)
    unit_VM = unembedding_VM / unembedding_VM.norm(dim=1, keepdim=True)
    reader_VM = reader_VM / forget.mean_rms
    if form == "head":
        unit_VM = reader_VM = torch.eye(VOCAB, dtype=torch.float64)
    requests = requests_of(family, form)
    return Problem(system, requests, retain_RN, forget.mean_rms, reader_VM, unit_VM)


def audited(given: Problem) -> dict[str, Audited]:
    return {one.whole.request: one for one in given.auditor().influences(given.requests)}
