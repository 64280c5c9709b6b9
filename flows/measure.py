"""Commands that measure a model: `grom eval`, `grom benchmarks`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.config import checked
from flows.presets import model_named
from flows.terminal import console, plain_logs, prepare_environment, readable_errors
from grom.errors import ConfigError

if TYPE_CHECKING:
    from flows.evaluate import Evaluated
    from grom.metrics import Metric

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
        int | None, typer.Option(min=1, help="Rows per split, the first ones.")
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
        from flows.evaluate import EvalConfig, evaluate

        settings = {
            "model": model_named(model),
            "benchmark": {
                "name": benchmark,
                "data": data,
                "splits": dict(_pair(text) for text in split or ()),
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
        show_metrics(done)
        console.print(f"look:  grom ui --work {work}", soft_wrap=True)


def list_benchmarks() -> None:
    """List the benchmarks with their splits."""
    from grom.benchmarks import BENCHMARKS

    for name, benchmark in BENCHMARKS.items():
        splits = ", ".join(
            split.name if split.needed else f"({split.name})" for split in benchmark.splits
        )
        console.print(f"[bold]{name}[/]  {splits}", highlight=False)
    console.print("In brackets: optional splits. Models in roles of a preset: PRESET:reference.")


def _pair(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not address:
        raise ConfigError(f"--split {text!r}: write NAME=FILE")
    return name.strip(), address


def show_metrics(done: Evaluated) -> None:
    """A table with a column per model; then the notes, and why some metrics have no value."""
    from tasks.benchmark import benchmark_of
    from tasks.exam import metrics_of

    exams = done.exams
    found = metrics_of(exams, done.place)
    table = Table(title=f"{exams.benchmark.name}: {exams.benchmark.num_items} items")
    for column in ("metric", "variant", "better"):
        table.add_column(column)
    table.add_column("n", justify="right")
    for label in found:
        table.add_column(label, justify="right")
    remarks: dict[str, None] = {}
    for row in zip(*found.values(), strict=True):
        first = row[0]
        table.add_row(
            first.name, first.variant, first.better, str(first.num), *(_shown(one) for one in row)
        )
        for metric in row:
            for text in (*metric.notes, *([metric.missing] if metric.missing else [])):
                remarks[f"{metric.name}: {text}"] = None
    console.print(table)
    for remark in remarks:
        console.print(f"  {remark}", highlight=False, markup=False)
    for published in benchmark_of(exams.benchmark.name).published:
        values = ", ".join(f"{name} {value:g}" for name, value in published.values.items())
        console.print(f"published, {published.model}: {values} ({published.source})", style="dim")


def _shown(metric: Metric) -> str:
    if math.isnan(metric.value):
        return "-"
    text = f"{metric.value:.2e}" if 0 < abs(metric.value) < 1e-3 else f"{metric.value:.3f}"
    if metric.interval is None:
        return text
    return f"{text} [{metric.interval[0]:.3f}, {metric.interval[1]:.3f}]"
