"""What an edit is: sites, ranks, norms, strength, and what it came from.

Shapes: N inputs of W, M outputs of W.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grom.apply import Rounding
from grom.export import inner, spectrum
from grom.target import LowRank
from tasks.bucket import Bucket
from tasks.codecs import read_table
from tasks.edits import EDIT, open_edit
from tasks.provenance import find_published
from tasks.retries import BRIEF
from tasks.store import MARKER
from tasks.undo import ORIGINALS
from tasks.updates import FACTORS, StoredUpdates

TOLERANCE = 1e-6
"""Singular values above this share of the largest count for the rank that is shown."""


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """The update of one weight."""

    site: str
    layer: int | None
    """None for the head."""
    shape: tuple[int, int]
    """M, N."""
    form: str
    """How it is kept: whole, factors or rows."""
    kept: int
    """Factors or rows that it is kept as; M if it is kept whole."""
    rank: int
    """Numerical, at `TOLERANCE`."""
    norm: float
    """|P|, Frobenius."""
    spectral_norm: float
    relative_norm: float | None
    """|P| / |W|; None for an edit that was never applied."""
    lost: float | None
    """Share of P that rounding to the checkpoint's dtype lost."""
    num_changed: int | None
    """Weights whose stored value changed."""
    num_bytes: int
    """Of its factors."""


@dataclass(frozen=True, slots=True)
class EditFacts:
    """An edit, whole."""

    folder: str
    sha256: str
    """Of sites and factors."""
    recorded: bool
    """Whether that hash was checked against the record of what was applied."""
    base: str | None
    """Fingerprint of the base model."""
    nats: float | None
    """Direct drop of the suppressed tokens' logits; None at unit strength."""
    beta: float | None
    solve: str | None
    """Key of the solve that it is a multiple of."""
    norm: float
    num_bytes: int
    """Of the factors' file."""
    undo_bytes: int
    """Of the exact originals' file."""
    sites: tuple[SiteFacts, ...]
    origin: dict[str, Any] = field(default_factory=dict)
    """Keys of statistics and batches, and digests of the data, as far as the store has them."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much two edits have in common at the sites that both change."""

    sites: tuple[str, ...]
    cosine: float
    """|<P, Q>| / (|P| |Q|) over those sites; 0: nothing in common, 1: the same direction."""
    same_base: bool


def inspect_edit(folder: Path, store: str | None = None) -> EditFacts:
    """Measure an edit from its factors.

    Args:
        folder: of the edit.
        store: where its statistics are; not given: the store that the folder lies in, if any.

    Raises:
        MissingInput, BrokenCheckpoint, TamperedEdit, CorruptArtifact: see `open_edit`.
    """
    updates, undo = open_edit(folder)
    path = folder / "rounding.parquet"
    roundings = {row.site: row for row in read_table(path, Rounding)} if path.is_file() else {}
    sites = tuple(_site_facts(updates, site, roundings.get(site.name)) for site in updates.sites)
    originals = folder / ORIGINALS
    facts = updates.facts
    solve = facts.get("edit") or (folder.name if folder.parent.name == "solve" else None)
    return EditFacts(
        folder=str(folder),
        sha256=updates.sha256(),
        recorded=undo is not None,
        base=facts.get("model"),
        nats=facts.get("nats"),
        beta=facts.get("beta"),
        solve=solve,
        norm=sum(site.norm**2 for site in sites) ** 0.5,
        num_bytes=(folder / FACTORS).stat().st_size,
        undo_bytes=originals.stat().st_size if originals.is_file() else 0,
        sites=sites,
        origin=_origin(solve, store or _store_of(folder)),
    )


