"""The keys of each request on disk, exactly as the model gave them.

    examples.parquet          digest, group, answer tokens, in the order of the positions
    positions.parquet         example (row of examples.parquet), gold, alternative, rms
    <site>.keys.npy           (T, N) in the dtype of the model; bfloat16 as its bits
    keys.json                 dtype

A request is a group of examples.  Kept beside the moments where `collect.keep_request_keys` is on;
else only in a scratch folder while the audit runs.

Shapes: T positions, N inputs of W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from grom.changes import Request
from grom.collect import ExampleStatistics, RequestKeys
from tasks.codecs import read_json, read_table, write_json, write_table

KEYS = ".keys.npy"
DTYPES = {str(kind): kind for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
SCHEMA = pa.schema(
    [
        pa.field("example", pa.int32(), nullable=False),
        pa.field("gold", pa.int32(), nullable=False),
        pa.field("alternative", pa.int32()),
        pa.field("rms", pa.float32()),
    ]
)


class KeyWriter:
    """Writes keys as they come, one batch at a time in memory; to be given to a `ForgetPlan`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.examples = folder, list[ExampleStatistics]()
        self._files: dict[str, IO[bytes]] = {}
        self._kinds: dict[str, tuple[np.dtype[np.generic], int]] = {}
        self._dtype, self._num_positions = torch.float32, 0
        self._positions = pq.ParquetWriter(
            folder / "positions.parquet", SCHEMA, compression="zstd", write_statistics=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._positions.close()
        for name, file in self._files.items():
            file.seek(0)
            _write_header(file, *self._kinds[name], self._num_positions)
            file.close()
        write_table(self.folder / "examples.parquet", self.examples, ExampleStatistics)
        write_json(self.folder / "keys.json", {"dtype": str(self._dtype)})

    def __call__(self, found: RequestKeys) -> None:
        """Append the keys of a batch."""
        for name, keys_TN in found.keys.items():
            self._dtype = keys_TN.dtype
            stored_TN = _bits(keys_TN.detach().cpu().contiguous()).numpy()
            if name not in self._files:
                self._files[name] = (self.folder / f"{name}{KEYS}").open("w+b")
                self._kinds[name] = (stored_TN.dtype, stored_TN.shape[1])
                _write_header(self._files[name], *self._kinds[name], 0)
            self._files[name].write(stored_TN.tobytes())
        sizes = torch.tensor([example.num_tokens for example in found.examples])
        first = len(self.examples)
        example_T = torch.arange(first, first + len(sizes)).repeat_interleave(sizes)
        columns = (example_T, found.gold_T, found.alt_T, found.rms_T)
        arrays = [
            pa.nulls(len(example_T), field.type)
            if column is None
            else pa.array(column.cpu().numpy(), field.type)
            for field, column in zip(SCHEMA, columns, strict=True)
        ]
        self._positions.write_table(pa.table(arrays, schema=SCHEMA))
        self.examples += found.examples
        self._num_positions += len(found.gold_T)


class StoredKeys:
    """Keys on disk, read request by request.

    Raises:
        MissingInput: the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dtype = DTYPES[read_json(folder / "keys.json")["dtype"]]
        self.examples = read_table(folder / "examples.parquet", ExampleStatistics)
        ends = np.cumsum([example.num_tokens for example in self.examples])
        self._positions: list[slice] = []
        self._by_group: dict[str, list[int]] = {}
        for number, (example, end) in enumerate(zip(self.examples, ends.tolist(), strict=True)):
            self._positions.append(slice(end - example.num_tokens, end))
            self._by_group.setdefault(example.group, []).append(number)
        table = pq.read_table(folder / "positions.parquet")
        self._gold_T = torch.from_numpy(table["gold"].to_numpy().copy()).long()
        self._alt_T = self._rms_T = None
        if not table["alternative"].null_count:
            self._alt_T = torch.from_numpy(table["alternative"].to_numpy().copy()).long()
        if not table["rms"].null_count:
            self._rms_T = torch.from_numpy(table["rms"].to_numpy().copy())
        self._arrays = {
            path.name.removesuffix(KEYS): np.load(path, mmap_mode="r", allow_pickle=False)
            for path in sorted(folder.glob(f"*{KEYS}"))
        }

    @property
    def groups(self) -> list[str]:
        """The requests, in the order in which they came up."""
        return list(self._by_group)

    @property
    def sizes(self) -> dict[str, int]:
        """Name of the moments -> inputs."""
        return {name: array.shape[1] for name, array in self._arrays.items()}

    def of(self, group: str) -> Iterator[RequestKeys]:
        """The keys of a request, one example at a time, as they were collected; none for an
        unknown one."""
        for number in self._by_group.get(group, ()):
            own = self._positions[number]
            yield RequestKeys(
                {name: self._keys(name, own) for name in self._arrays},
                self._gold_T[own],
                None if self._alt_T is None else self._alt_T[own],
                None if self._rms_T is None else self._rms_T[own],
                (self.examples[number],),
            )

    def request(self, group: str, name: str) -> Request | None:
        """A request's keys at one system, in one piece; None if it has none here."""
        positions = [self._positions[number] for number in self._by_group.get(group, ())]
        if not positions:
            return None
        alt_T = self._alt_T
        return Request(
            group,
            torch.cat([self._keys(name, own) for own in positions]),
            torch.cat([self._gold_T[own] for own in positions]),
            None if alt_T is None else torch.cat([alt_T[own] for own in positions]),
        )

    def whole(self, name: str) -> Request:
        """The keys of all requests at one system, in the order in which they were collected."""
        everything = slice(0, len(self._gold_T))
        return Request("all", self._keys(name, everything), self._gold_T, self._alt_T)

    def _keys(self, name: str, own: slice) -> Tensor:
        stored_TN = torch.from_numpy(np.array(self._arrays[name][own]))
        return stored_TN.view(self.dtype)


class KeySource:
    """The keys of all requests, wherever they lie."""

    def __init__(self, stores: Sequence[StoredKeys]) -> None:
        self.stores = stores

    @property
    def requests(self) -> list[str]:
        """Those that have keys."""
        return list(dict.fromkeys(group for store in self.stores for group in store.groups))

    @property
    def num_positions(self) -> int:
        """Keys in all."""
        return sum(one.num_tokens for store in self.stores for one in store.examples)

    def of(self, request: str, name: str) -> Request:
        """All keys of a request at one system."""
        found = [store.request(request, name) for store in self.stores]
        return _joined([part for part in found if part is not None])

    def whole(self, name: str) -> Request:
        """The keys of all requests at one system."""
        return _joined([store.whole(name) for store in self.stores])


def has_keys(folder: Path) -> bool:
    """Whether the keys of requests are in a folder."""
    return (folder / "keys.json").is_file()


def _joined(parts: Sequence[Request]) -> Request:
    if len(parts) == 1:
        return parts[0]
    alts = [part.alt_T for part in parts if part.alt_T is not None]
    return Request(
        parts[0].name,
        torch.cat([part.keys_TN for part in parts]),
        torch.cat([part.gold_T for part in parts]),
        torch.cat(alts) if len(alts) == len(parts) else None,
    )


def _bits(keys_TN: Tensor) -> Tensor:
    """NumPy has no bfloat16."""
    return keys_TN.view(torch.int16) if keys_TN.dtype == torch.bfloat16 else keys_TN


def _write_header(
    file: IO[bytes], dtype: np.dtype[np.generic], num_inputs: int, num_positions: int
) -> None:
    """The header of an NPY file; NumPy leaves room for any length of the first axis."""
    header = {"descr": dtype.str, "fortran_order": False, "shape": (num_positions, num_inputs)}
    np.lib.format.write_array_header_1_0(file, header)
