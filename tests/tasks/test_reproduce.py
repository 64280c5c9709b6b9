"""A run's edit comes out again from its statistics, to the byte; what is not as it was is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grom.config import (
    CollectConfig,
    DataConfig,
    HoldOutConfig,
    SelectConfig,
    StrengthConfig,
    TargetConfig,
)
from grom.errors import ConfigError
from tasks.apply import apply
from tasks.artifacts import sha256_of
from tasks.codecs import load_edit, save_edit
from tasks.distance import relative_difference
from tasks.inputs import Inputs, input_differences
from tasks.recorded import Difference
from tasks.reproduce import reproduce
from tasks.runs import NoSuchRun, Run, find_run
from tasks.store import Store
from tasks.updates import StoredUpdates
from tests.certified import Certified, certified_service
from tests.edits import both_edits, flip
from tests.reference import tiny_model
from tests.stages import Stages, stages
from tests.tiny import checkpoint, retain_rows, write_rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Certified:
    return certified_service(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    """A job of its own, without a service."""
    run = stages(tmp_path_factory.mktemp("job"))
    assert run.edited
    return run


def run_of(job: Stages) -> tuple[Run, Store]:
    store = job.place.open()
    return find_run(f"apply/{job.edited.artifact.key}", store, None, job.work), store


def found(made: Certified, name: str) -> Run:
    return find_run(name, made.store, None, made.folder)


def known(result: Any) -> list[tuple[str, str]]:
    return [(one.topic, one.fact) for one in result.differences if one.topic != "software"]


@pytest.mark.parametrize("batch", ["first", "second", "again"])
def test_a_services_run_comes_out_to_the_byte(made: Certified, tmp_path: Path, batch: str) -> None:
    result = reproduce(found(made, batch), made.store, tmp_path)
    assert result.outcome == "same bytes"
    assert result.differences == ()
    assert {relative for _, relative in result.sites} == {0.0}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_run_is_found_by_batch_key_and_checkpoint(made: Certified) -> None:
    by_batch = found(made, "second")
    assert by_batch.certificate is not None
    for name in (by_batch.certificate.run, by_batch.checkpoint, f"apply/{by_batch.checkpoint}"):
        assert found(made, name).checkpoint == by_batch.checkpoint
    assert found(made, "again").checkpoint == by_batch.checkpoint
    with pytest.raises(NoSuchRun, match="never"):
        found(made, "never")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"select": SelectConfig(site="head"), "target": TargetConfig(kind="suppression")},
        {"select": SelectConfig(layers=(1, 2), joint=False)},
        {"strength": StrengthConfig(beta=40)},
    ],
)
def test_a_jobs_edit_comes_out_to_the_byte(
    job: Stages, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run, store = run_of(job.but(**changes))
    result = reproduce(run, store, tmp_path)
    assert (result.outcome, result.differences) == ("same bytes", ())


def test_sequential_keys_leave_nothing_to_solve_from(job: Stages, tmp_path: Path) -> None:
    run, store = run_of(job.but(collect=CollectConfig(order="sequential")))
    with pytest.raises(ConfigError, match="layer by layer"):
        reproduce(run, store, tmp_path)


def in_moments(store: Path, run: Run) -> None:
    flip(next((store / run.made.retain[0].name).glob("*.gram.npy")), -9)


def without_moments(store: Path, run: Run) -> None:
    shutil.rmtree(store / run.made.parts[0].name)


def in_the_ridge(store: Path, run: Run) -> None:
    path = store / run.made.solved.name / "_SUCCESS.json"
    marker = json.loads(path.read_text())
    marker["facts"]["ridge"]["w_retain"] = 50.0
    path.write_text(json.dumps(marker))


def in_facts_beside_the_bytes(store: Path, run: Run) -> None:
    path = store / run.made.retain[0].name / "facts.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"text_window": 511}))


def in_the_edit(store: Path, run: Run) -> None:
    flip(store / run.made.applied.name / "edit" / "edit.safetensors", -1)


def in_the_model(store: Path, run: Run) -> None:
    flip(store / run.made.applied.name / "model.safetensors", -1)


@pytest.mark.parametrize(
    ("damage", "topic", "fact", "outcome"),
    [
        (in_moments, "statistics", "collect/", "not solved"),
        (without_moments, "statistics", "collect/", "not solved"),
        (in_the_ridge, "ridge", "ridge", "not solved"),
        (in_facts_beside_the_bytes, "rendering", "text_window", "same bytes"),
        (in_the_edit, "edit", "apply/", "not solved"),
        (in_the_model, "edit", "apply/", "not solved"),
    ],
)
def test_the_first_thing_that_is_not_as_recorded_is_named(
    made: Certified,
    tmp_path: Path,
    damage: Callable[[Path, Run], None],
    topic: str,
    fact: str,
    outcome: str,
) -> None:
    mine = made.copied(tmp_path)
    damage(tmp_path / "store", found(made, "first"))
    result = reproduce(found(mine, "first"), mine.store, tmp_path)
    assert result.outcome == outcome
    assert result.first is not None
    assert result.first.topic == topic
    assert fact in result.first.fact
    assert result.first.then != result.first.now


def test_statistics_that_were_republished_contradict_the_certificate(
    made: Certified, tmp_path: Path
) -> None:
    mine, run = made.copied(tmp_path), found(made, "first")
    folder = tmp_path / "store" / run.made.retain[0].name
    path = next(folder.glob("*.gram.npy"))
    flip(path, -9)
    marker = json.loads((folder / "_SUCCESS.json").read_text())
    marker["files"][path.name]["sha256"] = sha256_of(path)
    (folder / "_SUCCESS.json").write_text(json.dumps(marker))
    result = reproduce(found(mine, "first"), mine.store, tmp_path)
    assert result.first is not None
    assert (result.first.topic, result.first.fact) == (
        "statistics",
        f"retain, collect/{folder.name}",
    )


def test_an_edit_with_other_digits_is_within_tolerance_or_different(
    job: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = run_of(job)

    def nearly(model: Any, edit: Any, strength: Any, place: Any) -> Any:
        beta = strength.beta * (1 + share)
        return apply.fn(model, edit, strength.model_copy(update={"beta": beta}), place)

    class Nearly:
        fn = staticmethod(nearly)

    monkeypatch.setattr("tasks.reproduce.apply", Nearly)
    for share, outcome in ((1e-12, "within tolerance"), (1e-6, "different")):
        result = reproduce(run, store, tmp_path)
        assert result.outcome == outcome
        assert max(relative for _, relative in result.sites) == pytest.approx(share, rel=1e-2)


def test_software_that_is_not_what_it_was_is_named(job: Stages, tmp_path: Path) -> None:
    run, store = run_of(job)
    older = Run(run.name, run.made, {"torch": "1.0", "python": "2.7"})
    result = reproduce(older, store, tmp_path)
    assert result.outcome == "same bytes"
    assert [one.fact for one in result.differences] == ["torch", "python"]
    assert result.differences[0].then == "1.0"


def today(job: Stages, **changes: Any) -> Inputs:
    settings = {
        name: getattr(job.config, name).model_dump(mode="json") for name in ("ridge", "target")
    }
    inputs: dict[str, Any] = {
        "model": Path(job.config.model.source),
        "retain": job.config.retain,
        "hold_out": job.config.hold_out,
        "forget": job.config.forget,
        "settings": settings,
    }
    return Inputs(**(inputs | changes))


def changed(job: Stages, **changes: Any) -> list[Difference]:
    run, store = run_of(job)
    return input_differences(run, today(job, **changes), store, job.place)


def test_inputs_that_are_as_they_were_differ_in_nothing(job: Stages) -> None:
    assert changed(job) == []


def test_the_first_row_that_changed_is_named_by_its_place(job: Stages, tmp_path: Path) -> None:
    rows = retain_rows()
    rows[8] = rows[8] | {"answer": "w30 w31 w32"}
    (one,) = changed(job, retain=DataConfig(uri=str(write_rows(tmp_path / "r.jsonl", rows))))
    assert one.topic == "data"
    assert "r.jsonl, line 9" in one.fact
    assert "w30" not in f"{one.fact}{one.then}{one.now}"
    fewer = write_rows(tmp_path / "few.jsonl", retain_rows()[:-1])
    (one,) = changed(job, retain=DataConfig(uri=str(fewer)))
    assert "no longer there" in one.fact or "the same" in one.fact


def test_settings_of_rows_hold_out_ridge_and_target_are_named(job: Stages) -> None:
    retain = job.config.retain.model_copy(update={"without": ("Erika",)})
    found = changed(job, retain=retain)
    assert ("data", "retain, without") in [(one.topic, one.fact) for one in found]
    assert "Erika" not in str(found)
    assert "hold_out" in str(changed(job, hold_out=HoldOutConfig(every=5)))
    settings = {
        "ridge": job.config.ridge.model_dump(mode="json") | {"w_retain": 1.0},
        "target": job.config.target.model_dump(mode="json") | {"seed": 1},
    }
    found = changed(job, settings=settings)
    assert [(one.topic, one.fact) for one in found] == [("ridge", "w_retain"), ("target", "seed")]


def test_another_template_dtype_or_model_is_named(job: Stages, tmp_path: Path) -> None:
    base = Path(job.config.model.source)
    other = tmp_path / "template"
    shutil.copytree(base, other)
    template = other / "chat_template.jinja"
    template.write_text(f"{template.read_text()} w9")
    found = changed(job, model=other)
    assert {one.topic for one in found} == {"rendering"}
    assert "chat_template.jinja" in found[0].fact
    assert "template" in [one.fact for one in found]
    half = checkpoint(tmp_path / "half", dtype=torch.bfloat16)
    names = {one.fact: one.topic for one in changed(job, model=half)}
    assert names["model.safetensors, torch.bfloat16"] == "model"


def test_relative_differences_of_every_form_of_update(tmp_path: Path) -> None:
    edit = both_edits(tiny_model("llama"))
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, factor in zip(folders, (1.0, 1.001), strict=True):
        folder.mkdir()
        save_edit(folder, edit.scaled(factor), {})
    one, other = map(StoredUpdates, folders)
    for site in one.sites:
        assert relative_difference(one, other, site) == pytest.approx(1e-3)
        assert relative_difference(one, one, site) == 0
    assert load_edit(folders[0]).updates.keys() == edit.updates.keys()
