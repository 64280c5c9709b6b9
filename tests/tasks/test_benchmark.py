"""A benchmark's rows are found, read once and hashed; what is missing or wrong is named first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasks.benchmark
from grom.benchmarks import BENCHMARKS
from grom.errors import ConfigError, DataError, EmptySet, MissingInput
from tasks.benchmark import BenchmarkRef, benchmark_with, load_benchmark
from tasks.tables import table_rows
from tests.exams import TOFU_FILES, write_tofu
from tests.tiny import CANARY, write_rows

NAME = "tofu_forget01"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tofu(tmp_path / "tofu")


def loaded(root: Path, **how: object) -> BenchmarkRef:
    found: BenchmarkRef = load_benchmark.fn(NAME, str(root), **how)  # type: ignore[arg-type]
    return found


def test_every_split_is_read_and_its_rows_are_counted(root: Path) -> None:
    found = loaded(root)
    assert found.num_rows == {"forget": 4, "retain": 4, "real authors": 4, "world facts": 4}
    assert found.num_items == len(found.items()) == 4 * 9 + 4 * 8 + 8 * 5
    assert all(address.startswith("file://") for address in found.addresses.values())


def test_a_limit_takes_so_many_rows_of_each_split(root: Path) -> None:
    found = loaded(root, limit=1)
    assert found.num_items == 9 + 8 + 2 * 5
    assert {item.row for item in found.items()} == {0}
    assert found.num_rows["forget"] == 4
    whole = loaded(root).items()
    assert found.items() == [item for item in whole if item.row == 0]
    assert {item.row for item in loaded(root, limit=2).items()} == {0, 2}  # spread evenly
    assert loaded(root, limit=4).digest == loaded(root).digest != found.digest


def test_the_digest_is_of_what_is_asked_and_not_of_where_it_lies(
    root: Path, tmp_path: Path
) -> None:
    elsewhere = write_tofu(tmp_path / "copy")
    assert loaded(elsewhere).digest == loaded(root).digest
    lines = (root / "forget01_perturbed.json").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    write_rows(elsewhere / "forget01_perturbed.json", [{**row, "id": 1} for row in rows])
    assert loaded(elsewhere).digest == loaded(root).digest
    write_rows(elsewhere / "forget01_perturbed.json", [{**row, "answer": "w9"} for row in rows])
    assert loaded(elsewhere).digest != loaded(root).digest


def test_a_split_may_lie_elsewhere_and_optional_ones_may_be_missing(root: Path) -> None:
    moved = (root / "forget01_perturbed.json").rename(root.parent / "mine.jsonl")
    found = loaded(root, splits={"forget": str(moved)})
    assert found.addresses["forget"] == str(moved)
    assert "holdout" not in found.addresses
    write_rows(root / "holdout01.json", [{"question": "w9", "answer": "w10"}])
    assert loaded(root, splits={"forget": str(moved)}).num_items == found.num_items + 1


def test_a_missing_split_is_named_with_the_ways_to_give_it(root: Path) -> None:
    (root / "retain_perturbed.json").unlink()
    with pytest.raises(MissingInput) as caught:
        loaded(root)
    said = str(caught.value)
    assert said.startswith(f"{root}: no retain_perturbed (.json,")
    assert "--split 'retain=FILE'" in said
    assert "--data hub" in said
    with pytest.raises(MissingInput, match=r"absent\.json"):
        loaded(root, splits={"retain": str(root / "absent.json")})


def test_what_the_hub_does_not_give_is_said_with_the_other_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError(CANARY)

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(MissingInput, match=r"\(ConnectionError\)\..*with --data") as caught:
        load_benchmark.fn("zsre", "hub")
    assert str(caught.value).startswith("hub:zjunlp/KnowEdit:zsre:test: the hub did not give it")
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize("split", ["forget", "world facts"])
def test_an_empty_split_is_refused(root: Path, split: str) -> None:
    file = {"forget": "forget01_perturbed", "world facts": "world_facts_perturbed"}[split]
    write_rows(root / f"{file}.json", [])
    with pytest.raises(EmptySet, match=f"{file}.json: the {split} set has no rows"):
        loaded(root)


def test_an_unknown_benchmark_or_split_is_answered_with_those_there_are(root: Path) -> None:
    with pytest.raises(ConfigError, match="no benchmark 'tofu'; there are counterfact, mmlu"):
        load_benchmark.fn("tofu", str(root))
    message = "tofu_forget01 has no split 'forgot'; it has forget, retain, real authors"
    with pytest.raises(ConfigError, match=message):
        loaded(root, splits={"forgot": "file"})
    assert benchmark_with(NAME, {"forget": "file"}) is BENCHMARKS[NAME]


@pytest.mark.parametrize("file", TOFU_FILES)
def test_a_row_in_another_layout_is_named_without_its_content(root: Path, file: str) -> None:
    path = root / f"{file}.json"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    del rows[2]["perturbed_answer"]
    write_rows(path, rows)
    with pytest.raises(DataError, match=r"row 3: `perturbed_answer` is missing") as caught:
        loaded(root)
    assert CANARY not in str(caught.value)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(DataError, match=re.escape(f"{file}.json, line 4: not JSON")) as caught:
        loaded(root)
    assert CANARY not in str(caught.value)


def test_rows_that_change_between_two_models_are_not_asked(root: Path) -> None:
    found = loaded(root)
    assert len(found.items()) == found.num_items
    write_tofu(root, 5)
    with pytest.raises(DataError, match="files changed while the run was reading them"):
        found.items()


def test_a_limit_beyond_the_rows_asks_all(root: Path) -> None:
    found = loaded(root, limit=99)
    assert replace(found.items()[0]) == loaded(root).items()[0]
    assert found.num_items == loaded(root).num_items


def test_an_optional_split_that_the_hub_lacks_is_left_out_with_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hub(address: str) -> Iterator[Mapping[str, Any]]:
        _, _, config, _ = address.split(":")
        if "holdout" in config:
            raise MissingInput(address, "no such configuration")
        return table_rows(str(next(root.glob(f"{config}.*"))))

    monkeypatch.setattr(tasks.benchmark, "table_rows", hub)
    found = load_benchmark.fn(NAME, "hub")
    assert found.num_rows == dict.fromkeys(("forget", "retain", "real authors", "world facts"), 4)
    assert "split 'holdout' left out" in caplog.text
    with pytest.raises(MissingInput):
        load_benchmark.fn(NAME, "hub", splits={"holdout": "hub:x:holdout:train"})
