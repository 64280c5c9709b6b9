"""Small forget sets: their kept keys, and the stored factor of the retain part that solves them.

    factor/<hash>/<system>.json            mu and inputs of each site, sizes, extreme eigenvalues
    factor/<hash>/<system>.lower.npy       L, (N, N) float64
    factor/<hash>/<system>.diagonal.npy    (N,) float64
    factor/<hash>/<system>.counts.npy      (V,) int64

The hash is that of the retain moments and the ridge: a factor of anything else is never found.

Shapes: N inputs of W, V vocabulary.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from grom.config import RidgeConfig
from grom.errors import MissingInput
from grom.woodbury import MAX_SHARE, RetainFactor, factorise_retain
from tasks.artifacts import Artifact
from tasks.codecs import read_json, write_json
from tasks.collect import read_facts, read_moments
from tasks.place import CollectRef, Place
from tasks.request_keys import KeySource, StoredKeys, has_keys

logger = logging.getLogger(__name__)
FLOAT64_BYTES = 8
ARRAYS = ("lower", "diagonal", "counts")


def small_keys(forget: CollectRef, ridge: RidgeConfig, place: Place) -> KeySource | None:
    """The keys of a forget set that is solved with the stored factor, or None.

    None, so that the whole system is factorised, unless `ridge.cache_retain` asks for it, the keys
    of every batch were kept, and they are not more than `MAX_SHARE` of the inputs.  Which way is
    taken follows from what was stored, never from time or memory.
    """
    if not ridge.cache_retain:
        return None
    stores = stored_keys(forget, place)
    if stores is None:
        logger.info("solve: not every request's keys were kept, so the system is factorised")
        return None
    source = KeySource(stores)
    most = int(MAX_SHARE * min(stores[0].sizes.values(), default=0))
    if not 0 < source.num_positions <= most:
        logger.info(
            "solve: %d tokens to forget, and the stored factor serves up to %d",
            source.num_positions, most,
        )  # fmt: skip
        return None
    return source


def stored_keys(forget: CollectRef, place: Place) -> list[StoredKeys] | None:
    """The kept keys of each batch of a forget set; None if those of one are not there."""
    try:
        folder = place.fetch(forget.artifact)
    except MissingInput:
        return None  # a batch whose own moments are gone, merged though they were
    if has_keys(folder):
        return [StoredKeys(folder)]
    found: list[StoredKeys] = []
    for key in read_facts(forget, place).get("parts", ()):
        artifact = Artifact(stage="collect", key=key, uri=f"collect/{key}")
        part = stored_keys(CollectRef(artifact=artifact, reused=True, seconds=0.0), place)
        if part is None:
            return None
        found += part
    return found or None


def retain_factor(
    retain: tuple[CollectRef, ...],
    widths: Mapping[str, Sequence[int]],
    ridge: RidgeConfig,
    place: Place,
    device: torch.device,
) -> Path:
    """Folder with the factor of every system's retain part, made now if the store has none.

    Args:
        retain: moments of the retain sets, which are added up.
        widths: name of the moments -> inputs of each site.
        ridge: weights and mu.
        place: store.
        device: where it is computed.

    Raises:
        EmptySet, NotPositiveDefinite, NonFiniteKeys: a system cannot be solved; names it.
        NotEnoughDisk: it does not fit.
    """
    facts = {
        "retain": [ref.artifact.key for ref in retain],
        "ridge": ridge.model_dump(mode="json"),
    }

    def write(folder: Path) -> None:
        for name, inputs in widths.items():
            kept = reduce(operator.add, (read_moments(ref, name, place) for ref in retain))
            save_factor(
                folder, name, factorise_retain(kept.to(device), ridge, site=name, widths=inputs)
            )

    expected_bytes = sum(FLOAT64_BYTES * sum(inputs) ** 2 for inputs in widths.values())
    artifact, reused = place.cached("factor", facts, write, expected_bytes=expected_bytes)
    logger.info("solve: factor of the retain part %s", "found" if reused else "made")
    return place.fetch(artifact)


def save_factor(folder: Path, name: str, factor: RetainFactor) -> None:
    """Write the factor of one system."""
    numbers = {
        "mus": factor.mus,
        "widths": factor.widths,
        "num_retain": factor.num_retain,
        "low": factor.low,
        "high": factor.high,
    }
    write_json(folder / f"{name}.json", numbers)
    for kind, array in zip(
        ARRAYS, (factor.lower_NN, factor.diagonal_N, factor.counts_V), strict=True
    ):
        values = np.ascontiguousarray(array.cpu().numpy())
        np.save(folder / f"{name}.{kind}.npy", values, allow_pickle=False)


def load_factor(folder: Path, name: str) -> RetainFactor:
    """Read the factor of one system, on the CPU; arrays are mapped, so read when they are used."""
    numbers = read_json(folder / f"{name}.json")
    # Copy on write: torch warns of memory that it must not write to.
    lower_NN, diagonal_N, counts_V = (
        torch.from_numpy(np.load(folder / f"{name}.{kind}.npy", mmap_mode="c", allow_pickle=False))
        for kind in ARRAYS
    )
    return RetainFactor(
        lower_NN=lower_NN,
        diagonal_N=diagonal_N,
        mus=tuple(numbers["mus"]),
        widths=tuple(numbers["widths"]),
        counts_V=counts_V,
        num_retain=numbers["num_retain"],
        low=numbers["low"],
        high=numbers["high"],
    )
