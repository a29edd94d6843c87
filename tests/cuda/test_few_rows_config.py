"""How a product of few rows is cut on Hopper: a pure function, run here without a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cuda" / "gemm"
SMS = 132  # of an H200

SIZES = [1, 40, 64, 100, 576, 1000, 4096, 6144, 8192, 10944, 14336, 28672, 151936]
REQUESTS = [
    (bits, many_scales, n, k, sms)
    for bits, many_scales, n, k, sms in itertools.product(
        (2, 3, 4, 8), (0, 1), SIZES, SIZES, (78, 114, SMS)
    )
]
# Of 4 bits and groups of 64 and more: what was fastest of all shapes and clusters on one H200.
FASTEST = {
    (28672, 4096): (7, 8, 1),
    (8192, 28672): (8, 16, 2),
    (4096, 14336): (4, 16, 2),
    (6144, 4096): (6, 16, 2),
    (4096, 4096): (4, 16, 2),
}


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict[tuple[int, ...], tuple[int, ...]]:
    program = tmp_path_factory.mktemp("config") / "few_rows_config"
    source = HERE / "few_rows_config.cpp"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [compiler, "-std=c++20", "-O0", f"-I{SOURCES}", str(source), "-o", str(program)], check=True
    )
    asked = "\n".join(" ".join(map(str, request)) for request in REQUESTS)
    run = subprocess.run([str(program)], input=asked, capture_output=True, text=True, check=True)
    answers = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    return dict(zip(REQUESTS, answers, strict=True))


def test_every_shape_has_a_configuration(configs) -> None:
    for (bits, *_), (rows, warps, cluster) in configs.items():
        assert rows >= 1 and warps in (8, 16) and cluster in (1, 2, 4, 8)
        assert rows % {2: 2, 3: 4, 4: 1, 8: 1}[bits] == 0  # whole blocks of codes


def test_clusters_leave_work_to_every_block_and_fit_at_once(configs) -> None:
    for (_, _, n, k, sms), (rows, warps, cluster) in configs.items():
        if cluster > 1:
            groups = -(-(-(-n // 64) * 4) // rows)
            assert groups * cluster <= sms * (16 // warps)
            assert -(-k // 64) // cluster >= warps // 2


@pytest.mark.parametrize(("shape", "fastest"), FASTEST.items())
def test_the_fastest_is_chosen(configs, shape, fastest) -> None:
    assert configs[(4, 0, *shape, SMS)] == fastest
