"""silu_and_mul and gelu_and_mul against torch's composition, eager and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.bench_norm import peers
from bench.harness import Case
from fastinfer import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RUNS = {
    "silu_and_mul": (ops.silu_and_mul, F.silu),
    "gelu_and_mul": (ops.gelu_and_mul, F.gelu),
    "gelu_and_mul/tanh": (
        lambda x: ops.gelu_and_mul(x, tanh_approx=True),
        lambda a: F.gelu(a, approximate="tanh"),
    ),
}


SHAPES = {
    "cpu": [(1, 1536), (64, 4096), (1024, 4096)],
    "cuda": [(1, 4096), (64, 4096), (8192, 8192)],
}


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("shape", SHAPES[device], ids=lambda s: f"{s[0]}x{s[1]}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", RUNS)
def test_gated_activation(record, suite, op, dtype, shape):
    rows, width = shape
    run, activation = RUNS[op]

    def eager(x):
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    record(
        Case(
            name=f"{op}/{dtype}/{rows}x{width}",
            make=lambda: (torch.randn(rows, 2 * width, device=suite.device).to(DTYPES[dtype]),),
            run=run,
            peers=peers(eager, suite.device),
            bytes_moved=3 * rows * width * DTYPES[dtype].itemsize,
        )
    )
