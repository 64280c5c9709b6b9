"""Two checkpoints are compared where they differ, in the orientation that a load quantises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from grom.apply import Edit
from grom.errors import BrokenCheckpoint, ConfigError, MissingTensor
from grom.quantize import SCHEMES, CodeChange, Scheme, code_change
from grom.sites import find_sites
from grom.target import LowRank
from tasks.checkpoint import write_edited
from tasks.codes import changed_modules, code_changes
from tests.reference import MODELS, VOCAB, random_matrix, tiny_model
from tests.tiny import save_model

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def matrix(model: Any, name: str) -> Tensor:
    found: Tensor = model.get_submodule(name).weight.detach()
    return found


def edit_of(model: PreTrainedModel, size: float = 0.3) -> Edit:
    """Updates of one MLP site and of three rows of the head."""
    sites = find_sites(model)
    rows = LowRank(
        size * random_matrix(1, 3, 16), rows_K=torch.tensor([5, 12, 40]), num_outputs=VOCAB
    )
    return Edit({sites[1]: LowRank(size * random_matrix(0, 16, 24)), sites[-1]: rows})


def pair(
    tmp_path: Path, model: PreTrainedModel, size: float = 0.3, **how: Any
) -> tuple[Path, Path]:
    """A checkpoint and its edited copy."""
    before, after = save_model(tmp_path / "before", model, **how), tmp_path / "after"
    after.mkdir()
    write_edited(before, edit_of(model, size), after)
    return before, after


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_exactly_the_edited_matrices_are_found(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny_model(family, tied=tied)
    sites = find_sites(model)
    before, after = pair(tmp_path, model)
    expected = {sites[1].tensor.removesuffix(".weight"), sites[-1].tensor.removesuffix(".weight")}
    assert set(changed_modules(before, after)) == expected
    assert changed_modules(before, before) == changed_modules(after, after) == ()
    assert set(code_changes(before, after, None, "int4")) == expected


@every_scheme
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_changes_are_those_of_the_oriented_matrices(
    family: str, scheme: Scheme, tmp_path: Path
) -> None:
    model = tiny_model(family, tied=True)
    mlp, head = find_sites(model)[1], find_sites(model)[-1]
    before, after = pair(tmp_path, model)
    found = code_changes(before, after, None, scheme)
    weight_MN = mlp.weight_MN(model).contiguous()
    update_MN = edit_of(model).updates[mlp].dense()
    edited_MN = (weight_MN.double() + update_MN).float()
    assert weight_MN.shape == (16, 24)
    assert found[mlp.name] == code_change(weight_MN, edited_MN, scheme)
    assert found[mlp.name].num_edited == 16 * 24
    assert found[mlp.name].changed_codes > 50
    assert found[head.name].num == VOCAB * 16
    assert found[head.name].num_edited == 3 * 16


def test_an_edit_below_half_a_bin_is_seen_in_the_weights_and_not_in_the_codes(
    tmp_path: Path,
) -> None:
    before, after = pair(tmp_path, tiny_model("llama"), size=1e-6)
    found = code_changes(before, after, None, "nf4")["model.layers.1.mlp.down_proj"]
    assert found.num_edited > 300
    assert found.changed_codes == 0
    assert found.changed_values > 0  # the scales moved by as little


def test_named_modules_are_compared_even_if_nothing_changed(tmp_path: Path) -> None:
    before, after = pair(tmp_path, tiny_model("llama"))
    names = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    found = code_changes(before, after, names, "nf4")
    assert list(found) == names
    assert found[names[0]] == CodeChange(0, 0, 16 * 24, 0)
    assert found[names[1]].changed_codes > 0


def test_shards_are_read_through_the_index_and_other_files_are_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    whole.mkdir()
    sharded.mkdir()
    plain = pair(whole, model)
    shards = pair(sharded, model, max_shard_size="8KB")
    assert len(list(shards[1].glob("*.safetensors"))) > 2
    (shards[1] / "consolidated.safetensors").write_bytes(b"not of this model")
    assert code_changes(*shards, None, "fp4") == code_changes(*plain, None, "fp4")
    assert code_changes(plain[0], shards[1], None, "fp4") == code_changes(*plain, None, "fp4")


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    before, after = pair(tmp_path, tiny_model("llama"))
    with pytest.raises(MissingTensor, match=r"no tensor named model.layers.9.mlp.down_proj.weight"):
        code_changes(before, after, ["model.layers.9.mlp.down_proj"], "nf4")


def test_another_model_is_refused(tmp_path: Path) -> None:
    before, other = pair(tmp_path, tiny_model("llama"))[0], tiny_model("llama")
    other.resize_token_embeddings(40)
    folder = save_model(tmp_path / "other", other)
    with pytest.raises(ConfigError, match=r"is \(40, 16\), and \(64, 16\) in .*of the same model"):
        changed_modules(before, folder)


@pytest.mark.parametrize("damage", ["truncated", "no shard", "no weights"])
def test_a_damaged_checkpoint_is_named(damage: str, tmp_path: Path) -> None:
    before, after = pair(tmp_path, tiny_model("llama"))
    weights = after / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.unlink()
    if damage == "no shard":
        index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
        (after / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpoint, match=f"{after}: the model does not open"):
        changed_modules(before, after)
