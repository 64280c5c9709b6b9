"""The influence of all requests against solving again without each of them: ratios, not times.

    python -m tests.bench.influence [--forget 400] [--retain 300]

Every forget example is a request.  Parts: the solve, the pass that collects the forget keys, adding
them to the moments alone, the influence of all requests, and one solve without a request, timed on
a few; and how far the edit is off after requests were subtracted one after the other.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flows.presets import tofu_smollm2
from grom.auditor import Auditor
from grom.changes import Request
from grom.collect import ForgetPlan, RequestKeys, collect_moments
from grom.config import CollectConfig, RidgeConfig, TargetConfig
from grom.moments import KeyMoments
from grom.sites import Site, find_sites
from grom.withdraw import System
from tasks.load import load_data, load_model
from tasks.models import OpenModel, open_model
from tasks.place import DataRef, Part, Place
from tasks.streams import batch_stream

BAND = range(24, 30)
TARGET, RIDGE = TargetConfig(kind="replacement"), RidgeConfig()
NAIVE = 3
"""Requests that are really solved without."""


@dataclass(frozen=True, slots=True)
class Case:
    """A system, its requests, and the size of the residual."""

    name: str
    system: System
    requests: list[Request]
    rms: float
    collect_s: float
    """Of the forward pass over the forget set."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one site and the whole band as one system; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forget", type=int, default=400, help="forget examples")
    parser.add_argument("--retain", type=int, default=300, help="retain examples")
    parser.add_argument("--work", type=Path, default=Path("grom-work"), help="store of the models")
    parser.add_argument("--alone", action="store_true", help="leave the joint system out")
    options = parser.parse_args(arguments)
    table = Table(title="SmolLM2-135M, TOFU, layers 24-29; every example a request")
    for heading in ("what", "seconds", "in solves"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for case in cases(options):
        for row in measured(case):
            table.add_row(*row)
        table.add_section()
        for row in drift(case) if case.name != "joint" else ():
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """One site alone, then all side by side."""
    preset = tofu_smollm2()
    place = Place(work=str(options.work), store=str(options.work / "store"))
    model = load_model.fn(preset.model, place)
    whole = preset.forget.uri.replace("forget05", "forget10")
    config = preset.forget.model_copy(update={"uri": whole, "paraphrase": None})
    forget = load_data.fn(config, place, "forget")
    retain = load_data.fn(preset.retain, place, "retain", preset.hold_out)
    opened = open_model(Path(model.folder), text_window=512)
    band = tuple(find_sites(opened.model)[layer] for layer in BAND)
    yield case_of("one site", opened, band[-1:], forget, retain, options)
    if not options.alone:
        yield case_of("joint", opened, band, forget, retain, options)


def case_of(
    name: str,
    opened: OpenModel,
    sites: tuple[Site, ...],
    forget: DataRef,
    retain: DataRef,
    options: argparse.Namespace,
) -> Case:
    """Moments of both sets and the keys of every forget example."""
    found: list[RequestKeys] = []

    def batches(data: DataRef, part: Part, size: int, alone: bool) -> Iterator[Any]:
        sample = (size, sum(1 for _ in data.examples(part)))
        config = CollectConfig()
        return batch_stream(opened.rendering, data, config, part=part, sample=sample, alone=alone)

    joint, plan = len(sites) > 1, ForgetPlan(True, keep=found.append)
    stream = batches(forget, "all", options.forget, True)
    collect_s, moved = seconds(
        lambda: collect_moments(opened.model, sites, stream, plan, joint=joint)
    )
    kept = collect_moments(
        opened.model, sites, batches(retain, "seen", options.retain, False), joint=joint
    )
    (key,) = moved.moments
    system = System.of(
        opened.model, sites, kept.moments[key], moved.moments[key], RIDGE, TARGET,
        opened.rendering.special_ids(),
    )  # fmt: skip
    requests = [
        Request(f"{number}", part.keys[key], part.gold_T, part.alt_T)
        for number, part in enumerate(found)
    ]
    return Case(name, system, requests, moved.mean_rms, collect_s)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time and result: the machine may have other work."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def moments_of(case: Case, requests: Sequence[Request]) -> KeyMoments:
    """Moments of some requests from their keys."""
    size, vocab_size = len(case.system.forget.gram_NN), len(case.system.forget.counts_V)
    moments = KeyMoments.zeros(size, vocab_size)
    return moments.update_(
        torch.cat([request.keys_TN for request in requests]),
        torch.cat([request.gold_T for request in requests]),
        torch.cat([request.alt_T for request in requests if request.alt_T is not None]),
    )


def measured(case: Case) -> Iterator[tuple[str, str, str]]:
    """Rows of one system."""
    keys = sum(len(request.gold_T) for request in case.requests)
    solve_s = min(seconds(case.system.solved)[0] for _ in range(2))
    pass_s, _ = seconds(lambda: moments_of(case, case.requests))
    start_s, auditor = seconds(lambda: Auditor(case.system, case.rms))
    audit_s, rows = seconds(lambda: list(auditor.influences(case.requests)))
    some = random.Random(0).sample(case.requests, NAIVE)
    naive_s, found = seconds(lambda: [naive(case, auditor, request) for request in some])
    by_name = {row.whole.request: row.whole.frozen for row in rows}
    worst = max(
        abs(by_name[request.name] / value - 1) for request, value in zip(some, found, strict=True)
    )
    all_naive_s = naive_s / NAIVE * len(case.requests)
    whole = sum(row.whole.share for row in rows)
    for name, value in (
        (f"{case.name}, N = {sum(case.system.widths)}: one solve", solve_s),
        (f"collecting {keys} forget keys", case.collect_s),
        ("adding them to the moments alone", pass_s),
        ("setting up the audit, its own solve included", start_s),
        (f"influence of {len(case.requests)} requests", audit_s),
        ("the same by a solve without each (estimated)", all_naive_s),
    ):
        yield name, f"{value:.2f}", f"{value / solve_s:.2f}"
    yield "solving again / influence", "", f"{all_naive_s / audit_s:.0f}x"
    for name, allowed_s in (("collecting", case.collect_s), ("adding the keys", pass_s)):
        ratio = audit_s / (1.5 * solve_s + allowed_s)
        yield f"influence / (1.5 solves + {name})", "", f"{ratio:.2f}"
    yield f"largest relative difference, shares - 1 = {whole - 1:.0e}", "", f"{worst:.0e}"


def naive(case: Case, auditor: Auditor, request: Request) -> float:
    """|P - P_-e| / |P| and the retain effect, by a solve without the request."""
    changes, system = auditor.changes, case.system
    left = system.forget - moments_of(case, [request])
    lower_NN = torch.linalg.cholesky(
        system.matrix(changes.solved.factor, system.forget.gram_NN - left.gram_NN)
    )
    cross = system.cross(left, changes.solved.alpha_V)
    update_KN = torch.cholesky_solve(cross.right_KN.mT, lower_NN).mT * changes.weight
    P_MN = replace(cross, right_KN=update_KN).dense()
    whole_MN: Tensor = changes.update.dense()
    change_MN = whole_MN - P_MN
    torch.sum((change_MN @ system.retain.gram_NN) * change_MN)
    return float(change_MN.norm() / whole_MN.norm())


def drift(case: Case) -> Iterator[tuple[str, str, str]]:
    """Error of the edit after subtracting request by request, against adding up the rest."""
    order = random.Random(1).sample(case.requests, len(case.requests))
    left = case.system.forget
    marks = [len(order) - count for count in (len(order) // 2, 20, 5, 2, 1)]
    for number, request in enumerate(order, 1):
        left = left - moments_of(case, [request])
        if number in marks:
            scratch = moments_of(case, order[number:])
            found, expected = (case.system.solved(part).update.dense() for part in (left, scratch))
            share = left.num_tokens / case.system.forget.num_tokens
            error = float((found - expected).norm() / expected.norm())
            yield f"subtracted {number} times, share left {share:.1e}", "", f"{error:.0e}"


if __name__ == "__main__":
    main()
