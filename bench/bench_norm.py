"""rms_norm, layer_norm and their fused forms against torch's own, eager and compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.harness import Case, Run
from fastinfer import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {
    "cpu": [(1, 576), (64, 4096), (2048, 4096)],
    "cuda": [(1, 4096), (64, 4096), (8192, 8192), (8192 * 32, 128)],
}


ON_GPU = ["bf16"]


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("dtype", DTYPES if device == "cpu" else ON_GPU)
    metafunc.parametrize("shape", SHAPES[device], ids=lambda s: f"{s[0]}x{s[1]}")


def peers(eager: Run, device: torch.device) -> dict[str, Run]:
    """The composition in eager mode and, on a GPU, as torch.compile makes it for one shape."""
    if device.type == "cpu":
        return {"eager": eager}
    torch._dynamo.reset()  # else it stops compiling after a few shapes
    return {"eager": eager, "torch_compile": torch.compile(eager, dynamic=False)}


def tensors(
    rows: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    x, residual = (torch.randn(rows, hidden, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(hidden, device=device).to(dtype) for _ in range(2))
    return x, residual, weight, bias


class TestNorm:
    def case(self, suite, op, dtype, shape, run, eager, passes):
        rows, hidden = shape
        size = DTYPES[dtype].itemsize
        return Case(
            name=f"{op}/{dtype}/{rows}x{hidden}",
            make=lambda: tensors(rows, hidden, DTYPES[dtype], suite.device),
            run=run,
            peers=peers(eager, suite.device),
            bytes_moved=passes * rows * hidden * size,
        )

    def test_rms_norm(self, record, suite, dtype, shape):
        def eager(x, residual, weight, bias):
            return F.rms_norm(x, x.shape[-1:], weight, 1e-6)

        record(
            self.case(
                suite, "rms_norm", dtype, shape, lambda x, r, w, b: ops.rms_norm(x, w), eager, 2
            )
        )

    def test_layer_norm(self, record, suite, dtype, shape):
        def eager(x, residual, weight, bias):
            return F.layer_norm(x, x.shape[-1:], weight, bias)

        record(
            self.case(
                suite,
                "layer_norm",
                dtype,
                shape,
                lambda x, r, w, b: ops.layer_norm(x, w, b),
                eager,
                2,
            )
        )

    def test_fused_add_rms_norm_(self, record, suite, dtype, shape):
        def eager(x, residual, weight, bias):
            residual.add_(x)
            return x.copy_(F.rms_norm(residual, x.shape[-1:], weight, 1e-6))

        def run(x, residual, weight, bias):
            ops.fused_add_rms_norm_(x, residual, weight)

        record(self.case(suite, "fused_add_rms_norm_", dtype, shape, run, eager, 4))

    def test_fused_add_layer_norm_(self, record, suite, dtype, shape):
        def eager(x, residual, weight, bias):
            residual.add_(x)
            return x.copy_(F.layer_norm(residual, x.shape[-1:], weight, bias))

        def run(x, residual, weight, bias):
            ops.fused_add_layer_norm_(x, residual, weight, bias)

        record(self.case(suite, "fused_add_layer_norm_", dtype, shape, run, eager, 4))
