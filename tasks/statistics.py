"""How what was collected from a set becomes files.  Explicit schemas, no pickle.

    collected.json            rms sums, and the facts that determine the statistics
    examples.parquet          a forget set's examples: digest, group, answer tokens
    <site>.json               sizes
    <site>.gram.npy           (N, N) float64; not of a few keys that lie beside it, which give it
    <site>.counts.parquet     token, count
    <site>.sums.parquet       token, count, vector (N,) float64
    <site>.pairs.parquet      gold, alternative, count, vector
    <site>.alt.parquet        token, vector; only of positions with a weight of their own

Shapes: N inputs of W, V vocabulary, K distinct tokens or pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from grom.collect import Collected, ExampleStatistics
from grom.moments import BLOCK_TOKENS, KeyMoments, add_outer_
from grom.sums import PairSums, TokenSums, compact
from grom.woodbury import MAX_SHARE
from tasks.codecs import read_json, read_table, write_json, write_table
from tasks.request_keys import StoredKeys, has_keys

ROW_GROUP_BYTES = 64 * 2**20
"""Vectors that are written and read at once."""
GRAM, COUNTS = ".gram.npy", ".counts.parquet"
INTEGERS = {"token": pa.int32(), "gold": pa.int32(), "alternative": pa.int32(), "count": pa.int64()}


def save_collected(folder: Path, collected: Collected, facts: Mapping[str, Any]) -> None:
    """Write the statistics of a set, with what determines them.

    Where the folder has the keys themselves (`tasks.request_keys`) and they are few, their gram is
    left out: a small batch would take N^2 x 8 bytes for nothing.

    Raises:
        ValueError: a fact is not JSON.
    """
    for name, moments in collected.moments.items():
        # In one block, so that the same gram comes back to the bit.
        few = moments.num_tokens <= min(MAX_SHARE * len(moments.gram_NN), BLOCK_TOKENS)
        save_moments(folder, name, moments, gram=not (few and has_keys(folder)))
    write_table(folder / "examples.parquet", collected.examples, ExampleStatistics)
    residual = {"rms_sum": collected.rms_sum, "rms_tokens": collected.rms_tokens}
    write_json(folder / "collected.json", {"facts": dict(facts), **residual})


def load_collected(folder: Path, names: Collection[str] | None = None) -> Collected:
    """Read the statistics of a set, on the CPU and equal to the bit.

    Args:
        folder: where `save_collected` wrote.
        names: whose moments to read; not given: all that are there.

    Raises:
        MissingInput: the folder has no such statistics.
    """
    residual = read_json(folder / "collected.json")
    wanted = moment_names(folder) if names is None else names
    return Collected(
        {name: load_moments(folder, name) for name in wanted},
        read_table(folder / "examples.parquet", ExampleStatistics),
        residual["rms_sum"],
        residual["rms_tokens"],
    )


def moment_names(folder: Path) -> list[str]:
    """Names of the moments in a folder: sites, or that of all sites side by side."""
    return sorted(path.name.removesuffix(COUNTS) for path in folder.glob(f"*{COUNTS}"))


def save_moments(folder: Path, name: str, moments: KeyMoments, *, gram: bool = True) -> None:
    """Write the moments of one site as `<name>.json` and four or five more files."""
    write_json(
        folder / f"{name}.json",
        {
            "num_tokens": moments.num_tokens,
            "num_inputs": moments.gram_NN.shape[0],
            "vocab_size": len(moments.counts_V),
            "keeps_sums": moments.keeps_sums,
        },
    )
    if gram:
        array = np.ascontiguousarray(moments.gram_NN.detach().cpu().numpy())
        np.save(folder / f"{name}{GRAM}", array, allow_pickle=False)
    counts_V = moments.counts_V.cpu()
    ids_K = counts_V.nonzero().squeeze(1)
    columns = {"token": ids_K, "count": counts_V[ids_K]}
    table = {key: pa.array(column.numpy(), INTEGERS[key]) for key, column in columns.items()}
    pq.write_table(pa.table(table), folder / f"{name}{COUNTS}", compression="zstd")
    sums, pairs, fixed = compact(moments.sums), moments.pair_sums, compact(moments.alt_sums)
    ids_K = sums.ids_K.cpu()
    columns = {"token": ids_K, "count": counts_V[ids_K]}
    _save_rows(folder / f"{name}.sums.parquet", columns, sums.rows_KN)
    columns = {"gold": pairs.gold_K, "alternative": pairs.alt_K, "count": pairs.counts_K}
    _save_rows(folder / f"{name}.pairs.parquet", columns, pairs.rows_KN)
    if fixed:
        _save_rows(folder / f"{name}.alt.parquet", {"token": fixed.ids_K}, fixed.rows_KN)


def load_moments(folder: Path, name: str) -> KeyMoments:
    """Read moments, on the CPU and equal to the bit, order of the tokens included.

    Raises:
        MissingInput: the folder has no moments of that name.
    """
    scalars = read_json(folder / f"{name}.json")
    num_inputs, vocab_size = scalars["num_inputs"], scalars["vocab_size"]
    table = pq.read_table(folder / f"{name}{COUNTS}")
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    counts_V[_integers(table, "token")] = _integers(table, "count")
    fixed = folder / f"{name}.alt.parquet"
    return KeyMoments(
        gram_NN=_gram(folder, name, num_inputs),
        sums=_load_sums(folder / f"{name}.sums.parquet", num_inputs, vocab_size),
        counts_V=counts_V,
        num_tokens=scalars["num_tokens"],
        alt_sums=_load_sums(fixed, num_inputs, vocab_size) if fixed.is_file() else {},
        keeps_sums=scalars["keeps_sums"],
        pair_sums=_load_pairs(folder / f"{name}.pairs.parquet", num_inputs, vocab_size),
    )


def _gram(folder: Path, name: str, num_inputs: int) -> Tensor:
    path = folder / f"{name}{GRAM}"
    if path.is_file() or not has_keys(folder):
        return torch.from_numpy(np.load(path, allow_pickle=False))
    gram_NN = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
    add_outer_(gram_NN, StoredKeys(folder).whole(name).keys_TN.double())
    return gram_NN


def _save_rows(path: Path, columns: Mapping[str, Tensor], rows_KN: Tensor) -> None:
    """One row per sum, in order of first occurrence."""
    num_inputs = rows_KN.shape[1]
    fields = [(name, INTEGERS[name]) for name in columns]
    schema = pa.schema([*fields, ("vector", pa.list_(pa.float64(), num_inputs))])
    step = max(1, ROW_GROUP_BYTES // (8 * num_inputs))
    # Dictionaries and statistics of sums only cost time.
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, schema, **options) as writer:
        for start in range(0, len(rows_KN), step):
            part = slice(start, start + step)
            arrays = [
                pa.array(column_K[part].cpu().numpy(), INTEGERS[name])
                for name, column_K in columns.items()
            ]
            flat = pa.array(rows_KN[part].cpu().contiguous().view(-1).numpy(), pa.float64())
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, num_inputs))
            writer.write_table(pa.table(arrays, schema=schema))


def _load_sums(path: Path, num_inputs: int, vocab_size: int) -> TokenSums:
    sums = TokenSums(num_inputs, vocab_size)
    for table, rows_KN in _row_groups(path, num_inputs):
        ids_K = _integers(table, "token")
        for run in _ascending(ids_K):
            sums.add_(ids_K[run], rows_KN[run])
    return sums


def _load_pairs(path: Path, num_inputs: int, vocab_size: int) -> PairSums:
    sums = PairSums(num_inputs, vocab_size)
    for table, rows_KN in _row_groups(path, num_inputs):
        gold_K, alt_K, counts_K = (
            _integers(table, name) for name in ("gold", "alternative", "count")
        )
        for run in _ascending(gold_K * vocab_size + alt_K):
            sums.add_(gold_K[run], alt_K[run], rows_KN[run], counts_K[run])
    return sums


def _row_groups(path: Path, num_inputs: int) -> Iterator[tuple[pa.Table, Tensor]]:
    parquet = pq.ParquetFile(path)
    for group in range(parquet.num_row_groups):
        table = parquet.read_row_group(group)
        flat = table["vector"].combine_chunks().flatten()
        yield (
            table,
            torch.from_numpy(flat.to_numpy(zero_copy_only=False).copy()).view(-1, num_inputs),
        )


def _ascending(codes_K: Tensor) -> Iterator[slice]:
    """Ascending runs: adding sorts the new codes of one call, so these keep their order."""
    ends = ((codes_K[1:] < codes_K[:-1]).nonzero().squeeze(1) + 1).tolist()
    bounds = [0, *ends, len(codes_K)]
    return map(slice, bounds[:-1], bounds[1:])


def _integers(table: pa.Table, name: str) -> Tensor:
    return torch.from_numpy(table[name].to_numpy().copy()).long()
