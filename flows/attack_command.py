"""The command `grom attack`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from flows.measure import MODEL_HELP
from flows.presets import load, model_named
from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.config import DataConfig
from grom.errors import ConfigError

if TYPE_CHECKING:
    from flows.attack import AttackRun
    from grom.attack import AttackResult

COLOURS = {"removed": "green", "suppressed": "red", "not tested": "yellow"}


def attack_model(
    model: Annotated[str, typer.Argument(help=f"The edited model. {MODEL_HELP}")],
    unedited: Annotated[
        str | None, typer.Option(help="The model before the edit; as MODEL.")
    ] = None,
    forget: Annotated[
        str | None, typer.Option(help="File or address of what must be forgotten.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Preset or YAML file to take what is not given here from."),
    ] = None,
    retrained: Annotated[
        str | None, typer.Option(help="A model trained without the forget set; as MODEL.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Column of the question.")] = "prompt",
    answer: Annotated[str, typer.Option(help="Column of the answer.")] = "answer",
    paraphrase: Annotated[
        str | None, typer.Option(help="Column of the question in other words.")
    ] = None,
    group_rows: Annotated[
        int | None, typer.Option(help="So many consecutive rows are about one subject.")
    ] = None,
    attacks: Annotated[
        str | None, typer.Option(help="Comma-separated: nf4,int4,relearn ...; not given: all.")
    ] = None,
    head: Annotated[
        bool | None,
        typer.Option(help="Quantise the LM head, too; not given: only if the edit changed it."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Forget rows that are asked, spread evenly.")
    ] = None,
    relearn_steps: Annotated[
        int | None, typer.Option(min=1, help="Optimiser steps of relearning.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Work folder.")] = Path("grom-work"),
    quiet: Annotated[bool, typer.Option(help="Only warnings and the result.")] = False,
) -> None:
    """Attack an edited model: is what it forgot removed, or only suppressed?"""
    with readable_errors():
        prepare_environment(work)
        from flows.attack import attack

        columns = {"prompt": prompt, "answer": answer, "paraphrase": paraphrase}
        data = None
        if forget is not None:
            data = DataConfig(uri=forget, group_rows=group_rows, **columns)
        how: dict[str, Any] = {"quantise_head": head, "max_examples": limit}
        how["attacks"] = [name.strip() for name in attacks.split(",")] if attacks else None
        how["relearn"] = None if relearn_steps is None else {"steps": relearn_steps}
        given = {name: value for name, value in how.items() if value is not None}
        run = run_of(model, unedited, retrained, data, config, given, work)
        with plain_logs(quiet=quiet):
            outcome = attack(run)
        show_attacks(outcome.attacked.results)
        console.print(f"look:  grom ui --work {work}", soft_wrap=True)


def run_of(
    edited: str,
    unedited: str | None,
    retrained: str | None,
    forget: DataConfig | None,
    config: str | None,
    attack: dict[str, Any],
    work: Path,
) -> AttackRun:
    """The whole round of attacks from what the command line says and a configuration adds.

    Raises:
        ConfigError: what is attacked is not named, or there is no attack of a name.
    """
    from flows.attack import AttackRun
    from grom.attack_config import ALL_ATTACKS, AttackConfig

    whole = None if config is None else load(config, None)
    before = whole.model if whole and unedited is None else None
    rows = forget or (whole.forget if whole else None)
    if unedited is not None:
        before = model_named(unedited)
    if before is None or rows is None:
        missing = "--unedited MODEL" if before is None else "--forget FILE"
        raise ConfigError(f"give {missing}, or --config with a preset or YAML file that names it")
    level = whole.retrained if whole else None
    try:
        settings = AttackConfig.model_validate(attack)
    except ValidationError as error:
        raise ConfigError(
            f"--attacks, --limit or --relearn-steps: {error.errors()[0]['msg']}. There are the "
            f"attacks {', '.join(ALL_ATTACKS)}."
        ) from error
    return AttackRun(
        edited=model_named(edited),
        unedited=before,
        retrained=level if retrained is None else model_named(retrained),
        forget=rows,
        attack=settings,
        work=str(work),
    )


def show_attacks(results: Sequence[AttackResult]) -> None:
    """A table: attack, values, what came back, verdict, why."""
    table = Table(title="does it come back?")
    table.add_column("attack")
    for column in ("unedited", "edited", "attacked", "recovered"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    table.add_column("why")
    for result in results:
        values = (result.unedited, result.edited, result.attacked)
        share = result.recovered_share
        table.add_row(
            result.name,
            *("-" if math.isnan(value) else f"{value:.3f}" for value in values),
            "-" if math.isnan(share) else f"{share:.0%}",
            f"[{COLOURS[result.verdict]}]{result.verdict}[/]",
            result.reason,
        )
    console.print(table)
