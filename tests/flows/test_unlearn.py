"""Whole runs with real components: SmolLM2-135M, TOFU, Prefect, MLflow, bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flows.config import BenchmarkConfig, UnlearnConfig
from flows.presets import shared, tofu_smollm2
from flows.unlearn import Outcome, unlearn
from grom.config import CollectConfig, EvaluateConfig, SelectConfig, StrengthConfig
from tasks.codecs import load_edit, read_json
from tasks.registry import registered_folder
from tasks.tracking import Tracking, client_of

pytestmark = pytest.mark.e2e
BAND = (24, 25, 26, 27, 28, 29)
FEW = EvaluateConfig(max_examples=12, health_examples=2, health_tokens=12)


def smaller(work: Path, **changes: Any) -> UnlearnConfig:
    """The TOFU preset on one forget and four retain authors, without background."""
    preset = tofu_smollm2()
    return preset.model_copy(
        update={
            "name": "small-tofu",
            "work": str(work),
            "forget": preset.forget.model_copy(update={"limit": 20}),
            "retain": preset.retain.model_copy(update={"limit": 80}),
            "also": {},
            "background": None,
            "select": SelectConfig(layers=BAND),
            "strength": StrengthConfig(nats=12),
            "evaluate": FEW,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One work folder for the module: later runs find what earlier ones put in the store."""
    if not shared().is_dir():
        pytest.fail(f"{shared()}: the benchmark data are missing; set GROM_SHARED")
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def outcome(work: Path, prefect_server: None) -> Outcome:
    """One run of the whole flow, with a row of each split of the benchmark."""
    return unlearn(smaller(work, benchmark=BenchmarkConfig(name="tofu_forget05", limit=1)))


def test_forgets_what_was_asked_and_keeps_the_rest(outcome: Outcome) -> None:
    unedited, edited, nf4, int4 = outcome.scores
    assert unedited.sets["forget"]["probability"] > 0.95
    assert edited.sets["forget"]["probability"] < 0.45
    assert edited.sets["retain, seen"]["probability"] > 0.95
    assert edited.sets["retain, held out"]["probability"] > 0.85
    assert nf4.sets["forget"]["probability"] < edited.sets["forget"]["probability"] + 0.05
    # Seven linear modules in each of thirty layers.
    assert len(nf4.quantised_modules) == len(int4.quantised_modules) == 210
    assert edited.sets["forget, paraphrased"]["probability"] < 0.45
    assert edited.health["empty rate"] == 0
    assert outcome.registered.passed


def test_each_attack_has_a_verdict_with_its_number(outcome: Outcome) -> None:
    verdicts = {attack["name"]: attack["verdict"] for attack in outcome.registered.attacks}
    assert verdicts == {"nf4": "removed", "int4": "removed", "paraphrase": "removed"}
    for attack in outcome.registered.attacks:
        assert attack["recovered_share"] <= 0.2


def test_the_benchmark_and_the_report_are_in_mlflow(outcome: Outcome, work: Path) -> None:
    client = client_of(Tracking(), work)
    run = client.get_run(outcome.registered.run_id)
    before, after = (
        run.data.metrics[f"tofu_forget05/forget probability/correct/{label}"]
        for label in ("unedited", "edited")
    )
    assert before > 0.95
    assert after < before
    names = {file.path for file in client.list_artifacts(run.info.run_id, "tables")}
    assert {"tables/tofu_forget05.json", "tables/tofu_forget05-edited.parquet"} <= names
    (folder,) = (work / "reports").glob(f"*{run.info.run_id[:8]}")
    pictures = {path.name for path in folder.glob("*.png")}
    assert {"bars.png", "forgetting.png", "truth_ratios.png"} <= pictures


def test_registered_version_loads_with_plain_transformers(outcome: Outcome, work: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = registered_folder(
        Tracking(), work, f"models:/{outcome.registered.model_name}@candidate"
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)
    base = load_file(Path(outcome.before.folder) / "model.safetensors")
    edit = load_edit(outcome.place.fetch(outcome.edited.artifact) / "edit")
    for site, update in edit.updates.items():
        expected = base[site.tensor].double() + update.dense()
        assert torch.equal(site.weight_MN(model), expected.float())


def test_untouched_tensors_are_the_same_bytes_and_the_edit_can_be_undone(outcome: Outcome) -> None:
    folder = outcome.place.fetch(outcome.edited.artifact)
    base = load_file(Path(outcome.before.folder) / "model.safetensors")
    edited = load_file(folder / "model.safetensors")
    undo = load_file(folder / "edit" / "undo.safetensors")
    changed = {name for name in base if not torch.equal(base[name], edited[name])}
    assert changed == set(undo) == {f"model.layers.{layer}.mlp.down_proj.weight" for layer in BAND}
    assert all(torch.equal(base[name], undo[name]) for name in undo)


def test_mlflow_has_one_finished_run_with_metrics_by_layer_and_data_by_digest(
    outcome: Outcome, work: Path
) -> None:
    client = client_of(Tracking(), work)
    run = client.get_run(outcome.registered.run_id)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "site/condition")
    assert sorted(metric.step for metric in history) == list(BAND)
    assert "forget/probability/edited nf4" in run.data.metrics
    assert run.inputs is not None
    assert {entry.dataset.name for entry in run.inputs.dataset_inputs} >= {"retain, seen"}
    version = client.get_model_version_by_alias(outcome.registered.model_name, "candidate")
    assert version.tags["gate"] == "passed"
    assert version.tags["base_fingerprint"] == outcome.before.fingerprint


def test_forget_text_is_nowhere_but_in_the_source(outcome: Outcome, work: Path) -> None:
    canary = b"Hina Ameen"  # an author of the forget set, in its questions and answers
    assert canary in (shared() / "data" / "tofu" / "forget05.json").read_bytes()
    tainted = [
        path
        for path in work.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and canary in path.read_bytes()
    ]
    assert tainted == []


def test_second_run_collects_nothing_again_and_searches_the_strength(
    outcome: Outcome, work: Path
) -> None:
    preset = tofu_smollm2()
    auto = preset.strength.search
    assert auto is not None
    again = unlearn(
        smaller(
            work,
            strength=StrengthConfig(auto=auto.model_copy(update={"probe_examples": 10})),
            evaluate=FEW.model_copy(update={"quantisations": (), "health_examples": 0}),
        )
    )
    assert again.reused_retain
    assert again.edit.artifact == outcome.edit.artifact
    found = read_json(again.place.fetch(again.calibrated.artifact) / "calibration.json")
    assert found["stopped_by"] in ("forget level", "utility floor")
    nats = [point["nats"] for point in found["curve"]]
    assert nats == sorted(nats)
    assert len(nats) > 4


def test_sequential_keys_forget_as_well(outcome: Outcome, work: Path) -> None:
    run = unlearn(
        smaller(
            work,
            collect=CollectConfig(order="sequential"),
            evaluate=FEW.model_copy(update={"quantisations": (), "health_examples": 0}),
        )
    )
    assert run.edit.artifact != outcome.edit.artifact
    assert run.scores[1].sets["forget"]["probability"] < 0.6
    assert run.scores[1].sets["retain, seen"]["probability"] > 0.9
