"""The bucket: atomic writes under races and faults, and errors that name what to do."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from grom.errors import ConfigError, DataError, GromError
from tasks.backends import PlainBackend, TooLarge
from tasks.bucket import Bucket, CutShort, UnsafeStore
from tasks.folder import LocalBackend, held, is_held
from tasks.retries import AccessRefused, BucketMissing, Patience, StoreUnreachable, passes
from tasks.s3 import S3Backend
from tasks.store import Store
from tests.faulty import FAULTS, QUICK, FaultyBackend, faulty, once, s3_error, storm

BOTH = pytest.mark.parametrize("store", ["local", "s3"], indirect=True)
ON_S3 = pytest.mark.parametrize("store", ["s3"], indirect=True)
LOCALLY = pytest.mark.parametrize("store", ["local"], indirect=True)
RACERS = 20


def again(store: Store) -> Store:
    """The same store in another process: a session of its own."""
    return Store(store.root, store.scratch, store._options, QUICK)


def test_a_file_is_created_once_and_swapped_by_version(store: Store) -> None:
    assert store.read("a/b.json") is None
    assert store.create("a/b.json", b"one")
    assert not store.create("a/b.json", b"two")
    found = store.read("a/b.json")
    assert found is not None
    assert (found.data, found.num_bytes) == (b"one", 3)
    version = store.swap("a/b.json", b"three", found.version)
    assert version is not None
    assert store.swap("a/b.json", b"four", found.version) is None
    assert store.swap("a/c.json", b"none is there", version) is None
    assert store.swap("a/b.json", b"five", version) is not None
    store.delete("a/b.json")
    store.delete("a/b.json")
    assert store.swap("a/b.json", b"six", version) is None
    assert store.read("a/b.json") is None


def test_listings_are_never_cached_and_sorted(store: Store, tmp_path: Path) -> None:
    assert store.entries("inbox") == []
    (tmp_path / "f").write_bytes(b"123")
    other = again(store)
    other.upload(tmp_path / "f", "inbox/b/2")
    other.create("inbox/a/1", b"")
    other.create("inboxes/a", b"")
    found = store.entries("inbox")
    assert [(entry.name, entry.num_bytes) for entry in found] == [
        ("inbox/a/1", 0),
        ("inbox/b/2", 3),
    ]
    assert all(abs(entry.modified - store.now()) < 60 for entry in found)
    target = io.BytesIO(b"longer than the object")
    assert store.download("inbox/b/2", target, 10) == 3
    assert target.getvalue() == b"123"
    assert store.download("inbox/b/9", target, 10) is None


def test_the_whole_store_is_listed(store: Store) -> None:
    for name in ("top", "inbox/a/1", "claims/b"):
        store.create(name, b"")
    assert [entry.name for entry in store.entries(None)] == ["claims/b", "inbox/a/1", "top"]


@LOCALLY
def test_drafts_and_hidden_files_are_leftovers(store: Store) -> None:
    store.create("solve/abc/file", b"123")
    root, number = Path(store.root), uuid4().hex
    (root / f"solve/.def.{number}/inner").mkdir(parents=True)
    (root / f"solve/.def.{number}/inner/file").write_bytes(b"1234")
    (root / f"solve/abc/.file.{number}").write_bytes(b"12")
    (root / "solve/abc/.other").write_bytes(b"")
    (root / "solve/abc/.lock").write_bytes(b"")
    (root / f".probe-{number}").write_bytes(b"1")
    left = store.leftovers()
    assert [(one.name, one.kind, one.num_bytes) for one in left] == [
        (f".probe-{number}", "draft", 1),
        ("solve/abc/.other", "hidden", 0),
        ("solve/abc/file", "draft", 2),
        ("solve/def", "draft", 4),
    ]
    assert store.leftovers("solve/abc") == left[1:3]
    for one in left + left:
        store.drop(one)
    assert store.leftovers() == []
    assert [entry.name for entry in store.entries(None)] == ["solve/abc/file"]


@ON_S3
def test_uploads_that_were_not_ended_are_leftovers(store: Store) -> None:
    store.create("a/b", b"")
    assert store.leftovers() == []
    bucket, _, prefix = store.root.removeprefix("s3://").partition("/")
    fs = fsspec.filesystem("s3", key="testing", secret="testing", **store._options)
    for name in ("a/c", "d"):
        fs.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{name}")
    left = store.leftovers()
    assert [(one.name, one.kind) for one in left] == [("a/c", "upload"), ("d", "upload")]
    assert store.leftovers("a") == left[:1]
    for one in left + left:
        store.drop(one)
    assert store.leftovers() == []
    assert store.read("a/b") is not None


@ON_S3
@pytest.mark.parametrize("code", ["NotImplemented", "MethodNotAllowed"])
def test_a_store_that_knows_no_versions_has_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise s3_error(OSError, code, 501)

    assert isinstance(store.backend, S3Backend)
    monkeypatch.setattr(store.backend.fs, "_call_s3", refuse)
    assert store.leftovers() == []


@ON_S3
def test_a_store_that_hides_its_versions_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An erasure that cannot see old versions must not be believed."""

    async def refuse(*_: object, **__: object) -> None:
        raise s3_error(PermissionError, "AccessDenied", 403)

    assert isinstance(store.backend, S3Backend)
    monkeypatch.setattr(store.backend.fs, "_call_s3", refuse)
    with pytest.raises(AccessRefused):
        store.leftovers()


