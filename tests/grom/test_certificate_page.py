"""The page says how a request stands, whether it is signed, and what is not covered."""

from __future__ import annotations

from html.parser import HTMLParser

from grom.certificate import of_request
from grom.certificate_page import MOST_REQUESTS, page_of, render_certificate
from grom.certified import Base, CertifiedLine, CertifiedRequest
from grom.ledger import GENESIS
from grom.signing import sealed
from tests.documents import HASH, NOON, a_certificate, a_key, hash_of

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Words and elements of a page, which must be balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert not [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def line(number: int, state: str) -> CertifiedLine:
    fields: dict[str, str | None] = {"state": state, "model_version": "7", "finished": NOON}
    return CertifiedLine(number=number, previous=GENESIS, line_hash=HASH, line=fields)


def test_the_page_of_a_batch() -> None:
    whole = sealed(a_certificate(), None)
    found = Reader(render_certificate(whole))
    assert "script" not in found.seen
    assert "1 of 2 requests honoured, 1 refused" in found.text
    assert "Not signed" in found.text
    assert whole.sha256 in found.text
    for sentence in whole.not_covered:
        assert sentence in found.text
    assert "0.900 → 0.100" in found.text
    assert "edited, nf4" in found.text
    assert "n/a" in found.text
    assert "no token of its own" in found.text
    assert "source: hub/base" in found.text


def test_the_page_of_a_signed_request() -> None:
    whole = sealed(a_certificate(), a_key())
    mine = sealed(of_request(whole, hash_of(1), [line(3, "honoured")], NOON), a_key())
    found = Reader(render_certificate(mine))
    assert "✓ Honoured" in found.text
    assert "✓ Signed" in found.text or " Signed " in found.text
    assert hash_of(1) in found.text
    assert hash_of(2) not in found.text
    assert mine.signature is not None
    assert mine.signature.value in found.text
    assert "Settings" not in found.text


def test_a_request_that_was_rolled_back_is_not_shown_as_honoured() -> None:
    lines = [line(3, "honoured"), line(9, "rolled back")]
    page = page_of(of_request(sealed(a_certificate(), None), hash_of(1), lines, NOON))
    assert page.verdict.startswith("Rolled back")
    assert not page.is_good


def test_everything_is_escaped_and_missing_attacks_are_said() -> None:
    base = Base(source="<script>alert(1)</script>", fingerprint="x")
    found = Reader(render_certificate(sealed(a_certificate(base=base, attacks=()), None)))
    assert "script" not in found.seen
    assert "<script>alert(1)</script>" in found.text
    assert "None was tried" in found.text


def test_a_long_batch_shows_some_and_counts_the_rest() -> None:
    many = tuple(
        CertifiedRequest(request=hash_of(number), state="honoured")
        for number in range(MOST_REQUESTS + 3)
    )
    found = Reader(render_certificate(sealed(a_certificate(requests=many), None)))
    assert "3 more are in the document" in found.text
    assert f"{len(many)} of {len(many)} requests honoured" in found.text
