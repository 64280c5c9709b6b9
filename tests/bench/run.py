"""Speed and memory, side by side in one process: ratios, not times.

    grom bench [--forget 200] [--retain 300]
    grom bench --kills 44

Parts: the edit (reference, sequential sweep, frozen pass), collecting against a bare forward pass,
all likelihood metrics from one pass, the solve against LAPACK's Cholesky rate, and peak memory
with ten times the retain data.  The kills are a part of their own, see `kills.py`; and so are

    grom bench streaming | influence | apply | small
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flows.presets import tofu_smollm2
from grom.apply import Edit, edited
from grom.batches import Batch
from grom.collect import ForgetPlan, collect_moments
from grom.config import CollectConfig, RidgeConfig, TargetConfig
from grom.forward import recorded_inputs, run
from grom.moments import KeyMoments
from grom.sites import Site, find_sites, unembedding_VD
from grom.solve import factorise, solve_factored
from grom.sweep import Held, sweep
from grom.target import LowRank, specificity, target_cross
from tasks.load import load_data, load_model
from tasks.models import OpenModel, open_model
from tasks.place import DataRef, Part, Place
from tasks.streams import batch_stream
from tests.bench import apply, influence, kills, small, streaming
from tests.bench.suite import one_pass_each, suite
from tests.reference import reference_sequential_edit

BAND = range(24, 30)
APART = {
    "apply": apply.main,
    "influence": influence.main,
    "small": small.main,
    "streaming": streaming.main,
}
BETA = 300.0
TARGET, PLAN = TargetConfig(kind="suppression"), ForgetPlan(replace=False)
RIDGE = RidgeConfig()
SOLVE_INPUTS, SOLVE_OUTPUTS = 8192, 2048
MEMORY_ROWS = 200
"""More tokens than two blocks of keys: the buffers are full before the set is ten times as long."""


@dataclass(slots=True)
class Bench:
    """The model, both sets in batches, and what was measured."""

    opened: OpenModel
    forget: list[Batch]
    retain: list[Batch]
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def sites(self) -> tuple[Site, ...]:
        """Sites of the band."""
        return tuple(find_sites(self.opened.model)[layer] for layer in BAND)

    @property
    def alpha_V(self) -> Tensor:
        """alpha of these sets."""
        vocab_size = len(unembedding_VD(self.opened.model))
        counts = [
            torch.bincount(torch.cat([batch.gold_T for batch in batches]), minlength=vocab_size)
            for batches in (self.forget, self.retain)
        ]
        special = self.opened.rendering.special_ids()
        return specificity(counts[0], counts[1], special)

    def unit_update(self, site: Site, kept: KeyMoments, moved: KeyMoments) -> LowRank:
        """Update of one site at unit strength."""
        unembedding_VM = unembedding_VD(self.opened.model)
        cross = target_cross(moved, self.alpha_V, unembedding_VM, TARGET, head=False)
        return solve_factored(cross, factorise(kept, moved, RIDGE, site=site.name), RIDGE)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every part and print one table, or one of the benchmarks of their own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in APART:
        APART[given[0]](given[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forget", type=int, default=200, help="forget examples")
    parser.add_argument("--retain", type=int, default=300, help="retain examples")
    parser.add_argument("--work", type=Path, default=Path("grom-work"), help="store of the models")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, help="kill workers at so many points, nothing else")
    parser.add_argument("--seed", type=int, default=0, help="of kills in a row")
    options = parser.parse_args(given)
    if options.kills is not None:
        kills.main(options.kills, options.seed)
        return
    bench = prepare(options.work, options.forget, options.retain)
    if options.memory_of is not None:
        sys.stdout.write(json.dumps(peak_of_collecting(bench, options.memory_of)))
        return
    compare_edits(bench)
    compare_collecting(bench)
    compare_suite(bench)
    compare_solve(bench)
    compare_memory(bench, options)
    show(bench)


def prepare(work: Path, num_forget: int, num_retain: int) -> Bench:
    """The preset's model and sets, in the batches that the flow would make."""
    preset, place = tofu_smollm2(), Place(work=str(work), store=str(work / "store"))
    model = load_model.fn(preset.model, place)
    forget = load_data.fn(preset.forget, place, "forget")
    retain = load_data.fn(preset.retain, place, "retain", preset.hold_out)
    opened = open_model(Path(model.folder), text_window=512)
    config = CollectConfig()

    def batches(data: DataRef, part: Part, size: int) -> list[Batch]:
        sample = (size, sum(1 for _ in data.examples(part)))
        return list(batch_stream(opened.rendering, data, config, part=part, sample=sample))

    return Bench(opened, batches(forget, "all", num_forget), batches(retain, "seen", num_retain))


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time and result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def compare_edits(bench: Bench) -> None:
    """The whole edit: reference, sequential sweep, frozen pass; and how far results differ."""
    model, sites = bench.opened.model, bench.sites
    run(model, bench.forget[0])
    frozen_time, _ = seconds(lambda: frozen_edit(bench))
    sweep_time, swept = seconds(lambda: sequential_edit(bench))
    originals = {site: site.weight_MN(model).clone() for site in sites}
    reference_time, _ = seconds(
        lambda: reference_sequential_edit(
            model,
            bench.forget,
            bench.retain,
            sites,
            bench.alpha_V,
            unembedding_VD(model).clone(),
            RIDGE,
            BETA,
        )
    )
    worst = 0.0
    for site in sites:
        weight_MN = site.weight_MN(model)
        expected_MN = weight_MN.double() - originals[site].double()
        found_MN = (originals[site].double() + swept[site].dense()).float().double()
        difference = (found_MN - weight_MN.double()).norm() / expected_MN.norm()
        worst = max(worst, float(difference))
        with torch.no_grad():
            weight_MN.copy_(originals[site])
    bench.rows += [
        ("edit, reference algorithm", f"{reference_time:.1f} s", "1"),
        ("edit, sequential sweep", f"{sweep_time:.1f} s", f"{reference_time / sweep_time:.2f}x"),
        ("edit, frozen keys", f"{frozen_time:.1f} s", f"{reference_time / frozen_time:.2f}x"),
        ("sequential against reference, relative difference", f"{worst:.1e}", ""),
    ]


