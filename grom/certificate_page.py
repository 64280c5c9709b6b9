"""A certificate as a page: HTML that needs no server, no script and no other file.

The page is for reading.  What is signed, and what the ledger has the hash of, is the document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from grom.certificate import Certificate
from grom.certified import CertifiedRequest
from grom.gate import FORGET, HELD_OUT
from grom.pictures import EDITED, UNEDITED
from grom.report import Cell, Headline, MetricTable, TableRow, number, settings_text

TEMPLATE = "certificate.html.j2"
HONOURED = "honoured"
MOST_REQUESTS = 500
"""Rows of the table of requests; the document has them all."""
MEASURES = {
    "probability": "Mean answer probability",
    "token_accuracy": "Token accuracy",
    "extraction_strength": "Extraction strength",
}
SHORT = 12
"""Digits of a hash that are enough to tell it by."""


@dataclass(frozen=True, slots=True)
class CertificatePage:
    """What the template shows beside the certificate itself."""

    certificate: Certificate
    title: str
    verdict: str
    is_good: bool
    headlines: tuple[Headline, ...]
    tables: tuple[MetricTable, ...]
    requests: tuple[CertifiedRequest, ...]
    more: int
    """Requests that are only in the document."""


def render_certificate(certificate: Certificate) -> str:
    """The page, everything escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "settings": settings_text, "short": _short}
    text = Path(__file__).with_name(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text).render(page=page_of(certificate))


def page_of(certificate: Certificate) -> CertificatePage:
    """What is said about a certificate."""
    verdict, is_good = _verdict(certificate)
    of = f"request {_short(certificate.requests[0].request)}"
    if certificate.kind == "batch":
        of = f"batch {certificate.batch}"
    return CertificatePage(
        certificate=certificate,
        title=f"Certificate of unlearning: {of}",
        verdict=verdict,
        is_good=is_good,
        headlines=tuple(_headlines(certificate)),
        tables=tuple(table for table in map(_table, [certificate] * 3, MEASURES) if table.rows),
        requests=certificate.requests[:MOST_REQUESTS],
        more=max(0, len(certificate.requests) - MOST_REQUESTS),
    )


def _verdict(certificate: Certificate) -> tuple[str, bool]:
    """How it stands, in words, and whether that is what was asked for."""
    if certificate.lines:
        line = certificate.lines[-1].line
        state = str(line["state"])
        return f"{state.capitalize()}, as of {certificate.issued}", state == HONOURED
    states = [entry.state for entry in certificate.requests]
    honoured = states.count(HONOURED)
    words = f"{honoured} of {len(states)} requests honoured"
    others = sorted(set(states) - {HONOURED})
    words += "".join(f", {states.count(other)} {other}" for other in others)
    return words, honoured == len(states)


def _values(certificate: Certificate) -> dict[tuple[str, str], Mapping[str, float]]:
    """Column and set -> values."""
    return {
        (_column(one.model, one.precision), one.set): one.values for one in certificate.measured
    }


def _column(model: str, precision: str) -> str:
    return f"{model}, {precision}"


def _headlines(certificate: Certificate) -> list[Headline]:
    found = _values(certificate)
    dtype = certificate.model.dtype
    headlines = []
    for name in (FORGET, HELD_OUT):
        before = found.get((_column(UNEDITED, dtype), name), {}).get("probability", math.nan)
        after = found.get((_column(EDITED, dtype), name), {}).get("probability", math.nan)
        if not math.isnan(after):
            headlines.append(Headline(name, before, after, should_fall=name == FORGET))
    return headlines


def _table(certificate: Certificate, measure: str) -> MetricTable:
    """Sets down, models and precisions across."""
    found = _values(certificate)
    columns = tuple(dict.fromkeys(column for column, _ in found))
    num = {one.set: one.num_examples for one in certificate.measured}
    rows = []
    for name in num:
        cells: tuple[Cell, ...] = tuple(
            found.get((column, name), {}).get(measure) for column in columns
        )
        if any(cell is not None for cell in cells):
            rows.append(TableRow(name, cells, num=f"{num[name]:,}"))
    return MetricTable(MEASURES[measure], columns, tuple(rows))


def _short(digest: str) -> str:
    """The start of a hash."""
    return f"{digest[:SHORT]}…" if len(digest) > SHORT else digest
