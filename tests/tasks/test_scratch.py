"""Housekeeping of a work folder: a folder in use stays, whoever uses it and however."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tasks.claims import claim, finish
from tasks.folder import held
from tasks.place import Place
from tasks.scratch import clean_scratch, trim_cache
from tasks.store import Store
from tasks.submit import submit
from tests.faulty import QUICK

DAY_S = 86400.0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A store and a work folder."""
    (tmp_path / "work/scratch").mkdir(parents=True)
    return Place(work=str(tmp_path / "work"), store=str(tmp_path / "store"))


def write(place: Place, name: str, days: float = 0.0, size: int = 1, read_days: float = 99) -> Path:
    """A file in the work folder that was written, and read, so many days ago."""
    path = Path(place.work) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    now = time.time()
    os.utime(path, (now - min(days, read_days) * DAY_S, now - days * DAY_S))
    for folder in path.parents:
        if folder.is_relative_to(Path(place.work) / "scratch") or folder.parent.name == "reports":
            os.utime(folder, (now - days * DAY_S, now - days * DAY_S))
    return path


def short(place: Place, places: tuple[str, ...]) -> set[str]:
    """Names below the work folder."""
    return {str(Path(one).relative_to(place.work)) for one in places}


def files(place: Place) -> list[Path]:
    """Everything in the work folder."""
    return sorted(Path(place.work).rglob("*"))


def taken(place: Place, batch: str, owner: str, tmp_path: Path, *, end: bool = False) -> None:
    """A batch that a worker has, or had."""
    store = Store(place.store, tmp_path, patience=QUICK)
    path = tmp_path / f"{batch}.jsonl"
    path.write_text(json.dumps({"request_id": "r", "text": "t"}))
    submit([path], store, batch)
    claimed = claim(batch, owner, store)
    assert claimed is not None
    if end:
        finish(claimed, store)


def test_what_nobody_touched_for_a_day_goes(place: Place, tmp_path: Path) -> None:
    for folder in ("drafts/1", "sweep-1", "forget/dead", "inbox/b-0123456789abcdef"):
        write(place, f"scratch/{folder}/file", days=2, size=10)
    write(place, "scratch/.clock.x", days=2)
    write(place, "scratch/journals/old.jsonl", days=31)
    write(place, "reports/old/report.html", days=91)
    for name in ("journals/new.jsonl", "fetched/count/abc/file"):
        write(place, f"scratch/{name}", days=29)
    for name in ("drafts/2/file", "sweep-2/file", "forget/young/file"):
        write(place, f"scratch/{name}", days=0.9)
    write(place, "reports/new/report.html", days=89)
    write(place, "mlflow.db", days=999)
    before = files(place)
    would = clean_scratch.fn(place, dry_run=True)
    assert files(place) == before
    assert clean_scratch.fn(place) == would
    assert would.num_bytes == 4 * 10 + 3
    assert short(place, would.places) == {
        "scratch/drafts/1",
        "scratch/sweep-1",
        "scratch/forget/dead",
        "scratch/inbox/b-0123456789abcdef",
        "scratch/.clock.x",
        "scratch/journals/old.jsonl",
        "reports/old",
    }
    assert not any(Path(one).exists() for one in would.places)
    assert clean_scratch.fn(place).places == ()


def test_one_young_file_protects_a_folder(place: Place) -> None:
    write(place, "scratch/drafts/1/deep/young", days=0.5)
    write(place, "scratch/drafts/1/old", days=9)
    assert clean_scratch.fn(place).places == ()


def test_a_lock_protects_a_folder(place: Place) -> None:
    folder = write(place, "scratch/drafts/1/file", days=9).parent
    with held(folder):
        assert clean_scratch.fn(place).places == ()
    assert clean_scratch.fn(place).places == (str(folder),)


def test_a_live_claim_protects_its_run_and_its_batch(place: Place, tmp_path: Path) -> None:
    taken(place, "live", "run-1", tmp_path)
    taken(place, "over", "run-2", tmp_path, end=True)
    for run in ("run-1", "run-2"):
        write(place, f"scratch/forget/{run}/x.jsonl", days=9)
    for batch in ("live", "over"):
        write(place, f"scratch/inbox/{batch}-0123456789abcdef/requests.jsonl", days=9)
    assert short(place, clean_scratch.fn(place).places) == {
        "scratch/forget/run-2",
        "scratch/inbox/over-0123456789abcdef",
    }


def test_a_wrong_clock_of_this_machine_does_not_count(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, "scratch/drafts/1/file")
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + 9 * DAY_S)
    assert clean_scratch.fn(place).places == ()


def test_nothing_to_clean_is_no_error(tmp_path: Path) -> None:
    place = Place(work=str(tmp_path / "none"), store=str(tmp_path / "store"))
    assert clean_scratch.fn(place).places == trim_cache.fn(place).places == ()
    assert not (tmp_path / "none").exists()


def test_downloads_go_by_age_and_by_size(place: Place, tmp_path: Path) -> None:
    for key, days in {"a": 40, "b": 20, "c": 10, "d": 0.5}.items():
        write(place, f"scratch/fetched/count/{key}/file", days=days, size=100)
    write(place, "scratch/fetched/count/e/file", days=50, size=100, read_days=2)

    def trimmed(max_bytes: float) -> set[str]:
        would = trim_cache.fn(place, max_bytes, 30.0, dry_run=True)
        assert would.num_bytes == 100 * len(would.places)
        return {Path(one).name for one in would.places}

    assert trimmed(1e9) == {"a"}
    assert trimmed(400) == {"a"}
    assert trimmed(300) == {"a", "b"}
    assert trimmed(200) == {"a", "b", "c"}
    assert trimmed(0) == {"a", "b", "c", "e"}
    taken(place, "live", "run-1", tmp_path)
    assert trimmed(0) == {"a", "b", "c"}  # `e` was read two days ago, perhaps by this run
    done = trim_cache.fn(place, 300.0, 30.0)
    assert {Path(one).name for one in done.places} == {"a", "b"}
    assert trim_cache.fn(place, 300.0, 30.0).places == ()
    assert (Path(place.work) / "scratch/fetched/count/c/file").exists()
