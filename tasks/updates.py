"""An edit's updates as they are needed: from memory, or from `edit.safetensors` row by row.

Shapes: N inputs of W, M outputs of W, K rank or edited rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from grom.apply import Edit
from grom.errors import ConfigError, MissingInput
from grom.sites import Site
from grom.target import LowRank
from tasks.artifacts import canonical_json
from tasks.codecs import read_json
from tasks.models import damage_named
from tasks.tensors import DTYPES, Stored, chunks, mapped, read_header

FACTORS = "edit.safetensors"
SITES = "edit.json"
PARTS = ("right", "left", "rows")


class Updates(Protocol):
    """P of every edited weight, in parts that fit in memory."""

    @property
    def sites(self) -> Sequence[Site]:
        """The edited weights, in order."""

    def whole(self, site: Site) -> LowRank:
        """P of one site; from a file, it is read when it is used."""

    def rows(self, site: Site, first: int, last: int) -> LowRank:
        """Some rows of a P that is not row-sparse, `last` excluded."""

    def sha256(self) -> str:
        """Hash of sites and factors; the same for an edit in memory and in its file."""


class HeldUpdates:
    """The updates of an edit in memory."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    @property
    def sites(self) -> Sequence[Site]:
        """See `Updates`."""
        return tuple(self.edit.updates)

    def whole(self, site: Site) -> LowRank:
        """See `Updates`."""
        return self.edit.updates[site]

    def rows(self, site: Site, first: int, last: int) -> LowRank:
        """See `Updates`."""
        update = self.edit.updates[site]
        if update.left_MK is None:
            return replace(update, right_KN=update.right_KN[first:last])
        return replace(update, left_MK=update.left_MK[first:last])

    def sha256(self) -> str:
        """See `Updates`."""
        sha = hashlib.sha256()
        for site, update in self.edit.updates.items():
            sha.update(_about(site, update.num_outputs))
            for part, tensor in _parts(update):
                sha.update(_shape_of(part, tensor.shape))
                sha.update(tensor.detach().cpu().contiguous().numpy().data)
        return sha.hexdigest()


class StoredUpdates:
    """The updates of an edit folder, read from the disk when they are used."""

    def __init__(self, folder: Path) -> None:
        """Read what the edit is, not its factors.

        Raises:
            MissingInput: the folder has no edit.
            BrokenCheckpoint: its files cannot be read.
        """
        self.folder = folder
        self._sha256: str | None = None
        if not (folder / FACTORS).is_file():
            raise MissingInput(str(folder / FACTORS), "no such file in the edit")
        with damage_named(folder):
            found = read_json(folder / SITES)
            self.facts: dict[str, Any] = found["facts"]
            entries = [dict(entry) for entry in found["sites"]]
            outputs = [entry.pop("num_outputs") for entry in entries]
            self.num_outputs = {
                Site(**entry): number for entry, number in zip(entries, outputs, strict=True)
            }
            self._regions = read_header(folder / FACTORS, DTYPES | {"I64": torch.int64})
            missing = [site.name for site in self.sites if self.region(site, "right") is None]
            if missing:
                raise ValueError(f"{FACTORS} lacks the factors of {missing[0]}")

    @property
    def sites(self) -> Sequence[Site]:
        """See `Updates`."""
        return tuple(self.num_outputs)

    def need_strength(self) -> None:
        """Refuse an edit whose strength was never chosen.

        Raises:
            ConfigError: it is one; or it edits nothing.
        """
        if not self.sites:
            raise ConfigError(
                f"{self.folder}: this edit changes nothing: all requests were withdrawn, and the "
                "model beside it is the base."
            )
        if "beta" not in self.facts:
            raise ConfigError(
                f"{self.folder}: an edit at unit strength, as `solve` makes it. Take the one that "
                "`apply` wrote, which has its strength."
            )

    def region(self, site: Site, part: str) -> Stored | None:
        """Where `right`, `left` or `rows` of a site lies, if it has that part."""
        return self._regions.get(f"{site.name}.{part}")

    def whole(self, site: Site) -> LowRank:
        """See `Updates`."""
        right_KN = self._mapped(self.region(site, "right"))
        assert right_KN is not None
        left_MK, rows_K = (self._mapped(self.region(site, part)) for part in ("left", "rows"))
        return LowRank(right_KN, left_MK, rows_K, self.num_outputs[site])

    def rows(self, site: Site, first: int, last: int) -> LowRank:
        """See `Updates`."""
        left, right = self.region(site, "left"), self.region(site, "right")
        assert right is not None
        if left is not None:
            left = left.rows(first, last)
        else:
            right = right.rows(first, last)
        right_KN = self._mapped(right)
        assert right_KN is not None
        return LowRank(right_KN, self._mapped(left), None, self.num_outputs[site])

    def sha256(self) -> str:
        """See `Updates`.  Read once."""
        if self._sha256 is None:
            sha = hashlib.sha256()
            for site in self.sites:
                sha.update(_about(site, self.num_outputs[site]))
                for part in PARTS:
                    if (region := self.region(site, part)) is not None:
                        sha.update(_shape_of(part, region.shape))
                        for chunk in chunks(self.folder / FACTORS, region):
                            sha.update(chunk)
            self._sha256 = sha.hexdigest()
        return self._sha256

    def _mapped(self, region: Stored | None) -> Tensor | None:
        return None if region is None else mapped(self.folder / FACTORS, region, write=False)


def _parts(update: LowRank) -> Iterator[tuple[str, Tensor]]:
    parts = {"right": update.right_KN, "left": update.left_MK, "rows": update.rows_K}
    return ((part, tensor) for part, tensor in parts.items() if tensor is not None)


def _about(site: Site, num_outputs: int | None) -> bytes:
    return canonical_json(asdict(site) | {"num_outputs": num_outputs})


def _shape_of(part: str, shape: Sequence[int]) -> bytes:
    return canonical_json([part, list(shape)])
