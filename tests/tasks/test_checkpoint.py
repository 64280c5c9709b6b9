"""The edited checkpoint is the edited model, to the bit, and everything else is as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from grom.apply import Edit, edited
from grom.errors import ErasedByRounding, MissingTensor
from grom.sites import find_sites, is_tied
from grom.target import LowRank
from tasks.checkpoint import checkpoint_bytes, mapped, read_header, write_edited
from tasks.codecs import load_edit, save_edit
from tasks.place import Place
from tests.reference import MODELS, VOCAB, embedding_VD, random_matrix, tiny_model
from tests.tiny import residue, save_model

every_model = pytest.mark.parametrize(("family", "tied"), MODELS)
IDS_BL = torch.arange(4, 24).view(2, 10)


def mlp_edit(model: PreTrainedModel, size: float = 0.1) -> Edit:
    """Updates of two MLP sites: factors of rank 2 and a whole matrix."""
    first, _, last = find_sites(model)[:3]
    factors = LowRank(random_matrix(0, 2, 24) * size, left_MK=random_matrix(1, 16, 2))
    return Edit({first: factors, last: LowRank(random_matrix(2, 16, 24) * size)})


def head_edit(model: PreTrainedModel, size: float = 0.1) -> Edit:
    """Updates of three rows of the head."""
    rows_K = torch.tensor([5, 12, 40])
    update = LowRank(random_matrix(0, 3, 16) * size, rows_K=rows_K, num_outputs=VOCAB)
    return Edit({find_sites(model)[-1]: update})


def both_edits(model: PreTrainedModel) -> Edit:
    return Edit({**mlp_edit(model).updates, **head_edit(model).updates})


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS_BL).logits
    return found


def reload(folder: Path) -> Any:
    """The checkpoint as any user of transformers loads it; nothing in it is missing or unused."""
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    options = {"dtype": "auto", "attn_implementation": "eager", "output_loading_info": True}
    model, report = load(folder, **options)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def tensors(folder: Path) -> dict[str, bytes]:
    """Bytes of every tensor of a checkpoint, by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name).contiguous()
                found[name] = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return found


def write(folder: Path, model: PreTrainedModel, edit: Edit, **how: Any) -> tuple[Path, Path]:
    """Folders of the unedited and of the edited checkpoint."""
    base, out = folder / "base", folder / "out"
    save_model(base, model, **how)
    out.mkdir()
    roundings = write_edited(base, edit, out)
    assert [rounding.site for rounding in roundings] == [site.name for site in edit.updates]
    return base, out


def publish(work: Path, base: Path, edit: Edit) -> None:
    """Write the edited checkpoint as an artifact; a failure leaves none."""
    place = Place(work=str(work), store=str(work / "store"))

    def make(out: Path) -> None:
        write_edited(base, edit, out)

    try:
        place.cached("apply", {"edit": 1}, make)
    finally:
        assert residue(work) == []
        assert place.open().find("apply", {"edit": 1}) is None


def undo(out: Path, edit: Edit) -> dict[str, bytes]:
    """The tensors of the edited checkpoint once the originals are put back."""
    originals = load_file(out / "edit" / "undo.safetensors")
    for site, update in edit.updates.items():
        path, stored = next(
            (path, header[site.tensor])
            for path in sorted(out.glob("*.safetensors"))
            if site.tensor in (header := read_header(path))
        )
        weight = mapped(path, stored, write=True)
        if update.rows_K is None:
            weight.copy_(originals[site.tensor])
        else:
            weight[originals[f"{site.tensor}.rows"]] = originals[f"{site.tensor}.values"]
        del weight
    return tensors(out)


