"""Products with weights of 2, 3, 4 and 8 bits against products with whole weights: on a GPU cuBLAS
with bf16 weights, on a CPU torch's fp32 product with the dequantized weight.

Codes and weights are drawn apart: what a product costs does not depend on them. Shapes are those of
the weight, N x K. What is fused with a product (gates, a norm) is beside the two ops apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.harness import Case, Suite
from fastinfer import ops

OPS = {2: ops.int2_gemm, 3: ops.int3_gemm, 4: ops.int4_gemm, 8: ops.int8_gemm}
GROUP = 128
SHAPES = {
    "cpu": [(576, 1536), (2048, 2048)],
    "cuda": [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 28672)],
}
ROWS = {"cpu": [1, 16, 256], "cuda": [1, 8, 16, 32, 64, 128, 256, 1024, 4096]}
# Of the largest shapes, as in a prefill of many prompts.
MOST_ROWS = {"cpu": [], "cuda": [(28672, 4096, 8192), (8192, 28672, 8192)]}
# The other widths, where the weight counts.
SIBLINGS = {"cpu": (2048, 2048), "cuda": (8192, 28672)}
SIBLING_ROWS = [1, 8, 256]
FUSED = {"cpu": (2048, 2048), "cuda": (28672, 4096)}
HALF_ROWS: dict[str, list[int]] = {"cpu": [], "cuda": [16, 64, 256, 1024]}
GATED_ROWS = {"cpu": [16], "cuda": [64, 256, 1024, 4096]}
NORM_ROWS = {"cpu": [1], "cuda": [1, 8]}
NORM_SHAPE = {"cpu": (2048, 2048), "cuda": (6144, 4096)}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
PEER = {"cpu": "eager", "cuda": "cublas_bf16"}


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    if "fused_rows" in metafunc.fixturenames:
        norm = "norm" in metafunc.function.__name__
        metafunc.parametrize("fused_rows", (NORM_ROWS if norm else GATED_ROWS)[device])
        return
    cases = [(4, *shape, m, DTYPE[device]) for shape in SHAPES[device] for m in ROWS[device]]
    cases += [(4, *case, DTYPE[device]) for case in MOST_ROWS[device]]
    for bits in (2, 3, 8):
        cases += [(bits, *SIBLINGS[device], m, DTYPE[device]) for m in SIBLING_ROWS]
    cases += [(4, *FUSED[device], m, torch.float16) for m in HALF_ROWS[device]]
    ids = [f"int{bits}-{n}x{k}-m{m}{half(dtype)}" for bits, n, k, m, dtype in cases]
    metafunc.parametrize(("bits", "n", "k", "m", "dtype"), cases, ids=ids)


def half(dtype: torch.dtype) -> str:
    """What tells cases in fp16 from others."""
    return "/fp16" if dtype == torch.float16 else ""


def work(bits: int, n: int, k: int, m: int, columns: int, dtype: torch.dtype) -> dict[str, int]:
    """What a product with `columns` results a row moves and computes, as a case has it."""
    read = m * k * dtype.itemsize + n * k * bits // 8 + n * k // GROUP * dtype.itemsize
    return {
        "bytes_moved": read + m * columns * dtype.itemsize,
        "flops": 2 * m * n * k,
        "read_bytes": read,
    }


def case(suite: Suite, bits: int, n: int, k: int, m: int, dtype: torch.dtype) -> Case:
    device, op = suite.device, OPS[bits]

    def make() -> tuple[torch.Tensor, ...]:
        x = torch.randn(m, k, device=device).to(dtype)
        words = (n // 64, k // 64, bits * 128)
        qweight = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=device)
        scales = (torch.rand(k // GROUP, n, device=device) + 0.5).to(dtype)
        return x, qweight, scales, torch.randn(n, k, device=device).to(dtype)

    return Case(
        name=f"int{bits}_gemm/g{GROUP}/{n}x{k}/m{m}{half(dtype)}",
        make=make,
        run=lambda x, qweight, scales, weight: op(x, qweight, scales, group_size=GROUP),
        peers={
            "cublas_fp16" if half(dtype) else PEER[device.type]: (
                lambda x, qweight, scales, weight: F.linear(x, weight)
            )
        },
        **work(bits, n, k, m, n, dtype),
    )


def test_gemm(record, suite, bits, n, k, m, dtype):
    record(case(suite, bits, n, k, m, dtype))


def inputs_of(suite: Suite, n: int, k: int, m: int) -> tuple[torch.Tensor, ...]:
    device, dtype = suite.device, DTYPE[suite.device.type]
    qweight = torch.randint(
        -(2**31), 2**31, (n // 64, k // 64, 512), dtype=torch.int32, device=device
    )
    scales = ((torch.rand(k // GROUP, n, device=device) + 0.5) / 16).to(dtype)
    x = torch.randn(m, k, device=device).to(dtype)
    return x, qweight, scales, torch.randn(k, device=device).to(dtype)


def test_silu_gated(record, suite, fused_rows):
    n, k = FUSED[suite.device.type]
    m, dtype = fused_rows, DTYPE[suite.device.type]
    record(
        Case(
            name=f"int4_gemm/silu_gated/{n}x{k}/m{m}",
            make=lambda: inputs_of(suite, n, k, m),
            run=lambda x, qweight, scales, _: ops.int4_gemm(
                x, qweight, scales, activation="silu", gated=True
            ),
            peers={
                "apart": lambda x, qweight, scales, _: ops.silu_and_mul(
                    ops.int4_gemm(x, qweight, scales)
                )
            },
            **work(4, n, k, m, n // 2, dtype),
        )
    )


def test_norm(record, suite, fused_rows):
    n, k = NORM_SHAPE[suite.device.type]
    m, dtype = fused_rows, DTYPE[suite.device.type]
    record(
        Case(
            name=f"int4_gemm/norm/{n}x{k}/m{m}",
            make=lambda: inputs_of(suite, n, k, m),
            run=lambda x, qweight, scales, weight: ops.int4_gemm(
                x, qweight, scales, norm_weight=weight
            ),
            peers={
                "apart": lambda x, qweight, scales, weight: ops.int4_gemm(
                    ops.rms_norm(x, weight), qweight, scales
                )
            },
            **work(4, n, k, m, n, dtype),
        )
    )
