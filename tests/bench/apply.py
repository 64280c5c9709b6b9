"""Applying and reverting an edit against `cp`: time and memory, each in a process of its own.

    python -m tests.bench.apply [--work FOLDER] [--base MODEL --edit EDIT]

Without --base: a generated checkpoint of 2.4 GB in bfloat16, in shards, with six edited matrices.
`cp` checks nothing; applying hashes the base, to see that the edit belongs to it, and the edit.
Memory is the peak above that of a process that only imports the code, in units of the largest
tensor; the kernel counts pages of mapped files as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from grom.apply import Edit
from grom.config import ModelConfig
from grom.sites import Site
from grom.target import LowRank
from tasks import models
from tasks.checkpoint import checkpoint_bytes
from tasks.codecs import save_edit
from tasks.edits import apply_edit, edit_folder
from tasks.revert import revert
from tasks.tensors import Stored, content_of, create_file, model_files, read_header, write_region

HIDDEN, INNER, VOCAB, LAYERS = 2048, 8192, 128_256, 16
EDITED = range(10, 16)
RANK = 256
REPEATS = 3
MB = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """The best of some repetitions."""

    seconds: float
    peak_mb: float
    """Peak resident memory."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one table per edit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("grom-work") / "bench-apply")
    parser.add_argument("--base", type=Path, help="checkpoint; not given: a generated one")
    parser.add_argument("--edit", type=Path, help="its edit")
    parser.add_argument("--child", choices=("nothing", "apply", "revert"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(options.child, options.base, options.edit, options.work)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    if options.base:
        compare(options.base, edit_folder(options.edit), options.work)
        return
    base = generated(options.work / "base")
    for name, rank in (("factors", RANK), ("whole", None)):
        compare(base, generated_edit(base, options.work / name, rank), options.work)
        shutil.rmtree(options.work / name)


def generated(folder: Path) -> Path:
    """A checkpoint with the shapes of a model of 1.2 billion weights and random values."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shards: list[dict[str, tuple[int, int]]] = [{"model.embed_tokens.weight": (VOCAB, HIDDEN)}]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes = {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        if layer % 4 == 0:
            shards.append({})
        shards[-1] |= shapes
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        places = create_file(path, {name: (torch.bfloat16, shape) for name, shape in shard.items()})
        for place in places.values():
            write_region(path, place, torch.randn(place.shape).to(torch.bfloat16) * 0.02)
    return folder


def generated_edit(base: Path, folder: Path, rank: int | None) -> Path:
    """An edit of six MLP matrices, as factors or whole."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    updates = {}
    for layer in EDITED:
        site = Site(f"model.layers.{layer}.mlp.down_proj", "mlp", layer)
        left = torch.randn(HIDDEN, rank or 4, dtype=torch.float64) * 1e-2
        right = torch.randn(rank or 4, INNER, dtype=torch.float64) * 1e-2
        updates[site] = LowRank(right, left) if rank else LowRank(left @ right)
    fingerprint = models.fingerprint(ModelConfig(source=str(base)), base)
    save_edit(folder, Edit(updates), {"model": fingerprint, "beta": 1.0, "nats": 1.0})
    return folder


def compare(base: Path, edit: Path, work: Path) -> None:
    """One table: `cp` of the base, `cp` of all that is written, apply, revert."""
    out, edited = work / "out", work / "edited"
    shutil.rmtree(edited, ignore_errors=True)
    apply_edit(base, edit, edited)
    recorded = edited / "edit"
    copied = [best_copy(folder, out) for folder in (base, edited)]
    idle = best("nothing", base, recorded, out)
    applied, reverted = best("apply", base, recorded, out), best("revert", edited, recorded, out)
    largest = max(stored.size for path in base.glob("*.safetensors") for stored in _all(path)) / MB
    size, written = checkpoint_bytes(base) / MB, size_of(edited) / MB
    table = Table(title=f"{size:.0f} MB, largest tensor {largest:.0f} MB, {written:.0f} MB written")
    for heading in ("what", "time", "cp of the base", "cp of what is written", "memory above idle"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    table.add_row("cp of the base", f"{copied[0]:.2f} s", "1", "", "")
    table.add_row("cp of what is written", f"{copied[1]:.2f} s", "", "1", "")
    checked = copied[0] + best_hash(base)
    table.add_row("cp and sha256 of the base", f"{checked:.2f} s", f"{checked / copied[0]:.2f}", "")
    for name, found, cp in (("apply", applied, copied[1]), ("revert", reverted, copied[0])):
        table.add_row(
            name,
            f"{found.seconds:.2f} s",
            f"{found.seconds / copied[0]:.2f}",
            f"{found.seconds / cp:.2f}",
            f"{(found.peak_mb - idle.peak_mb) / largest:.2f} x largest tensor",
        )
    Console().print(table)
    shutil.rmtree(edited)


def best_copy(folder: Path, out: Path) -> float:
    """Seconds of `cp -r`."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run(["cp", "-r", str(folder), str(out)], check=True)
        times.append(time.perf_counter() - started)
        shutil.rmtree(out)
    return min(times)


def best_hash(folder: Path) -> float:
    """Seconds of hashing every file, one after the other."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for name in model_files(folder):
            content_of(folder / name)
        times.append(time.perf_counter() - started)
    return min(times)


def best(what: str, base: Path, edit: Path, out: Path) -> Measured:
    """Time and memory of a call in a process of its own; imports do not count as time."""
    found = []
    for _ in range(REPEATS):
        command = [sys.executable, "-m", "tests.bench.apply", "--child", what]
        command += ["--base", str(base), "--edit", str(edit), "--work", str(out)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(Measured(*json.loads(output)))
        shutil.rmtree(out, ignore_errors=True)
    return Measured(min(one.seconds for one in found), min(one.peak_mb for one in found))


def child(what: str, base: Path, edit: Path, out: Path) -> None:
    """One call; its time and this process's peak memory to standard output."""
    started = time.perf_counter()
    if what == "apply":
        apply_edit(base, edit, out)
    elif what == "revert":
        revert(base, out)
    seconds = time.perf_counter() - started
    # Not `ru_maxrss`: across fork and exec it keeps the parent's peak.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    sys.stdout.write(json.dumps([seconds, peak / 1024]))


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _all(path: Path) -> list[Stored]:
    return list(read_header(path).values())


if __name__ == "__main__":
    main()
