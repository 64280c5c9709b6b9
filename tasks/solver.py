"""The solve of one ridge system: its sites' unit updates, with the numbers of each.

Shapes: M outputs of W, N inputs of W, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grom.calibrate import band_drop
from grom.changes import Request
from grom.config import RidgeConfig, TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.sites import Site, unembedding_VD
from grom.solve import factorise, solve_factored, split_columns
from grom.target import LowRank, specificity, target_cross
from grom.woodbury import RetainFactor, position_shifts, solve_small, sums_of
from tasks.models import OpenModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The numbers of one site's solve, at unit strength."""

    site: str
    layer: int
    """-1 for the head."""
    num_forget: int
    num_retain: int
    mu: float
    peak_ratio: float
    condition: float
    """Of the site's system."""
    update_norm: float
    relative_norm: float
    """|P| / |W|."""
    drop_nats: float
    """Direct drop of the suppressed tokens' logits; not a number for corruption."""
    suppressed_share: float
    """Share of forget positions with alpha > 0."""


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solve of one system gave."""

    updates: dict[Site, LowRank]
    """At unit strength."""
    reports: list[SiteReport]
    alpha_V: Tensor
    seconds: float


class SystemNumbers(NamedTuple):
    """What is worth knowing about a system."""

    num_retain: int
    mus: tuple[float, ...]
    peak_ratios: tuple[float, ...]
    condition: float


class Solver:
    """What the solves of all sites share."""

    def __init__(
        self,
        opened: OpenModel,
        ridge: RidgeConfig,
        target: TargetConfig,
        rms: float,
    ) -> None:
        self.model: nn.Module = opened.model
        self.ridge, self.target, self.rms = ridge, target, rms
        self.special: Collection[int] = (
            () if target.suppress_special else opened.rendering.special_ids()
        )
        self.redirect_token = redirect_token(opened, target)

    @property
    def device(self) -> torch.device:
        """Where the systems are solved."""
        return unembedding_VD(self.model).device

    def widths(self, sites: Sequence[Site]) -> list[int]:
        """Inputs of each site."""
        return [site.weight_MN(self.model).shape[1] for site in sites]

    def whole(self, sites: Sequence[Site], retain: KeyMoments, forget: KeyMoments) -> Solved:
        """Factorise the whole system of sites whose keys stand side by side."""
        started = time.perf_counter()
        alpha_V = specificity(forget.counts_V, retain.counts_V, self.special)
        cross = target_cross(
            forget,
            alpha_V,
            unembedding_VD(self.model),
            self.target,
            head=sites[0].kind == "head",
            redirect_token=self.redirect_token,
        )
        factor = factorise(
            retain, forget, self.ridge, site=sites_name(sites), widths=self.widths(sites)
        )
        update = solve_factored(cross, factor, self.ridge)
        numbers = SystemNumbers(
            factor.num_retain, factor.mus, factor.peak_ratios, factor.condition()
        )
        found = self._by_site(sites, update, forget, alpha_V, numbers)
        return replace(found, seconds=time.perf_counter() - started)

    def small(self, sites: Sequence[Site], factor: RetainFactor, forget: Request) -> Solved:
        """The same from the retain part's factor and every forget key."""
        started = time.perf_counter()
        counts_V = torch.bincount(forget.gold_T, minlength=len(factor.counts_V))
        alpha_V = specificity(counts_V, factor.counts_V, self.special)
        shifts = position_shifts(
            forget,
            alpha_V,
            unembedding_VD(self.model),
            self.target,
            head=sites[0].kind == "head",
            redirect_token=self.redirect_token,
        )
        keys_SN = forget.keys_TN.double()
        found = solve_small(shifts, keys_SN, factor, self.ridge, site=sites_name(sites))
        numbers = SystemNumbers(factor.num_retain, factor.mus, found.peak_ratios, found.condition)
        moments = sums_of(forget, len(alpha_V))
        solved = self._by_site(sites, found.update, moments, alpha_V, numbers)
        return replace(solved, seconds=time.perf_counter() - started)

    def _by_site(
        self,
        sites: Sequence[Site],
        update: LowRank,
        forget: KeyMoments,
        alpha_V: Tensor,
        numbers: SystemNumbers,
    ) -> Solved:
        widths, start = self.widths(sites), 0
        updates = split_columns(update, widths)
        suppressed = int(forget.counts_V[alpha_V > 0].sum())
        reports = []
        for number, (site, own) in enumerate(zip(sites, updates, strict=True)):
            norm = own.norm()
            weight_MN = site.weight_MN(self.model)
            weight_norm = torch.linalg.vector_norm(weight_MN, dtype=torch.float64)
            block = forget.block(start, start + widths[number])
            start += widths[number]
            report = SiteReport(
                site=site.name,
                layer=-1 if site.layer is None else site.layer,
                num_forget=forget.num_tokens,
                num_retain=numbers.num_retain,
                mu=numbers.mus[number],
                peak_ratio=numbers.peak_ratios[number],
                condition=numbers.condition,
                update_norm=norm,
                relative_norm=norm / float(weight_norm),
                drop_nats=self.drop(site, own, block, alpha_V),
                suppressed_share=suppressed / forget.num_tokens,
            )
            logger.info("solve %s: condition %.1e, mu %.3g", site.name, report.condition, report.mu)
            reports.append(report)
        return Solved(dict(zip(sites, updates, strict=True)), reports, alpha_V, 0.0)

    def drop(self, site: Site, update: LowRank, forget: KeyMoments, alpha_V: Tensor) -> float:
        """Direct drop of the site's update, in nats."""
        if self.target.kind == "corruption":
            return float("nan")
        name = site.name
        return band_drop({name: update}, {name: forget}, alpha_V, self.model, self.rms)[name]


def sites_name(sites: Sequence[Site]) -> str:
    """What messages call the sites of one system."""
    return sites[0].name if len(sites) == 1 else f"{sites[0].name} ... {sites[-1].name}"


def redirect_token(opened: OpenModel, target: TargetConfig) -> int | None:
    """Id of the token that `redirect` moves to.

    Raises:
        ConfigError: the text gives no token.
    """
    if target.redirect_to is None:
        return None
    tokenizer = opened.rendering.tokenizer
    ids = tokenizer(target.redirect_to, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ConfigError("target.redirect_to gives no token; name a word, with its leading space")
    return int(ids[0])
