"""The store: what is published is complete, what fails is invisible, the first writer wins."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from grom.errors import MissingInput, NotEnoughDisk
from tasks.artifacts import canonical_json, place
from tasks.backends import PlainBackend
from tasks.retries import AccessRefused, BucketMissing
from tasks.store import (
    SCHEMA,
    Artifact,
    CorruptArtifact,
    Store,
    UnsafeStore,
    artifact_key,
)

ON_S3 = pytest.mark.parametrize("store", ["s3"], indirect=True)
FACTS = {"model": "a" * 64, "layers": [1, 2], "rho": 0.03}


def publish(store: Store, data: bytes = b"edit", **facts: Any) -> Artifact:
    """One artifact with a file, and a file in a folder."""
    with store.publish("solve", FACTS | facts) as folder:
        (folder / "P.bin").write_bytes(data)
        (folder / "sites").mkdir()
        (folder / "sites" / "a.json").write_bytes(b"{}")
    found = store.find("solve", FACTS | facts)
    assert found is not None
    return found


def opened(store: Store) -> tuple[Any, str]:
    """The file system below a store, and the root's path there."""
    options = {"use_listings_cache": False, "skip_instance_cache": True} | store._options
    fs, base = fsspec.core.url_to_fs(store.root, **options)
    return fs, base.rstrip("/")


def files_of(store: Store) -> list[str]:
    """All files below the root."""
    fs, base = opened(store)
    return sorted(name.removeprefix(base) for name in fs.find(base))


def other(store: Store) -> Store:
    """The same store on another machine: nothing in scratch."""
    return Store(store.root, store.scratch.with_name("elsewhere"), store._options)


def test_a_key_changes_with_any_fact_and_with_nothing_else() -> None:
    keys = {
        artifact_key("solve", FACTS),
        artifact_key("collect", FACTS),
        artifact_key("solve", FACTS | {"rho": 0.04}),
        artifact_key("solve", FACTS | {"layers": [2, 1]}),
        artifact_key("solve", FACTS | {"extra": None}),
    }
    assert len(keys) == 5
    assert artifact_key("solve", dict(reversed(FACTS.items()))) == artifact_key("solve", FACTS)


def test_a_key_is_the_hash_of_the_canonical_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert canonical_json({"b": 1, "a": ["ü"]}) == '{"a":["ü"],"b":1}'.encode()
    monkeypatch.setitem(SCHEMA, "solve", 1)
    assert artifact_key("solve", {"a": 1}) == "solve/d6a6b3ac78667ade"
    monkeypatch.setitem(SCHEMA, "solve", 2)
    assert artifact_key("solve", {"a": 1}) != "solve/d6a6b3ac78667ade"


@pytest.mark.parametrize("facts", [{"schema": 1}, {"x": float("nan")}, {"x": Path("a")}])
def test_facts_that_are_not_json_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"schema|JSON"):
        artifact_key("solve", facts)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="'polish'"):
        artifact_key("polish", {})


def test_what_is_published_is_found_and_fetched_elsewhere(store: Store) -> None:
    assert store.find("solve", FACTS) is None
    artifact = publish(store)
    assert f"{artifact.stage}/{artifact.key}" == artifact_key("solve", FACTS)
    assert Artifact.model_validate_json(artifact.model_dump_json()) == artifact
    folder = other(store).fetch(artifact)
    assert (folder / "P.bin").read_bytes() == b"edit"
    assert (folder / "sites" / "a.json").read_bytes() == b"{}"
    assert fsspec.open(f"{artifact.uri}/P.bin", **store._options).open().read() == b"edit"
    assert not list((store.scratch / "drafts").iterdir())


