"""Editing a safetensors checkpoint on disk: files are copied, edited tensors rewritten in place.

Memory: one edited tensor, memory-mapped, and a block of its rows in float64.  What is kept for
undoing goes from file to file.

Shapes: N inputs of W, M outputs of W, K rank or edited rows.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from grom.apply import Edit, Rounding, add_
from grom.errors import ErasedByRounding, MissingTensor
from grom.sites import Site
from grom.target import LowRank
from tasks.models import damage_named
from tasks.store import RESERVED
from tasks.tensors import (
    INDEX,
    SINGLE,
    Stored,
    content_of,
    copy_region,
    create_file,
    mapped,
    model_files,
    read_header,
    read_sizes,
    region_sha256,
    threads,
    write_region,
)
from tasks.undo import ORIGINALS, Undo, write_undo
from tasks.updates import HeldUpdates, Updates

__all__ = ["Stored", "mapped", "read_header", "write_edited"]

SPLIT = "model-00001-of-00002.safetensors"
ADDED_HEAD = "model-head.safetensors"
CONFIG = "config.json"
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight")
BLOCK_BYTES = 1 << 21
"""Rows of P in float64 that are in memory at once: they and what is made of them fit in a cache."""
EDITED_AT_ONCE = 2
"""Tensors, so that memory does not grow with the number of cores."""
Tensors = dict[str, tuple[Path, Stored]]


@dataclass(slots=True)
class Untying:
    """What giving a tied head a tensor of its own does to the files."""

    renamed: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()


def checkpoint_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def write_edited(base: Path, edit: Edit | Updates, out: Path) -> list[Rounding]:
    """Copy a checkpoint and add the edit to the copy.

    The exact originals of what changes go to `edit/undo.safetensors`, what the files were to
    `edit/undo.json`.  A tied head that is edited gets a tensor of its own, and the config says so.

    Raises:
        MissingTensor: the checkpoint has no tensor of a site's name.
        ErasedByRounding: no weight of a site would change.
        BrokenCheckpoint: its files cannot be read.
    """
    updates = HeldUpdates(edit) if isinstance(edit, Edit) else edit
    names = model_files(base, RESERVED)
    with threads() as pool:
        copies = [pool.submit(shutil.copyfile, base / name, out / name) for name in names]
        before = {name: pool.submit(content_of, base / name) for name in names}
        own = pool.submit(updates.sha256)
        for copied in copies:
            copied.result()
        (out / "edit").mkdir()
        tensors, untying = _prepare(out, updates, base)
        _keep(tensors, updates, out / "edit" / ORIGINALS)
        with threads(EDITED_AT_ONCE) as editors:
            done = [
                editors.submit(_edit, site, *tensors[site.tensor], updates)
                for site in updates.sites
            ]
            edited = {site: one.result() for site, one in zip(updates.sites, done, strict=True)}
        undo = Undo(
            edit=own.result(),
            files={name: future.result() for name, future in before.items()},
            edited={site.tensor: sha256 for site, (_, sha256) in edited.items()},
            renamed=untying.renamed,
            replaced=untying.replaced,
            added=untying.added,
            written={name: content_of(out / name) for name in (*untying.replaced, *untying.added)},
        )
    write_undo(out / "edit", undo)
    return [rounding for rounding, _ in edited.values()]


def _prepare(out: Path, updates: Updates, base: Path) -> tuple[Tensors, Untying]:
    """Find every tensor to edit; untie the head if it has none."""
    with damage_named(base):
        tensors, untying = _tensors(out), Untying()
    for site in updates.sites:
        if site.tensor not in tensors and site.kind == "head":
            tensors, untying = _untie(out, site.tensor, tensors)
        if site.tensor not in tensors:
            raise MissingTensor(str(out), site.tensor)
    return tensors, untying


def _edit(site: Site, path: Path, stored: Stored, updates: Updates) -> tuple[Rounding, str]:
    """Edit one tensor of a file.  Returns what rounding did, and the sha256 of its bytes now."""
    weight = mapped(path, stored, write=True)
    return _add(site, site.oriented(weight), updates), region_sha256(path, stored)


def _add(site: Site, weight_MN: Tensor, updates: Updates) -> Rounding:
    """Add P to W in place, some rows at a time, and sum up what rounding did."""
    num_rows, num_inputs = weight_MN.shape
    step = max(1, BLOCK_BYTES // (8 * num_inputs))
    if num_rows <= step or updates.whole(site).rows_K is not None:
        return add_(site, weight_MN, updates.whole(site))
    parts = []
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        update = LowRank(updates.rows(site, first, last).dense())
        parts.append(_add_block(site, weight_MN[first:last], update))
    if not any(part.num_changed for part in parts):
        raise ErasedByRounding(site.name, str(weight_MN.dtype).removeprefix("torch."))
    norm = sum(part.update_norm**2 for part in parts) ** 0.5
    return Rounding(
        site=site.name,
        update_norm=norm,
        weight_norm=sum(part.weight_norm**2 for part in parts) ** 0.5,
        lost=sum((part.lost * part.update_norm) ** 2 for part in parts) ** 0.5 / norm,
        num_changed=sum(part.num_changed for part in parts),
        num_weights=weight_MN.numel(),
    )


def _add_block(site: Site, weight_MN: Tensor, update: LowRank) -> Rounding:
    """As `add_`; rows that rounding leaves as they are have lost their update whole."""
    try:
        return add_(site, weight_MN, update)
    except ErasedByRounding:
        norm = float(torch.linalg.vector_norm(weight_MN, dtype=torch.float64))
        return Rounding(site.name, update.norm(), norm, 1.0, 0, weight_MN.numel())


def _keep(tensors: Tensors, updates: Updates, path: Path) -> None:
    """Write the originals of what changes, from file to file."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    sparse: dict[str, Tensor] = {}
    for site in updates.sites:
        stored, rows_K = tensors[site.tensor][1], updates.whole(site).rows_K
        if rows_K is None:
            shapes[site.tensor] = (stored.dtype, stored.shape)
        else:
            sparse[site.tensor] = rows_K
            shapes[f"{site.tensor}.rows"] = (torch.int64, tuple(rows_K.shape))
            shapes[f"{site.tensor}.values"] = (stored.dtype, (len(rows_K), *stored.shape[1:]))
    places = create_file(path, shapes)
    for site in updates.sites:
        name, (source, stored) = site.tensor, tensors[site.tensor]
        if name not in sparse:
            copy_region(source, stored, path, places[name])
            continue
        rows_K, weight = sparse[name].cpu(), mapped(source, stored, write=False)
        write_region(path, places[f"{name}.rows"], rows_K)
        write_region(path, places[f"{name}.values"], weight[rows_K])


