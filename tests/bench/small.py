"""Small batches: the solve from the retain part's factor, and the whole of a batch, side by side.

    python -m tests.bench.small [--tokens 256] [--work FOLDER] [--solve-only]

First the solve for 1,536 and 8,192 inputs, with random keys and tokens as rare as words are:
`solve_edit`, which takes a whole D, the pipeline's solve by token, and the one from the factor,
which is made beforehand.  Then stages of the preset `tofu_smollm2` in an empty store: those of a
first run on forget05, which collects the retain statistics, and those of small batches after it.
Converting the models, searching the strength and measuring take the same time either way and are
left out.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flows.config import UnlearnConfig
from flows.presets import tofu_smollm2
from grom.changes import Request
from grom.config import CollectConfig, DataConfig, RidgeConfig, StrengthConfig, TargetConfig
from grom.moments import KeyMoments
from grom.solve import factorise, solve_edit, solve_factored
from grom.target import LowRank, target_cross
from grom.woodbury import factorise_retain, position_shifts, solve_small
from tasks.apply import apply
from tasks.collect import collect_forget, collect_retain
from tasks.count import count
from tasks.load import load_data, load_model
from tasks.place import CollectRef, DataRef, ModelRef, Place, SitesRef
from tasks.select import select
from tasks.solve import solve
from tasks.withdraw import set_strength

SIZES = ((1536, 576), (8192, 2048))
"""N and M: one MLP of SmolLM2-135M, and of a model of 1.2 billion weights."""
VOCAB, REPEATS = 2000, 3
RIDGE, TARGET = RidgeConfig(cache_retain=True), TargetConfig()
KEPT = CollectConfig(keep_request_keys=True)
STRENGTH = StrengthConfig(nats=40.0)
FIRST_ROW = 40
"""Of the batch, in TOFU's forget10: its first half is not in forget05."""
console = Console()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="forget tokens of the solve")
    parser.add_argument("--rows", type=int, default=6, help="forget examples of the batch")
    parser.add_argument("--work", type=Path, default=Path("grom-work") / "bench-small")
    parser.add_argument("--solve-only", action="store_true", help="without the preset")
    options = parser.parse_args(arguments)
    table = Table(title=f"{options.tokens} forget tokens; {torch.get_num_threads()} threads")
    for heading in ("inputs", "solve", "seconds", "times the small one", "apart"):
        table.add_column(heading, justify="left" if heading == "solve" else "right")
    for num_inputs, num_outputs in SIZES:
        for row in solves(num_inputs, num_outputs, options.tokens):
            table.add_row(*row)
        table.add_section()
    console.print(table)
    if not options.solve_only:
        console.print(whole_batch(options.work, options.rows))


def best(work: Callable[[], Any]) -> tuple[float, Any]:
    """Least time of some repetitions, and the result."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - started)
    return min(times), result


def solves(num_inputs: int, num_outputs: int, num_tokens: int) -> list[Sequence[str]]:
    """Rows of one size: each solve, its time in small solves, and how far its P is from theirs."""
    generator = torch.Generator().manual_seed(0)

    def keys(count: int) -> Tensor:
        return torch.randn(count, num_inputs, generator=generator) + 0.3

    def tokens(count: int) -> Tensor:
        weights_V = 1 / torch.arange(1, VOCAB + 1)
        return torch.multinomial(weights_V, count, replacement=True, generator=generator)

    retain = KeyMoments.zeros(num_inputs, VOCAB, keeps_sums=False)
    for _ in range(4):
        retain.update_(keys(num_inputs), tokens(num_inputs))
    request = Request("all", keys(num_tokens), tokens(num_tokens), tokens(num_tokens))
    forget = KeyMoments.zeros(num_inputs, VOCAB)
    forget.update_(request.keys_TN, request.gold_T, request.alt_T)
    unembedding_VM = torch.randn(VOCAB, num_outputs, generator=generator)
    alpha_V = (forget.counts_V > 0).double()
    cross = target_cross(forget, alpha_V, unembedding_VM, TARGET, head=False)
    factor, keys_SN = factorise_retain(retain, RIDGE, site="W"), request.keys_TN.double()

    def by_token() -> LowRank:
        whole = factorise(retain, forget, RIDGE, site="W")
        return solve_factored(cross, whole, RIDGE)

    def small() -> LowRank:
        shifts = position_shifts(request, alpha_V, unembedding_VM, TARGET, head=False)
        return solve_small(shifts, keys_SN, factor, RIDGE, site="W").update

    cross_MN = cross.dense()
    dense_s, P_MN = best(lambda: solve_edit(retain, forget, cross_MN, RIDGE, site="W"))
    token_s, by_token_P = best(by_token)
    small_s, small_P = best(small)

    def apart(other_MN: Tensor) -> str:
        return f"{float((other_MN - P_MN).norm() / P_MN.norm()):.0e}"

    rank, size = len(cross.right_KN), f"{num_inputs:,}"
    return [
        (size, f"`solve_edit`, {num_outputs:,} rows of D", f"{dense_s:.3f}",
         f"{dense_s / small_s:.1f}", ""),
        ("", f"by token, rank {rank}", f"{token_s:.3f}", f"{token_s / small_s:.1f}",
         apart(by_token_P.dense())),
        ("", "from the factor", f"{small_s:.3f}", "1", apart(small_P.dense())),
    ]  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Seconds of stages, in order."""

    stages: dict[str, float]

    def __call__(self, name: str, stage: Callable[[], Any]) -> Any:
        """Run a stage."""
        started = time.perf_counter()
        result = stage()
        self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - started
        return result


