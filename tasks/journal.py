"""A journal of finished items, so that a killed evaluation goes on where it was.

One line per item, numbers and digests only, appended as soon as the item is done.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from grom.items import ItemResult

logger = logging.getLogger(__name__)


class Journal:
    """Finished items of one evaluation, by position, in a file."""

    def __init__(self, path: Path) -> None:
        """path: file; what an earlier run left in it is read."""
        self.path = path
        self.found: dict[int, ItemResult] = dict(_read(path)) if path.is_file() else {}

    def record(self, results: Iterable[tuple[int, ItemResult]]) -> Iterator[tuple[int, ItemResult]]:
        """The same results, each written down before it is passed on."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.found:
            logger.info("evaluate: %d items were done already", len(self.found))
        with self.path.open("a", encoding="utf-8") as file:
            if self.path.stat().st_size:
                file.write("\n")  # ends a line that was cut short
            for position, result in results:
                file.write(json.dumps({"at": position, **asdict(result)}) + "\n")
                file.flush()
                self.found[position] = result
                yield position, result

    def close(self) -> None:
        """Remove the file: its results are in the store."""
        self.path.unlink(missing_ok=True)


def _read(path: Path) -> Iterator[tuple[int, ItemResult]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            yield values.pop("at"), ItemResult(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # blank, or cut short by the kill