def test_a_folder_is_held_until_its_holder_ends(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "none")
    assert not is_held(tmp_path)
    with held(tmp_path), held(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    code = "import sys; from pathlib import Path; from tasks.folder import held\n"
    code += "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=root, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == b"held\n"
        assert is_held(tmp_path)
        holder.kill()
        holder.wait()
        assert not is_held(tmp_path)


def test_large_objects_are_not_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * 2**20))
    store.upload(tmp_path / "f", "a")
    with pytest.raises(TooLarge, match="more than 10 bytes"):
        store.read("a", limit=10)
    target = io.BytesIO()
    assert store.download("a", target, 10) == 3 * 2**20
    assert len(target.getvalue()) <= 2**20


def test_of_many_creators_one_wins(store: Store) -> None:
    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(lambda i: again(store).create("a", b"%d" % i), range(RACERS)))
    found = store.read("a")
    assert sum(won) == 1
    assert found is not None
    assert found.data == b"%d" % won.index(True)


def test_two_who_write_the_same_both_wrote_it(store: Store) -> None:
    """So a writer whose first answer was lost is not told that somebody else was first."""
    assert store.create("a", b"the same")
    assert again(store).create("a", b"the same")


def test_no_increment_is_lost(store: Store) -> None:
    store.create("a", b"0")

    def increment(worker: int) -> None:
        mine = again(store)
        while True:
            found = mine.read("a")
            assert found is not None
            count = int(found.data.split()[0]) + 1
            if mine.swap("a", b"%d by %d" % (count, worker), found.version):
                return

    with ThreadPoolExecutor(RACERS) as pool:
        list(pool.map(increment, range(RACERS)))
    found = store.read("a")
    assert found is not None
    assert found.data.startswith(b"%d " % RACERS)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_primitive_survives_every_fault(store: Store, tmp_path: Path, fault: str) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")

    def anew() -> Store:
        return faulty(store, once(fault))

    assert anew().create("a", b"one")
    assert not anew().create("a", b"two")
    found = anew().read("a")
    assert found is not None
    assert found.data == b"one"
    assert anew().swap("a", b"three", found.version) is not None
    assert anew().swap("a", b"four", found.version) is None
    anew().upload(tmp_path / "f", "b")
    anew().upload(tmp_path / "f", "c/d")
    target = io.BytesIO()
    assert anew().download("b", target, 10) == 10
    assert target.getvalue() == b"0123456789"
    listing = anew()
    listed = [listing.entries("c") for _ in range(2)][-1]
    assert [entry.name for entry in listed] == ["c/d"]
    anew().delete("a")
    assert store.read("a") is None
    assert abs(anew().now() - store.now()) < 10
    anew().probe(swaps=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_changes_nothing(store: Store, seed: int) -> None:
    """What a model in memory says, a store that fails at every third request says, too."""
    numbers, broken = random.Random(seed), faulty(store, storm(seed))
    model: dict[str, bytes] = {}
    for step in range(60):
        name, data = f"o{numbers.randrange(3)}", b"%d" % step
        match numbers.randrange(4):
            case 0:
                assert broken.create(name, data) == (name not in model)
                model.setdefault(name, data)
            case 1:
                found = broken.read(name)
                assert (found.data if found else None) == model.get(name)
            case 2:
                found = broken.read(name)
                if found is not None:
                    assert broken.swap(name, data, found.version) is not None
                    model[name] = data
            case _:
                broken.delete(name)
                model.pop(name, None)
    assert isinstance(broken.backend, FaultyBackend)
    assert len(broken.backend.faults) > len(FAULTS) // 2


def test_a_fault_that_stays_is_named(store: Store) -> None:
    broken = faulty(store, lambda _: "busy")
    with pytest.raises(StoreUnreachable, match=r"in 12 attempts \(SlowDown\)"):
        broken.read("a")
    assert isinstance(broken.backend, FaultyBackend)
    assert broken.backend.requests["read"] == QUICK.attempts
    store.create("a", b"12345678")
    with pytest.raises(StoreUnreachable, match="CutShort"):
        faulty(store, lambda _: "truncated").read("a")
    with pytest.raises(AccessRefused, match="ExpiredToken"):
        faulty(store, lambda _: "expired").read("a")


@LOCALLY
def test_what_is_wrong_with_the_data_is_not_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(*_: object) -> None:
        calls.append(1)
        raise DataError("the rows are wrong")

    monkeypatch.setattr(store.backend, "read", fail)
    with pytest.raises(DataError, match="the rows are wrong"):
        store.read("a")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (s3_error(OSError, "SlowDown", 503), True),
        (s3_error(OSError, "InternalError", 500), True),
        (s3_error(OSError, "SomethingNew", 502), True),
        (s3_error(OSError, "ConditionalRequestConflict", 409), True),
        (s3_error(PermissionError, "ExpiredToken", 400), True),
        (s3_error(PermissionError, "AccessDenied", 403), False),
        (s3_error(OSError, "InvalidArgument", 400), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (CutShort("a"), True),
        (FileNotFoundError(), False),
        (ValueError(), False),
        (DataError("x"), False),
    ],
)
def test_what_passes_by_itself(error: Exception, does: bool) -> None:
    assert passes(error) == does


