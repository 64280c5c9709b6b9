"""How values become files: moments, edits, tables and small JSON.  Explicit schemas, no pickle.

Shapes: N inputs of W, V vocabulary, K distinct tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grom.apply import Edit
from grom.errors import MissingInput
from grom.moments import KeyMoments, TokenSums, compact
from grom.sites import Site
from grom.target import LowRank
from tasks.artifacts import canonical_json

Row = TypeVar("Row")
ROW_GROUP_BYTES = 64 * 2**20
"""Vectors that are written and read at once."""
ARROW_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def write_json(path: Path, value: object) -> None:
    """Write a value as canonical JSON; NaN and Inf, which JSON lacks, as "nan", "inf", "-inf".

    Raises:
        ValueError: the value is not made of dicts, lists, strings, numbers, bools and None.
    """
    path.write_bytes(canonical_json(_finite(value)))


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        MissingInput: there is no such file.
    """
    if not path.is_file():
        raise MissingInput(str(path), "no such file in the artifact")
    return json.loads(path.read_bytes())


def save_moments(folder: Path, name: str, moments: KeyMoments) -> None:
    """Write the moments of one site as `<name>.json` and three or four more files."""
    write_json(
        folder / f"{name}.json",
        {
            "num_tokens": moments.num_tokens,
            "num_inputs": moments.gram_NN.shape[0],
            "vocab_size": len(moments.counts_V),
            "keeps_sums": moments.keeps_sums,
        },
    )
    gram = moments.gram_NN.detach().cpu().numpy()
    np.save(folder / f"{name}.gram.npy", np.ascontiguousarray(gram), allow_pickle=False)
    counts_V = moments.counts_V.cpu()
    ids_K = counts_V.nonzero().squeeze(1)
    counts = {
        "token": pa.array(ids_K.numpy(), pa.int32()),
        "count": pa.array(counts_V[ids_K].numpy(), pa.int64()),
    }
    pq.write_table(pa.table(counts), folder / f"{name}.counts.parquet", compression="zstd")
    _save_sums(folder / f"{name}.sums.parquet", compact(moments.sums), counts_V)
    _save_sums(folder / f"{name}.alt.parquet", compact(moments.alt_sums), None)


def load_moments(folder: Path, name: str) -> KeyMoments:
    """Read moments, on the CPU and equal to the bit, order of the tokens included.

    Raises:
        MissingInput: the folder has no moments of that name.
    """
    scalars = read_json(folder / f"{name}.json")
    num_inputs, vocab_size = scalars["num_inputs"], scalars["vocab_size"]
    table = pq.read_table(folder / f"{name}.counts.parquet")
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    counts_V[_tensor(table["token"]).long()] = _tensor(table["count"])
    return KeyMoments(
        gram_NN=torch.from_numpy(np.load(folder / f"{name}.gram.npy", allow_pickle=False)),
        sums=_load_sums(folder / f"{name}.sums.parquet", num_inputs, vocab_size),
        counts_V=counts_V,
        num_tokens=scalars["num_tokens"],
        alt_sums=_load_sums(folder / f"{name}.alt.parquet", num_inputs, vocab_size),
        keeps_sums=scalars["keeps_sums"],
    )


def save_edit(folder: Path, edit: Edit, facts: Mapping[str, Any]) -> None:
    """Write an edit as `edit.safetensors` (its factors) and `edit.json` (its sites and facts).

    Raises:
        ValueError: a fact is not JSON.
    """
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for site, update in edit.updates.items():
        parts = {"right": update.right_KN, "left": update.left_MK, "rows": update.rows_K}
        for part, tensor in parts.items():
            if tensor is not None:
                tensors[f"{site.name}.{part}"] = _unshared(tensor, storages)
    sites = [
        asdict(site) | {"num_outputs": update.num_outputs} for site, update in edit.updates.items()
    ]
    # One metadata key only: safetensors writes several in random order, and files are hashed.
    save_file(tensors, folder / "edit.safetensors", metadata={"format": "pt"})
    write_json(folder / "edit.json", {"facts": dict(facts), "sites": sites})


