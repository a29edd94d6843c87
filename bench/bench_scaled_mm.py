"""Scaled products of 8-bit matrices: on a GPU against cuBLAS's fp8 product with row-wise scales, on
a CPU against torch's fp32 product of the same values.

Codes and scales are drawn apart: what a product costs does not depend on them. Shapes are those of
the weight, N x K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.harness import Case, Run, Suite
from fastinfer import ops

FP8, BLOCK = torch.float8_e4m3fn, 128
# Storage and kind of scales, by variant: per row and feature; blocks of 1x128 and 128x128; rows
# with zero points.
VARIANTS = {
    "fp8_scaled_mm/row": FP8,
    "fp8_scaled_mm/block": FP8,
    "int8_scaled_mm/row": torch.int8,
    "int8_scaled_mm/asymmetric": torch.int8,
}
SHAPES = {
    "cpu": [(576, 1536), (2048, 2048)],
    "cuda": [(4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672)],
}
ROWS = {"cpu": [1, 16, 256], "cuda": [1, 16, 64, 256, 1024, 4096, 8192]}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    cases = [
        (variant, *shape, m)
        for variant in VARIANTS
        for shape in SHAPES[device]
        for m in ROWS[device]
    ]
    ids = [f"{variant}-{n}x{k}-m{m}" for variant, n, k, m in cases]
    metafunc.parametrize(("variant", "n", "k", "m"), cases, ids=ids)


def codes(rows: int, columns: int, storage: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random ones; of e4m3 none that is NaN."""
    if storage == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    return torch.randn(rows, columns, device=device).mul_(60).clamp_(-448, 448).to(storage)


def ours(variant: str, dtype: torch.dtype) -> Run:
    def fp8(a, b, a_scale, b_scale, a_zero, *other):
        return ops.fp8_scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype)

    def int8(a, b, a_scale, b_scale, a_zero, *other):
        return ops.int8_scaled_mm(a, b, a_scale, b_scale, a_zero, out_dtype=dtype)

    return fp8 if VARIANTS[variant] == FP8 else int8


def cublas_fp8(a, b, a_scale, b_scale, a_zero, x, weight, x_scale, weight_scale):
    return torch._scaled_mm(x, weight.T, x_scale, weight_scale.T, out_dtype=torch.bfloat16)


def eager(a, b, a_scale, b_scale, a_zero, x, weight, x_scale, weight_scale):
    return F.linear(x, weight)


def case(suite: Suite, variant: str, n: int, k: int, m: int) -> Case:
    device, dtype = suite.device, DTYPE[suite.device.type]
    storage, on_gpu = VARIANTS[variant], suite.device.type == "cuda"
    blocks = variant.endswith("block")

    def make() -> tuple[torch.Tensor | None, ...]:
        a, b = (codes(rows, k, storage, device) for rows in (m, n))
        x_scale, weight_scale = (torch.rand(rows, 1, device=device) + 0.5 for rows in (m, n))
        a_scale, b_scale, a_zero = x_scale, weight_scale, None
        if blocks:
            a_scale = torch.rand(k // BLOCK, m, device=device).T
            b_scale = torch.rand(-(-n // BLOCK), k // BLOCK, device=device)
        if variant.endswith("asymmetric"):
            a_zero = torch.randint(-128, 128, (m, 1), dtype=torch.int32, device=device)
        # The peer's operands, where they are not ours.
        if not on_gpu:
            x, weight = a.float(), b.float()
        elif storage == FP8:
            x, weight = a, b
        else:
            x, weight = (codes(rows, k, FP8, device) for rows in (m, n))
        return a, b, a_scale, b_scale, a_zero, x, weight, x_scale, weight_scale

    return Case(
        name=f"{variant}/{n}x{k}/m{m}",
        make=make,
        run=ours(variant, dtype),
        peers={"cublas_fp8": cublas_fp8} if on_gpu else {"eager": eager},
        bytes_moved=m * k + n * k + m * n * dtype.itemsize,
        flops=2 * m * n * k,
        read_bytes=m * k + n * k,
    )


def test_scaled_mm(record, suite, variant, n, k, m):
    record(case(suite, variant, n, k, m))
