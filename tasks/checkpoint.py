"""Editing a safetensors checkpoint on disk: files are copied, edited tensors rewritten in place.

Memory: one tensor, memory-mapped, and a block of rows in float64.
"""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from grom.apply import Edit, Rounding, add_
from grom.errors import MissingTensor
from grom.sites import Site
from grom.target import LowRank
from tasks.models import COPIED
from tasks.store import RESERVED

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int


def read_header(path: Path) -> dict[str, Stored]:
    """The floating-point tensors of a safetensors file, without reading their values."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: Stored(
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in DTYPES
    }


def mapped(path: Path, stored: Stored, *, write: bool) -> Tensor:
    """A tensor of the file, sharing memory with it."""
    mode: Literal["r+", "c"] = "r+" if write else "c"
    data = np.memmap(path, dtype=np.uint8, mode=mode, offset=stored.start, shape=(stored.size,))
    return torch.from_numpy(data).view(stored.dtype).view(stored.shape)


def checkpoint_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_edited(base: Path, edit: Edit, out: Path) -> list[Rounding]:
    """Copy a checkpoint and add the edit to the copy.

    The exact originals of what changes go to `edit/undo.safetensors`.  A tied head that is edited
    gets a tensor of its own, and the config says so.

    Raises:
        MissingTensor: the checkpoint has no tensor of a site's name.
        ErasedByRounding: no weight of a site would change.
    """
    for pattern in COPIED:
        for path in base.glob(pattern):
            if path.name not in RESERVED:
                shutil.copyfile(path, out / path.name)
    (out / "edit").mkdir()
    originals: dict[str, Tensor] = {}
    roundings = []
    for site, update in edit.updates.items():
        path, stored = _find(out, site)
        weight = mapped(path, stored, write=True)
        _keep(originals, site, update, weight)
        roundings.append(add_(site, site.oriented(weight), update))
        del weight
    save_file(originals, out / "edit" / "undo.safetensors", metadata={"format": "pt"})
    return roundings


def _keep(originals: dict[str, Tensor], site: Site, update: LowRank, weight: Tensor) -> None:
    if update.rows_K is None:
        originals[site.tensor] = weight.clone()
    else:
        originals[f"{site.tensor}.rows"] = update.rows_K.clone()
        originals[f"{site.tensor}.values"] = weight[update.rows_K].clone()


def _find(folder: Path, site: Site) -> tuple[Path, Stored]:
    name = site.tensor
    tensors = {
        tensor: (path, stored)
        for path in sorted(folder.glob("*.safetensors"))
        for tensor, stored in read_header(path).items()
    }
    if name not in tensors and site.kind == "head":
        return _untie(folder, name, tensors)
    if name not in tensors:
        raise MissingTensor(str(folder), name)
    return tensors[name]


def _untie(folder: Path, name: str, tensors: dict[str, tuple[Path, Stored]]) -> tuple[Path, Stored]:
    """Give a tied head a tensor of its own, in a file of its own, listed in the index."""
    source = next((tensor for tensor in EMBEDDINGS if tensor in tensors), None)
    if source is None:
        raise MissingTensor(str(folder), name)
    single = folder / SINGLE
    if single.exists():
        single.rename(folder / "model-00001-of-00002.safetensors")
        tensors = {
            tensor: (folder / "model-00001-of-00002.safetensors" if path == single else path, at)
            for tensor, (path, at) in tensors.items()
        }
    path, stored = tensors[source]
    added = folder / "model-head.safetensors"
    head = mapped(path, stored, write=False).clone()
    save_file({name: head}, added, metadata={"format": "pt"})
    weight_map = {tensor: path.name for tensor, (path, _) in tensors.items()} | {name: added.name}
    total = sum(at.size for _, at in tensors.values()) + stored.size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": False}, indent=2)
    )
    return added, read_header(added)[name]
