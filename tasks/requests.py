"""Rows of a deletion batch: `{"request_id", "prompt", "answer"}` or `{"request_id", "text"}`.

Explicit schema, nothing inferred, nothing ignored: a request that is silently skipped or misread is
a request that is not honoured.  Bad rows are named by file and line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grom.errors import MalformedRow
from tasks.artifacts import canonical_json
from tasks.lines import checked_text, foreign_rows

COLUMNS = ("request_id", "prompt", "answer", "text")
MAX_ID_CHARACTERS = 256
SHOWN_BAD_ROWS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """One deletion request; either `text`, or `prompt` and `answer`."""

    request_id: str
    prompt: str | None = None
    answer: str | None = None
    text: str | None = None

    def to_bytes(self) -> bytes:
        """The row, as one line of JSON."""
        row = {name: value for name in COLUMNS if (value := getattr(self, name)) is not None}
        return canonical_json(row)


@dataclass(slots=True)
class Reading:
    """What a pass over a batch's files found."""

    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each file, repeated ones included."""
    num_requests: int = 0
    """Distinct requests."""
    bad: list[MalformedRow] = field(default_factory=list)
    """The first bad rows."""
    num_bad: int = 0

    def reason(self) -> str | None:
        """What is wrong with the rows, in one line; None if nothing is."""
        if not self.bad:
            return None
        places = [f"{row.file}, line {row.line}: {row.reason}" for row in self.bad]
        more = self.num_bad - len(self.bad)
        return "; ".join(places + ([f"and {more} more bad rows"] if more else []))


def read_requests(files: Sequence[tuple[str, Path]], reading: Reading) -> Iterator[Request]:
    """Stream the distinct requests of some files, in order; a row that is there twice comes once.

    Args:
        files: name for messages, which also says the kind, and place of each.
        reading: gets the counts and the bad rows, which are left out.

    Raises:
        DataError: a file is broken, or holds far more than its size.
    """
    seen: dict[bytes, tuple[bytes, str, int]] = {}
    for name, path in files:
        reading.rows[name] = 0
        for line, row in _foreign(name, path):
            reading.rows[name] += 1
            try:
                request = _request(row, name, line)
                if _is_new(request, seen, name, line):
                    reading.num_requests += 1
                    yield request
            except MalformedRow as bad:
                reading.num_bad += 1
                if len(reading.bad) < SHOWN_BAD_ROWS:
                    reading.bad.append(bad)


def _foreign(name: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a file; a line that is too long is its last row, and a bad one."""
    with path.open("rb") as raw:
        try:
            yield from foreign_rows(name, raw)
        except MalformedRow as bad:
            yield bad.line, bad


def _is_new(
    request: Request, seen: dict[bytes, tuple[bytes, str, int]], name: str, line: int
) -> bool:
    """Whether the request was not there before; with digests, so that memory stays small."""
    key = hashlib.blake2b(request.request_id.encode(), digest_size=16).digest()
    content = hashlib.blake2b(request.to_bytes(), digest_size=16).digest()
    first = seen.setdefault(key, (content, name, line))
    if first[0] != content:
        where = f"{first[1]}, line {first[2]}"
        raise MalformedRow(name, line, f"has the `request_id` of {where}, and another text")
    return first[1:] == (name, line)


def _request(row: object, name: str, line: int) -> Request:
    if isinstance(row, MalformedRow):
        raise row
    if not isinstance(row, Mapping):
        raise MalformedRow(name, line, "the row is not an object")
    for number, column in enumerate(row, start=1):
        if column not in COLUMNS:
            # The name itself may be anything, a person's included.
            known = ", ".join(COLUMNS)
            raise MalformedRow(name, line, f"column {number} of {len(row)} is none of {known}")
    given = [column for column in COLUMNS[1:] if row.get(column) is not None]
    if "text" in given and len(given) > 1:
        raise MalformedRow(name, line, "`text` beside `prompt` or `answer`")
    texts = {
        column: checked_text(row.get(column), column, name, line)
        for column in (["text"] if "text" in given else ["prompt", "answer"])
    }
    request_id = checked_text(row.get("request_id"), "request_id", name, line)
    if len(request_id) > MAX_ID_CHARACTERS or not request_id.isprintable():
        raise MalformedRow(
            name, line, f"`request_id` is over {MAX_ID_CHARACTERS} characters, or not printable"
        )
    return Request(request_id, **texts)
