"""Benchmarks are pytest-benchmark suites, one file a family: `make bench`, or `pytest
bench/bench_norm.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import RESULTS, Case, Suite


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--bench-device", default="cpu", help="device to measure on: cpu or cuda")
    parser.addoption("--bench-results", type=Path, default=RESULTS, help="folder the results go to")


@pytest.fixture(scope="module")
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    name = request.path.stem.removeprefix("bench_")
    yield Suite(
        name,
        request.config.getoption("--bench-device"),
        request.config.getoption("--bench-results"),
    )


@pytest.fixture
def record(suite: Suite, benchmark: Any) -> Callable[[Case], dict[str, Any]]:
    """Measures a case beside its peers; pytest-benchmark's own table shows our time and carries the
    ratios.
    """

    def run(case: Case) -> dict[str, Any]:
        row = suite.measure(case)
        benchmark.extra_info.update({name: peer["ratio"] for name, peer in row["peers"].items()})
        benchmark.pedantic(case.run, args=case.make(), rounds=3, iterations=1)
        ratios = ", ".join(f"{name} x{peer['ratio']}" for name, peer in row["peers"].items())
        print(f"\n{row['name']}: {row['us']} us (iqr {row['us_iqr']}), {ratios}")
        return row

    return run


@pytest.fixture
def cpu(suite: Suite) -> None:
    """For cases whose sizes are a CPU's."""
    if suite.device.type != "cpu":
        pytest.skip("sizes for a CPU")


@pytest.fixture
def gpu(suite: Suite) -> None:
    """For cases whose sizes are a GPU's."""
    if suite.device.type != "cuda":
        pytest.skip("sizes for a GPU")
