"""Stage audit: how much each request changed the model, and which retain groups protect what.

influence.parquet    a row for each request and site, and of all sites: `grom.influence.Influence`
tokens.parquet       the tokens that each request suppresses most; ids only where keys are kept
measured.parquet     answers of the most influential requests, with and without them in the edit
protection.parquet   what leaving out some retain groups changes, by site
growth.parquet       what it adds to the effect on each request
audit.json           totals, how exact it is, warnings
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect import task

from grom.apply import Edit, edited
from grom.batches import batches
from grom.changes import SOLVED_AGAIN
from grom.config import AuditConfig, CollectConfig, Config, RidgeConfig, TargetConfig
from grom.evaluate import score_examples
from grom.influence import Influence, TokenWeight
from tasks.artifacts import Artifact
from tasks.codecs import load_edit, read_json, write_json, write_table
from tasks.influence import Findings, Growth, Protection, Stage
from tasks.models import open_model, pad_id, scratch_folder
from tasks.place import (
    CalibrationRef,
    CollectRef,
    CountRef,
    DataRef,
    EditRef,
    ModelRef,
    Place,
    SitesRef,
)
from tasks.request_keys import KeySource

logger = logging.getLogger(__name__)
SHARE_TOLERANCE = 1e-6


class Moments(Config):
    """What an edit was solved from."""

    retain: tuple[CollectRef, ...]
    forget: CollectRef
    """Of all batches together."""
    fresh: tuple[CollectRef, ...]
    """Of the batches whose text is at hand."""
    earlier: tuple[CollectRef, ...] = ()
    """Of the others; their requests are audited only if their keys were kept."""

    @property
    def facts(self) -> dict[str, list[str]]:
        """What determines them."""
        parts = {"retain": self.retain, "forget": (self.forget,)}
        parts |= {"fresh": self.fresh, "earlier": self.earlier}
        return {name: [ref.artifact.key for ref in refs] for name, refs in parts.items()}


class AuditRef(Config):
    """The influence of every request."""

    artifact: Artifact
    num_requests: int
    covered: float
    """Share of the forget positions whose keys were there."""
    exactness: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean log-probability of a request's answer tokens, in nats, with the edit and with the edit
    that the frozen solve gives without the request."""

    request: str
    num_examples: int
    with_request: float
    without_request: float


@task(tags=["gpu"])
def audit(
    model: ModelRef,
    moments: Moments,
    edit: EditRef,
    forget: DataRef,
    retain: DataRef,
    sites: SitesRef,
    counted: CountRef,
    ridge: RidgeConfig,
    target: TargetConfig,
    strength: CalibrationRef,
    collect: CollectConfig,
    config: AuditConfig,
    place: Place,
    reference: ModelRef | None = None,
) -> AuditRef:
    """Measure the influence of every request whose keys are there.  Returns its reference.

    Keys that were not kept are taken from the text once more, one example at a time as they were
    collected: equal to the bit on the same machine.

    `edit` is at unit strength, effects are given at `strength`, and `forget` has the rows of the
    fresh batches.

    Raises:
        ForeignKeys: keys are not part of the moments.
    """
    facts = {
        "edit": edit.artifact.key,
        "beta": strength.beta,
        "forget": forget.facts,
        "retain": retain.facts if config.retain_groups else None,
        "order": collect.order,
        "request_keys": collect.keep_request_keys,
        "audit": config.model_dump(mode="json"),
        "moments": moments.facts,
    }

    def write(folder: Path) -> None:
        opened = open_model(Path(model.folder), text_window=collect.text_window)
        stage = Stage(
            opened, moments.retain, moments.forget, sites, ridge, target, strength.beta, collect,
            place,
        )  # fmt: skip
        with scratch_folder(Path(place.work) / "scratch", f"audit-{uuid4().hex}") as scratch:
            keys = stage.key_source(
                moments.fresh, moments.earlier, forget, counted, scratch / "forget", reference
            )
            retained = stage.retain_keys(retain, config.retain_groups, scratch / "retain")
            found = stage.findings(keys, retained)
            stage.refit(found, keys, chosen_of(found, config))
            asked = config.exact_log_probs and collect.order == "frozen"
            measured = _measured(stage, found, keys, edit, forget, config.top) if asked else []
            _flag(found, sites, collect)
            _write(folder, found, measured, collect.keep_request_keys)
            summary = _summary(found, keys, stage.num_positions, sites, collect)
        write_json(folder / "audit.json", summary)

    artifact, _ = place.cached("audit", facts, write)
    return _logged(artifact, place)


