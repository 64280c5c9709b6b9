"""The housekeeping flow: a dry run touches nothing, a broken step does not stop the others."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter

from flows import housekeeping as module
from flows.housekeeping import NotTidied, housekeeping, report
from flows.service import ServiceConfig
from tasks.bucket import Bucket
from tasks.claims import claim, finish
from tasks.housekeep import Tidied
from tasks.tracking import client_of, open_run
from tests.services import bucket_of, put, requests, service

pytestmark = pytest.mark.usefixtures("prefect_server")
DAYS_S = 2 * 86400.0
KEY = "0c7a3c4e-0000-4000-8000-000000000001"
"""Of a run that no server knows."""


@pytest.fixture
def cfg(tmp_path: Path) -> ServiceConfig:
    """A service that was killed at many points, days ago."""
    cfg = service(tmp_path)
    work, store = Path(cfg.work), Path(cfg.store)
    put(cfg, "done", requests(0), tmp_path)
    put(cfg, "waiting", requests(2), tmp_path)
    held = claim("done", KEY, bucket_of(cfg))
    assert held is not None
    finish(held, bucket_of(cfg))
    (store / "done/done.json").unlink()
    for name in ("scratch/drafts/1/raw", f"scratch/forget/{KEY}/done.jsonl"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text("row")
    (store / f"inbox/waiting/.forget-00002.jsonl.{32 * '0'}").write_text("row")
    (store / "count/0123456789abcdef").mkdir(parents=True)
    (store / "count/0123456789abcdef/file").write_text("x")
    open_run(cfg.tracking, work, name="r", tags={}, flow_run_id=KEY, run_key=KEY)
    then = time.time() - DAYS_S
    for root in (work / "scratch", store):
        for path in (root, *root.rglob("*")):
            os.utime(path, (then, then))
    return cfg


def contents(*roots: str) -> dict[str, str]:
    """Every file with its bytes and time."""
    return {
        str(path): f"{path.stat().st_mtime} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for root in roots
        for path in sorted(Path(root).rglob("*"))
        if path.is_file() and path.suffix not in (".db", ".db-wal", ".db-shm")
    }


def places(tidied: tuple[Tidied, ...]) -> dict[str, int]:
    """How many places each step had, if any."""
    return {one.step: len(one.places) for one in tidied if one.places}


def test_everything_is_tidied_once(cfg: ServiceConfig) -> None:
    before = contents(cfg.work, cfg.store)
    would = housekeeping(cfg, dry_run=True)
    assert contents(cfg.work, cfg.store) == before
    expected = {
        "outcomes published": 1,
        "raw requests erased": 2,  # in the inbox and in scratch
        "MLflow runs closed": 1,
        "unfinished uploads removed": 1,
        "orphans removed": 1,
        "scratch removed": 2,
    }
    assert places(would) == expected
    # What was erased with its batch is no scratch any more.
    assert places(housekeeping(cfg)) == expected | {"scratch removed": 1}
    assert places(housekeeping(cfg)) == {}
    kept = [entry.name for entry in Bucket(cfg.store).entries("inbox")]
    assert "inbox/waiting/forget-00001.jsonl" in kept
    assert "inbox/done/forget-00001.jsonl" not in kept
    (run,) = client_of(cfg.tracking, Path(cfg.work)).search_runs(["1"])
    assert run.info.status == "KILLED"


def test_a_broken_step_does_not_stop_the_others(
    cfg: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("tasks.reaper.close_stale", fails)
    with pytest.raises(NotTidied, match="housekeeping: MLflow runs failed"):
        housekeeping(cfg)
    assert not (Path(cfg.work) / "scratch/drafts/1").exists()
    assert not (Path(cfg.store) / "count/0123456789abcdef/file").exists()


def test_the_report_is_an_artifact(cfg: ServiceConfig) -> None:
    housekeeping(cfg, dry_run=True)
    wanted = ArtifactFilter.model_validate({"key": {"any_": ["housekeeping-report"]}})
    with get_client(sync_client=True) as client:
        texts = [str(one.data) for one in client.read_artifacts(artifact_filter=wanted)]
    assert any("a dry run" in text and "inbox/done/forget-00001.jsonl" in text for text in texts)


def test_a_long_report_is_cut() -> None:
    many = tuple(f"place-{number}" for number in range(module.SHOWN_PLACES + 3))
    text = report([Tidied(step="a", places=many, num_bytes=1234), Tidied(step="b")], dry_run=False)
    assert "| a | 23 | 1,234 |" in text
    assert "| b | 0 | 0 |" in text
    assert "`place-19`" in text
    assert "place-20" not in text
    assert "- and 3 more" in text
    assert "dry run" not in text
    assert "## b" not in text