def frozen_edit(bench: Bench) -> dict[Site, LowRank]:
    """One pass over each set, one solve per site, applied and taken back."""
    model, sites = bench.opened.model, bench.sites
    kept = collect_moments(model, sites, bench.retain)
    moved = collect_moments(model, sites, bench.forget, PLAN)
    updates = {
        site: bench.unit_update(site, kept.moments[site.name], moved.moments[site.name]).scaled(
            BETA
        )
        for site in sites
    }
    with edited(model, Edit(updates)):
        return updates


def sequential_edit(bench: Bench) -> dict[Site, LowRank]:
    """The sweep, with hidden states in memory."""
    retain = Held(lambda: bench.retain, {}, None, {})
    forget = Held(lambda: bench.forget, {}, PLAN, {})

    def solve(site: Site, kept: KeyMoments, moved: KeyMoments) -> LowRank:
        return bench.unit_update(site, kept, moved).scaled(BETA)

    return sweep(bench.opened.model, bench.sites, retain, forget, solve)[0]


def compare_collecting(bench: Bench) -> None:
    """Collecting the retain moments against the forward pass to the same layer alone."""
    model, sites = bench.opened.model, bench.sites
    module = sites[-1].module(model)

    def bare() -> None:
        for batch in bench.retain:
            with recorded_inputs([module], stop=True):
                run(model, batch)

    times = [
        (seconds(bare)[0], seconds(lambda: collect_moments(model, sites, bench.retain))[0])
        for _ in range(3)
    ]
    bare_time, collect_time = (min(values) for values in zip(*times, strict=True))
    bench.rows += [
        ("forward to the last site alone", f"{bare_time:.1f} s", "1"),
        ("collect retain moments", f"{collect_time:.1f} s", f"{collect_time / bare_time:.3f}"),
    ]


