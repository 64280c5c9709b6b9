"""Plain PEFT and plain transformers load what is exported and compute what the edited checkpoint
computes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel

from grom.apply import Edit
from grom.config import CollectConfig, EvaluateConfig
from grom.errors import ConfigError
from grom.sites import find_sites
from grom.target import LowRank
from tasks.edits import WrongBase, apply_edit
from tasks.export import Measurement, export_nf4, export_peft
from tasks.models import open_model
from tests.edits import (
    both_edits,
    edited_checkpoint,
    every_model,
    head_edit,
    mlp_edit,
    write_edit_of,
)
from tests.reference import Tolerance
from tests.stages import stages
from tests.tasks.test_quantised import wide_model
from tests.tiny import save_model

IDS_BL = torch.arange(4, 24).view(2, 10)
CLOSE: Tolerance = {"rtol": 1e-4, "atol": 1e-4}
"""float32 logits of up to 50, summed in another order."""


def opened(folder: Path) -> Any:
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype="auto", attn_implementation="eager").eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS_BL).logits
    return found


def with_adapter(base: Path, adapter: Path) -> Any:
    """The base with the adapter, by PEFT alone; a warning fails the test."""
    return PeftModel.from_pretrained(opened(base), adapter).eval()


def weights(model: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model.state_dict()
    return found


@every_model
def test_peft_computes_what_the_edited_checkpoint_computes(
    family: str, tied: bool, tmp_path: Path
) -> None:
    base, edited = edited_checkpoint(tmp_path, family, mlp_edit, tied=tied)
    found = export_peft(edited / "edit", tmp_path / "lora")
    assert found.is_exact
    assert 0 < found.error < 1e-7  # rounding to float32
    assert [(site.rank, site.full_rank) for site in found.sites] == [(2, 2), (16, 16)]
    assert found.tied_head is False
    before, expected = logits(opened(base)), logits(opened(edited))
    assert not torch.allclose(before, expected, atol=1e-2)
    model = with_adapter(base, tmp_path / "lora")
    assert_close(logits(model), expected, **CLOSE)
    merged = model.merge_and_unload()
    stored = weights(opened(edited))
    assert weights(merged).keys() == stored.keys()
    for name, weight in weights(merged).items():
        assert_close(weight, stored[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt_neox"])
def test_an_adapter_of_an_untied_head(family: str, tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path, family, both_edits)
    found = export_peft(edited / "edit", tmp_path / "lora")
    assert found.tied_head is False
    assert found.sites[-1].rank == 3
    model = with_adapter(base, tmp_path / "lora")
    assert_close(logits(model), logits(opened(edited)), **CLOSE)
    stored = weights(opened(edited))
    for name, weight in weights(model.merge_and_unload()).items():
        assert_close(weight, stored[name], rtol=1e-6, atol=1e-6)
    assert "ties its head" not in (tmp_path / "lora" / "README.md").read_text()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_an_adapter_of_a_tied_head_is_for_use_unmerged_and_says_so(
    family: str, tmp_path: Path
) -> None:
    base, edited = edited_checkpoint(tmp_path, family, head_edit, tied=True)
    found = export_peft(edited / "edit", tmp_path / "lora")
    assert found.tied_head is True
    text = (tmp_path / "lora" / "README.md").read_text()
    assert "The base ties its head" in text
    assert "use the adapter unmerged" in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of the same
        model = with_adapter(base, tmp_path / "lora")
        assert_close(logits(model), logits(opened(edited)), **CLOSE)
        merged = model.merge_and_unload()
    assert not torch.allclose(logits(merged), logits(opened(edited)), atol=1e-2)


def test_whether_a_head_is_tied_is_seen_in_the_base_or_left_open(tmp_path: Path) -> None:
    for tied in (True, False):
        base, edited = edited_checkpoint(tmp_path / str(tied), "llama", head_edit, tied=tied)
        (edited / "edit" / "undo.json").unlink()
        out = tmp_path / str(tied)
        assert export_peft(edited / "edit", out / "one", base=base).tied_head is tied
        assert export_peft(edited / "edit", out / "two").tied_head is None
        assert "If the base ties" in (out / "two" / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merging_differs_from_the_edited_checkpoint_by_rounding(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    base, edited = edited_checkpoint(tmp_path, "llama", mlp_edit, dtype=dtype)
    export_peft(edited / "edit", tmp_path / "lora")
    merged = with_adapter(base, tmp_path / "lora").merge_and_unload()
    stored, differ = weights(opened(edited)), 0
    for name, weight in weights(merged).items():
        eps = torch.finfo(dtype).eps
        assert_close(weight, stored[name], rtol=eps, atol=0)
        differ += int((weight != stored[name]).sum())
    assert differ < 8


@pytest.mark.parametrize("uniform", [False, True])
def test_a_truncated_adapter_states_its_error(uniform: bool, tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path, "llama", mlp_edit)
    found = export_peft(edited / "edit", tmp_path / "lora", rank=5, uniform=uniform)
    assert [(site.rank, site.full_rank) for site in found.sites] == [(2, 2), (5, 16)]
    exact, cut = found.sites
    assert exact.error < 1e-7
    assert not found.is_exact
    merged = weights(with_adapter(base, tmp_path / "lora").merge_and_unload())
    before, after = weights(opened(base)), weights(opened(edited))
    lost, whole = 0.0, 0.0
    for site in found.sites:
        name = f"{site.site}.weight"
        update = after[name].double() - before[name]
        missing = (merged[name].double() - after[name]).norm() / update.norm()
        assert float(missing) == pytest.approx(site.error, abs=1e-5)
        lost += float(missing * update.norm()) ** 2
        whole += float(update.norm()) ** 2
    assert found.error == pytest.approx((lost / whole) ** 0.5, abs=1e-5)
    assert cut.error > 0.3
    report = json.loads((tmp_path / "lora" / "export.json").read_text())
    assert report["error"] == found.error
    assert f"{cut.error:.2e}" in (tmp_path / "lora" / "README.md").read_text()


def test_rounding_to_a_lower_precision_is_part_of_the_error(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path, "llama", mlp_edit)
    found = export_peft(edited / "edit", tmp_path / "lora", dtype="bfloat16")
    merged = weights(with_adapter(base, tmp_path / "lora").merge_and_unload())
    before, after = weights(opened(base)), weights(opened(edited))
    for site in found.sites:
        name = f"{site.site}.weight"
        update = after[name].double() - before[name]
        missing = (merged[name].double() - after[name]).norm() / update.norm()
        assert float(missing) == pytest.approx(site.error, rel=0.05)
        assert site.error > 1e-4
    card = (tmp_path / "lora" / "README.md").read_text()
    assert "exact up to the rounding of its dtype" in card
    assert f"{found.error:.2e}" in card


def test_an_adapter_is_not_exported_for_another_base(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path, "llama", mlp_edit)
    with pytest.raises(WrongBase, match="not the model that the edit was made for"):
        export_peft(edited / "edit", tmp_path / "lora", base=edited)
    assert not (tmp_path / "lora").exists()


def test_one_rank_for_all_sites_is_filled_up_with_zeros(tmp_path: Path) -> None:
    base, edited = edited_checkpoint(tmp_path, "llama", mlp_edit)
    export_peft(edited / "edit", tmp_path / "lora", uniform=True)
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (16, 16)
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert all(16 in tensor.shape for tensor in tensors.values())
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    card = (tmp_path / "lora" / "README.md").read_text()
    assert "`--max-lora-rank` of at least 16" in card
    assert "it was not run" in card
    model = with_adapter(base, tmp_path / "lora")
    assert_close(logits(model), logits(opened(edited)), **CLOSE)


def test_the_files_of_an_export_are_the_same_each_time(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path, "llama", both_edits)
    for name in ("one", "two"):
        export_peft(edited / "edit", tmp_path / name, dtype="bfloat16", base_name="org/base")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    settings = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/base"


def test_the_change_in_metrics_is_measured_on_the_merged_model(tmp_path: Path) -> None:
    run = stages(tmp_path)
    made = run.place.fetch(run.edited.artifact)
    sets: Any = {"forget": (run.forget, "all"), "retain, held out": (run.retain, "held out")}
    collect, evaluate = CollectConfig(), EvaluateConfig(health_examples=0)
    how = Measurement(run.model, sets, evaluate, collect, run.place)
    exact = export_peft(made / "edit", tmp_path / "exact", measurement=how)
    cut = export_peft(made / "edit", tmp_path / "cut", rank=1, measurement=how)
    assert exact.metrics is not None
    assert cut.metrics is not None
    for name in sets:
        found = exact.metrics[name]
        assert found["adapter"]["probability"] == pytest.approx(
            found["edited"]["probability"], rel=1e-4
        )
    found = cut.metrics["forget"]
    low, mid, high = (found[label]["probability"] for label in ("edited", "adapter", "unedited"))
    assert low < mid < high
    assert low == pytest.approx(run.score(edited=True).sets["forget"]["probability"], rel=1e-4)
    assert "| forget | adapter |" in (tmp_path / "cut" / "README.md").read_text()
    assert sorted(path.name for path in Path(run.place.work).iterdir()) == ["scratch", "store"]


def test_an_edit_at_unit_strength_is_not_exported(tmp_path: Path) -> None:
    run = stages(tmp_path)
    with pytest.raises(ConfigError, match="unit strength"):
        export_peft(run.place.fetch(run.edit.artifact), tmp_path / "lora")
    assert not (tmp_path / "lora").exists()


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    _, edited = edited_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="--rank 0: at least 1"):
        export_peft(edited / "edit", tmp_path / "lora", rank=0)
    with pytest.raises(ConfigError, match="there are float32, bfloat16, float16"):
        export_peft(edited / "edit", tmp_path / "lora", dtype="int8")
    with pytest.raises(ConfigError, match="something already"):
        export_peft(edited / "edit", edited)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
def test_a_4_bit_checkpoint_has_the_logits_of_the_4_bit_load(
    family: str, tied: bool, tmp_path: Path
) -> None:
    model: PreTrainedModel = wide_model(family, tied)
    base = save_model(tmp_path / "base", model)
    site = find_sites(model)[0]
    P_MN = torch.randn(site.weight_MN(model).shape, dtype=torch.float64) * 0.05
    folder = write_edit_of(base, Edit({site: LowRank(P_MN)}), tmp_path / "edit")
    apply_edit(base, folder, tmp_path / "edited")
    modules = export_nf4(tmp_path / "edited", tmp_path / "nf4")
    assert site.name in modules
    expected = open_model(
        tmp_path / "edited", text_window=64, quantisation="nf4", editable=False
    ).model
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    loaded = load(tmp_path / "nf4").eval()
    assert type(loaded.get_submodule(site.name)).__name__ == "Linear4bit"
    assert torch.equal(logits(loaded), logits(expected))
    assert not torch.allclose(logits(loaded), logits(opened(base)), atol=1e-3)
    assert (tmp_path / "nf4" / "edit" / "undo.json").is_file()
    assert (tmp_path / "nf4" / "tokenizer.json").is_file()