@every_model
@pytest.mark.parametrize("make", [mlp_edit, head_edit, both_edits])
def test_the_reloaded_checkpoint_is_the_edited_model(
    make: Callable[[PreTrainedModel], Edit], family: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model(family, tied=tied)
    edit = make(model)
    base, out = write(tmp_path, model, edit)
    before = logits(reload(base))
    torch.testing.assert_close(before, logits(model), rtol=0, atol=0)
    with edited(model, edit):
        expected = logits(model)
    found = logits(reload(out))
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@every_model
def test_only_edited_tensors_change_and_undo_restores_every_bit(
    family: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny_model(family, tied=tied)
    edit = both_edits(model)
    base, out = write(tmp_path, model, edit)
    before, after = tensors(base), tensors(out)
    head = find_sites(model)[-1].tensor
    changed = {name for name in before if after[name] != before[name]}
    assert changed | {head} == {site.tensor for site in edit.updates}
    assert set(after) - set(before) == ({head} if tied else set())
    restored = undo(out, edit)
    assert {name: restored[name] for name in before} == before


@pytest.mark.parametrize("family", [family for family, tied in MODELS if tied])
def test_a_tied_head_gets_its_own_tensor_and_the_embedding_stays(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(family, tied=True)
    base, out = write(tmp_path, model, head_edit(model))
    before, after = reload(base), reload(out)
    assert is_tied(before)
    assert not is_tied(after)
    assert torch.equal(embedding_VD(after), embedding_VD(before))
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    head = find_sites(after)[-1].weight_MN(after)
    changed = (head != embedding_VD(after)).any(1).nonzero().flatten().tolist()
    assert changed == [5, 12, 40]


@pytest.mark.parametrize("family", [family for family, tied in MODELS if tied])
def test_an_mlp_edit_leaves_a_tied_model_tied(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tied=True)
    base, out = write(tmp_path, model, mlp_edit(model))
    assert is_tied(reload(out))
    assert sorted(path.name for path in out.glob("*.*")) == sorted(
        path.name for path in base.glob("*.*")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_checkpoint_is_edited_in_its_own_dtype(
    tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("llama", tied=tied, dtype=dtype)
    edit = both_edits(model)
    base, out = write(tmp_path, model, edit, max_shard_size="4KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(out))
    assert {path.name for path in out.glob("*.safetensors")} == set(index["weight_map"].values())
    with edited(model, edit):
        expected = logits(model)
    found = reload(out)
    assert found.dtype == dtype
    torch.testing.assert_close(logits(found), expected, rtol=0, atol=0)
    assert {name: undo(out, edit)[name] for name in tensors(base)} == tensors(base)


def test_the_size_is_known_before_anything_is_copied(tmp_path: Path) -> None:
    model = tiny_model("llama")
    base, out = write(tmp_path, model, mlp_edit(model))
    assert checkpoint_bytes(base) == (base / "model.safetensors").stat().st_size
    assert checkpoint_bytes(out) == checkpoint_bytes(base)


def test_tokenizer_and_template_come_along_and_marks_of_the_store_do_not(tmp_path: Path) -> None:
    model = tiny_model("llama")
    base, out = save_model(tmp_path / "base", model), tmp_path / "out"
    for name in ("_SUCCESS.json", "facts.json"):
        (base / name).write_text("{}")
    out.mkdir()
    write_edited(base, mlp_edit(model), out)
    names = {path.name for path in base.iterdir()} - {"_SUCCESS.json", "facts.json"}
    assert {path.name for path in out.iterdir()} == names | {"edit"}


def test_the_stored_edit_applied_to_the_base_gives_the_same_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("gpt2", tied=True)
    edit = both_edits(model)
    base, out = write(tmp_path, model, edit)
    save_edit(out / "edit", edit, {})
    again = tmp_path / "again"
    again.mkdir()
    write_edited(base, load_edit(out / "edit"), again)
    assert tensors(again) == tensors(out)


def test_a_checkpoint_with_other_names_is_refused_with_the_cure(tmp_path: Path) -> None:
    model = tiny_model("gpt2", tied=True)
    base = save_model(tmp_path / "base", model)
    stored = load_file(base / "model.safetensors")  # as `openai-community/gpt2` names them
    renamed = {name.removeprefix("transformer."): value for name, value in stored.items()}
    save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    for edit in (mlp_edit(model), head_edit(model)):
        with pytest.raises(MissingTensor, match=r"no tensor named .*weight.*`save_pretrained`"):
            publish(tmp_path / "work", base, edit)


def test_an_edit_erased_by_rounding_leaves_no_artifact(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    base = save_model(tmp_path / "base", model)
    with pytest.raises(ErasedByRounding, match=r"layers\.0\..*0 weights changed.*bfloat16.*Raise"):
        publish(tmp_path / "work", base, mlp_edit(model, size=1e-9))
