"""The primitives on S3 and on what speaks its language: SeaweedFS, MinIO, moto."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import fsspec
from fsspec.asyn import sync

from tasks.backends import BLOCK_BYTES, Entry, Found, Leftover, TooLarge
from tasks.retries import NO_BUCKET_CODE, code_of

Answer = TypeVar("Answer")
REFUSED_CODES = {"PreconditionFailed", "412"}
UNKNOWN_CODES = {"NotImplemented", "MethodNotAllowed"}
"""Of stores that keep no versions, or have no uploads in parts."""
MARKERS = ("KeyMarker", "VersionIdMarker", "UploadIdMarker")
FIXED = {"use_listings_cache": False, "skip_instance_cache": True}
CLIENT = {
    "connect_timeout": 10,
    "read_timeout": 60,
    # s3fs tries five times and `patiently` tries those again; a third layer only takes longer.
    "retries": {"mode": "standard", "max_attempts": 1},
}


class S3Backend:
    """Objects below `bucket/prefix`.  A version is the entity tag.

    Args:
        base: bucket and prefix.
        options: for s3fs.  Without key and secret the provider's chain finds, and renews, them.
    """

    def __init__(self, base: str, options: Mapping[str, Any]) -> None:
        self.base = base
        self._options = FIXED | {"config_kwargs": CLIENT} | dict(options)
        self.fs: Any
        self.reopen()

    def reopen(self) -> None:
        """See `Backend`."""
        self.fs = fsspec.filesystem("s3", **self._options)

    def read(self, name: str, limit: int) -> Found | None:
        """See `Backend`.  One request: bytes, version and time are of one moment."""

        async def get() -> Found:
            response = await self._call("get_object", name)
            async with response["Body"] as body:
                if response["ContentLength"] > limit:
                    raise TooLarge(name, limit)
                data = await body.read()
            modified = response["LastModified"].timestamp()
            return Found(data, response["ETag"], modified, response["ContentLength"])

        return self._or_none(get)

    def download(self, name: str, target: BinaryIO, limit: int) -> int | None:
        """See `Backend`.  One request, so that no two versions mix."""

        async def get() -> int:
            response, copied = await self._call("get_object", name), 0
            async with response["Body"] as body:
                while copied <= limit and (block := await body.read(BLOCK_BYTES)):
                    copied += len(block)
                    await asyncio.to_thread(target.write, block)
            return int(response["ContentLength"])

        return self._or_none(get)

    def upload(self, source: Path, name: str) -> int:
        """See `Backend`."""
        path = f"{self.base}/{name}"
        self.fs.put_file(str(source), path)
        return int(self.fs.info(path)["size"])

    def swap(self, name: str, data: bytes, version: str | None) -> str | None:
        """See `Backend`."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}

        async def put() -> str:
            return str((await self._call("put_object", name, Body=data, **condition))["ETag"])

        try:
            return self._run(put)
        except FileExistsError:
            return None
        except FileNotFoundError as error:
            if code_of(error) == NO_BUCKET_CODE:
                raise
            return None  # the version to replace is gone
        except OSError as error:
            # SeaweedFS answers with words of its own.
            if code_of(error) in REFUSED_CODES or "pre-condition" in str(error):
                return None
            raise

    def delete(self, name: str) -> None:
        """See `Backend`."""

        async def remove() -> None:
            await self._call("delete_object", name)

        self._or_none(remove)

    def entries(self, folder: str) -> list[Entry]:
        """See `Backend`."""
        bucket, prefix = self._split(folder and f"{folder}/")
        skip = len(self._split("")[1])

        async def listed() -> list[Entry]:
            entries, page = [], {"IsTruncated": True}
            while page["IsTruncated"]:
                token = page.get("NextContinuationToken")
                more = {"ContinuationToken": token} if token else {}
                page = await self.fs._call_s3(
                    "list_objects_v2", Bucket=bucket, Prefix=prefix, **more
                )
                for found in page.get("Contents", ()):
                    if not found["Key"].endswith("/"):  # a "folder" that a console made
                        modified = found["LastModified"].timestamp()
                        entries.append(Entry(found["Key"][skip:], found["Size"], modified))
            return entries

        return self._run(listed)

    def now(self) -> float:
        """See `Backend`.  Every answer is dated; this one needs the right to list only."""
        bucket, prefix = self._split("")

        async def dated() -> float:
            page = await self.fs._call_s3(
                "list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1
            )
            date = page["ResponseMetadata"]["HTTPHeaders"]["date"]
            return parsedate_to_datetime(date).timestamp()

        return self._run(dated)

    def leftovers(self, folder: str) -> list[Leftover]:
        """See `KeepsLeftovers`."""
        bucket, prefix = self._split(folder and f"{folder}/")
        where = {"Bucket": bucket, "Prefix": prefix}
        skip = len(self._split("")[1])

        async def versions() -> list[Leftover]:
            found = []
            async for page in self._pages("list_object_versions", where):
                for old in page.get("Versions", ()):
                    if not old["IsLatest"]:
                        found.append(_leftover("version", old, old["VersionId"], skip))
                for mark in page.get("DeleteMarkers", ()):
                    found.append(_leftover("marker", mark, mark["VersionId"], skip))
            return found

        async def uploads() -> list[Leftover]:
            pages = self._pages("list_multipart_uploads", where)
            started = [one async for page in pages for one in page.get("Uploads", ())]
            return [_leftover("upload", one, one["UploadId"], skip) for one in started]

        found = []
        for listing in (versions, uploads):
            try:
                found += self._run(listing)
            except (OSError, NotImplementedError) as error:
                if code_of(error) not in UNKNOWN_CODES:
                    raise
        return found

    def drop(self, leftover: Leftover) -> None:
        """See `KeepsLeftovers`."""

        async def remove() -> None:
            if leftover.kind == "upload":
                await self._call("abort_multipart_upload", leftover.name, UploadId=leftover.key)
            else:
                await self._call("delete_object", leftover.name, VersionId=leftover.key)

        self._or_none(remove)

    async def _pages(self, method: str, how: Mapping[str, Any]) -> AsyncIterator[Any]:
        page: dict[str, Any] = {"IsTruncated": True}
        while page.get("IsTruncated"):
            after = {name: page[f"Next{name}"] for name in MARKERS if page.get(f"Next{name}")}
            page = await self.fs._call_s3(method, **how, **after)
            yield page

    async def _call(self, method: str, name: str, **options: Any) -> Any:
        bucket, key = self._split(name)
        return await self.fs._call_s3(method, Bucket=bucket, Key=key, **options)

    def _split(self, name: str) -> tuple[str, str]:
        bucket, _, prefix = self.base.partition("/")
        return bucket, f"{prefix}/{name}" if prefix else name

    def _run(self, do: Callable[[], Awaitable[Answer]]) -> Answer:
        answer: Answer = sync(self.fs.loop, do)
        return answer

    def _or_none(self, do: Callable[[], Awaitable[Answer]]) -> Answer | None:
        try:
            return self._run(do)
        except FileNotFoundError as error:
            if code_of(error) == NO_BUCKET_CODE:
                raise
            return None


def _leftover(
    kind: Literal["version", "marker", "upload"], found: Mapping[str, Any], key: str, skip: int
) -> Leftover:
    when = found.get("LastModified") or found["Initiated"]
    return Leftover(found["Key"][skip:], kind, key, found.get("Size", 0), when.timestamp())
