"""The ledger's chain: nothing can be changed, removed, put in or moved unseen."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grom.errors import BrokenLedger
from grom.ledger import (
    GENESIS,
    ChainedLine,
    LedgerLine,
    chain,
    line_hash,
    request_hash,
    verify,
)

SALT = b"0123456789abcdef"


def line(number: int = 0, **changes: Any) -> LedgerLine:
    """A line."""
    plain = LedgerLine(
        request=request_hash(f"request {number}", SALT),
        batch="b",
        received="2026-12-01T10:00:00+00:00",
        run="run 1",
        model_version="3",
        certificate="c" * 64,
        state="honoured",
        started="2026-12-01T10:01:00+00:00",
        finished="2026-12-01T10:02:00+00:00",
    )
    return replace(plain, **changes)


def lines(count: int) -> list[ChainedLine]:
    """A chain."""
    return chain([line(number) for number in range(count)])


def test_the_hash_is_what_the_page_says() -> None:
    """Computed here by hand, so that anybody can verify a ledger with other software."""
    canonical = (
        '{"batch":"b","certificate":"' + "c" * 64 + '","finished":"2026-12-01T10:02:00+00:00",'
        '"model_version":"3","received":"2026-12-01T10:00:00+00:00","request":"'
        + line().request
        + '","run":"run 1","started":"2026-12-01T10:01:00+00:00","state":"honoured"}'
    )
    assert line().to_bytes() == canonical.encode()
    first = hashlib.sha256(("0" * 64 + canonical).encode()).hexdigest()
    assert line_hash(GENESIS, line()) == first
    assert lines(1)[0].line_hash == first
    assert lines(1)[0].to_bytes() == line().to_bytes()
    assert json.loads(canonical)["batch"] == "b"


@given(count=st.integers(0, 6), cut=st.integers(0, 6))
def test_a_chain_verifies_whole_and_in_pieces(count: int, cut: int) -> None:
    whole = lines(count)
    last = verify(whole)
    assert last == (whole[-1].line_hash if whole else GENESIS)
    middle = verify(whole[:cut])
    assert verify(whole[cut:], middle, len(whole[:cut]) + 1) == last
    rest = [line(number) for number in range(cut, count)]
    assert chain(rest, middle, len(whole[:cut]) + 1) == whole[cut:]


FIELDS: dict[str, Any] = {
    "request": "f" * 64,
    "batch": "c",
    "received": "2026-12-01T10:00:01+00:00",
    "run": "run 2",
    "model_version": "4",
    "certificate": None,
    "state": "refused",
    "started": "2026-12-01T10:01:01+00:00",
    "finished": "2026-12-01T10:02:01+00:00",
    "line_hash": "0" * 64,
}


@pytest.mark.parametrize("field", FIELDS)
@given(place=st.integers(0, 4))
def test_any_change_breaks_the_chain_there(field: str, place: int) -> None:
    whole = lines(5)
    whole[place] = replace(whole[place], **{field: FIELDS[field]})
    with pytest.raises(BrokenLedger, match=rf"ledger, line {place + 1}: its hash") as caught:
        verify(whole)
    assert caught.value.number == place + 1


def test_lines_removed_put_in_or_moved_are_found() -> None:
    whole = lines(5)
    for broken, first in (
        (whole[:1] + whole[2:], 2),
        ([*whole[:2], whole[1], *whole[2:]], 3),
        ([whole[0], whole[2], whole[1], *whole[3:]], 2),
        (whole[1:], 1),
    ):
        with pytest.raises(BrokenLedger) as caught:
            verify(broken)
        assert caught.value.number == first


def test_a_chain_written_anew_has_another_end() -> None:
    """Who may write everything can forge a chain; the noted last hash shows it."""
    forged = chain([line(0), line(1, state="refused", model_version=None), line(2)])
    assert verify(forged) != verify(lines(3))
    assert verify(lines(2)) != verify(lines(3))


def test_a_request_hash_needs_the_salt() -> None:
    one = request_hash("jane@example.org", SALT)
    assert one == request_hash("jane@example.org", SALT)
    assert one != request_hash("Jane@example.org", SALT)
    assert one != request_hash("jane@example.org", SALT[::-1])
    assert one != hashlib.sha256(b"jane@example.org").hexdigest()
    with pytest.raises(ValueError, match="16 bytes"):
        request_hash("jane@example.org", b"short")


@pytest.mark.parametrize(
    "changes",
    [
        {"request": "jane@example.org"},
        {"certificate": "x"},
        {"state": "perhaps"},
        {"batch": ""},
        {"run": ""},
        {"received": "yesterday"},
        {"finished": "2026-12-01T10:02:00"},
        {"started": "2026-12-01T10:02:00+01:00"},
    ],
)
def test_lines_that_say_nothing_sure_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        line(**changes)
    assert "jane" not in str(caught.value)


def test_key_and_result() -> None:
    assert line(1).key == line(1, finished="2026-12-02T10:02:00+00:00").key != line(2).key
    assert line(1).result == line(1, finished="2026-12-02T10:02:00+00:00").result
    assert line(1).result != line(1, model_version="4").result
