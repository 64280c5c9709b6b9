"""Stage solve: moments in, the edit at unit strength out."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from prefect import task
from torch import nn

from grom.apply import Edit
from grom.calibrate import band_drop
from grom.config import RidgeConfig, TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.sites import Site, unembedding_VD
from grom.solve import RidgeFactor, factorise, solve_factored
from grom.target import LowRank, target_cross
from tasks.codecs import read_json, save_edit, write_json, write_table
from tasks.collect import read_moments, read_rms
from tasks.count import read_alpha
from tasks.models import OpenModel, open_model
from tasks.place import CollectRef, CountRef, EditRef, ModelRef, Place, SitesRef
from tasks.select import chosen_sites

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
    update_norm: float
    relative_norm: float
    """|P| / |W|."""
    drop_nats: float
    """Direct drop of the suppressed tokens' logits; not a number for corruption."""
    suppressed_share: float
    """Share of forget positions with alpha > 0."""


@task(tags=["gpu"])
def solve(
    model: ModelRef,
    retain: CollectRef,
    forget: CollectRef,
    sites: SitesRef,
    counted: CountRef,
    ridge: RidgeConfig,
    target: TargetConfig,
    place: Place,
) -> EditRef:
    """Solve each site independently in float64.  Returns the reference of the unit edit.

    Raises:
        NotPositiveDefinite, NonFiniteKeys: a site's system cannot be solved; names the site.
    """
    facts = {
        "retain": retain.artifact.key,
        "forget": forget.artifact.key,
        "count": counted.artifact.key,
        "ridge": ridge.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
    }

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=512)
        solver = Solver(opened, counted, ridge, target, read_rms(forget, place), place)
        updates: dict[Site, LowRank] = {}
        reports = []
        started = time.perf_counter()
        for site in chosen_sites(opened.model, sites):
            kept = read_moments(retain, site.name, place)
            moved = read_moments(forget, site.name, place)
            updates[site], report = solver.site(site, kept, moved)
            reports.append(report)
        seconds = time.perf_counter() - started
        save_edit(folder, Edit(updates), facts)
        write_table(folder / "sites.parquet", reports)
        drop = sum(report.drop_nats for report in reports)
        unit = 1.0 if target.kind == "corruption" else drop
        write_json(folder / "solve.json", {"seconds": seconds, "nats_per_beta": unit})

    artifact, _ = place.cached("solve", facts, write)
    solved = read_json(place.fetch(artifact) / "solve.json")
    logger.info("solve: %d sites in %.2f s", len(sites.layers) or 1, solved["seconds"])
    return EditRef(artifact=artifact, **solved)


class Solver:
    """What the solves of all sites share."""

    def __init__(
        self,
        opened: OpenModel,
        counted: CountRef,
        ridge: RidgeConfig,
        target: TargetConfig,
        rms: float,
        place: Place,
    ) -> None:
        self.model: nn.Module = opened.model
        self.ridge, self.target, self.rms = ridge, target, rms
        self.alpha_V = read_alpha(counted, place)
        self.suppressed_share = counted.num_suppressed / counted.num_forget_tokens
        self.redirect_token = redirect_token(opened, target)

    def update(
        self, site: Site, retain: KeyMoments, forget: KeyMoments
    ) -> tuple[LowRank, RidgeFactor]:
        """The site's update at unit strength, and the factor of its ridge system."""
        cross = target_cross(
            forget,
            self.alpha_V,
            unembedding_VD(self.model).to(forget.gram_NN.device),
            self.target,
            head=site.kind == "head",
            redirect_token=self.redirect_token,
        )
        factor = factorise(retain, forget, self.ridge, site=site.name)
        return solve_factored(cross, factor, self.ridge), factor

    def site(
        self, site: Site, retain: KeyMoments, forget: KeyMoments
    ) -> tuple[LowRank, SiteReport]:
        """The site's update at unit strength with its report."""
        update, factor = self.update(site, retain, forget)
        weight_norm = float(torch.linalg.matrix_norm(site.weight_MN(self.model).double()))
        norm = update.norm()
        report = SiteReport(
            site=site.name,
            layer=-1 if site.layer is None else site.layer,
            num_forget=factor.num_forget,
            num_retain=factor.num_retain,
            mu=factor.mu,
            peak_ratio=factor.peak_ratio,
            condition=factor.condition(),
            update_norm=norm,
            relative_norm=norm / weight_norm,
            drop_nats=self.drop(site, update, forget),
            suppressed_share=self.suppressed_share,
        )
        logger.info(
            "solve %s: condition %.1e, mu %.3g, |P|/|W| %.2e per unit strength",
            site.name,
            report.condition,
            report.mu,
            report.relative_norm,
        )
        return update, report

    def drop(self, site: Site, update: LowRank, forget: KeyMoments) -> float:
        """Direct drop of the site's update, in nats."""
        if self.target.kind == "corruption":
            return float("nan")
        name = site.name
        return band_drop({name: update}, {name: forget}, self.alpha_V, self.model, self.rms)[name]


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
