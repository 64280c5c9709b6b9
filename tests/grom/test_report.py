"""The report is one file that loads nothing, escapes everything and hides no missing number."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from grom.gate import Condition
from grom.metrics.metric import Metric, not_computed
from grom.report import (
    Headline,
    MetricTable,
    Picture,
    ReportPage,
    TableRow,
    metric_table,
    number,
    render_report,
    settings_text,
)

NAN = math.nan
PASSED = Condition("forget probability", 0.198, 0.5, at_most=True)
FAILED = Condition("recovery under nf4", NAN, 0.05, at_most=True)
CONFIG = {"name": "tofu", "model": {"source": "hub:x", "revision": None}, "layers": [24, 25]}
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """Text, addresses and balance of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
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


def page(**changes: Any) -> ReportPage:
    whole: dict[str, Any] = {
        "title": "tofu",
        "facts": {"base fingerprint": "3fa29c"},
        "headlines": [Headline("forget", 0.992, 0.198, should_fall=True)],
        "conditions": [PASSED, FAILED],
        "warnings": ["int4 was not tested"],
        "pictures": [Picture("Every strength", PNG)],
        "tables": [MetricTable("By set", ("edited",), (TableRow("forget", (0.0587,)),))],
        "config": CONFIG,
    }
    return ReportPage(**{**whole, **changes})


def metric(name: str, value: float, **changes: Any) -> Metric:
    whole = {"num": 200, "variant": "correct", "better": "lower", "low": 0.0, "high": 1.0}
    return Metric(name, value, **{**whole, **changes})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.9916, "0.992"), (0.05874, "0.0587"), (0.2, "0.200"), (1.0, "1.00"), (12.34, "12.3"),
        (123.4, "123"), (999.7, "1,000"), (12345.6, "12,346"), (-0.011, "-0.0110"),
        (1.834e-21, "1.83e-21"), (0.0, "0"), (-0.0, "0"), (200, "200"), (12345, "12,345"),
        (NAN, "n/a"), (None, "n/a"), (math.inf, "∞"), (-math.inf, "-∞"),
        ("0.2 to 0.3", "0.2 to 0.3"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_decimals(value: float | str | None, text: str) -> None:
    assert number(value) == text


def test_a_margin_shows_its_sign() -> None:
    assert [number(value, "+") for value in (0.3, -0.3, 2000.0)] == ["+0.300", "-0.300", "+2,000"]


def test_the_page_shows_everything_it_was_given() -> None:
    shown = Reader(render_report(page()))
    for words in (
        "✗ Gate failed: 1 of 2 conditions",
        "int4 was not tested",
        "0.992 → 0.198",
        "forget probability ✓ passed 0.198 ≤ 0.500 +0.302",
        "recovery under nf4 not measured, which counts as failed ✗ failed n/a ≤ 0.0500 n/a",
        "Every strength",
        "forget 0.0587",
        "base fingerprint 3fa29c",
        "revision: null",
    ):
        assert words in shown.text


@pytest.mark.parametrize(
    ("conditions", "verdict"), [([PASSED], "✓ Gate passed: 1 of 1"), ([], "Gate: not judged")]
)
def test_the_verdict_is_passed_only_if_something_was_judged(
    conditions: list[Condition], verdict: str
) -> None:
    assert verdict in Reader(render_report(page(conditions=conditions))).text


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = render_report(page())
    shown = Reader(text)
    (address,) = shown.addresses
    assert b64decode(address.removeprefix("data:image/png;base64,")) == PNG
    assert not shown.seen & {"script", "link", "iframe", "object", "base", "form"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def everywhere(word: str) -> str:
    """A page with this word wherever a word can be."""
    row = TableRow(word, (word,), variant=word, num=word, notes=(word,), missing=word)
    return render_report(
        ReportPage(
            title=word,
            facts={word: word},
            headlines=[Headline(word, 1.0, 0.5)],
            conditions=[Condition(word, 0.1, 0.2, at_most=True)],
            warnings=[word],
            pictures=[Picture(word, PNG)],
            tables=[MetricTable(word, (word,), (row,), note=word)],
            config={word: word},
        )
    )


def test_markup_in_a_value_is_text() -> None:
    evil = "<script>alert('x')</script>&"
    shown, harmless = Reader(everywhere(evil)), Reader(everywhere("harmless"))
    assert shown.seen == harmless.seen
    assert shown.text == harmless.text.replace("harmless", evil)


def test_an_empty_page_has_a_title_and_no_empty_section() -> None:
    shown = Reader(render_report(ReportPage("nothing yet")))
    assert "h2" not in shown.seen
    assert shown.text.startswith("nothing yet nothing yet Gate: not judged")


def test_settings_are_the_same_settings_when_read_again() -> None:
    text = settings_text(CONFIG)
    assert yaml.safe_load(text) == CONFIG
    assert text.startswith("name: tofu\nmodel:\n  source: hub:x")


def test_a_row_without_a_cell_for_each_column_is_refused() -> None:
    table = MetricTable("By set", ("unedited", "edited"), (TableRow("forget", (0.1,)),))
    with pytest.raises(ValueError, match="By set: 'forget' needs 2 cells"):
        render_report(page(tables=[table]))


def test_metrics_become_a_row_for_each_name_and_variant() -> None:
    missing = not_computed(
        "forget quality", "no retrained reference",
        variant="correct", better="higher", low=0, high=1,
    )  # fmt: skip
    table = metric_table(
        "TOFU",
        {
            "unedited": [metric("ES", 0.99), metric("ES", 0.98, variant="compat"), missing],
            "edited": [metric("ES", 0.21, num=1999, notes=("floor",), interval=(0.1, 0.3))],
        },
    )
    assert table.columns == ("unedited", "edited")
    assert [(row.name, row.variant) for row in table.rows] == [
        ("ES", "correct"),
        ("ES", "compat"),
        ("forget quality", "correct"),
    ]
    first, second, third = table.rows
    assert first.cells == (0.99, "0.210 (0.100 to 0.300)")
    assert first.details == "correct · n = 200 / 1,999 · float64 · lower is better"
    assert first.notes == ("edited: floor",)
    assert first.missing == ""
    assert second.cells == (0.98, None)
    assert second.missing == "not computed (edited)"
    assert third.missing == (
        "not computed: no retrained reference (unedited); not computed (edited)"
    )
    text = Reader(render_report(page(tables=[table]))).text
    assert "n/a: not computed: no retrained reference (unedited)" in text


def test_a_composite_names_its_worst_part_and_the_numbers_beside_it() -> None:
    parts, details = {"ROUGE": 0.31, "probability": 0.9}, {"log10 p": -20.7, "floor": 1e-59}
    utility = metric("model utility", 0.5, better="higher", parts=parts, details=details)
    (row,) = metric_table("TOFU", {"edited": [utility]}).rows
    assert row.notes == (
        "edited: worst part: ROUGE 0.310",
        "edited: log10 p -20.7, floor 1.00e-59",
    )