def test_the_marker_names_facts_sizes_and_digests(store: Store) -> None:
    publish(store)
    marker = store._marker(artifact_key("solve", FACTS))
    assert marker is not None
    assert marker["facts"] == FACTS
    assert marker["files"]["sites/a.json"] == {
        "bytes": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    facts = next(name for name in files_of(store) if name.endswith("facts.json"))
    fs, base = opened(store)
    assert json.loads(fs.cat_file(base + facts)) == FACTS


def test_an_error_leaves_nothing(store: Store) -> None:
    with pytest.raises(KeyError), store.publish("solve", FACTS) as folder:
        write_half(folder)
    assert store.find("solve", FACTS) is None
    assert files_of(store) == []
    assert not folder.exists()


def write_half(folder: Path) -> None:
    """A stage that fails."""
    (folder / "P.bin").write_bytes(b"half")
    raise KeyError


def test_a_failed_upload_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        module, name = (store.backend, "upload") if "s3" in store.root else (os, "rename")
        broken.setattr(module, name, fail)
        with pytest.raises(OSError, match="gone"):
            publish(store)
    assert files_of(other(store)) == []


def fail(*_: Any, **__: Any) -> None:
    """A connection that breaks."""
    raise OSError(errno.EIO, "gone")


def test_the_second_writer_uses_what_the_first_wrote(store: Store) -> None:
    late = other(store)
    with late.publish("solve", FACTS) as folder:
        (folder / "P.bin").write_bytes(b"second")
        first = publish(store, b"first")
    found = late.find("solve", FACTS)
    assert found == first
    assert (late.fetch(first) / "P.bin").read_bytes() == b"first"
    assert sum(name.endswith("P.bin") for name in files_of(store)) == 1


def test_changed_bytes_are_detected(store: Store) -> None:
    artifact = publish(store)
    fs, base = opened(store)
    name = next(name for name in files_of(store) if name.endswith("P.bin"))
    fs.pipe_file(base + name, b"edip")
    with pytest.raises(CorruptArtifact, match=r"P\.bin: its sha256 .* run its stage again"):
        other(store).fetch(artifact)
    fs.pipe_file(base + name, b"edi")
    with pytest.raises(CorruptArtifact, match=r"P\.bin: 3 bytes, and 4 were published"):
        other(store).fetch(artifact)
    fs.rm_file(base + name)
    with pytest.raises(CorruptArtifact, match=r"P\.bin: the file is missing"):
        other(store).fetch(artifact)


@ON_S3
def test_a_damaged_download_is_fetched_again(store: Store) -> None:
    artifact = publish(store)
    (store.fetch(artifact) / "P.bin").write_bytes(b"????")
    assert (store.fetch(artifact) / "P.bin").read_bytes() == b"edit"


def test_an_artifact_without_marker_does_not_exist(store: Store) -> None:
    artifact = publish(store)
    fs, base = opened(store)
    fs.rm_file(f"{base}/{artifact_key('solve', FACTS)}/_SUCCESS.json")
    assert store.find("solve", FACTS) is None
    with pytest.raises(MissingInput, match=artifact.key):
        store.fetch(artifact)


@pytest.mark.parametrize("outside", ["../../x", "/x"])
def test_a_marker_cannot_name_files_outside(store: Store, outside: str) -> None:
    name = f"{artifact_key('solve', FACTS)}/_SUCCESS.json"
    assert store.create(name, canonical_json({"files": {outside: {}}, "folder": ""}))
    with pytest.raises(CorruptArtifact, match="outside"):
        store.find("solve", FACTS)


def test_probe_accepts_a_store_that_creates_once(store: Store) -> None:
    store.probe()
    assert files_of(store) == []


def test_probe_refuses_a_store_that_overwrites(store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "create", lambda *_: True)
    with pytest.raises(UnsafeStore, match="second writer"):
        store.probe()


@ON_S3
def test_probe_names_a_bucket_that_does_not_exist(store: Store) -> None:
    with pytest.raises(BucketMissing, match=r"nobodys-bucket/a at http://127.* no such bucket"):
        Store("s3://nobodys-bucket/a", store.scratch, store._options).probe()


@ON_S3
def test_probe_names_missing_credentials(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AccessRefused, match="no credentials were found"):
        other(store).probe()


@pytest.mark.parametrize(
    "refusal",
    [
        FileExistsError(),  # moto
        OSError(errno.EINVAL, "At least one of the pre-conditions did not hold"),  # SeaweedFS
    ],
)
def test_every_way_to_refuse_the_second_writer_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    store = Store("memory://refuses", tmp_path)
    assert isinstance(store.backend, PlainBackend)

    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    monkeypatch.setattr(store.backend.fs, "pipe_file", refuse)
    assert store.create("x", b"") is False


def test_other_file_systems_work_too(tmp_path: Path) -> None:
    store = Store("memory://bucket/prefix", tmp_path)
    store.probe()
    artifact = publish(store)
    assert (other(store).fetch(artifact) / "P.bin").read_bytes() == b"edit"


def test_too_little_disk_is_said_before_anything_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with (
        pytest.raises(NotEnoughDisk, match=r"3\.00 GB to write and 0\.00 GB free"),
        store.publish("solve", FACTS, expected_bytes=3 * 10**9),
    ):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("1000000 requested and 131056 written"),  # NumPy
        RuntimeError("I/O error: No space left on device (os error 28)"),  # safetensors
    ],
)
def test_a_full_disk_has_one_error(store: Store, error: Exception) -> None:
    with pytest.raises(NotEnoughDisk) as caught, store.publish("solve", FACTS):
        raise error
    assert caught.value.__cause__ is error
    assert files_of(store) == []


def test_the_names_of_the_store_are_reserved(store: Store) -> None:
    with (
        pytest.raises(ValueError, match="written by the store"),
        store.publish("solve", FACTS) as folder,
    ):
        (folder / "_SUCCESS.json").write_bytes(b"{}")
    assert store.find("solve", FACTS) is None


def test_a_file_address_is_a_plain_path(tmp_path: Path) -> None:
    artifact = publish(Store(str(tmp_path / "a b"), tmp_path / "scratch"))
    same = Store(f"file://{tmp_path}/a b/", tmp_path / "scratch")
    assert same.find("solve", FACTS) == artifact
    assert same.fetch(artifact) == tmp_path / "a b" / "solve" / artifact.key


def test_leftovers_without_marker_are_named(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), tmp_path / "scratch")
    target = tmp_path / "store" / artifact_key("solve", FACTS)
    target.mkdir(parents=True)
    (target / "P.bin").touch()
    with pytest.raises(CorruptArtifact, match="files without a marker"):
        publish(store)


def test_writers_that_race_leave_the_files_of_one(tmp_path: Path) -> None:
    names, target = ("a", "b", "marker"), tmp_path / "store" / "key"

    def write(number: int) -> None:
        draft = tmp_path / f"draft{number}"
        draft.mkdir()
        for name in names:
            (draft / name).write_bytes(bytes([number]))
        place(draft, target, "marker")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(16)))
    assert len({(target / name).read_bytes() for name in names}) == 1
    assert [path.name for path in target.parent.iterdir()] == ["key"]


def test_large_arrays_survive_the_way(store: Store) -> None:
    rows = np.random.default_rng(0).standard_normal((512, 1024))
    with store.publish("collect", FACTS) as folder:
        np.save(folder / "gram.npy", rows, allow_pickle=False)
    artifact = store.find("collect", FACTS)
    assert artifact is not None
    loaded = np.load(other(store).fetch(artifact) / "gram.npy", allow_pickle=False)
    assert (loaded == rows).all()
