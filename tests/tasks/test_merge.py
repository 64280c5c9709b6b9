"""A run on stored moments of earlier batches gives what a run from scratch on them all gives."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks.collect
from grom.collect import collect_moments
from grom.config import (
    CollectConfig,
    DataConfig,
    HoldOutConfig,
    ModelConfig,
    SelectConfig,
    TargetConfig,
)
from grom.errors import ConfigError
from grom.target import specificity
from tasks.calibrate import calibrate
from tasks.codecs import load_edit, read_table
from tasks.collect import merge_forget, read_moments
from tasks.count import read_alpha
from tasks.models import open_rendering
from tasks.place import CalibrationRef, CollectRef, DataRef, EditRef
from tasks.solve import solve
from tasks.solver import SiteReport
from tasks.statistics import load_collected, moment_names
from tests.stages import Stages, stages, with_rows
from tests.tiny import checkpoint, forget_rows, residue, retain_rows, words, write_rows

EXACT = 1e-9
"""Relative; float32 models: the keys are the same to the bit, and all sums are in float64."""
ROWS = [*forget_rows(6), *({"prompt": words(9), "answer": words(n, 2)} for n in (11, 30, 44, 46))]
CUTS = {"a": (0, 3), "b": (3, 4), "c": (4, 10)}
TARGETS = {
    "replacement": TargetConfig(),
    "suppression": TargetConfig(kind="suppression"),
    "special": TargetConfig(kind="suppression", suppress_special=True),
    "redirect": TargetConfig(kind="redirect", redirect_to="w30"),
    "corruption": TargetConfig(kind="corruption", seed=3),
}
SELECTS = {
    "joint": SelectConfig(layers=(1, 2)),
    "one by one": SelectConfig(layers=(0, 2), joint=False),
    "head": SelectConfig(site="head"),
}
CASES = [
    *((target, "joint") for target in TARGETS),
    *(("replacement", select) for select in ("one by one", "head")),
]
"""Every target with every kind of system: `tests/grom/test_merge.py`."""


@pytest.fixture
def base(tmp_path: Path) -> Stages:
    return stages(tmp_path)


def on(run: Stages, names: str, **changes: Any) -> Stages:
    """The same run on these batches as one set."""
    rows = [row for name in names for row in ROWS[slice(*CUTS[name])]]
    path = write_rows(run.work.parent / f"batches-{names}.jsonl", rows)
    return run.but(forget=DataConfig(uri=str(path)), **changes)


def solved(run: Stages, forget: CollectRef) -> EditRef:
    return solve.fn(
        run.model, (run.kept,), forget, run.sites, run.config.ridge, run.config.target, run.place
    )


def calibrated(run: Stages, edit: EditRef) -> CalibrationRef:
    return calibrate.fn(
        run.model, edit, run.forget, run.retain, run.sites, run.counted, run.config.strength,
        run.config.collect, run.place,
    )  # fmt: skip


def apart(run: Stages, one: EditRef, other: EditRef) -> float:
    """Largest relative difference of the updates."""
    found, expected = (load_edit(run.place.fetch(edit.artifact)).updates for edit in (one, other))
    assert found.keys() == expected.keys()
    return max(
        float((found[site].dense() - update.dense()).norm() / update.norm())
        for site, update in expected.items()
    )


def reports(run: Stages, edit: EditRef) -> list[SiteReport]:
    return read_table(run.place.fetch(edit.artifact) / "sites.parquet", SiteReport)


@pytest.mark.parametrize(("target", "select"), CASES)
def test_stored_moments_and_a_new_batch_give_the_edit_of_a_run_on_all_rows(
    target: str, select: str, base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last run has the text of its own batch alone, and reads none of it to merge and solve."""
    base = base.but(target=TARGETS[target], select=SELECTS[select])
    scratch = on(base, "abc")
    expected, strength = scratch.edit, scratch.calibrated
    stored = []
    for name in "ab":
        earlier = on(base, name)
        stored.append(earlier.moved)
        Path(earlier.config.forget.uri).unlink()
    last = on(base, "c")
    parts = (*stored, last.moved)
    assert (last.kept.artifact, last.sites.layers) == (scratch.kept.artifact, scratch.sites.layers)
    assert last.counted != scratch.counted

    def read(*_: Any) -> Any:
        raise AssertionError("text was read")

    monkeypatch.setattr(DataRef, "examples", read)
    union = merge_forget.fn(parts, last.place)
    edit = solved(last, union)
    found = calibrated(last, edit)
    assert apart(last, edit, expected) <= EXACT
    assert edit.nats_per_beta == pytest.approx(expected.nats_per_beta, rel=EXACT)
    assert found.beta == pytest.approx(strength.beta, rel=EXACT)
    for mine, theirs in zip(reports(last, edit), reports(last, expected), strict=True):
        assert (mine.num_forget, mine.num_retain) == (theirs.num_forget, theirs.num_retain)
        assert mine.suppressed_share == theirs.suppressed_share
        assert mine.drop_nats == pytest.approx(theirs.drop_nats, rel=EXACT, nan_ok=True)
    assert residue(last.work) == []


