"""Codecs: what is read is what was written, to the bit, and no pickle is ever opened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grom.apply import Edit
from grom.errors import MissingInput
from grom.sites import Site
from grom.target import LowRank
from tasks.codecs import (
    load_edit,
    read_json,
    read_table,
    save_edit,
    write_json,
    write_table,
)


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor: -0.0 is not 0.0, and NaN is NaN."""
    return tensor.contiguous().numpy().tobytes()


def test_an_absent_edit_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"edit\.json"):
        load_edit(tmp_path)


def an_edit() -> Edit:
    """One update of each form; two share a factor, as targets of several sites may."""
    left = torch.randn(3, 8).double().mT
    return Edit(
        {
            Site("model.layers.1.mlp.down_proj", "mlp", 1): LowRank(
                torch.randn(3, 6).double(), left_MK=left
            ),
            Site("transformer.h.2.mlp.c_proj", "mlp", 2, inputs_first=True): LowRank(
                torch.randn(3, 6).double(), left_MK=left
            ),
            Site("model.layers.3.mlp.down_proj", "mlp", 3): LowRank(
                torch.randn(8, 6).double().mT[:, :4]
            ),
            Site("lm_head", "head", None): LowRank(
                torch.randn(2, 6).double(), rows_K=torch.tensor([7, 1]), num_outputs=40
            ),
        }
    )


def test_edits_come_back_to_the_bit(tmp_path: Path) -> None:
    edit = an_edit()
    save_edit(tmp_path, edit, {"rho": 0.03})
    loaded = load_edit(tmp_path)
    assert list(loaded.updates) == list(edit.updates)
    for site, update in edit.updates.items():
        found = loaded.updates[site]
        assert found.num_outputs == update.num_outputs
        for part in ("right_KN", "left_MK", "rows_K"):
            before, after = getattr(update, part), getattr(found, part)
            assert (before is None) == (after is None)
            if before is not None:
                assert before.dtype == after.dtype
                assert bits(before) == bits(after)
    assert read_json(tmp_path / "edit.json")["facts"] == {"rho": 0.03}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edit.json", "edit.safetensors"]


def test_the_same_edit_gives_the_same_bytes(tmp_path: Path) -> None:
    edit, written = an_edit(), set()
    for name in "abcde":
        (tmp_path / name).mkdir()
        save_edit(tmp_path / name, edit, {})
        written.add((tmp_path / name / "edit.safetensors").read_bytes())
    assert len(written) == 1


@dataclass(frozen=True)
class Row:
    """One of each column type."""

    digest: str
    num_tokens: int
    score: float
    kept: bool
    layer: int | None = None
    note: "str | None" = None  # noqa: UP037 - a hint may be a string


def test_tables_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        Row("a", 2**62, 0.1, True, 3, "ü"),
        Row("", -1, -0.0, False),
        Row("b", 0, math.inf, True),
    ]
    write_table(tmp_path / "t.parquet", rows)
    assert read_table(tmp_path / "t.parquet", Row) == rows
    write_table(tmp_path / "n.parquet", [Row("a", 1, math.nan, True)])
    assert math.isnan(read_table(tmp_path / "n.parquet", Row)[0].score)


def test_a_column_of_dates_stays_text(tmp_path: Path) -> None:
    rows = [Row("2024-01-01", 1, 1, True)]
    write_table(tmp_path / "t.parquet", rows)
    assert read_table(tmp_path / "t.parquet", Row)[0].digest == "2024-01-01"


def test_an_empty_table_needs_its_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs `kind`"):
        write_table(tmp_path / "t.parquet", [])
    write_table(tmp_path / "t.parquet", [], Row)
    assert read_table(tmp_path / "t.parquet", Row) == []


def test_a_table_of_another_type_is_refused(tmp_path: Path) -> None:
    @dataclass
    class Other:
        digest: str
        values: list[int]

    write_table(tmp_path / "t.parquet", [Row("a", 1, 1, True)])
    with pytest.raises(TypeError, match=r"Other\.values"):
        read_table(tmp_path / "t.parquet", Other)
    Other.__annotations__["values"] = int
    with pytest.raises(ValueError, match="not the fields of Other"):
        read_table(tmp_path / "t.parquet", Other)


def test_json_keeps_numbers_and_spells_out_what_json_lacks(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": (0.1, math.inf), "a": {"x": math.nan, "y": None}})
    assert (tmp_path / "a.json").read_bytes() == b'{"a":{"x":"nan","y":null},"b":[0.1,"inf"]}'
    assert float(read_json(tmp_path / "a.json")["b"][1]) == math.inf