def test_patience_doubles_with_jitter_and_outlasts_half_a_minute() -> None:
    waits = list(Patience().waits_s())
    assert len(waits) == Patience().attempts - 1
    assert 26 < sum(waits) < 56
    for attempt, wait in enumerate(waits):
        full = min(15.0, 0.2 * 2**attempt)
        assert full / 2 <= wait <= full
    assert list(Patience().waits_s()) != waits


@pytest.mark.parametrize("name", ["", "../x", "a/../../x", "/etc/passwd", "a//b", "a/.", "a\\b"])
@BOTH
def test_names_stay_inside(store: Store, name: str) -> None:
    for do in (store.read, store.delete, store.entries, lambda n: store.create(n, b"")):
        with pytest.raises(ValueError, match="not the name"):
            do(name)


@LOCALLY
def test_links_lead_nowhere(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert store.create("inbox/a/b", b"")
    root = Path(store.root)
    (root / "inbox/a/link").symlink_to(tmp_path / "secret")
    (root / "inbox/folder").symlink_to(tmp_path)
    assert [entry.name for entry in store.entries("inbox")] == ["inbox/a/b"]
    with pytest.raises(DataError, match="a link"):
        store.read("inbox/a/link")
    with pytest.raises(DataError, match="by a link"):
        store.read("inbox/folder/secret")


@LOCALLY  # the S3 server of the tests lives in this process and would follow the change
def test_the_clock_is_the_store_s(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("a", b"")
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + 3600)
    assert abs(store.now() - real) < 30


@ON_S3
def test_a_missing_bucket_is_not_an_empty_one(store: Store) -> None:
    nobody = Bucket("s3://nobodys-bucket/a", store._options, QUICK)
    for do in (
        lambda: nobody.read("a"),
        lambda: nobody.create("a", b""),
        lambda: nobody.entries("a"),
        nobody.now,
        lambda: nobody.probe(swaps=True),
    ):
        with pytest.raises(BucketMissing, match=r"nobodys-bucket/a at http://127"):
            do()


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(StoreUnreachable, match=r"s3://b/a at http://127\.0\.0\.1:9: no usable"):
        Bucket("s3://b/a", patience=Patience(attempts=1)).read("x")


def test_an_address_that_does_not_open_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense://x: this kind of address"):
        Bucket("nonsense://x").read("a")


def test_a_store_without_compare_and_swap_is_refused() -> None:
    bucket = Bucket("memory://cannot-swap")
    assert isinstance(bucket.backend, PlainBackend)
    bucket.probe()
    with pytest.raises(UnsafeStore, match="MemoryFileSystem cannot compare and swap"):
        bucket.probe(swaps=True)


@LOCALLY
def test_a_store_that_ignores_versions_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store.backend, LocalBackend)
    swap = store.backend.swap

    def careless(name: str, data: bytes, version: str | None) -> str | None:
        found = store.read(name)
        return swap(name, data, found.version if found and version else version)

    monkeypatch.setattr(store.backend, "swap", careless)
    with pytest.raises(UnsafeStore, match="If-Match"):
        store.probe(swaps=True)


def test_errors_are_the_user_s_and_never_quote_what_was_sent(store: Store) -> None:
    assert issubclass(StoreUnreachable, GromError)
    with pytest.raises(StoreUnreachable) as caught:
        faulty(store, lambda _: "refused").create("a", b"a person's text")
    assert "person" not in str(caught.value)