def test_forget_examples_go_through_the_model_one_by_one(
    base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch its neighbours would change the last digits of an example's keys."""
    seen: list[int] = []

    def collect(model: Any, sites: Any, stream: Any, *args: Any, **how: Any) -> Any:
        batches = list(stream)
        seen.extend(len(batch.examples) for batch in batches)
        return collect_moments(model, sites, batches, *args, **how)

    monkeypatch.setattr(tasks.collect, "collect_moments", collect)
    assert base.moved.reused is False
    assert seen == [1] * len(forget_rows())
    assert base.kept.reused is False
    assert max(seen) > 1


def test_the_order_of_the_batches_does_not_matter(base: Stages) -> None:
    runs = {name: on(base, name) for name in "abc"}
    merged = {
        merge_forget.fn(tuple(runs[name].moved for name in order), base.place).artifact.key
        for order in permutations("abc")
    }
    assert len(merged) == 1


def test_merged_moments_merge_on(base: Stages) -> None:
    """As from batch to batch, each run adding one to what the last one had."""
    a, b, c = (on(base, name).moved for name in "abc")
    step = merge_forget.fn((merge_forget.fn((a, b), base.place), c), base.place)
    once = merge_forget.fn((a, b, c), base.place)
    assert apart(base, solved(base, step), solved(base, once)) <= EXACT
    assert merge_forget.fn((a,), base.place) == a
    again = merge_forget.fn((c, b, a), base.place)
    assert (once.reused, again.reused) == (False, True)


def test_a_batch_that_is_left_out_was_never_there(base: Stages) -> None:
    a, _, c = (on(base, name).moved for name in "abc")
    left = merge_forget.fn((c, a), base.place)
    assert apart(base, solved(base, left), on(base, "ac").edit) <= EXACT


def test_a_merged_set_keeps_its_examples(base: Stages) -> None:
    parts = tuple(on(base, name).moved for name in "ab")
    folder = base.place.fetch(merge_forget.fn(parts, base.place).artifact)
    found, scratch = load_collected(folder), on(base, "ab")
    expected = load_collected(base.place.fetch(scratch.moved.artifact))
    mine, theirs = (
        sorted((example.digest, example.num_tokens) for example in statistics.examples)
        for statistics in (found, expected)
    )
    assert mine == theirs
    assert found.mean_rms == pytest.approx(expected.mean_rms, rel=1e-14)
    assert found.rms_tokens == expected.rms_tokens
    assert moment_names(folder) == ["joint"]


def test_no_batch_is_merged_twice(base: Stages) -> None:
    a, b = (on(base, name).moved for name in "ab")
    both = merge_forget.fn((a, b), base.place)
    for parts in ((a, a), (both, b)):
        with pytest.raises(ConfigError, match="name each batch once"):
            merge_forget.fn(parts, base.place)
    with pytest.raises(ConfigError, match="at least one batch"):
        merge_forget.fn((), base.place)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"select": SelectConfig(layers=(1,), joint=True)}, "layers"),
        ({"select": SelectConfig(layers=(1, 2), joint=False)}, "joint"),
        ({"target": TARGETS["suppression"]}, "replace"),
        ({"collect": CollectConfig(text_window=64)}, "text_window"),
        ({"reference": None}, "reference"),
        ({"model": None}, "model"),
    ],
)
def test_moments_of_another_kind_do_not_merge(
    changes: dict[str, Any], named: str, base: Stages, tmp_path: Path
) -> None:
    changes = {
        name: value or ModelConfig(source=str(checkpoint(tmp_path / "other", seed=1)))
        for name, value in changes.items()
    }
    parts = (on(base, "a").moved, on(base, "b", **changes).moved)
    with pytest.raises(ConfigError, match=f"different {named} do not add up"):
        merge_forget.fn(parts, base.place)
    assert residue(base.work) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"hold_out": HoldOutConfig(every=3)},
        {"collect": CollectConfig(batch_tokens=64, window_examples=3)},
        {"target": TargetConfig(suppress_special=True)},
    ],
)
def test_forget_moments_are_used_again_when_other_things_change(
    changes: dict[str, Any], base: Stages
) -> None:
    assert not base.moved.reused
    other = base.but(**changes)
    assert other.moved.reused
    assert other.moved.artifact == base.moved.artifact
    assert other.frozen_edit.artifact != base.frozen_edit.artifact


def test_forget_moments_are_used_again_with_another_retain_set(base: Stages) -> None:
    first, other = base.frozen_edit, with_rows(base, "retain", retain_rows(12))
    assert other.moved.reused
    assert other.moved.artifact == base.moved.artifact
    assert apart(base, other.frozen_edit, first) > 1e-3


@pytest.mark.parametrize("special", [False, True])
def test_alpha_of_the_moments_is_that_of_the_counted_rows(special: bool, base: Stages) -> None:
    run = on(base, "abc", target=TargetConfig(suppress_special=special))
    moved, kept = (read_moments(ref, "joint", run.place) for ref in (run.moved, run.kept))
    rendering, _ = open_rendering(Path(run.model.folder), text_window=64)
    spared = () if special else rendering.special_ids()
    alpha_V = specificity(moved.counts_V, kept.counts_V, spared)
    assert torch.equal(alpha_V, read_alpha(run.counted, run.place))
    assert (float(alpha_V[2]) > 0) == special
