"""Safetensors files as regions of bytes: read, mapped, copied and hashed without being loaded."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from grom.config import Config
from grom.errors import BrokenCheckpoint
from tasks.models import COPIED

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.int64: "I64"}
CHUNK_BYTES = 1 << 18
"""Read at once: what is hashed is then still in a core's own cache."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LOADABLE = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf")
"""Files that a library may take weights from."""
MAX_THREADS = 8
ALIGNMENT = 8
"""Of the first tensor in a safetensors file, in bytes."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    size: int

    def rows(self, first: int, last: int) -> Stored:
        """The region of some of a matrix's rows, `last` excluded."""
        row_size = self.size // self.shape[0]
        shape = (last - first, *self.shape[1:])
        return Stored(self.dtype, shape, self.start + first * row_size, (last - first) * row_size)


class Content(Config):
    """What a file holds."""

    num_bytes: int
    sha256: str


def read_header(path: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, Stored]:
    """The tensors of a safetensors file, floating-point ones only unless `dtypes` names others,
    without reading their values."""
    entries, first = _entries(path)
    return {
        name: Stored(
            dtypes[entry["dtype"]],
            tuple(entry["shape"]),
            first + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
        if entry["dtype"] in dtypes
    }


def read_sizes(path: Path) -> dict[str, int]:
    """Bytes of every tensor of a safetensors file, of whatever type."""
    entries, _ = _entries(path)
    return {
        name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()
    }


def _entries(path: Path) -> tuple[dict[str, Any], int]:
    """What the header says, and where the values begin.

    Raises:
        ValueError: the file is cut off, or its header is not one.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > num_bytes:  # before so much is read
            raise ValueError(f"{path.name}: no safetensors file, or cut off")
        header = json.loads(file.read(length))
    first = 8 + length
    try:
        header.pop("__metadata__", None)
        is_whole = all(_fits(entry, num_bytes - first) for entry in header.values())
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name}: its header is damaged") from error
    if not is_whole:
        raise ValueError(f"{path.name}: cut off, or its header is damaged")
    return header, first


def _fits(entry: Mapping[str, Any], num_bytes: int) -> bool:
    """Whether a tensor lies within the values of a file."""
    begin, end = entry["data_offsets"]
    return bool(entry["dtype"]) and all(
        [0 <= begin <= end <= num_bytes, *(int(size) >= 0 for size in entry["shape"])]
    )


def weight_places(
    folder: Path, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> dict[str, tuple[Path, Stored]]:
    """Where the tensors lie that transformers loads from a folder: those of `model.safetensors`, or
    else of the files that the index lists.

    Raises:
        BrokenCheckpoint: there are other files of weights, which it would not look at or take
            instead; a tensor is in none of the listed files, or in two.
    """
    index = folder / INDEX
    listed: dict[str, str] | None = None
    if (folder / SINGLE).is_file():
        files = {SINGLE}
    elif index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(listed.values())
    else:
        raise BrokenCheckpoint(str(folder), f"neither {SINGLE} nor {INDEX}")
    there = {path.name for pattern in LOADABLE for path in folder.glob(pattern)}
    if odd := sorted(there ^ files):
        raise BrokenCheckpoint(str(folder), f"{odd[0]}: listed and missing, or there and not read")
    found: dict[str, tuple[Path, Stored]] = {}
    for name in sorted(files):
        header = read_header(folder / name, dtypes)
        if twice := sorted(header.keys() & found.keys()):
            raise BrokenCheckpoint(str(folder), f"{twice[0]} is in two files")
        if listed and (odd := sorted(one for one in header if listed.get(one) != name)):
            raise BrokenCheckpoint(str(folder), f"{odd[0]} is in {name}, and not listed so")
        found |= {tensor: (folder / name, stored) for tensor, stored in header.items()}
    return found


def mapped(path: Path, stored: Stored, *, write: bool) -> Tensor:
    """A tensor of the file, sharing memory with it."""
    if stored.size == 0:
        return torch.empty(stored.shape, dtype=stored.dtype)
    mode: Literal["r+", "c"] = "r+" if write else "c"
    data = np.memmap(path, dtype=np.uint8, mode=mode, offset=stored.start, shape=(stored.size,))
    return torch.from_numpy(data).view(stored.dtype).view(stored.shape)


def create_file(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, Stored]:
    """Write a safetensors file whose values are still to come.  Returns where each will lie."""
    order = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    regions, at = {}, 0
    for name in order:
        dtype, shape = shapes[name]
        size = dtype.itemsize * int(np.prod(shape))
        header[name] = {
            "dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]
        }  # fmt: skip
        regions[name] = (dtype, shape, at, size)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    first = 8 + len(text)
    return {
        name: Stored(dtype, shape, first + start, size)
        for name, (dtype, shape, start, size) in regions.items()
    }


def copy_region(source: Path, region: Stored, target: Path, to: Stored) -> None:
    """Copy a tensor's bytes to a region of the same size."""
    with target.open("r+b") as file:
        file.seek(to.start)
        for chunk in chunks(source, region):
            file.write(chunk)


def write_region(path: Path, region: Stored, values: Tensor) -> None:
    """Write a tensor's values.  Not by mapping: a full disk would then end the process."""
    with path.open("r+b") as file:
        file.seek(region.start)
        file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)


def chunks(path: Path, region: Stored) -> Iterator[bytes]:
    """The bytes of a region, piece by piece."""
    with path.open("rb") as file:
        file.seek(region.start)
        left = region.size
        while left and (chunk := file.read(min(left, CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def region_sha256(path: Path, region: Stored) -> str:
    """sha256 of a tensor's bytes."""
    sha = hashlib.sha256()
    for chunk in chunks(path, region):
        sha.update(chunk)
    return sha.hexdigest()


def content_of(path: Path) -> Content:
    """Size and sha256 of a file.  Never from a cache: files that are mapped change unseen."""
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    return Content(num_bytes=path.stat().st_size, sha256=sha)


def model_files(folder: Path, without: Collection[str] = ()) -> list[str]:
    """Names of the files that make a checkpoint, sorted."""
    found = {path.name for pattern in COPIED for path in folder.glob(pattern)}
    return sorted(found - set(without))


@contextmanager
def threads(limit: int = MAX_THREADS) -> Iterator[ThreadPoolExecutor]:
    """Threads that copy and hash, which Python lets run side by side; after an error, what they
    have not begun is dropped."""
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, limit))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