def _site_facts(updates: StoredUpdates, site: Any, rounding: Rounding | None) -> SiteFacts:
    update = updates.whole(site)
    found = spectrum(update)
    regions = (updates.region(site, part) for part in ("right", "left", "rows"))
    form, kept = _form(update)
    return SiteFacts(
        site=site.name,
        layer=site.layer,
        shape=_shape(update),
        form=form,
        kept=kept,
        rank=found.rank(TOLERANCE),
        norm=found.norm,
        spectral_norm=found.spectral_norm,
        relative_norm=None if rounding is None else rounding.update_norm / rounding.weight_norm,
        lost=None if rounding is None else rounding.lost,
        num_changed=None if rounding is None else rounding.num_changed,
        num_bytes=sum(region.size for region in regions if region is not None),
    )


def _form(update: LowRank) -> tuple[str, int]:
    if update.left_MK is not None:
        return "factors", len(update.right_KN)
    return ("whole" if update.rows_K is None else "rows"), len(update.right_KN)


def _shape(update: LowRank) -> tuple[int, int]:
    if update.left_MK is not None:
        num_outputs = len(update.left_MK)
    elif update.rows_K is not None:
        assert update.num_outputs is not None
        num_outputs = update.num_outputs
    else:
        num_outputs = len(update.right_KN)
    return num_outputs, update.right_KN.shape[1]


def overlap(one: Path, other: Path) -> Overlap:
    """Measure what two edits have in common.

    Raises:
        MissingInput, BrokenCheckpoint, TamperedEdit, CorruptArtifact: see `open_edit`.
    """
    first, second = open_edit(one)[0], open_edit(other)[0]
    shared = [site for site in first.sites if site in set(second.sites)]
    product, norms = 0.0, [0.0, 0.0]
    for site in shared:
        P, Q = first.whole(site), second.whole(site)
        if _shape(P) == _shape(Q):
            product += inner(P, Q)
            norms = [norms[0] + P.norm() ** 2, norms[1] + Q.norm() ** 2]
    size = (norms[0] * norms[1]) ** 0.5
    return Overlap(
        sites=tuple(site.name for site in shared),
        cosine=abs(product) / size if size else 0.0,
        same_base=first.facts.get("model") == second.facts.get("model"),
    )


def _store_of(folder: Path) -> str | None:
    """The store of <store>/apply/<key>/edit or <store>/solve/<key>."""
    artifact = folder.parent if folder.name == EDIT else folder
    return str(artifact.parents[1]) if (artifact / MARKER).is_file() else None


def _origin(solve: str | None, store: str | None) -> dict[str, Any]:
    """What the solve was made from: statistics' keys, batches that were merged, the data."""
    if solve is None or store is None:
        return {}
    bucket = Bucket(store, patience=BRIEF)
    solved = _facts(bucket, f"solve/{solve}")
    forget = _facts(bucket, f"collect/{solved['forget']}") if "forget" in solved else {}
    names = ("retain", "forget", "ridge", "target")
    found: dict[str, Any] = {name: solved[name] for name in names if name in solved}
    keys = forget.get("parts", [solved["forget"]]) if forget else []
    if requests := [_num_requests(bucket, f"collect/{key}") for key in keys]:
        found["requests"] = "not known" if None in requests else str(sum(filter(None, requests)))
    data = forget.get("data", [])
    found |= {"batches": forget["parts"]} if "parts" in forget else {}
    digests = [one.get("digest") for one in (data if isinstance(data, list) else [data])]
    return found | ({"data": digests} if digests else {})


def _num_requests(bucket: Bucket, key: str) -> int | None:
    """Groups of the examples that moments are of; None if the file is not there."""
    made = find_published(key, bucket)
    if made is None:
        return None
    found = bucket.read("/".join(filter(None, (key, made.folder, "examples.parquet"))))
    if found is None:
        return None
    groups = pq.read_table(io.BytesIO(found.data), columns=["group"])["group"]
    return len(groups.unique())


def _facts(bucket: Bucket, key: str) -> dict[str, Any]:
    found = bucket.read(f"{key}/{MARKER}")
    if found is None:
        return {}
    facts: dict[str, Any] = json.loads(found.data)["facts"]
    return facts
