"""Commands that measure a model: `grom eval`, `grom benchmarks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.table import Table

from flows.config import checked
from flows.presets import model_named
from flows.show_metrics import show_metrics
from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import ConfigError

MODEL_HELP = (
    "Folder, hub id, models:/NAME@ALIAS, or PRESET:model, PRESET:reference, PRESET:retrained "
    "(also FILE.yaml:model ...)."
)


def evaluate_model(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    benchmark: Annotated[str, typer.Option(help="Name; `grom benchmarks` lists them.")],
    reference: Annotated[
        str | None, typer.Option(help="A model trained without the forget set; as MODEL.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder or address of the benchmark's files, or `hub`.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE for a split that lies elsewhere; repeat.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows per split, spread evenly over it.")
    ] = None,
    quantisation: Annotated[
        str | None, typer.Option(help="Load the model in nf4, fp4, int8 or int4.")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Quantise the LM head, too.")] = False,
    work: Annotated[Path, typer.Option(help="Work folder.")] = Path("grom-work"),
    quiet: Annotated[bool, typer.Option(help="Only warnings and the result.")] = False,
) -> None:
    """Measure a model on a benchmark, every metric with its variant and count."""
    with readable_errors():
        prepare_environment(work)
        from flows.evaluate import EvalConfig, Quantisation, evaluate
        from tasks.benchmark import benchmark_with

        splits = dict(_pair(text) for text in split or ())
        benchmark_with(benchmark, splits)  # before Prefect and MLflow start
        if quantisation not in (None, *get_args(Quantisation)):
            known = ", ".join(get_args(Quantisation))
            raise ConfigError(f"--quantisation {quantisation!r}: there are {known}")
        settings = {
            "model": model_named(model),
            "benchmark": {
                "name": benchmark,
                "data": data,
                "splits": splits,
                "limit": limit,
            },
            "reference": None if reference is None else model_named(reference),
            "quantisation": quantisation,
            "quantise_head": head,
            "work": str(work),
        }
        config = checked(EvalConfig, settings, "grom eval")
        with plain_logs(quiet=quiet):
            done = evaluate(config)
        show_metrics(done.exams, done.place)
        console.print(f"look:  grom ui --work {work}", soft_wrap=True)


def list_benchmarks() -> None:
    """List the benchmarks with their splits."""
    from grom.benchmarks import BENCHMARKS

    table = Table(box=None, pad_edge=False)
    table.add_column("benchmark", style="bold", no_wrap=True)
    table.add_column("splits (optional ones in brackets)")
    for name, benchmark in BENCHMARKS.items():
        splits = (split.name if split.needed else f"({split.name})" for split in benchmark.splits)
        table.add_row(name, ", ".join(splits))
    console.print(table)


def _pair(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not address:
        raise ConfigError(f"--split {text!r}: write NAME=FILE, for instance forget=rows.jsonl")
    return name.strip(), address
