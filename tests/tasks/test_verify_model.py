"""A model's bytes contain the edit of its certificate: base + P, and nothing else was touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from grom.apply import Edit
from grom.certificate import Certificate
from tasks.certified import EDIT_FILES, untouched_sha256
from tasks.store import RESERVED
from tasks.tensors import model_files, read_header
from tasks.undo import need_undo
from tasks.verify_model import fits, verify_model
from tests.documents import HASH, a_certificate
from tests.edits import edited_checkpoint, every_edit, flip, head_edit

Folders = tuple[Path, Certificate]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def certified(folder: Path) -> Certificate:
    """A certificate that fits a checkpoint's bytes."""
    undo, plain = need_undo(folder / "edit"), a_certificate()
    model = plain.model.model_copy(
        update={
            "files": {name: sha256(folder / name) for name in model_files(folder, RESERVED)},
            "untouched_sha256": untouched_sha256(folder, undo.edited),
        }
    )
    edit = plain.edit.model_copy(
        update={
            "files": {name: sha256(folder / "edit" / name) for name in EDIT_FILES},
            "edited": undo.edited,
            "alpha_sha256": HASH,
        }
    )
    return a_certificate(model=model, edit=edit)


def failures(certificate: Certificate, folder: Path) -> dict[str, str]:
    checks = verify_model(certificate, folder, None)
    return {check.name: check.detail for check in checks if check.state == "failed"}


@pytest.fixture
def edited(tmp_path: Path) -> Folders:
    _, folder = edited_checkpoint(tmp_path)
    return folder, certified(folder)


@every_edit
@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [("llama", False, torch.float32), ("gpt2", True, torch.bfloat16)],
)
def test_every_kind_of_edit_holds(
    tmp_path: Path,
    make: Callable[[PreTrainedModel], Edit],
    family: str,
    tied: bool,
    dtype: torch.dtype,
) -> None:
    _, folder = edited_checkpoint(tmp_path, family, make, tied=tied, dtype=dtype)
    assert {check.state for check in verify_model(certified(folder), folder, None)} == {"ok"}


def test_any_file_of_the_model_with_another_byte_is_named(edited: Folders) -> None:
    folder, certificate = edited
    for name in model_files(folder):
        whole = (folder / name).read_bytes()
        for at in (len(whole) // 3, -2):
            flip(folder / name, at)
            assert name in failures(certificate, folder)["model files"]
            (folder / name).write_bytes(whole)
    assert failures(certificate, folder) == {}


def test_a_changed_tensor_is_named(edited: Folders) -> None:
    folder, certificate = edited
    path = folder / "model.safetensors"
    header, whole = read_header(path), path.read_bytes()
    touched = max(certificate.edit.edited)
    flip(path, header[touched].start)
    found = failures(certificate, folder)
    assert touched in found["model tensors"]
    assert f"{touched}, row 0: not the original plus the edit" in found["edit in the model"]
    path.write_bytes(whole)
    other = next(name for name in header if name not in certificate.edit.edited)
    flip(path, header[other].start)
    found = failures(certificate, folder)
    assert "a tensor that the edit left alone" in found["model tensors"]
    assert "edit in the model" not in found


@pytest.mark.parametrize("name", EDIT_FILES)
def test_a_changed_file_of_the_edit_is_named(edited: Folders, name: str) -> None:
    folder, certificate = edited
    flip(folder / "edit" / name, -6)
    assert name in " ".join(failures(certificate, folder).values())


def test_originals_that_were_exchanged_do_not_add_up(edited: Folders) -> None:
    folder, certificate = edited
    path = folder / "edit" / "undo.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name in certificate.edit.edited)
    tensors[name][1, 0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert f"{name}, row 1" in failures(certificate, folder)["edit in the model"]


def test_a_row_of_the_head_that_was_edited_and_put_back_is_found(tmp_path: Path) -> None:
    base, folder = edited_checkpoint(tmp_path, make=head_edit)
    certificate = certified(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][5] = load_file(base / "model.safetensors")["lm_head.weight"][5]
    save_file(tensors, path, metadata={"format": "pt"})
    assert "lm_head.weight, row 5" in failures(certificate, folder)["edit in the model"]


def test_the_base_an_empty_folder_and_added_files_fail(edited: Folders, tmp_path: Path) -> None:
    folder, certificate = edited
    assert "edit in the model" in failures(certificate, tmp_path / "base")
    (tmp_path / "empty").mkdir()
    assert "edit in the model" in failures(certificate, tmp_path / "empty")
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    assert "more.safetensors" in failures(certificate, folder)["model files"]


def test_the_same_tensors_in_other_files_hold(edited: Folders) -> None:
    folder, certificate = edited
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    split(folder, sorted(whole)[::2], sorted(whole)[1::2], whole)
    assert failures(certificate, folder) == {}


def split(folder: Path, first: list[str], second: list[str], tensors: dict[str, Tensor]) -> None:
    """Two files with an index, as transformers reads them."""
    where: dict[str, str] = {}
    for number, names in enumerate((first, second), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        part = {name: tensors[name].clone() for name in names}
        save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_what_transformers_loads_counts(edited: Folders, tmp_path: Path) -> None:
    """The unedited weights where they are loaded, and the edited tensors in a file beside them."""
    folder, certificate = edited
    base = load_file(tmp_path / "base" / "model.safetensors")
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    split(folder, sorted(base)[::2], sorted(base)[1::2], base)
    own = {name: whole[name] for name in certificate.edit.edited}
    save_file(own, folder / "z.safetensors", {"format": "pt"})
    assert "z.safetensors" in failures(certificate, folder)["model files"]
    (folder / "z.safetensors").unlink()
    assert "model tensors" in failures(certificate, folder)
    split(folder, sorted(whole)[::2], sorted(whole), whole)
    assert "model-00001-of-00002.safetensors" in failures(certificate, folder)["model files"]
    split(folder, sorted(whole)[::2], sorted(whole)[1::2], whole)
    assert failures(certificate, folder) == {}
    (folder / "adapter_model.bin").write_bytes(b"weights")
    assert "adapter_model.bin" in failures(certificate, folder)["model files"]


def test_a_sum_that_nearly_cancels_is_still_the_original_plus_the_edit() -> None:
    before = torch.tensor([[0.014763355255126953]])
    update = torch.tensor([[-0.01476524739060916]], dtype=torch.float64)
    now = torch.tensor([[-1.8921355149359442e-06]])
    assert bool(fits(now, before, update).all())
    assert not bool(fits(now * (1 + 1e-4), before, update).any())
