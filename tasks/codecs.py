"""How values become files: edits, tables and small JSON.  Explicit schemas, no pickle.

Moments have their own codec, `tasks.statistics`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file
from torch import Tensor

from grom.apply import Edit
from grom.errors import MissingInput
from grom.sites import Site
from grom.target import LowRank
from tasks.artifacts import canonical_json

Row = TypeVar("Row")
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