def load_edit(folder: Path) -> Edit:
    """Read an edit, on the CPU and equal to the bit.

    Raises:
        MissingInput: the folder has no edit.
    """
    entries = read_json(folder / "edit.json")["sites"]
    tensors = load_file(folder / "edit.safetensors")
    updates = {}
    for entry in entries:
        num_outputs = entry.pop("num_outputs")
        site = Site(**entry)
        updates[site] = LowRank(
            right_KN=tensors[f"{site.name}.right"],
            left_MK=tensors.get(f"{site.name}.left"),
            rows_K=tensors.get(f"{site.name}.rows"),
            num_outputs=num_outputs,
        )
    return Edit(updates)


def write_table(path: Path, rows: Sequence[Any], kind: type | None = None) -> None:
    """Write dataclasses as Parquet, one column per field.

    Args:
        path: the file.
        rows: instances of one dataclass whose fields are str, int, float, bool, or one of them
            or None.
        kind: that dataclass; needed when there may be no rows.

    Raises:
        ValueError: no rows and no `kind`.
        TypeError: a field has another type.
    """
    if not rows and kind is None:
        raise ValueError(f"{path.name}: a table without rows needs `kind`")
    row_type = kind or type(rows[0])
    schema = _schema_of(row_type)
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")


def read_table(path: Path, kind: type[Row]) -> list[Row]:
    """Read what `write_table` wrote.

    Raises:
        MissingInput: there is no such file.
        ValueError: its columns are not the fields of `kind`.
    """
    if not path.is_file():
        raise MissingInput(str(path), "no such file in the artifact")
    table = pq.ParquetFile(path).read()
    if table.schema != _schema_of(kind):
        raise ValueError(f"{path.name}: its columns are not the fields of {kind.__name__}")
    return [kind(**row) for row in table.to_pylist()]


def _schema_of(kind: type) -> pa.Schema:
    hints = get_type_hints(kind)
    columns = []
    for field in fields(kind):
        hint = hints[field.name]
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        plain = [option for option in options if option is not type(None)]
        if len(plain) != 1 or plain[0] not in ARROW_TYPES:
            raise TypeError(f"{kind.__name__}.{field.name}: no column type for {field.type}")
        columns.append(pa.field(field.name, ARROW_TYPES[plain[0]], nullable=len(options) > 1))
    return pa.schema(columns)


def _save_sums(path: Path, sums: TokenSums, counts_V: Tensor | None) -> None:
    """One row per token, in order of first occurrence; `count` where it is known."""
    ids_K, rows_KN = sums.ids_K.cpu(), sums.rows_KN.cpu()
    num_inputs = rows_KN.shape[1]
    columns = [("token", pa.int32())]
    columns += [] if counts_V is None else [("count", pa.int64())]
    schema = pa.schema([*columns, ("vector", pa.list_(pa.float64(), num_inputs))])
    step = max(1, ROW_GROUP_BYTES // (8 * num_inputs))
    # Dictionaries and statistics of sums only cost time.
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for start in range(0, len(ids_K), step):
            ids, block = ids_K[start : start + step], rows_KN[start : start + step]
            arrays = [pa.array(ids.numpy(), pa.int32())]
            arrays += [] if counts_V is None else [pa.array(counts_V[ids].numpy(), pa.int64())]
            flat = pa.array(block.contiguous().view(-1).numpy(), pa.float64())
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, num_inputs))
            writer.write_table(pa.table(arrays, schema=schema))


def _load_sums(path: Path, num_inputs: int, vocab_size: int) -> TokenSums:
    sums = TokenSums(num_inputs, vocab_size)
    parquet = pq.ParquetFile(path)
    for group in range(parquet.num_row_groups):
        table = parquet.read_row_group(group)
        ids_K = _tensor(table["token"]).long()
        rows_KN = _tensor(table["vector"].combine_chunks().flatten()).view(-1, num_inputs)
        # `add_` sorts the new tokens of one call: ascending runs keep their order.
        run_ends = ((ids_K[1:] < ids_K[:-1]).nonzero().squeeze(1) + 1).tolist()
        for start, end in zip([0, *run_ends], [*run_ends, len(ids_K)], strict=True):
            sums.add_(ids_K[start:end], rows_KN[start:end])
    return sums


def _tensor(column: Any) -> Tensor:
    return torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())


def _unshared(tensor: Tensor, storages: set[int]) -> Tensor:
    """A contiguous CPU tensor whose storage no other tensor of the file uses."""
    plain = tensor.detach().cpu().contiguous()
    pointer = plain.untyped_storage().data_ptr()
    if pointer in storages:
        plain = plain.clone()
    storages.add(pointer)
    return plain


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
