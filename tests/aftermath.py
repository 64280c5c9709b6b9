"""What a service holds after its runs, in a form that two histories can be compared by.

Names that differ from run to run (keys of runs, hashes of ledger segments, folders of scratch) are
replaced by `*`.  MLflow's database is read by SQL: whoever wrote it has no say in what it holds.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlparse

import torch

from flows.service import ServiceConfig
from tasks.erase import copies, is_raw
from tasks.folder import LOCK
from tasks.ledger import Ledger
from tests.services import bucket_of, dense_edit

Rows = list[tuple[str, ...]]
CHANGING = (
    (re.compile(r"^((?:runs|certificates)/[^/]+/)[^/]+/"), r"\1*/"),
    (re.compile(r"^(desks/)[^/]+\.json"), r"\1*.json"),
    (re.compile(r"^(ledger/\d+)-[0-9a-f]{16}"), r"\1-*"),
    (re.compile(r"^(load/)[^/]+/"), r"\1*/"),
    (re.compile(r"[0-9a-f]{32}"), "*"),
)


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The facts that must not depend on who was killed when."""

    champion: tuple[tuple[str, str], ...]
    """Files of the champion, with their sha256."""
    versions: tuple[tuple[str, ...], ...]
    """Number, batches, gate and aliases of each version."""
    lines: tuple[tuple[str | None, ...], ...]
    """Request, batch, version and state of each line of the ledger."""
    done: tuple[str, ...]
    failed: tuple[str, ...]
    runs: tuple[str, ...]
    """Status of each MLflow run, and whether its key is the only one of its kind."""
    raw: tuple[str, ...]
    """Rows of requests that still exist."""

    def differences(self, other: Aftermath) -> list[str]:
        """Names of the facts that differ."""
        names = [one.name for one in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def aftermath(cfg: ServiceConfig) -> Aftermath:
    """What the service holds."""
    bucket, scratch = bucket_of(cfg), Path(cfg.work) / "scratch"
    names = [entry.name for entry in bucket.entries(None)]
    raw = [name for name in names if name.startswith("inbox/") and is_raw(name)]
    raw += [str(path) for path, _ in copies(Path(cfg.work))]
    raw += [str(path) for path in scratch.rglob("*") if path.is_file() and "draft" in path.parts]
    return Aftermath(
        champion=_champion(cfg),
        versions=tuple(_versions(cfg)),
        lines=tuple(
            (line.request, line.batch, line.model_version, line.state)
            for line in Ledger(bucket).read()
        ),
        done=_ended("done/", names),
        failed=_ended("failed/", names),
        runs=_runs(cfg),
        raw=tuple(raw),
    )


def everything(cfg: ServiceConfig) -> Counter[str]:
    """All files of the store, hidden ones too, those in scratch, and models without a version."""
    store, work = Path(cfg.store), Path(cfg.work)
    found = [path.relative_to(store).as_posix() for path in store.rglob("*") if path.name != LOCK]
    found = [name for name in found if (store / name).is_file()]
    found += [
        path.relative_to(work).as_posix()
        for path in (work / "scratch").rglob("*")
        if path.is_file()
    ]
    found += ["model without a version"] * _num_orphan_models(cfg)
    return Counter(_plain(name) for name in found)


def assert_same_update(found: Path, expected: Path) -> None:
    """Both models differ from the base by the same P."""
    updates = dense_edit(found)
    for name, update_MN in dense_edit(expected).items():
        assert torch.dist(updates[name], update_MN) <= 1e-9 * update_MN.norm()


def champion_folder(cfg: ServiceConfig) -> Path | None:
    """Files of the model that is in service."""
    sources = _asked(
        cfg,
        "select coalesce(storage_location, source) from model_versions natural join"
        " (select name, version from registered_model_aliases where alias = 'champion')",
    )
    return Path(urlparse(sources[0][0]).path) if sources else None


def _plain(name: str) -> str:
    for pattern, instead in CHANGING:
        name = pattern.sub(instead, name)
    return name


def _ended(folder: str, names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(name.removeprefix(folder) for name in names if name.startswith(folder)))


def _champion(cfg: ServiceConfig) -> tuple[tuple[str, str], ...]:
    folder = champion_folder(cfg)
    if folder is None:
        return ()
    names = ("model.safetensors", "edit/edit.safetensors")
    return tuple((name, hashlib.sha256((folder / name).read_bytes()).hexdigest()) for name in names)


def _versions(cfg: ServiceConfig) -> Rows:
    number = "cast(version as text)"
    tag = "(select value from model_version_tags t where t.name = v.name and t.version = v.version"
    aliases = (
        "(select group_concat(alias) from (select alias from registered_model_aliases a"
        " where a.name = v.name and a.version = v.version order by alias))"
    )
    return _asked(
        cfg,
        f"select {number}, {tag} and key = 'batches'), {tag} and key = 'gate'), {aliases}"
        " from model_versions v where current_stage <> 'Deleted_Internal' order by v.version",
    )


def _runs(cfg: ServiceConfig) -> tuple[str, ...]:
    """Status of each run, and the key if two share it."""
    rows = _asked(
        cfg,
        "select status, value from runs left join tags on runs.run_uuid = tags.run_uuid"
        " and tags.key = 'grom.run'",
    )
    times = Counter(key for _, key in rows)
    return tuple(
        sorted(
            status if times[key] == 1 else f"{status}, one of {times[key]}" for status, key in rows
        )
    )


def _num_orphan_models(cfg: ServiceConfig) -> int:
    rows = _asked(
        cfg,
        "select model_id from logged_models where lifecycle_stage = 'active' and not exists"
        " (select 1 from model_versions where storage_location like '%' || model_id || '%')",
    )
    return len(rows)


def _asked(cfg: ServiceConfig, query: str) -> Rows:
    with closing(sqlite3.connect(Path(cfg.work) / "mlflow.db")) as database:
        return database.execute(query).fetchall()
