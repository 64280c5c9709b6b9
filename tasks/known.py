"""Rows that count already, so that a row which several batches have counts once."""

from __future__ import annotations

from functools import cache

from grom.collect import ExampleStatistics
from grom.examples import Example
from grom.ledger import ChainedLine
from tasks.accepted import HONOURED, accepted, standing
from tasks.codecs import read_table
from tasks.store import Store


class Known:
    """Rows that are forgotten by earlier batches, or that a batch before on the desk has, too."""

    def __init__(self, lines: list[ChainedLine], store: Store) -> None:
        self._honoured = {one.request for one in standing(lines).values() if one.state == HONOURED}
        self._earlier = cache(lambda: _earlier(lines, store))
        self._before: set[tuple[str, str]] = set()
        self._now: set[tuple[str, str]] = set()

    def has(self, request: str, row: dict[str, str]) -> bool:
        """Whether a row is among them."""
        key = request, _digest_of(row)
        self._now.add(key)
        return key in self._before or (request in self._honoured and key in self._earlier())

    def end_batch(self) -> None:
        """What was asked for belongs to a batch before from now on."""
        self._before |= self._now


def _digest_of(row: dict[str, str]) -> str:
    texts = {name: row.get(name) for name in ("prompt", "answer", "text")}
    return Example("", "", 0, **texts).digest


def _earlier(lines: list[ChainedLine], store: Store) -> set[tuple[str, str]]:
    """Request and digest of every row whose moments count."""
    found = set()
    for record in accepted(lines, store):
        if record.forget is not None:
            path = store.fetch(record.forget) / "examples.parquet"
            rows = read_table(path, ExampleStatistics)
            found |= {(row.group, row.digest) for row in rows}
    return found
