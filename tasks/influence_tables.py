"""The influence of requests for the report: numbers and ranks only."""

from __future__ import annotations

from collections.abc import Sequence

from grom.influence import WHOLE, Influence
from grom.metrics.metric import mean
from grom.report import MetricTable, TableRow
from tasks.audit import AuditRef
from tasks.codecs import read_table
from tasks.place import Place


def read_influence(ref: AuditRef, place: Place) -> list[Influence]:
    """Every row: request by site, and of all sites."""
    return read_table(place.fetch(ref.artifact) / "influence.parquet", Influence)


def influence_tables(rows: Sequence[Influence], top: int) -> list[MetricTable]:
    """The most and the least influential requests, by rank: their names are not shown."""
    wholes = sorted((row for row in rows if row.site == WHOLE), key=lambda row: -row.frozen)
    columns = ("change of the edit", "refit", "own effect, nats", "others, nats", "share", "keys")
    shown = [*enumerate(wholes, 1)]
    if len(shown) > 2 * top:
        shown = shown[:top] + shown[-top:]
    lines = tuple(
        TableRow(
            f"request {rank} of {len(wholes)}",
            (
                row.frozen,
                row.refit,
                row.own_effect_nats,
                row.others_effect_nats,
                row.share,
                f"{row.num_tokens}",
            ),
        )
        for rank, row in shown
    )
    if not lines:
        return []
    note = (
        f"Change: |P - P without it| / |P|; mean {mean(row.frozen for row in wholes):.3g}. Refit: "
        "with s, mu and alpha anew. Changes do not add up; shares do, here to "
        f"{sum(row.share for row in wholes):.3g}: to 1 if the keys of every request are at hand."
    )
    return [MetricTable("Influence of single requests", columns, lines, note)]
