"""`grom models`, `grom rollback`: the versions of the model, from the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import ConfigError, MissingInput

if TYPE_CHECKING:
    from tasks.version_info import VersionInfo

STYLES = {
    "champion": "bold green",
    "previous": "green",
    "candidate": "yellow",
    "superseded": "",
    "failed": "red",
    "purged": "dim",
}
COLUMNS = (
    "version", "state", "aliases", "batches", "requests", "gate", "size", "created", "still knows",
)  # fmt: skip
MAX_BATCHES = 3
"""Names of batches in a cell."""
Service = Annotated[Path, typer.Option("--config", help="YAML file of the service.")]


def list_models(
    name: Annotated[str | None, typer.Argument(help="A registered model; else all.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file of a service: its model.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Work folder: what is registered in it.")
    ] = None,
) -> None:
    """List the versions of registered models, newest first.

    `still knows`: older than what serves, and its files are there, so what was requested since is
    in them.
    """
    with readable_errors():
        found = _found(name, config, work)
        if not found:
            console.print("no versions yet; a run registers one")
        for model in dict.fromkeys(info.name for info in found):
            _show(model, [info for info in found if info.name == model])


def roll_back(
    config: Service,
    reason: Annotated[str, typer.Option(help="Why, without personal data.")],
    to: Annotated[
        str | None, typer.Option(help="Number of a version that served; else the previous one.")
    ] = None,
) -> None:
    """Let an older version serve again; requests it does not honour are no longer honoured."""
    from flows.service import read_service

    with readable_errors():
        cfg = read_service(config)
        prepare_environment(Path(cfg.work))
        from flows.rollback import rollback

        with plain_logs(quiet=True):
            result = rollback(cfg, reason, to)
        line = f"{result.name}: version {result.to_version} serves, after {result.from_version}"
        console.print(f"{line}; {result.num_requests} requests changed", soft_wrap=True)


def _found(name: str | None, config: Path | None, work: Path | None) -> list[VersionInfo]:
    from flows.service import read_service
    from tasks.tracking import Tracking
    from tasks.versions import model_of, versions

    if (config is None) == (work is None):
        raise ConfigError("say where to look: either `--config service.yaml` or `--work FOLDER`.")
    tracking = Tracking()
    if config is not None:
        cfg = read_service(config)
        tracking, work = cfg.tracking, Path(cfg.work)
        name = name or model_of(cfg.tracking, cfg.name)
    assert work is not None
    if config is None and not work.is_dir():
        raise MissingInput(str(work), "no such folder")
    prepare_environment(work)
    with plain_logs(quiet=True):
        return versions(tracking, work, name)


def _show(name: str, found: list[VersionInfo]) -> None:
    table = Table(title=name)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for one in found:
        size = "" if one.num_bytes is None or one.state == "purged" else decimal(one.num_bytes)
        cells = {
            "version": one.number,
            "state": one.state,
            "aliases": ", ".join(one.aliases),
            "batches": _few(one.batches),
            "requests": "" if one.requests is None else f"{one.requests:,}",
            "gate": one.gate or "",
            "size": size,
            "created": datetime.fromtimestamp(one.created, UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "still knows": "yes" if one.still_knows else "",
        }
        styles = {"state": STYLES[one.state], "still knows": "yellow"}
        table.add_row(*(Text(cells[name], styles.get(name, "")) for name in COLUMNS))
    console.print(table)


def _few(batches: tuple[str, ...]) -> str:
    """The newest batches, and how many more."""
    more = len(batches) - MAX_BATCHES
    shown = batches[-MAX_BATCHES:]
    return ", ".join([*([f"{more} more"] if more > 0 else []), *shown])
