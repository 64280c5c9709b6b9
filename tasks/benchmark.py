"""Stage load, for a benchmark: its splits found, read once and hashed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

from prefect import task

from grom.benchmarks import BENCHMARKS
from grom.benchmarks.benchmark import Benchmark, Row
from grom.config import Config
from grom.errors import ConfigError, DataError, EmptySet, MissingInput
from grom.items import Item
from tasks.rows import HUB
from tasks.tables import split_address, table_rows

logger = logging.getLogger(__name__)


class BenchmarkRef(Config):
    """A benchmark whose rows were found and read once."""

    name: str
    addresses: dict[str, str]
    """Split -> where its rows are."""
    num_rows: dict[str, int]
    limit: int | None
    num_items: int
    digest: str
    """Hash over everything that is asked, in order."""

    def items(self) -> list[Item]:
        """All that is asked.

        Raises:
            DataError: a file is not as it was when the benchmark was loaded.
        """
        items = _items(self.name, _rows(self.addresses), self.limit)
        if _digest(items) != self.digest:
            raise DataError(
                f"{self.name}: its files changed while the run was reading them. Start the run "
                "again."
            )
        return items


def benchmark_of(name: str) -> Benchmark:
    """A benchmark by name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are {', '.join(sorted(BENCHMARKS))}")
    return BENCHMARKS[name]


def benchmark_with(name: str, splits: Mapping[str, str]) -> Benchmark:
    """A benchmark by name that has these splits.

    Raises:
        ConfigError: there is none of this name, or it has no such split.
    """
    benchmark = benchmark_of(name)
    known = [split.name for split in benchmark.splits]
    if strange := sorted(set(splits) - set(known)):
        raise ConfigError(f"{name} has no split {strange[0]!r}; it has {', '.join(known)}")
    return benchmark


@task
def load_benchmark(
    name: str, root: str, limit: int | None = None, splits: Mapping[str, str] | None = None
) -> BenchmarkRef:
    """Find and read a benchmark's splits.

    Args:
        name: which benchmark.
        root: folder, fsspec address or `hub`.
        limit: rows per split that are asked about, spread evenly.
        splits: address of single splits that lie elsewhere.

    Raises:
        ConfigError: an unknown benchmark or split.
        MissingInput: a needed split is not there.
        DataError: a row lacks what the benchmark needs.
    """
    benchmark = benchmark_with(name, splits or {})
    addresses = _addresses(benchmark, root, splits or {})
    rows: dict[str, list[Row]] = {}
    for split in benchmark.splits:
        if split.name not in addresses:
            continue
        try:
            rows[split.name] = _split_rows(addresses[split.name])
        except MissingInput as error:
            # Whether the hub has an optional split shows only when it is asked for.
            if split.needed or split.name in (splits or {}):
                raise
            logger.warning("evaluate %s: split %r left out: %s", name, split.name, error)
            del addresses[split.name]
    for split in benchmark.splits:
        if split.needed and not rows[split.name]:
            raise EmptySet(split.name, addresses[split.name])
    items = _items(name, rows, limit)
    return BenchmarkRef(
        name=name,
        addresses=addresses,
        num_rows={split: len(listed) for split, listed in rows.items()},
        limit=limit,
        num_items=len(items),
        digest=_digest(items),
    )


def _addresses(benchmark: Benchmark, root: str, given: Mapping[str, str]) -> dict[str, str]:
    addresses: dict[str, str] = {}
    for split in benchmark.splits:
        address = given.get(split.name) or split_address(root, split)
        if address is not None:
            addresses[split.name] = address
        elif split.needed:
            raise MissingInput(
                root,
                f"no {' or '.join(split.files)} (.json, .jsonl, .parquet, .csv, .txt) there, the "
                f"{split.name!r} split of {benchmark.name}. Give its folder with --data, its file "
                f"with --split '{split.name}=FILE', or `--data hub`",
            )
    return addresses


def _rows(addresses: Mapping[str, str]) -> dict[str, list[Row]]:
    return {name: _split_rows(address) for name, address in addresses.items()}


def _split_rows(address: str) -> list[Row]:
    try:
        return list(table_rows(address))
    except MissingInput as error:
        if not address.startswith(HUB):
            raise
        raise MissingInput(
            address,
            f"the hub did not give it ({type(error.__cause__).__name__}). Give the folder of the "
            "benchmark's files with --data",
        ) from error


def _digest(items: Sequence[Item]) -> str:
    return hashlib.sha256("".join(item.digest for item in items).encode()).hexdigest()


def _items(name: str, rows: Mapping[str, list[Row]], limit: int | None) -> list[Item]:
    items = benchmark_of(name).items(rows)
    if limit is None:
        return items
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.split] = max(sizes.get(item.split, 0), item.row + 1)
    # The first rows would be one MMLU subject, or half of the authors.
    asked = {
        split: {number * size // min(limit, size) for number in range(min(limit, size))}
        for split, size in sizes.items()
    }
    return [item for item in items if item.row in asked[item.split]]
