"""The batches that a run works on: claimed, verified, copied to scratch, kept until the block ends.

    scratch/forget/<owner>/<batch>.jsonl     rows with the salted hash of their request's id
    desks/<owner>.json                       which batches a run took: resumed, it takes the same

Ids of requests go no further than this file.  Rows are gone from scratch when the block ends,
however it ends.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prefect.exceptions import Pause

from grom.errors import DataError, GromError
from grom.ledger import ChainedLine, request_hash
from tasks import claims
from tasks.artifacts import canonical_json
from tasks.batches import waiting
from tasks.claims import LeaseLost
from tasks.inbox import Checked, check, discard
from tasks.keeper import Keeper
from tasks.known import Known
from tasks.ledger import Ledger
from tasks.outcomes import reason_of
from tasks.place import Place
from tasks.store import Store

logger = logging.getLogger(__name__)
DESKS = "desks"


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch on the desk."""

    keeper: Keeper
    checked: Checked
    rows: Path
    """Local JSON Lines, once they were copied; empty if an earlier batch had every row."""
    requests: tuple[str, ...]
    """Salted hash of each request, in order; none before the rows were copied."""
    started: str
    """When it was taken, by the store's clock, ISO 8601."""

    @property
    def batch(self) -> str:
        """Its name."""
        return self.checked.batch


@dataclass(slots=True)
class Desk:
    """What a run has taken."""

    store: Store
    owner: str
    taken: list[Taken] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    """Batches that needed no work: an earlier run had entered them, or they cannot be taken."""
    entered: dict[str, Keeper] = field(default_factory=dict)
    """Batches that the ledger has, by a run that was killed before they were done."""

    @property
    def run(self) -> str:
        """Key of the run: that of the interrupted run it goes on with, or its owner's id."""
        return min((one.keeper.run for one in self.taken if one.keeper.run), default=self.owner)

    @property
    def keepers(self) -> dict[str, Keeper]:
        """All claims, by batch."""
        return self.entered | {one.batch: one.keeper for one in self.taken}

    def copied(self, taken: Sequence[Taken]) -> list[Taken]:
        """The batches with their rows in scratch, but for those that others have, too: batches that
        the ledger has now, and those before in `taken`."""
        ledger = Ledger(self.store)
        known, salt = Known(ledger.read(), self.store), ledger.salt()
        return [_copy(one, salt, known) for one in taken]

    @property
    def interrupted(self) -> list[str]:
        """Keys of the killed runs that had entered batches."""
        lines = Ledger(self.store).read()
        mine = [_lines_of(name, keeper.run, lines) for name, keeper in self.entered.items()]
        return sorted({line.run for found in mine for line in found})

    def end(self) -> None:
        """Publish as done what the ledger has of the batches here."""
        lines = Ledger(self.store).read()
        for name, keeper in self.keepers.items():
            if mine := _lines_of(name, keeper.run, lines):
                versions = (line.model_version for line in mine if line.model_version)
                try:
                    keeper.finish(
                        model_version=next(versions, None),
                        certificate=mine[-1].certificate,
                        ledger=mine[-1].line_hash,
                    )
                except LeaseLost:  # whoever has it publishes the same
                    logger.info("batch %s: another run has it", name)


@contextmanager
def at_desk(
    place: Place, owner: str, batch: str | None, max_batches: int, lease_s: float
) -> Iterator[Desk]:
    """Claim what waits, and hold it while the block works.

    What has no outcome when the block ends by an error is given back, with the error's reason; a
    run that is suspended keeps it.

    Args:
        place: store and scratch.
        owner: this run; the same when it is resumed.
        batch: one that was announced; taken even if the listing does not show it yet.
        max_batches: at most so many.
        lease_s: time without a sign of life after which others may take them.
    """
    desk = Desk(place.open(), owner)
    folder = desk.store.scratch / "forget" / owner
    with ExitStack() as kept:
        try:
            _fill(desk, _names(desk, batch, max_batches), lease_s, folder, kept)
            yield desk
        except Pause:
            raise
        except BaseException as error:
            _give_back(desk, reason_of(error))
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for one in desk.taken:
                discard(one.checked)


def _names(desk: Desk, batch: str | None, max_batches: int) -> list[str]:
    note = desk.store.read(f"{DESKS}/{desk.owner}.json")
    if note is not None:
        return list(json.loads(note.data))
    return list(dict.fromkeys([*([batch] if batch else []), *waiting(desk.store)]))[:max_batches]


def _fill(desk: Desk, names: list[str], lease_s: float, folder: Path, kept: ExitStack) -> None:
    ledger = Ledger(desk.store)
    for name in names:
        held = claims.claim(name, desk.owner, desk.store, lease_s)
        if held is None:
            desk.settled.append(name)
            continue
        keeper = kept.enter_context(Keeper(held, desk.store))
        if _lines_of(name, held.record.run, ledger.read()):
            desk.entered[name] = keeper
            desk.settled.append(name)
            continue
        try:
            desk.taken.append(_take(keeper, name, desk, folder))
        except DataError as error:
            keeper.fail(reason_of(error))
            desk.settled.append(name)
        except GromError as error:
            keeper.release(reason_of(error))
            raise
    for one in desk.taken:
        one.keeper.renew(run=desk.run)
    names = [one.batch for one in desk.taken]
    if names:
        desk.store.create(f"{DESKS}/{desk.owner}.json", canonical_json(names))
    logger.info("desk: %d batches taken, %d settled", len(names), len(desk.settled))


def own_run(run: str, batch: str) -> str:
    """Key of a run for one batch that goes on alone, since all together failed."""
    return f"{run}-{batch}"


def _lines_of(batch: str, run: str | None, lines: list[ChainedLine]) -> list[ChainedLine]:
    """What the run that a batch's claim names has entered of it, together with others or alone."""
    keys = () if run is None else (run, own_run(run, batch))
    return [line for line in lines if line.batch == batch and line.run in keys]


def _take(keeper: Keeper, name: str, desk: Desk, folder: Path) -> Taken:
    checked = check(name, desk.store)
    try:
        started = claims.iso(desk.store.now())
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Taken(keeper, checked, folder / f"{name}.jsonl", (), started)
    except BaseException:
        discard(checked)
        raise


def _copy(one: Taken, salt: bytes, known: Known) -> Taken:
    """Write the rows that are not known, under the hashes of their requests."""
    requests: dict[str, None] = {}
    with one.checked.requests.open("rb") as source, one.rows.open("wb") as target:
        for line in source:
            row = json.loads(line)
            row["request_id"] = digest = request_hash(row["request_id"], salt)
            requests[digest] = None
            if not known.has(digest, row):
                target.write(canonical_json(row) + b"\n")
    known.end_batch()
    return replace(one, requests=tuple(requests))


def _give_back(desk: Desk, reason: str) -> None:
    for name, keeper in desk.keepers.items():
        try:
            keeper.release(reason)
        except LeaseLost:
            logger.info("batch %s: another run has it", name)
