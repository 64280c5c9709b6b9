"""The benchmarks by name."""

from grom.benchmarks.benchmark import Benchmark
from grom.benchmarks.mmlu import MMLU, MMLU_5_SHOT
from grom.benchmarks.muse import BOOKS, NEWS
from grom.benchmarks.tofu import tofu_benchmark
from grom.benchmarks.verbatim import VERBATIM
from grom.benchmarks.wmdp import WMDP
from grom.benchmarks.zsre import COUNTERFACT, ZSRE

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        *(tofu_benchmark(percent) for percent in ("01", "05", "10")),
        NEWS,
        BOOKS,
        VERBATIM,
        WMDP,
        MMLU,
        MMLU_5_SHOT,
        ZSRE,
        COUNTERFACT,
    )
}
"""Each benchmark is one file in this folder and one line here."""

__all__ = ["BENCHMARKS", "Benchmark"]
