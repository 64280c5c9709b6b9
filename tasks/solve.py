"""Stage solve: moments in, the edit at unit strength out."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prefect import task
from torch import Tensor, nn

from grom.apply import Edit
from grom.calibrate import band_drop
from grom.collect import JOINT
from grom.config import RidgeConfig, TargetConfig
from grom.errors import ConfigError
from grom.moments import KeyMoments
from grom.sites import Site, unembedding_VD
from grom.solve import factorise, solve_factored, split_columns
from grom.target import LowRank, specificity, target_cross
from tasks.codecs import read_json, save_edit, write_json, write_table
from tasks.collect import read_moments, read_rms
from tasks.models import OpenModel, open_model
from tasks.place import CollectRef, EditRef, ModelRef, Place, SitesRef
from tasks.select import chosen_sites

logger = logging.getLogger(__name__)
ALPHA = "alpha.npy"


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


@task(tags=["gpu"])
def solve(
    model: ModelRef,
    retain: tuple[CollectRef, ...],
    forget: CollectRef,
    sites: SitesRef,
    ridge: RidgeConfig,
    target: TargetConfig,
    place: Place,
) -> EditRef:
    """Solve in float64, each site alone or all as one system.  Returns the unit edit's reference.

    The moments of several retain sets are added first.  alpha comes from the counts of the moments:
    those of a forget set that was merged from batches give the alpha of all of them.

    Raises:
        NotPositiveDefinite, NonFiniteKeys: a system cannot be solved; names the site.
    """
    facts = {
        "retain": [ref.artifact.key for ref in retain],
        "forget": forget.artifact.key,
        "ridge": ridge.model_dump(mode="json"),
        "target": target.model_dump(mode="json"),
    }

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=512)
        solver = Solver(opened, ridge, target, read_rms(forget, place))
        chosen = chosen_sites(opened.model, sites)
        systems = {JOINT: chosen} if sites.joint else {site.name: (site,) for site in chosen}
        updates: dict[Site, LowRank] = {}
        reports: list[SiteReport] = []
        seconds = 0.0
        for name, members in systems.items():
            kept = reduce(operator.add, (read_moments(ref, name, place) for ref in retain))
            device = unembedding_VD(opened.model).device
            kept, moved = kept.to(device), read_moments(forget, name, place).to(device)
            started = time.perf_counter()
            solved, found = solver.system(members, kept, moved)
            seconds += time.perf_counter() - started
            updates |= solved
            reports += found
            alpha_V = specificity(moved.counts_V, kept.counts_V, solver.special).cpu()
        np.save(folder / ALPHA, alpha_V.numpy(), allow_pickle=False)  # the same at every site
        save_solved(folder, updates, reports, target, seconds, facts)

    artifact, _ = place.cached("solve", facts, write)
    solved = read_json(place.fetch(artifact) / "solve.json")
    logger.info("solve: %d sites in %.2f s", len(sites.layers) or 1, solved["seconds"])
    return EditRef(artifact=artifact, **solved)


def save_solved(
    folder: Path,
    updates: dict[Site, LowRank],
    reports: list[SiteReport],
    target: TargetConfig,
    seconds: float,
    facts: dict[str, Any],
) -> None:
    """Write the unit edit, the numbers of its sites, and what one unit of strength drops."""
    save_edit(folder, Edit(updates), facts)
    write_table(folder / "sites.parquet", reports)
    drop = sum(report.drop_nats for report in reports)
    unit = 1.0 if target.kind == "corruption" else drop
    write_json(folder / "solve.json", {"seconds": seconds, "nats_per_beta": unit})


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

    def system(
        self, sites: Sequence[Site], retain: KeyMoments, forget: KeyMoments
    ) -> tuple[dict[Site, LowRank], list[SiteReport]]:
        """Unit updates of sites whose keys stand side by side, with their reports."""
        unembedding_VM = unembedding_VD(self.model)
        weights = [site.weight_MN(self.model) for site in sites]
        widths = [weight_MN.shape[1] for weight_MN in weights]
        alpha_V = specificity(forget.counts_V, retain.counts_V, self.special)
        suppressed = int(forget.counts_V[alpha_V > 0].sum())
        name = sites[0].name if len(sites) == 1 else f"{sites[0].name} ... {sites[-1].name}"
        cross = target_cross(
            forget,
            alpha_V,
            unembedding_VM,
            self.target,
            head=sites[0].kind == "head",
            redirect_token=self.redirect_token,
        )
        factor = factorise(retain, forget, self.ridge, site=name, widths=widths)
        updates = split_columns(solve_factored(cross, factor, self.ridge), widths)
        condition, start, reports = factor.condition(), 0, []
        for number, (site, update) in enumerate(zip(sites, updates, strict=True)):
            norm = update.norm()
            weight_norm = torch.linalg.vector_norm(weights[number], dtype=torch.float64)
            block = forget.block(start, start + widths[number])
            start += widths[number]
            report = SiteReport(
                site=site.name,
                layer=-1 if site.layer is None else site.layer,
                num_forget=factor.num_forget,
                num_retain=factor.num_retain,
                mu=factor.mus[number],
                peak_ratio=factor.peak_ratios[number],
                condition=condition,
                update_norm=norm,
                relative_norm=norm / float(weight_norm),
                drop_nats=self.drop(site, update, block, alpha_V),
                suppressed_share=suppressed / forget.num_tokens,
            )
            logger.info("solve %s: condition %.1e, mu %.3g", site.name, condition, report.mu)
            reports.append(report)
        return dict(zip(sites, updates, strict=True)), reports

    def drop(self, site: Site, update: LowRank, forget: KeyMoments, alpha_V: Tensor) -> float:
        """Direct drop of the site's update, in nats."""
        if self.target.kind == "corruption":
            return float("nan")
        name = site.name
        return band_drop({name: update}, {name: forget}, alpha_V, self.model, self.rms)[name]


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
