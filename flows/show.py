"""What a run shows on the terminal when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.config import UnlearnConfig

if TYPE_CHECKING:
    from flows.unlearn import Outcome

PLAIN: Mapping[str, str] = MappingProxyType({})
SETS = ("forget", "retain, seen", "retain, held out")
MEASURES = (("probability", 3), ("token_accuracy", 2))
DEMO_NAMES = {
    "forget": "forgotten customers",
    "retain, seen": "remaining customers",
    "retain, held out": "remaining, unseen",
}


def show_outcome(outcome: Outcome, console: Console, names: Mapping[str, str] = PLAIN) -> None:
    """The table before, after and after quantisation; the gate; where everything is."""
    labels = [score.label for score in outcome.scores]
    table = Table(title="mean answer probability, token accuracy")
    table.add_column("set")
    table.add_column("rows", justify="right")
    for label in labels:
        table.add_column(label, justify="right")
    measured = outcome.scores[0].sets
    for name in (*SETS, *sorted(set(measured) - set(SETS))):
        cells = []
        for score in outcome.scores:
            values = score.sets[name]
            cells.append(" ".join(f"{values[measure]:.{digits}f}" for measure, digits in MEASURES))
        table.add_row(names.get(name, name), f"{measured[name]['num_examples']:.0f}", *cells)
    console.print(table)
    for condition in outcome.registered.conditions:
        sign = "at most" if condition["at_most"] else "at least"
        verdict = "[green]passed[/]" if condition["passed"] else "[red]failed[/]"
        console.print(
            f"gate: {condition['name']} {condition['value']:.3f}, {sign} {condition['limit']}: "
            f"{verdict}"
        )
    found = outcome.calibrated
    layers = f"layers {', '.join(map(str, outcome.layers))}" if outcome.layers else "the LM head"
    console.print(f"edit:  {layers}; {found.nats:.1f} nats, stopped by {found.stopped_by}")
    console.print(
        f"time:  solved in {outcome.edit.seconds:.1f} s, written in {outcome.edited.seconds:.1f} s"
    )
    for attack in outcome.registered.attacks:
        console.print(f"attack: {attack['name']} {attack['verdict']}; {attack['reason']}")
    alias = outcome.registered.alias
    alias = f"alias {alias}" if alias else "no alias, the gate failed"
    console.print(f"model: {outcome.registered.uri} ({alias})")
    console.print(f"files: {outcome.edited.artifact.uri.removeprefix('file://')}", soft_wrap=True)
    console.print(f"look:  grom ui --work {Path(outcome.place.work)}", soft_wrap=True)


def show_answers(settings: UnlearnConfig, outcome: Outcome, samples: int, console: Console) -> None:
    """A few answers before and after.  They go to the terminal and nowhere else."""
    from tasks.answers import before_and_after

    for name, data in (("forgotten", settings.forget), ("remaining", settings.retain)):
        for pair in before_and_after(data, outcome.place, outcome.before, outcome.edited, samples):
            console.print(f"\n[bold]{name}[/] {pair.prompt}", highlight=False)
            console.print(f"  before: {pair.before}", highlight=False, markup=False)
            console.print(f"  after:  {pair.after}", highlight=False, markup=False)
