"""The ledger in object storage: Parquet segments that are added and never changed.

    ledger/<number>-<hash>.parquet     lines; named by the sha256 of its bytes
    ledger/<number>.json               makes that file segment <number>; created if absent
    salt/ledger.json                   what request ids are hashed with; keep it from those who
                                       may read the ledger

Two writers cannot both add segment <number>: the second one's file is no segment, and it tries
again behind the first one's lines.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grom.errors import BrokenLedger, GromError, LedgerConflict
from grom.ledger import GENESIS, ChainedLine, LedgerLine, chain, request_hash, verify
from tasks.artifacts import canonical_json
from tasks.bucket import Bucket
from tasks.codecs import read_table, write_table

logger = logging.getLogger(__name__)
LEDGER, SALT = "ledger", "salt/ledger.json"
DIGITS = 8
SALT_BYTES = 32


class LedgerMoved(GromError):
    """Another run was entered into the ledger meanwhile."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where}: other batches were accepted since this run began, so its edit is not that "
            "of all of them. Solve again."
        )


class Segment(BaseModel):
    """What `ledger/<number>.json` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    lines: int = Field(ge=1)
    previous: str
    """Hash of the line before its first one."""
    last: str
    """Hash of its last line."""

    @property
    def marker(self) -> str:
        """Its name."""
        return f"{LEDGER}/{self.number:0{DIGITS}d}.json"

    @property
    def file(self) -> str:
        """Name of its lines."""
        return f"{LEDGER}/{self.number:0{DIGITS}d}-{self.sha256[:16]}.parquet"


class Ledger:
    """The ledger of a store, as far as this object has read it."""

    def __init__(self, bucket: Bucket) -> None:
        """bucket: the store."""
        self._bucket = bucket
        self._lines: list[ChainedLine] = []
        self._num_segments = 0
        self._places: dict[tuple[str, str, str], int] = {}

    def read(self) -> list[ChainedLine]:
        """All lines, verified from the first to the last.

        Segments are asked for by number, since a listing may lag behind.

        Raises:
            BrokenLedger: names the first line that was changed, or is missing.
        """
        while (segment := self._segment(self._num_segments + 1)) is not None:
            self._take(segment, self._verified(segment))
        ends = [name for name in self._names() if name.endswith(".json")]
        if len(ends) > self._num_segments:
            # One may have been added since the loop ended, so ask once more before accusing.
            if self._segment(self._num_segments + 1) is not None:
                return self.read()
            raise BrokenLedger(self._where, len(self._lines) + 1, "a segment is missing")
        return list(self._lines)

    def append(self, lines: Iterable[LedgerLine], after: str | None = None) -> int:
        """Add the lines whose request, batch and run are not there yet; how many.

        Several writers may do so at once: each line is there once in the end.

        Args:
            lines: what to add, all of it or nothing.
            after: hash of the last line that the writer knew; not given: it does not matter.

        Raises:
            LedgerMoved: lines were added after that one; nothing was added.
            LedgerConflict: such a line is there with another result; nothing was added.
            BrokenLedger: see `read`.
        """
        wanted = list({line.key: line for line in lines}.values())
        while True:
            self.read()
            new = [line for line in wanted if not self._has(line)]
            if not new:
                return 0
            if after not in (None, self._last):
                raise LedgerMoved(self._where)
            if self._added(new):
                logger.info("ledger: %d lines added", len(new))
                return len(new)

    def head(self) -> str:
        """Hash of the last line: who notes it can tell later whether lines were cut off."""
        self.read()
        return self._last

    def salt(self) -> bytes:
        """What request ids are hashed with; made when it is first asked for."""
        self._bucket.create(SALT, canonical_json({"salt": secrets.token_hex(SALT_BYTES)}))
        found = self._bucket.read(SALT)
        assert found is not None
        return bytes.fromhex(json.loads(found.data)["salt"])

    def find(self, request_id: str) -> list[ChainedLine]:
        """The lines of one request, by its id."""
        wanted = request_hash(request_id, self.salt())
        return [line for line in self.read() if line.request == wanted]

    def remove_orphans(self) -> list[str]:
        """Remove files of writers that lost or were killed; their names.  No line is lost."""
        self.read()
        kept: set[str] = set()
        for number in range(1, self._num_segments + 1):
            segment = self._segment(number)
            kept |= set() if segment is None else {segment.file}
        orphans = [
            name
            for name in self._names()
            # The next number's file may become a segment at any moment.
            if name.endswith(".parquet") and name not in kept and 0 < _number(name) <= len(kept)
        ]
        for name in orphans:
            self._bucket.delete(name)
        return orphans

    @property
    def _last(self) -> str:
        return self._lines[-1].line_hash if self._lines else GENESIS

    @property
    def _where(self) -> str:
        return f"{self._bucket.root}/{LEDGER}"

    def _names(self) -> list[str]:
        return [entry.name for entry in self._bucket.entries(LEDGER)]

    def _has(self, line: LedgerLine) -> bool:
        place = self._places.get(line.key)
        if place is not None and self._lines[place].result != line.result:
            raise LedgerConflict(self._where, place + 1)
        return place is not None

    def _added(self, new: list[LedgerLine]) -> bool:
        """Whether the lines became the next segment."""
        previous = self._last
        chained = chain(new, previous, len(self._lines) + 1)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lines.parquet")
            write_table(path, chained, ChainedLine)
            data = path.read_bytes()
        segment = Segment(
            number=self._num_segments + 1,
            sha256=hashlib.sha256(data).hexdigest(),
            lines=len(chained),
            previous=previous,
            last=chained[-1].line_hash,
        )
        self._bucket.create(segment.file, data)
        if self._bucket.create(segment.marker, canonical_json(segment.model_dump())):
            self._take(segment, chained)
            return True
        winner = self._segment(segment.number)
        if winner is not None and winner.file != segment.file:
            self._bucket.delete(segment.file)
        return False

    def _segment(self, number: int) -> Segment | None:
        name = f"{LEDGER}/{number:0{DIGITS}d}.json"
        found = self._bucket.read(name)
        if found is None:
            return None
        try:
            segment = Segment.model_validate(json.loads(found.data))
        except (ValueError, ValidationError):
            segment = None
        if segment is None or segment.marker != name:
            raise BrokenLedger(self._where, len(self._lines) + 1, f"{name} was changed")
        return segment

    def _verified(self, segment: Segment) -> list[ChainedLine]:
        first = len(self._lines) + 1
        found = self._bucket.read(segment.file)
        if found is None:
            raise BrokenLedger(self._where, first, f"{segment.file} is missing")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lines.parquet")
            path.write_bytes(found.data)
            try:
                lines = read_table(path, ChainedLine)
            except (OSError, ValueError) as error:
                raise BrokenLedger(self._where, first, f"{segment.file} was changed") from error
        previous = self._last
        last = verify(lines, previous, first, self._where)
        if (len(lines), previous, last) != (segment.lines, segment.previous, segment.last):
            raise BrokenLedger(self._where, first + len(lines), f"{segment.marker} was changed")
        if hashlib.sha256(found.data).hexdigest() != segment.sha256:
            raise BrokenLedger(self._where, first, f"{segment.file} was changed")
        return lines

    def _take(self, segment: Segment, lines: list[ChainedLine]) -> None:
        for line in lines:
            self._places[line.key] = len(self._lines)
            self._lines.append(line)
        self._num_segments = segment.number


def _number(name: str) -> int:
    digits = name.rsplit("/", 1)[-1].split("-", 1)[0]
    return int(digits) if digits.isdigit() else 0
