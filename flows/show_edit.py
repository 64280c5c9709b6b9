"""An edit and its export on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from flows.terminal import console, errors
from grom.errors import GromError

if TYPE_CHECKING:
    from tasks.edit_facts import EditFacts, Overlap, SiteFacts
    from tasks.export_card import Exported

MB = 1e6
UNIT = "at unit strength"
NO_SUM = (
    "edits do not add up. Each was solved as if the other one was not there: P = D X' A^-1, whose "
    "A holds the keys of its own forget set only. In directions that both forget sets use, the sum "
    "moves the model too far or not far enough, and retain keys feel both, which neither solve "
    "saw. Sums over keys do add up, and that is what is stored of every batch."
)
JOINT = (
    "solve both together, from the base: `grom submit` both batches to one store, whose next run "
    "adds up their moments without reading old text; or `grom run` a configuration whose `forget` "
    "names the files of both."
)


def show_edit(found: EditFacts) -> None:
    """A row per site, then what holds for all of them."""
    console.print(found.folder, highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    table.add_column("site", overflow="fold")
    for column in ("shape", "factors", "rank", "|P|", "|P|/|W|", "spectral", "lost", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for site in found.sites:
        table.add_row(*_cells(site))
    console.print(table)
    checked = "as recorded when it was applied" if found.recorded else "no record to check it with"
    beta = UNIT if found.beta is None else f"beta {found.beta:g}"
    nats = "" if found.nats is None else f"{found.nats:g} nats, "
    lines: dict[str, Any] = {
        "strength": nats + beta,
        "|P|": f"{found.norm:.6g} over {len(found.sites)} sites",
        "size": f"{found.num_bytes / MB:.1f} MB, and {found.undo_bytes / MB:.1f} MB to undo it",
        "base": found.base,
        "sha256": f"{found.sha256} ({checked})",
        "solve": found.solve,
        **{name: _short(value) for name, value in found.origin.items()},
    }
    for name, value in lines.items():
        if value:
            console.print(f"{name + ':':<10}{value}", highlight=False, markup=False, soft_wrap=True)


def show_exported(found: Exported, out: Path) -> None:
    """Ranks and errors by site, the change in metrics, and what the adapter cannot be used for."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("site", overflow="fold")
    for column in ("rank", "rank of P", "relative error"):
        table.add_column(column, justify="right")
    for site in found.sites:
        table.add_row(site.site, str(site.rank), str(site.full_rank), f"{site.error:.2e}")
    console.print(table)
    for name, models in (found.metrics or {}).items():
        values = ", ".join(f"{label} {v['probability']:.3f}" for label, v in models.items())
        console.print(f"{name}: answer probability {values}", highlight=False, soft_wrap=True)
    how = "exact up to rounding" if found.is_exact else "truncated"
    lost = f"{found.error:.2e} of |P| is lost; {found.num_bytes / MB:.1f} MB"
    console.print(f"{out}: {how}, {lost}", highlight=False, soft_wrap=True)
    if found.tied_head is not False:
        console.print(
            "[yellow]do not merge it into a base whose head is tied to its embedding; see "
            "README.md[/]"
        )


def show_no_sum(found: Overlap | GromError) -> None:
    """Why two edits are not added, how much they have in common, and what to do instead."""
    errors.print(Text(f"refused: {NO_SUM}", "bold red"), soft_wrap=True)
    if isinstance(found, GromError):
        said = f"what they have in common cannot be measured: {found}"
    else:
        bases = "the same base" if found.same_base else "different bases"
        said = (
            f"measured: {len(found.sites)} shared sites, |<P, Q>| / (|P| |Q|) = "
            f"{found.cosine:.3f} there (0: nothing in common), for {bases}"
        )
    errors.print(Text(said), soft_wrap=True)
    errors.print(Text(f"instead: {JOINT}"), soft_wrap=True)


def _cells(site: SiteFacts) -> tuple[str, ...]:
    return (
        site.site,
        "x".join(map(str, site.shape)),
        {"factors": str(site.kept), "rows": f"{site.kept} rows"}.get(site.form, site.form),
        str(site.rank),
        f"{site.norm:.4g}",
        "" if site.relative_norm is None else f"{site.relative_norm:.2%}",
        f"{site.spectral_norm:.4g}",
        "" if site.lost is None else f"{site.lost:.0e}",
        f"{site.num_bytes / MB:.1f}",
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
