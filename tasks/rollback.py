"""What a step back to an older version means for the ledger."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from grom.ledger import LedgerLine
from tasks.bucket import Bucket
from tasks.claims import iso
from tasks.ledger import Ledger

STEP = re.compile(r"rollback-(\d+)-(\d+)(-\d+)?")
"""Run of the lines that a step from one version to another adds."""
Key = tuple[str, str]
"""Request and batch."""


def roll_back_ledger(bucket: Bucket, from_version: str, to_version: str, started: str) -> int:
    """Enter that a step from one version to another took back what requests were granted.

    A request that was honoured, but not yet in `to_version`, becomes `rolled back`.  One that an
    earlier step took back, from `to_version` or a newer one, is `honoured` again.  All lines are
    one segment, and who repeats the step adds none.

    Args:
        bucket: the store.
        from_version, to_version: numbers of versions of the registered model.
        started: when the step was asked for, ISO 8601.

    Returns:
        how many lines were added.

    Raises:
        BrokenLedger: see `Ledger.read`.
    """
    ledger = Ledger(bucket)
    lines = ledger.read()
    kept, now = _known_to(int(to_version), lines), iso(bucket.now())
    new = []
    for key, line in _last(lines).items():
        was = kept.get(key)
        run = _run(f"rollback-{from_version}-{to_version}", key, lines)
        changed = replace(_plain(line), run=run, started=started, finished=now)
        if line.state == "honoured" and was is None:
            nothing = {"model_version": None, "certificate": None}
            new.append(replace(changed, state="rolled back", **nothing))
        elif was is not None and _took_back(line, int(to_version)):
            granted = {"model_version": was.model_version, "certificate": was.certificate}
            new.append(replace(changed, state="honoured", **granted))
    return ledger.append(new)


def _known_to(version: int, lines: Sequence[LedgerLine]) -> dict[Key, LedgerLine]:
    """The requests that a version honours: those that were granted when it was entered.

    A version that brought no new requests honours what the newest one before it does.
    """
    entered = [
        _number(line) if line.state == "honoured" and not STEP.fullmatch(line.run) else 0
        for line in lines
    ]
    newest = max((number for number in entered if number <= version), default=0)
    end = max((place for place, number in enumerate(entered, 1) if 0 < number == newest), default=0)
    return {
        key: line
        for key, line in _last(lines[:end]).items()
        if line.state == "honoured" and _number(line) <= version
    }


def _last(lines: Iterable[LedgerLine]) -> dict[Key, LedgerLine]:
    return {(line.request, line.batch): line for line in lines}


def _number(line: LedgerLine) -> int:
    return int(line.model_version or 0)


def _took_back(line: LedgerLine, version: int) -> bool:
    """Whether the line says that a step over this version took a request back."""
    step = STEP.fullmatch(line.run)
    return (
        step is not None
        and line.state == "rolled back"
        and int(step[1]) >= version > int(step[2])
    )


def _run(step: str, key: Key, lines: Sequence[LedgerLine]) -> str:
    """The step's name, numbered from the second time on that it meets a request."""
    before = [
        line
        for line in lines
        if (line.request, line.batch) == key and (line.run == step or line.run.startswith(f"{step}-"))
    ]
    return f"{step}-{len(before) + 1}" if before else step


def _plain(line: LedgerLine) -> LedgerLine:
    names = [field.name for field in fields(LedgerLine)]
    return LedgerLine(**{name: getattr(line, name) for name in names})
