"""Two runs side by side differ in what was set differently, and that comes in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from grom.config import CollectConfig, RidgeConfig, SelectConfig, StrengthConfig
from tasks.compare import Comparison, compare
from tasks.run_facts import TOPICS, run_facts
from tasks.runs import find_run
from tests.certified import Certified, certified_service
from tests.stages import Stages, stages


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    return stages(tmp_path_factory.mktemp("job"))


def compared(one: Stages, other: Stages) -> Comparison:
    store = one.place.open()
    runs = [
        find_run(f"apply/{job.edited.artifact.key}", store, None, one.work) for job in (one, other)
    ]
    return compare(runs[0], runs[1], store)


def test_a_run_does_not_differ_from_itself(job: Stages) -> None:
    found = compared(job, job)
    assert (found.facts, found.alone) == ((), ())
    assert {relative for _, relative in found.sites} == {0.0}


def test_another_ridge_is_named_with_what_it_changed(job: Stages) -> None:
    found = compared(job, job.but(ridge=RidgeConfig(w_retain=1)))
    assert [(name, one, other) for name, one, other in found.facts if "beta" not in name] == [
        ("ridge: w_retain", 100.0, 1.0)
    ]
    assert all(relative > 0 for _, relative in found.sites)
    numbers = {name: (one, other) for name, one, other in found.numbers}
    assert numbers["strength, nats"][0] == pytest.approx(numbers["strength, nats"][1])
    condition = "model.layers.1.mlp.down_proj, condition"
    assert numbers[condition][0] != numbers[condition][1]


def test_another_strength_is_named_as_it_was_set(job: Stages) -> None:
    found = compared(job, job.but(strength=StrengthConfig(nats=2)))
    names = [name for name, _, _ in found.facts]
    assert "strength: nats" in names
    assert {name.split(":")[0] for name in names} == {"strength"}
    assert {f"{relative:.3f}" for _, relative in found.sites} == {"0.500"}


def test_sites_that_only_one_has_are_listed_and_topics_come_in_order(job: Stages) -> None:
    found = compared(job, job.but(select=SelectConfig(layers=(0, 1)), ridge=RidgeConfig(rho=0.1)))
    assert found.alone == ("model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj")
    assert [site for site, _ in found.sites] == ["model.layers.1.mlp.down_proj"]
    topics = [TOPICS.index(name.split(":")[0]) for name, _, _ in found.facts]
    assert topics == sorted(topics)
    assert "sites: layers" in [name for name, _, _ in found.facts]


def test_sequential_runs_have_their_facts_too(job: Stages) -> None:
    found = compared(job, job.but(collect=CollectConfig(order="sequential")))
    assert "sites: sweep, keys" in [name for name, _, _ in found.facts]


def test_a_services_batches_differ_in_their_data(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: None
) -> None:
    made: Certified = certified_service(tmp_path_factory.getbasetemp())
    runs = [find_run(name, made.store, None, Path()) for name in ("first", "second")]
    found = compare(runs[0], runs[1], made.store)
    names = [name for name, _, _ in found.facts]
    assert names[0] == "data: forget, data.digests"
    assert "statistics: forget" in names
    assert not any("retain" in name for name in names)
    facts = run_facts(runs[1], made.store)
    assert len(facts["data: forget, data.digests"]) == 2
    assert "rendering: template" in facts
    assert "software: torch" in facts
    assert facts["dtype: of edited tensors"] == "float32"
    scores = [name for name, _, _ in found.numbers if name.startswith("edited: forget")]
    assert "edited: forget, probability" in scores
