"""What a step from one version to another means for the ledger."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, fields, replace

from grom.ledger import GENESIS, ChainedLine, LedgerLine
from tasks.accepted import HONOURED, ROLLED_BACK, accepted, standing, write_accepted
from tasks.bucket import Bucket
from tasks.claims import iso
from tasks.ledger import Ledger, LedgerMoved

logger = logging.getLogger(__name__)
STEP = re.compile(r"rollback-\d+-\d+(-\d+)?")
"""Run of the lines that a step from one version to another adds."""
Key = tuple[str, str]
"""Request and batch."""


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What a step changed in the ledger."""

    num_lines: int
    """Lines that were added; 0 if the step was entered before."""
    versions: frozenset[str]
    """Versions that no honoured request counts on any more."""


def roll_back_ledger(bucket: Bucket, from_version: str, to_version: str, started: str) -> TakenBack:
    """Enter that another version serves, into the ledger.

    A request that was honoured, but not yet in `to_version`, becomes `rolled back`.  One that was
    rolled back, and is in it, is `honoured` again, by the moments that were accepted then.  All
    lines are one segment behind the lines they follow from.  Who repeats the step adds none.

    Args:
        bucket: the store.
        from_version, to_version: numbers of versions of the registered model.
        started: when the step was asked for, ISO 8601.

    Raises:
        BrokenLedger: see `Ledger.read`.
        CorruptArtifact: what was accepted then is no longer there.
    """
    ledger, step = Ledger(bucket), f"rollback-{from_version}-{to_version}"
    while True:
        lines = ledger.read()
        kept, now = _honoured_in(int(to_version), lines), iso(bucket.now())
        times = Counter(
            (line.request, line.batch) for line in lines if f"{line.run}-".startswith(f"{step}-")
        )
        new = []
        for key, line in standing(lines).items():
            run, was = _run(step, times[key]), kept.get(key)
            changed = replace(_plain(line), run=run, started=started, finished=now)
            if line.state == HONOURED and was is None:
                new.append(
                    replace(changed, state=ROLLED_BACK, model_version=None, certificate=None)
                )
            elif line.state == ROLLED_BACK and was is not None:
                new.append(_granted_again(changed, was, bucket))
        try:
            num_lines = ledger.append(new, after=lines[-1].line_hash if lines else GENESIS)
        except LedgerMoved:
            continue
        logger.info("ledger: %s changes %d requests", step, num_lines)
        return TakenBack(num_lines, _without_requests(ledger.read(), int(to_version)))


def _honoured_in(version: int, lines: list[ChainedLine]) -> dict[Key, ChainedLine]:
    """The requests that a version honours: those that counted when it was entered.

    A version that brought no requests of its own honours what the newest one before it does.
    """
    entered = [
        _number(line) if line.state == HONOURED and not STEP.fullmatch(line.run) else 0
        for line in lines
    ]
    newest = max((number for number in entered if number <= version), default=0)
    end = max((place for place, number in enumerate(entered, 1) if 0 < number == newest), default=0)
    return {
        key: line
        for key, line in standing(lines[:end]).items()
        if line.state == HONOURED and _number(line) <= version
    }


def _granted_again(changed: LedgerLine, was: ChainedLine, bucket: Bucket) -> LedgerLine:
    """The line, and before it a record of what was accepted, under the name of the step."""
    (record,) = accepted([was], bucket)
    write_accepted(record.model_copy(update={"run": changed.run}), bucket)
    return replace(
        changed, state=HONOURED, model_version=was.model_version, certificate=was.certificate
    )


def _without_requests(lines: list[ChainedLine], version: int) -> frozenset[str]:
    """Numbers above `version` that only lines name which no longer stand."""
    standing_now = {line.model_version for line in standing(lines).values()}
    named = {line.model_version for line in lines if _number(line) > version}
    return frozenset(str(number) for number in named - standing_now)


def _number(line: LedgerLine) -> int:
    return int(line.model_version or 0)


def _run(step: str, times: int) -> str:
    """The step's name, numbered from the second time on that it meets a request."""
    return f"{step}-{times + 1}" if times else step


def _plain(line: ChainedLine) -> LedgerLine:
    return LedgerLine(**{field.name: getattr(line, field.name) for field in fields(LedgerLine)})