def _logged(artifact: Artifact, place: Place) -> AuditRef:
    summary = read_json(place.fetch(artifact) / "audit.json")
    for warning in summary["warnings"]:
        logger.warning("audit: %s", warning)
    logger.info("audit: %d requests; %s", summary["num_requests"], summary["exactness"])
    return AuditRef(artifact=artifact, **summary)


def chosen_of(found: Findings, config: AuditConfig) -> list[str]:
    """Whose influence is measured with everything anew."""
    ranked = found.by_influence()
    if config.refit == "none":
        return []
    if config.refit == "all" or len(ranked) <= 2 * config.top:
        return ranked
    return ranked[: config.top] + ranked[-config.top :]


def _measured(
    stage: Stage, found: Findings, keys: KeySource, edit: EditRef, forget: DataRef, top: int
) -> list[Measured]:
    """Run the most influential requests whose text is at hand with both edits."""
    opened, place = stage.opened, stage.place
    at_hand = {example.group for example in forget.examples()}
    wanted = [request for request in found.by_influence() if request in at_hand][:top]
    whole = load_edit(place.fetch(edit.artifact)).scaled(stage.beta)
    rows = []
    for request, update in stage.updates_without(keys, wanted).items():
        own = (example for example in forget.examples() if example.group == request)
        rendered = list(opened.rendering.render_all(own))
        means = []
        for change in (whole, Edit(update)):
            stream = batches(
                rendered,
                batch_tokens=stage.collect.batch_tokens,
                window_examples=stage.collect.window_examples,
                pad_id=pad_id(opened.rendering),
            )
            with edited(opened.model, change):
                scores = score_examples(opened.model, stream)
            total = sum(score.mean_logprob * score.num_tokens for score in scores)
            means.append(total / sum(score.num_tokens for score in scores))
        rows.append(Measured(request, len(rendered), *means))
    return rows


def _flag(found: Findings, sites: SitesRef, collect: CollectConfig) -> None:
    """Mark what a sequential edit solved from other keys."""
    if collect.order == "frozen":
        return
    for request, rows in found.rows.items():
        exact = [number == 0 or len(sites.layers) == 1 for number in range(len(rows))]
        found.rows[request] = [
            replace(row, exact=is_exact) for row, is_exact in zip(rows, exact, strict=True)
        ]


def _write(folder: Path, found: Findings, measured: Sequence[Measured], keep_ids: bool) -> None:
    tokens = [
        token if keep_ids else replace(token, token=None)
        for weights in found.tokens.values()
        for token in weights
    ]
    growth = [Growth(*pair, nats) for pair, nats in found.growth.items()]
    rows = [row for rows in found.rows.values() for row in rows]
    write_table(folder / "influence.parquet", rows, Influence)
    write_table(folder / "tokens.parquet", tokens, TokenWeight)
    write_table(folder / "measured.parquet", measured, Measured)
    write_table(folder / "protection.parquet", found.protections, Protection)
    write_table(folder / "growth.parquet", growth, Growth)


def _summary(
    found: Findings, keys: KeySource, total: int, sites: SitesRef, collect: CollectConfig
) -> dict[str, Any]:
    wholes = [rows[-1] for rows in found.rows.values()]
    covered, warnings = keys.num_positions / total, []
    exactness = "the influence is exact at every site"
    if collect.order != "frozen" and len(sites.layers) > 1:
        exactness = f"sequential keys: exact at the first edited site only, layer {sites.layers[0]}"
        warnings.append(f"{exactness}; at the others the influence is that of the frozen edit.")
    if keys.num_positions < total:
        warnings.append(
            f"{total - keys.num_positions} of {total} forget positions belong to earlier requests "
            "whose keys were not kept; to audit those, set `collect.keep_request_keys` and hand in "
            "their text again."
        )
    elif abs(off := sum(row.share for row in wholes) - 1) > SHARE_TOLERANCE:
        warnings.append(
            f"the parts of the requests add up to the edit only to {off:.1e}: their keys are not "
            "quite those that were collected, on another machine perhaps."
        )
    if again := sum(row.method == SOLVED_AGAIN for row in wholes):
        warnings.append(f"{again} requests were solved again, since a downdate would not do.")
    return {
        "num_requests": len(wholes),
        "covered": covered,
        "exactness": exactness,
        "warnings": warnings,
    }