def compare_suite(bench: Bench) -> None:
    """All likelihood metrics from one pass against a pass for each, and how far they differ."""
    model = bench.opened.model
    suite_time, found = seconds(lambda: suite(model, bench.forget))
    each_time, expected = seconds(lambda: one_pass_each(model, bench.forget))
    worst = max(
        abs(ours - theirs)
        for name, values in expected.items()
        for ours, theirs in zip(found[name], values, strict=True)
    )
    bench.rows += [
        (f"{len(expected)} likelihood metrics, a pass each", f"{each_time:.1f} s", "1"),
        ("the same from one pass", f"{suite_time:.1f} s", f"{each_time / suite_time:.2f}x"),
        ("one pass against a pass each, largest difference", f"{worst:.1e}", ""),
    ]


def compare_solve(bench: Bench) -> None:
    """Arithmetic rate of one site's whole solve against that of LAPACK's Cholesky alone."""
    n, m = SOLVE_INPUTS, SOLVE_OUTPUTS
    moments = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(n, n // 4, generator=generator, dtype=torch.float64)
        gram = rows @ rows.mT
        gram.diagonal().add_(float(n))
        counts_V = torch.zeros(1, dtype=torch.int64)
        moments.append(KeyMoments(gram, {}, counts_V, n))
    cross_MN = torch.randn(m, n, dtype=torch.float64)
    matrix = moments[0].gram_NN + moments[1].gram_NN
    lapack = min(seconds(lambda: torch.linalg.cholesky_ex(matrix))[0] for _ in range(2))

    def solve() -> LowRank:
        factor = factorise(moments[0], moments[1], RIDGE, site="bench")
        return solve_factored(LowRank(cross_MN), factor, RIDGE)

    ours = min(seconds(solve)[0] for _ in range(2))
    lapack_rate, our_rate = n**3 / 3 / lapack, (n**3 / 3 + 2 * n * n * m) / ours
    bench.rows += [
        (f"LAPACK Cholesky, N = {n}", f"{lapack_rate / 1e9:.0f} GFLOP/s", "1"),
        (
            f"solve, N = {n}, M = {m}",
            f"{our_rate / 1e9:.0f} GFLOP/s",
            f"{our_rate / lapack_rate:.2f}",
        ),
    ]


def compare_memory(bench: Bench, options: argparse.Namespace) -> None:
    """Peak memory of collecting a retain set and one ten times as long, each in a new process."""
    peaks = []
    for copies in (1, 10):
        command = [sys.executable, "-m", "tests.bench.run", "--memory-of", str(copies)]
        command += ["--forget", "1", "--retain", "1", "--work", str(options.work)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(float(output))
    bench.rows += [
        ("peak memory, retain set", f"{peaks[0]:.0f} MB", "1"),
        ("peak memory, ten times as long", f"{peaks[1]:.0f} MB", f"{peaks[1] / peaks[0]:.3f}"),
    ]


def peak_of_collecting(bench: Bench, copies: int) -> float:
    """Peak resident memory in MB after streaming so many copies of a retain file from disk."""
    source = Path(tofu_smollm2().retain.uri)
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)[:MEMORY_ROWS]
    with tempfile.TemporaryDirectory() as folder:
        for copy in range(copies):
            (Path(folder) / f"part-{copy}.jsonl").write_text("".join(lines), encoding="utf-8")
        config = tofu_smollm2().retain.model_copy(update={"uri": folder})
        place = Place(work=folder, store=folder)
        data = load_data.fn(config, place, "retain")
        stream = batch_stream(bench.opened.rendering, data, CollectConfig(window_examples=64))
        collect_moments(bench.opened.model, bench.sites, stream)
    # Not `ru_maxrss`: across fork and exec it keeps the parent's peak.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) / 1024


def show(bench: Bench) -> None:
    """One table, and what it was measured on."""
    table = Table(title="SmolLM2-135M, TOFU forget05, layers 24-29")
    for heading in ("what", "measured", "ratio"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in bench.rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    sizes = [sum(len(batch.examples) for batch in part) for part in (bench.forget, bench.retain)]
    console.print(
        f"{sizes[0]} forget, {sizes[1]} retain examples; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )


if __name__ == "__main__":
    main()
