"""What a low-precision load leaves of an edit, from the files of two checkpoints.

Shapes: M outputs of W, N inputs of W.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from grom.errors import ConfigError, MissingTensor
from grom.quantize import ROW_BLOCK, CodeChange, Scheme, code_change
from grom.sites import FAMILIES, Family
from tasks.checkpoint import EMBEDDINGS, Stored, mapped, read_header
from tasks.models import damage_named
from tasks.tensors import INDEX, SINGLE

HEADS = {family.stored_head or f"{family.head}.weight" for family in FAMILIES.values()}
"""The head's tensor; a tied checkpoint does not have one."""
Tensors = dict[str, tuple[Path, Stored]]


def code_changes(
    before: Path, after: Path, modules: Sequence[str] | None, scheme: Scheme
) -> dict[str, CodeChange]:
    """What a low-precision load leaves of an edit, by module.

    The checkpoints' files are compared tensor by tensor, memory-mapped; a thousand rows at a
    time are in memory.

    Args:
        before: folder of the unedited checkpoint.
        after: folder of the edited checkpoint.
        modules: names in the checkpoint, without `.weight`; None: all whose matrix differs.
        scheme: nf4, fp4, int8 or int4.

    Raises:
        BrokenCheckpoint: a checkpoint's files cannot be read.
        MissingTensor: a checkpoint has no matrix of that name.
        ConfigError: the two are not checkpoints of the same model.
    """
    pair = _Pair(before, after)
    names = pair.changed() if modules is None else [f"{name}.weight" for name in modules]
    return {
        name.removesuffix(".weight"): code_change(*pair.matrices_MN(name), scheme) for name in names
    }


def changed_modules(before: Path, after: Path) -> tuple[str, ...]:
    """Names, without `.weight`, of the matrices in which two checkpoints differ.

    A tied head has the embedding's values.  Errors as in `code_changes`.
    """
    return tuple(name.removesuffix(".weight") for name in _Pair(before, after).changed())


class _Pair:
    """The matrices of two checkpoints of the same model."""

    def __init__(self, before: Path, after: Path) -> None:
        self.folders = (before, after)
        self.tensors = (_tensors(before), _tensors(after))
        self.family = _family(after)

    def changed(self) -> list[str]:
        names = {
            name
            for tensors in self.tensors
            for name, (_, stored) in tensors.items()
            if len(stored.shape) == 2
        }
        return [name for name in sorted(names) if _differ(*self.matrices_MN(name))]

    def matrices_MN(self, name: str) -> tuple[Tensor, Tensor]:
        """The matrix before and after, (M, N), memory-mapped."""
        one, other = (
            self._stored(folder, tensors, name)
            for folder, tensors in zip(self.folders, self.tensors, strict=True)
        )
        if one.shape != other.shape:
            raise ConfigError(
                f"{self.folders[1]}: {name} is {tuple(other.shape)}, and {tuple(one.shape)} in "
                f"{self.folders[0]}. Compare checkpoints of the same model."
            )
        inputs_first = self.family is not None and (
            self.family.inputs_first and name.startswith(f"{self.family.layers}.")
        )
        return (one.mT, other.mT) if inputs_first else (one, other)

    def _stored(self, folder: Path, tensors: Tensors, name: str) -> Tensor:
        found = tensors.get(name)
        if found is None and name in HEADS:
            found = next((tensors[other] for other in EMBEDDINGS if other in tensors), None)
        if found is None:
            raise MissingTensor(str(folder), name)
        with damage_named(folder):
            return mapped(*found, write=False)


def _tensors(folder: Path) -> Tensors:
    """Where the tensors of a checkpoint lie, in the files that transformers would load."""
    with damage_named(folder):
        files = [SINGLE]
        if not (folder / SINGLE).exists():
            index = json.loads((folder / INDEX).read_text())
            files = sorted(set(index["weight_map"].values()))
        return {
            name: (folder / file, stored)
            for file in files
            for name, stored in read_header(folder / file).items()
        }


def _family(folder: Path) -> Family | None:
    with damage_named(folder):
        return FAMILIES.get(json.loads((folder / "config.json").read_text()).get("model_type"))


def _differ(one_MN: Tensor, other_MN: Tensor) -> bool:
    for first in range(0, len(one_MN), ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        if not torch.equal(one_MN[rows].float(), other_MN[rows].float()):
            return True
    return False