@dataclass(frozen=True)
class Base:
    """What both runs share: models, sets and sites."""

    cfg: UnlearnConfig
    place: Place
    model: ModelRef
    reference: ModelRef
    retain: tuple[DataRef, ...]
    sites: SitesRef
    counted: Any


def whole_batch(work: Path, num_rows: int) -> Table:
    """A first run, another batch after it, and how many times faster that was."""
    shutil.rmtree(work, ignore_errors=True)
    cfg = tofu_smollm2().model_copy(update={"collect": KEPT, "ridge": RIDGE})
    place = Place(work=str(work), store=str(work / "store"))
    cold, warm, earlier = Timed({}), Timed({}), Timed({})
    batch = cfg.forget.model_copy(
        update={"uri": cfg.forget.uri.replace("forget05", "forget10"), "paraphrase": None}
    )
    base = base_of(cfg, place, cold)
    kept = cold("collect retain", lambda: tuple(
        collect_retain.fn(base.model, data, base.sites, base.counted, cfg.collect, place)
        for data in base.retain
    ))  # fmt: skip
    edit_of(base, cfg.forget, kept, cold)
    # The first small batch makes the factor, those after it find it.
    for timed, first in ((earlier, FIRST_ROW), (warm, FIRST_ROW + num_rows)):
        rows = first_rows(batch, work / f"rows-{first}.jsonl", first, num_rows)
        edit_of(base, rows, kept, timed)
    table = Table(title=f"tofu_smollm2, batch of {num_rows} rows; seconds")
    runs = (cold.stages, earlier.stages, warm.stages)
    for heading in ("stage", "first run", "first small batch", "small batch"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name in cold.stages:
        table.add_row(name, *(f"{run[name]:.2f}" if name in run else "" for run in runs))
    totals = [sum(run.values()) for run in runs]
    table.add_row("all", *(f"{total:.2f}" for total in totals))
    table.add_row("times a small batch", *(f"{total / totals[2]:.1f}" for total in totals))
    return table


def base_of(cfg: UnlearnConfig, place: Place, timed: Timed) -> Base:
    """Models, sets and sites; converting the models is not counted."""
    assert cfg.reference is not None
    other = cfg.background
    assert other is not None
    model, reference = (load_model.fn(one, place) for one in (cfg.model, cfg.reference))
    forget = timed("load", lambda: load_data.fn(cfg.forget, place, "forget"))
    retain = timed("load", lambda: load_data.fn(cfg.retain, place, "retain", cfg.hold_out))
    background = timed("load", lambda: load_data.fn(other, place, "background"))
    counted = timed("count", lambda: count.fn(
        model, forget, retain, background, cfg.collect, cfg.target.suppress_special, place
    ))  # fmt: skip
    sites = timed("select", lambda: select.fn(
        model, forget, retain, counted, cfg.select, cfg.collect, cfg.target, place, reference
    ))  # fmt: skip
    return Base(cfg, place, model, reference, (retain, background), sites, counted)


def edit_of(base: Base, rows: DataConfig, kept: tuple[CollectRef, ...], timed: Timed) -> None:
    """From a batch's rows to its edited checkpoint."""
    cfg, place, model = base.cfg, base.place, base.model
    forget = timed("load", lambda: load_data.fn(rows, place, "forget"))
    moved = timed("collect forget", lambda: collect_forget.fn(
        model, forget, base.sites, cfg.target, cfg.collect, place, base.reference
    ))  # fmt: skip
    edit = timed("solve", lambda: solve.fn(
        model, kept, moved, base.sites, cfg.ridge, cfg.target, place
    ))  # fmt: skip
    strength = set_strength.fn(edit, STRENGTH, place)
    timed("apply", lambda: apply.fn(model, edit, strength, place))


def first_rows(whole: DataConfig, path: Path, first: int, count: int) -> DataConfig:
    """Some rows of a file as a file of their own."""
    lines = Path(whole.uri).read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[first : first + count]), encoding="utf-8")
    return whole.model_copy(update={"uri": str(path)})


if __name__ == "__main__":
    main()
