"""Small forget sets in the solve stage: which way is taken, and that the edit is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grom.config import CollectConfig, DataConfig, RidgeConfig, SelectConfig, TargetConfig
from tasks import small, solve
from tasks.artifacts import CorruptArtifact
from tasks.codecs import load_edit, read_json, read_table
from tasks.collect import merge_forget
from tasks.place import CollectRef, EditRef
from tasks.solver import SiteReport
from tasks.statistics import load_moments, moment_names
from tests.stages import Stages, stages
from tests.tiny import forget_rows, residue, write_rows

EXACT = 1e-9
"""Relative; float32 keys, sums and solve in float64."""
KEPT = CollectConfig(keep_request_keys=True)
CACHED = RidgeConfig(cache_retain=True)
CASES: dict[str, dict[str, Any]] = {
    "joint": {"select": SelectConfig(layers=(1, 2))},
    "one by one": {"select": SelectConfig(layers=(0, 2), joint=False)},
    "head": {"select": SelectConfig(site="head")},
    "suppression": {"target": TargetConfig(kind="suppression")},
    "corruption": {"target": TargetConfig(kind="corruption", seed=3)},
}


@pytest.fixture
def base(tmp_path: Path) -> Stages:
    return on(stages(tmp_path), 0, 2).but(collect=KEPT, ridge=CACHED)


def on(run: Stages, first: int, last: int) -> Stages:
    """The same run on some rows."""
    path = write_rows(run.work.parent / f"rows-{first}-{last}.jsonl", forget_rows(9)[first:last])
    return run.but(forget=DataConfig(uri=str(path)))


def solved(run: Stages, forget: CollectRef) -> EditRef:
    return solve.solve.fn(
        run.model, (run.kept,), forget, run.sites, run.config.ridge, run.config.target, run.place
    )


def how(run: Stages, edit: EditRef) -> Any:
    return read_json(run.place.fetch(edit.artifact) / "facts.json").get("how")


def same(run: Stages, edit: EditRef, expected: EditRef) -> None:
    one, other = (load_edit(run.place.fetch(ref.artifact)).updates for ref in (edit, expected))
    assert one.keys() == other.keys()
    for site, update in other.items():
        difference = float((one[site].dense() - update.dense()).norm())
        assert difference <= EXACT * update.norm()
    assert edit.nats_per_beta == pytest.approx(expected.nats_per_beta, rel=EXACT)
    reports = (
        read_table(run.place.fetch(ref.artifact) / "sites.parquet", SiteReport)
        for ref in (edit, expected)
    )
    for mine, theirs in zip(*reports, strict=True):
        for name in SiteReport.__dataclass_fields__:
            if name != "condition":  # estimated in two ways
                wanted = getattr(theirs, name)
                if not isinstance(wanted, str):
                    wanted = pytest.approx(wanted, rel=EXACT, nan_ok=True)
                assert getattr(mine, name) == wanted, name


@pytest.mark.parametrize("case", CASES)
def test_a_small_set_gives_the_edit_of_the_whole_system(
    case: str, base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = base.but(**CASES[case])
    monkeypatch.setattr(small, "MAX_SHARE", 1)  # a tiny model has few inputs
    edit = solved(run, run.moved)
    assert how(run, edit) == "woodbury"
    monkeypatch.setattr(small, "MAX_SHARE", 0)
    whole = solved(run, run.moved)
    assert how(run, whole) is None
    same(run, edit, whole)
    assert residue(run.work) == []


def test_the_next_batch_reads_the_factor_and_no_gram(
    base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved(base, base.moved)
    (folder,) = (base.work / "store" / "factor").iterdir()
    following = on(base, 2, 4)
    forget, _ = following.moved, following.kept

    def read(*_: Any) -> Any:
        raise AssertionError("moments were read")

    monkeypatch.setattr(small, "read_moments", read)
    monkeypatch.setattr(solve, "read_moments", read)
    edit = solved(following, forget)
    assert how(following, edit) == "woodbury"
    assert list((base.work / "store" / "factor").iterdir()) == [folder]
    monkeypatch.undo()
    monkeypatch.setattr(small, "MAX_SHARE", 0)
    same(following, edit, solved(following, forget))


def test_batches_together_are_solved_from_the_keys_of_each(
    base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, both = on(base, 2, 4), on(base, 0, 4)
    union = merge_forget.fn((base.moved, other.moved), base.place)
    monkeypatch.setattr(small, "MAX_SHARE", 1)
    edit = solved(base, union)
    assert how(base, edit) == "woodbury"
    monkeypatch.setattr(small, "MAX_SHARE", 0)
    same(base, edit, solved(both, both.moved))


def test_a_batch_whose_keys_were_not_kept_is_solved_as_a_whole(
    base: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MAX_SHARE", 1)
    without = on(base, 2, 4).but(collect=CollectConfig())
    assert how(base, solved(base, without.moved)) is None
    union = merge_forget.fn((base.moved, without.moved), base.place)
    assert how(base, solved(base, union)) is None


def test_many_keys_are_solved_as_a_whole(base: Stages) -> None:
    many = on(base, 0, 9)
    assert how(many, solved(many, many.moved)) is None


def test_without_the_setting_nothing_is_kept(base: Stages) -> None:
    plain = base.but(ridge=RidgeConfig())
    assert how(plain, solved(plain, plain.moved)) is None
    assert not (plain.work / "store" / "factor").exists()


def test_the_gram_of_a_few_keys_comes_back_from_them_to_the_bit(base: Stages) -> None:
    """It is N^2 numbers, and would be most of what a small batch writes."""
    kept, plain = base.moved, base.but(collect=CollectConfig()).moved
    folders = [base.place.fetch(ref.artifact) for ref in (kept, plain)]
    assert [bool(list(folder.glob("*.gram.npy"))) for folder in folders] == [False, True]
    assert moment_names(folders[0]) == moment_names(folders[1]) != []
    for name in moment_names(folders[0]):
        mine, theirs = (load_moments(folder, name) for folder in folders)
        assert torch.equal(mine.gram_NN, theirs.gram_NN)
    many = on(base, 0, 9)
    assert list(many.place.fetch(many.moved.artifact).glob("*.gram.npy")) != []


def test_a_damaged_factor_is_refused(base: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    solved(base, base.moved)
    (path,) = (base.work / "store" / "factor").rglob("*.lower.npy")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    following = on(base, 2, 4)
    with pytest.raises(CorruptArtifact, match=r"lower\.npy"):
        solved(following, following.moved)