def _tensors(folder: Path) -> Tensors:
    return {
        tensor: (path, stored)
        for path in sorted(folder.glob("*.safetensors"))
        for tensor, stored in read_header(path).items()
    }


def _untie(folder: Path, name: str, tensors: Tensors) -> tuple[Tensors, Untying]:
    """Give a tied head a tensor of its own, in a file of its own, listed in the index."""
    source = next((tensor for tensor in EMBEDDINGS if tensor in tensors), None)
    if source is None:
        raise MissingTensor(str(folder), name)
    done = Untying(replaced={CONFIG: _text(folder / CONFIG)}, added=(ADDED_HEAD,))
    if (folder / INDEX).exists():
        done.replaced[INDEX] = _text(folder / INDEX)
    else:
        done.added += (INDEX,)
    if (folder / SINGLE).exists():
        (folder / SINGLE).rename(folder / SPLIT)
        done.renamed[SINGLE] = SPLIT
        tensors = _tensors(folder)
    path, stored = tensors[source]
    place = create_file(folder / ADDED_HEAD, {name: (stored.dtype, stored.shape)})[name]
    copy_region(path, stored, folder / ADDED_HEAD, place)
    sizes = {path.name: read_sizes(path) for path in sorted(folder.glob("*.safetensors"))}
    files = {tensor: file for file, held in sizes.items() for tensor in held}
    total = sum(size for held in sizes.values() for size in held.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))
    return tensors | {name: (folder / ADDED_HEAD, place)}, done


def _text(path: Path) -> str:
    """The text to the byte; reading as text would change ends of lines."""
    return path.read_bytes().decode()
