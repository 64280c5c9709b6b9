"""A small forget set whose keys were kept, and the stored inverse of the retain part for it.

    solve/<hash>/<system>.json             mu_0, inputs of each site, sizes
    solve/<hash>/<system>.inverse.npy      (N, N) float64
    solve/<hash>/<system>.vectors.npy      (N, 1 + 2 + 2 Q) float64: diagonal, extremes, probes,
                                           answers
    solve/<hash>/<system>.counts.npy       (V,) int64

The hash is that of the retain moments and the ridge: an inverse of anything else is never found.

Shapes: N inputs of W, Q probes, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from grom.changes import Request
from grom.collect import JOINT
from grom.config import RidgeConfig
from grom.errors import MissingInput
from grom.inverse import NUM_PROBES, RetainInverse, invert_retain, shift_of
from grom.sites import unembedding_VD
from grom.woodbury import MAX_LOAD
from tasks.artifacts import Artifact
from tasks.codecs import read_json, write_json
from tasks.collect import read_facts, read_moments
from tasks.models import OpenModel
from tasks.place import CollectRef, Place, SitesRef
from tasks.request_keys import StoredKeys, has_keys
from tasks.select import chosen_sites

logger = logging.getLogger(__name__)
FLOAT64 = 8


@dataclass(frozen=True, slots=True)
class SmallBatch:
    """A forget set that is solved with the inverse."""

    parts: tuple[StoredKeys, ...]
    """Its batches."""
    inverse: Artifact
    folder: Path
    """Where the inverse is."""

    def request(self, name: str) -> Request:
        """All keys at one system, float64."""
        return all_keys(self.parts, name)


def small_batch(
    retain: tuple[CollectRef, ...],
    forget: CollectRef,
    sites: SitesRef,
    ridge: RidgeConfig,
    place: Place,
    opened: Callable[[], OpenModel],
) -> SmallBatch | None:
    """The forget set with the inverse that serves it, which is made if the store has none.

    None, so that the whole system is factorised, unless the inverse is asked for
    (`ridge.cache_retain`), every key of every batch was kept, there are retain tokens to keep, and
    the keys are few: not more rows than `MAX_LOAD` of the inputs for all products that the batch's
    ridge takes.  So which way is taken depends on the facts alone.
    """
    if not ridge.cache_retain or ridge.w_retain == 0:
        return None
    parts = stored_parts(forget, place)
    if parts is None:
        logger.info("solve: not every request's keys were kept, so the system is factorised")
        return None
    num_forget = sum(example.num_tokens for part in parts for example in part.examples)
    sizes = parts[0].sizes
    if num_forget == 0 or num_forget > MAX_LOAD * min(sizes.values()):
        logger.info("solve: %d keys are too many for the inverse", num_forget)
        return None
    if not any(_num_tokens(ref, next(iter(sizes)), place) for ref in retain):
        return None
    artifact = stored_inverse(retain, sites, ridge, place, opened, list(sizes.values()))
    folder = place.fetch(artifact)
    for name in sizes:
        keys_SN = all_keys(parts, name).keys_TN
        load = shift_of(load_inverse(folder, name), keys_SN, ridge).load(num_forget)
        if load > MAX_LOAD:
            logger.info("solve: %d keys are too many for this ridge's inverse", num_forget)
            return None
    return SmallBatch(parts, artifact, folder)


def stored_parts(forget: CollectRef, place: Place) -> tuple[StoredKeys, ...] | None:
    """The kept keys of each batch of a forget set; None if those of one are not there."""
    try:
        folder = place.fetch(forget.artifact)
    except MissingInput:
        return None
    if has_keys(folder):
        return (StoredKeys(folder),)
    found: list[StoredKeys] = []
    for key in read_facts(forget, place).get("parts", ()):
        artifact = Artifact(stage="collect", key=key, uri=f"collect/{key}")
        part = CollectRef(artifact=artifact, reused=True, seconds=0)
        inner = stored_parts(part, place)
        if inner is None:
            return None
        found += inner
    return tuple(found) or None


def all_keys(parts: Sequence[StoredKeys], name: str) -> Request:
    """All keys at one system, float64."""
    requests = [
        request
        for part in parts
        for group in part.groups
        if (request := part.request(group, name)) is not None
    ]
    alternatives = [one.alt_T for one in requests if one.alt_T is not None]
    return Request(
        "all",
        torch.cat([one.keys_TN for one in requests]).double(),
        torch.cat([one.gold_T for one in requests]),
        torch.cat(alternatives) if len(alternatives) == len(requests) else None,
    )


def stored_inverse(
    retain: tuple[CollectRef, ...],
    sites: SitesRef,
    ridge: RidgeConfig,
    place: Place,
    opened: Callable[[], OpenModel],
    sizes: Sequence[int],
) -> Artifact:
    """The inverse of every system's retain part, made now if it is not in the store.

    Raises:
        NotPositiveDefinite, NonFiniteKeys: a system cannot be solved; names it.
        NotEnoughDisk: it does not fit.
    """
    facts = {
        "inverse of": [ref.artifact.key for ref in retain],
        "ridge": ridge.model_dump(mode="json", exclude={"cache_retain"}),
    }

    def write(folder: Path) -> None:
        model = opened().model
        chosen = chosen_sites(model, sites)
        device = unembedding_VD(model).device
        widths = {site.name: site.weight_MN(model).shape[1] for site in chosen}
        systems = {JOINT: list(widths.values())} if sites.joint else {n: [w] for n, w in widths.items()}
        for name, inputs in systems.items():
            kept = reduce(operator.add, (read_moments(ref, name, place) for ref in retain))
            inverse = invert_retain(kept.to(device), ridge, site=name, widths=inputs)
            save_inverse(folder, name, inverse)

    expected_bytes = sum(FLOAT64 * size**2 for size in sizes)
    artifact, reused = place.cached("solve", facts, write, expected_bytes=expected_bytes)
    logger.info("solve: inverse of the retain part %s", "found" if reused else "made")
    return artifact


def save_inverse(folder: Path, name: str, inverse: RetainInverse) -> None:
    """Write the inverse of one system."""
    numbers = {
        "mus": inverse.mus,
        "widths": inverse.widths,
        "num_retain": inverse.num_retain,
        "high": inverse.high,
        "low": inverse.low,
    }
    write_json(folder / f"{name}.json", numbers)
    columns = [
        inverse.diagonal_N.unsqueeze(1),
        inverse.extremes_2N.mT,
        inverse.probes_NQ,
        inverse.answers_NQ,
    ]
    arrays = {
        "inverse": inverse.inverse_NN,
        "vectors": torch.cat(columns, dim=1),
        "counts": inverse.counts_V,
    }
    for kind, array in arrays.items():
        values = np.ascontiguousarray(array.cpu().numpy())
        np.save(folder / f"{name}.{kind}.npy", values, allow_pickle=False)


def load_inverse(folder: Path, name: str) -> RetainInverse:
    """Read the inverse of one system, on the CPU; the matrix is mapped, so it is not read yet."""
    numbers = read_json(folder / f"{name}.json")
    # Copy on write: torch warns of memory that it must not write to.
    inverse = np.load(folder / f"{name}.inverse.npy", mmap_mode="c", allow_pickle=False)
    vectors, counts = (
        torch.from_numpy(np.load(folder / f"{name}.{kind}.npy", allow_pickle=False))
        for kind in ("vectors", "counts")
    )
    diagonal_N1, extremes_N2, probes_NQ, answers_NQ = torch.split(
        vectors, [1, 2, NUM_PROBES, NUM_PROBES], dim=1
    )
    return RetainInverse(
        inverse_NN=torch.from_numpy(inverse),
        diagonal_N=diagonal_N1.squeeze(1),
        mus=tuple(numbers["mus"]),
        widths=tuple(numbers["widths"]),
        counts_V=counts,
        num_retain=numbers["num_retain"],
        extremes_2N=extremes_N2.mT,
        high=numbers["high"],
        low=numbers["low"],
        probes_NQ=probes_NQ,
        answers_NQ=answers_NQ,
    )


def _num_tokens(ref: CollectRef, name: str, place: Place) -> int:
    return int(read_json(place.fetch(ref.artifact) / f"{name}.json")["num_tokens"])
