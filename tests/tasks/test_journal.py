"""A killed evaluation goes on with the first item that it had not done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from grom.items import ItemResult
from tasks.journal import Journal


def results(first: int, last: int) -> Iterator[tuple[int, ItemResult]]:
    """Items in another order than their positions, as batches give them."""
    for position in reversed(range(first, last)):
        yield position, ItemResult("s", position, "answer", "likelihood", f"d{position}", 3, -0.5)


def killed_after(count: int, stream: Iterator[tuple[int, ItemResult]]) -> None:
    for number, _ in enumerate(stream, start=1):
        if number == count:
            return


def test_what_was_done_is_found_again_to_the_last_item(tmp_path: Path) -> None:
    path = tmp_path / "journals" / "a.jsonl"
    killed_after(57, Journal(path).record(results(0, 100)))
    again = Journal(path)
    assert sorted(again.found) == list(range(43, 100))
    assert again.found[60].mean_logprob == -0.5
    assert math.isnan(again.found[60].probability)
    left = [pair for pair in results(0, 100) if pair[0] not in again.found]
    assert len(left) == 43
    assert len(list(again.record(iter(left)))) == 43
    assert sorted(Journal(path).found) == list(range(100))


@pytest.mark.parametrize("lost", [2, 20, 90])
def test_a_line_that_was_cut_short_is_done_again(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "a.jsonl"
    killed_after(5, Journal(path).record(results(0, 5)))
    path.write_bytes(path.read_bytes()[:-lost])
    again = Journal(path)
    assert sorted(again.found) == [1, 2, 3, 4]
    assert len(list(again.record(results(0, 1)))) == 1
    assert sorted(Journal(path).found) == [0, 1, 2, 3, 4]


def test_a_line_that_lacks_only_its_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    killed_after(5, Journal(path).record(results(0, 5)))
    path.write_bytes(path.read_bytes()[:-1])
    again = Journal(path)
    assert sorted(again.found) == [0, 1, 2, 3, 4]
    killed_after(1, again.record(results(5, 6)))
    assert sorted(Journal(path).found) == [0, 1, 2, 3, 4, 5]


def test_a_finished_journal_is_removed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    killed_after(2, journal.record(results(0, 2)))
    journal.close()
    assert list(tmp_path.iterdir()) == []
    journal.close()
