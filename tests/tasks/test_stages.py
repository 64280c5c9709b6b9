"""From rows to an edited checkpoint, stage by stage, with every target and both orders of keys."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grom.apply import Edit
from grom.config import (
    AutoStrength,
    CollectConfig,
    ModelConfig,
    SelectConfig,
    StrengthConfig,
    TargetConfig,
)
from grom.sites import is_tied
from tasks.codecs import load_edit, read_json, read_table
from tasks.models import open_model
from tasks.solver import SiteReport
from tests.stages import Stages, stages, with_rows
from tests.tiny import checkpoint, forget_rows, residue

SUPPRESSION = TargetConfig(kind="suppression")
REDIRECT = TargetConfig(kind="redirect", redirect_to="w30")
CORRUPTION = TargetConfig(kind="corruption", seed=3)


@pytest.fixture
def run(tmp_path: Path) -> Stages:
    return stages(tmp_path)


def unit_edit(run: Stages) -> Edit:
    return load_edit(run.place.fetch(run.edit.artifact))


def reports(run: Stages) -> list[SiteReport]:
    return read_table(run.place.fetch(run.edit.artifact) / "sites.parquet", SiteReport)


def forget_probability(run: Stages, *, edited: bool) -> float:
    return run.score(edited=edited).sets["forget"]["probability"]


@pytest.mark.parametrize("target", [TargetConfig(), SUPPRESSION, REDIRECT])
@pytest.mark.parametrize(
    "select",
    [
        SelectConfig(layers=(1, 2)),
        SelectConfig(layers=(0, 2), joint=False),
        SelectConfig(width=2, sample_examples=3),
        SelectConfig(site="head"),
    ],
    ids=["joint", "one by one", "searched", "head"],
)
def test_a_stated_strength_in_nats_makes_the_answers_unlikely(
    select: SelectConfig, target: TargetConfig, run: Stages
) -> None:
    run = run.but(target=target, select=select)
    assert run.calibrated.nats == 4
    assert run.calibrated.stopped_by == "given"
    assert forget_probability(run, edited=True) < 0.8 * forget_probability(run, edited=False)
    assert residue(run.work) == []


def test_redirect_says_its_word_more_often(run: Stages) -> None:
    run = run.but(target=REDIRECT, strength=StrengthConfig(nats=40))
    folder = run.place.fetch(run.edited.artifact)
    said = []
    for where in (Path(run.model.folder), folder):
        opened = open_model(where, text_window=64)
        example = next(opened.rendering.render_all(run.forget.examples()))
        with torch.no_grad():
            logits = opened.model(torch.tensor([example.ids])).logits[0, example.start - 1]
        said.append(float(logits.softmax(-1)[30]))
    assert said[1] > said[0]


def test_corruption_takes_its_length_from_beta_and_has_no_drop(run: Stages) -> None:
    run = run.but(target=CORRUPTION, strength=StrengthConfig(beta=5))
    assert run.calibrated.beta == 5
    assert all(report.drop_nats != report.drop_nats for report in reports(run))
    for update in unit_edit(run).updates.values():
        assert torch.linalg.matrix_rank(update.dense()) == 1
    other = run.but(target=TargetConfig(kind="corruption", seed=4))
    assert other.edit.artifact != run.edit.artifact
    assert run.edited.num_changed > 0


def test_sequential_keys_are_solved_one_by_one_and_leave_the_first_layer_as_it_is(
    run: Stages,
) -> None:
    apart = SelectConfig(layers=(1, 2), joint=False)
    frozen = run.but(select=apart)
    sequential = run.but(select=apart, collect=CollectConfig(order="sequential"))
    assert not sequential.sites.joint
    before, after = unit_edit(frozen).updates, unit_edit(sequential).updates
    first, second = sorted(before, key=lambda site: site.name)
    torch.testing.assert_close(after[first].dense(), before[first].dense(), rtol=1e-4, atol=1e-8)
    assert not torch.allclose(after[second].dense(), before[second].dense(), rtol=1e-2)
    assert [report.layer for report in reports(sequential)] == [1, 2]
    unedited = forget_probability(sequential, edited=False)
    assert forget_probability(sequential, edited=True) < 0.8 * unedited
    assert residue(run.work) == []
    assert list((run.work / "scratch").rglob("*.safetensors")) == []


def test_the_search_reaches_its_level_or_stops_at_the_floor(run: Stages) -> None:
    level = 0.5 * forget_probability(run, edited=False)
    auto = AutoStrength(forget_probability=level, utility_floor=0.5, max_nats=64)
    run = run.but(strength=StrengthConfig(auto=auto))
    found = read_json(run.place.fetch(run.calibrated.artifact) / "calibration.json")
    nats = [point["nats"] for point in found["curve"]]
    assert nats == sorted(nats)
    assert nats[0] == 0
    if run.calibrated.stopped_by == "forget level":
        assert forget_probability(run, edited=True) <= 1.001 * level
    else:
        assert run.calibrated.stopped_by == "utility floor"


def test_a_reference_is_asked_what_to_say_instead(run: Stages, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "reference", seed=1)
    advised = run.but(reference=ModelConfig(source=str(folder)))
    assert advised.kept.artifact == run.kept.artifact
    assert advised.moved.artifact != run.moved.artifact
    alone, helped = unit_edit(run).updates, unit_edit(advised).updates
    assert alone.keys() == helped.keys()
    assert any(not torch.equal(alone[site].dense(), helped[site].dense()) for site in alone)


def test_a_second_run_computes_nothing_again(run: Stages, caplog: pytest.LogCaptureFixture) -> None:
    first = run.score(edited=True)
    before = {path: path.stat().st_mtime_ns for path in (run.work / "store").rglob("*")}
    again = run.but()
    with caplog.at_level(logging.INFO):
        assert again.score(edited=True) == first
    assert "collect: found in the store" in caplog.text
    assert "collect: written" not in caplog.text
    assert {path: path.stat().st_mtime_ns for path in (run.work / "store").rglob("*")} == before


@pytest.mark.parametrize(
    ("changes", "kept", "moved"),
    [
        ({"strength": StrengthConfig(nats=2)}, True, True),
        ({"target": SUPPRESSION}, True, False),
        ({"select": SelectConfig(layers=(1,))}, False, False),
        ({"collect": CollectConfig(batch_tokens=64)}, False, True),
    ],
)
def test_only_what_a_setting_touches_is_computed_again(
    changes: dict[str, Any], kept: bool, moved: bool, run: Stages
) -> None:
    first, other = run, run.but(**changes)
    assert (first.kept.artifact == other.kept.artifact) == kept
    assert (first.moved.artifact == other.moved.artifact) == moved
    assert first.edited.artifact != other.edited.artifact


def test_another_forget_batch_reuses_the_retain_moments(run: Stages) -> None:
    assert not run.kept.reused
    other = with_rows(run, "forget", forget_rows(3))
    assert other.kept.reused
    assert not other.moved.reused


def test_a_tied_head_is_edited_without_its_embedding(tmp_path: Path) -> None:
    run = stages(tmp_path, "gpt2", tied=True).but(select=SelectConfig(site="head"))
    folder = run.place.fetch(run.edited.artifact)
    opened = open_model(folder, text_window=64)
    assert not is_tied(opened.model)
    base = load_file(Path(run.model.folder) / "model.safetensors")
    stored = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert all(torch.equal(base[name], stored[name]) for name in base)
    changed = (stored["lm_head.weight"] != base["transformer.wte.weight"]).any(1)
    assert 0 < int(changed.sum()) < len(changed)
    assert forget_probability(run, edited=True) < forget_probability(run, edited=False)
