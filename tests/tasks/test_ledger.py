"""The ledger in a store: each line once, in one order, whoever writes and whatever fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from grom.errors import BrokenLedger, LedgerConflict
from grom.ledger import GENESIS, LedgerLine, request_hash, verify
from tasks.ledger import Ledger
from tasks.store import Store
from tests.faulty import FAULTS, faulty, once, storm

RACERS = 20


def line(number: int, run: str = "run 1", finished: str = "10:02:00") -> LedgerLine:
    """What a run did with a request."""
    return LedgerLine(
        request=request_hash(f"request {number}", b"0123456789abcdef"),
        batch="b",
        received="2026-12-01T10:00:00+00:00",
        run=run,
        model_version="3",
        certificate=None,
        state="honoured",
        started="2026-12-01T10:01:00+00:00",
        finished=f"2026-12-01T{finished}+00:00",
    )


def names(store: Store) -> list[str]:
    """Objects of the ledger."""
    return [entry.name for entry in store.entries("ledger")]


def test_what_is_added_is_read_in_order_and_verified(store: Store) -> None:
    ledger = Ledger(store)
    assert (ledger.read(), ledger.head()) == ([], GENESIS)
    assert ledger.append([line(1), line(2)]) == 2
    assert ledger.append([line(3)]) == 1
    found = Ledger(store).read()
    assert [one.key for one in found] == [line(number).key for number in (1, 2, 3)]
    assert [one.number for one in found] == [1, 2, 3]
    assert verify(found) == ledger.head() == found[-1].line_hash
    assert len(names(store)) == 4
    assert names(store)[0].startswith("ledger/00000001-")


def test_the_same_lines_are_added_once(store: Store) -> None:
    assert Ledger(store).append([line(1), line(1), line(2)]) == 2
    resumed = [line(1, finished="11:00:00"), line(2), line(3)]
    assert Ledger(store).append(resumed) == 1
    assert Ledger(store).append(resumed) == 0
    assert Ledger(store).append([]) == 0
    found = Ledger(store).read()
    assert [one.number for one in found] == [1, 2, 3]
    assert found[0].finished == line(1).finished
    assert Ledger(store).append([line(1, run="run 2")]) == 1


def test_a_contradiction_is_refused(store: Store) -> None:
    Ledger(store).append([line(1), line(2)])
    other = replace(line(2), model_version="4")
    with pytest.raises(LedgerConflict, match=r"line 2: .* nothing was added"):
        Ledger(store).append([line(3), other])
    assert len(Ledger(store).read()) == 2


def test_many_writers_lose_no_line_and_double_none(store: Store) -> None:
    """Each writes a line of its own, and one that all write."""

    def write(number: int) -> int:
        return Ledger(store).append([line(0), line(number)])

    with ThreadPoolExecutor(RACERS) as pool:
        added = sum(pool.map(write, range(1, RACERS + 1)))
    found = Ledger(store).read()
    assert added == len(found) == RACERS + 1
    assert {one.key for one in found} == {line(number).key for number in range(RACERS + 1)}
    verify(found)
    assert Ledger(store).remove_orphans() == []
    assert len(names(store)) == 2 * RACERS


@pytest.mark.parametrize("fault", FAULTS)
def test_lines_arrive_once_under_each_fault(store: Store, fault: str) -> None:
    for number in (1, 2):
        assert Ledger(faulty(store, once(fault))).append([line(number)]) == 1
        assert Ledger(faulty(store, once(fault))).append([line(number)]) == 0
    assert len(Ledger(faulty(store, once(fault))).read()) == 2
    assert len(names(store)) == 4


def test_writers_in_a_storm_lose_nothing(store: Store) -> None:
    def write(number: int) -> None:
        Ledger(faulty(store, storm(number))).append([line(0), line(number)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 7)))
    assert len(Ledger(store).read()) == 7


def overwrite(store: Store, name: str, data: bytes) -> None:
    """Another content under the same name."""
    store.delete(name)
    store.create(name, data)


def test_tampering_is_found_where_it_is(store: Store, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        Ledger(store).append([line(2 * number), line(2 * number + 1)])
    second, marker = names(store)[2], names(store)[3]
    kept = {name: found.data for name in names(store) if (found := store.read(name))}
    overwrite(store, second, kept[names(store)[4]])
    with pytest.raises(BrokenLedger, match="line 3: line 5 is in its place"):
        Ledger(store).read()
    overwrite(store, second, b"PAR1")
    with pytest.raises(BrokenLedger, match=r"line 3: ledger/00000002-.*was changed"):
        Ledger(store).read()
    store.delete(second)
    with pytest.raises(BrokenLedger, match=r"line 3: ledger/00000002-.*is missing"):
        Ledger(store).read()
    overwrite(store, second, kept[second])
    for change in (
        kept[marker].replace(b'"lines":2', b'"lines":3'),
        kept[marker].replace(b'"number":2', b'"number":3'),
        b"{}",
    ):
        overwrite(store, marker, change)
        with pytest.raises(BrokenLedger, match=r"00000002\.json was changed"):
            Ledger(store).read()
    store.delete(marker)
    with pytest.raises(BrokenLedger, match="line 3: a segment is missing"):
        Ledger(store).append([line(9)])
    overwrite(store, marker, kept[marker])
    assert len(Ledger(store).read()) == 6


def test_a_cut_off_end_is_seen_by_the_noted_hash(store: Store) -> None:
    for number in (1, 2):
        Ledger(store).append([line(number)])
    noted = Ledger(store).head()
    for name in names(store)[2:]:
        store.delete(name)
    assert noted not in {one.line_hash for one in Ledger(store).read()}


def test_files_of_losers_are_removed_and_nothing_else(store: Store) -> None:
    Ledger(store).append([line(1)])
    orphan, coming = (f"ledger/0000000{number}-{'e' * 16}.parquet" for number in (1, 2))
    for name in (orphan, coming, "ledger/notes.parquet"):
        store.create(name, b"x")
    before = names(store)
    assert Ledger(store).remove_orphans() == [orphan]
    assert names(store) == [name for name in before if name != orphan]
    assert len(Ledger(store).read()) == 1


def test_an_auditor_finds_a_request_by_its_id(store: Store) -> None:
    ledger = Ledger(store)
    mine = replace(line(1), request=request_hash("jane@example.org", ledger.salt()))
    ledger.append([line(0), mine, line(2)])
    assert [one.number for one in Ledger(store).find("jane@example.org")] == [2]
    assert Ledger(store).find("john@example.org") == []
    for name in names(store):
        found = store.read(name)
        assert found is not None
        assert b"jane" not in found.data


def test_all_writers_hash_with_one_salt(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        salts = set(pool.map(lambda _: Ledger(store).salt(), range(8)))
    assert [len(salt) for salt in salts] == [32]
    assert names(store) == []  # the salt does not lie with the lines
