"""Damaged safetensors files are named before anything of them is believed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grom.errors import BrokenCheckpoint
from tasks.tensors import read_header, read_sizes, weight_places


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4)}, path)
    return path


@pytest.mark.parametrize("num_bytes", [0, 4, 7, 8, 20, -1])
def test_a_file_that_is_cut_off_is_named(num_bytes: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*cut off"):
        read_header(file)


@pytest.mark.parametrize("at", range(8))
def test_a_header_of_another_length_is_not_read(at: int, file: Path) -> None:
    """A flipped byte there would ask for terabytes."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0x80
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"no safetensors file|Expecting|header"):
        read_header(file)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    ],
)
def test_a_header_that_is_none_is_refused(header: object, file: Path) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(ValueError, match=r"header is damaged|cut off"):
        read_sizes(file)


def test_what_transformers_would_not_load_is_refused(file: Path) -> None:
    folder = file.parent
    assert sorted(weight_places(folder)) == ["a", "b"]
    save_file({"c": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(BrokenCheckpoint, match=r"more\.safetensors"):
        weight_places(folder)
    file.unlink()
    with pytest.raises(BrokenCheckpoint, match="neither"):
        weight_places(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"c": "more.safetensors"}}))
    assert sorted(weight_places(folder)) == ["c"]
    index.write_text(json.dumps({"weight_map": {"d": "more.safetensors"}}))
    with pytest.raises(BrokenCheckpoint, match=r"c is in more\.safetensors"):
        weight_places(folder)
