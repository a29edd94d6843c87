"""The low-bit matrix products compile into what each kind of GPU has: sm_90 and sm_80, and the
smaller shared memory of others (R33).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fastinfer.triton_kernels import epilogue, low_bit_gemm
from fastinfer.triton_kernels.activation import GELU_ERF, GELU_TANH, NONE, SILU
from fastinfer.triton_kernels.launch import INTERPRETED, Device
from fastinfer.triton_kernels.low_bit_gemm import block_k, gemm_config
from tests.triton.recording import BF16, FP8, FP16, FP32, INT8, Launch, recorded, resources

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="TRITON_INTERPRET=1 makes kernels that cannot be compiled"
)

KB = 1 << 10
DEVICES = {
    "227KB": Device(132, 227 * KB),
    "163KB": Device(108, 163 * KB),
    "99KB": Device(84, 99 * KB),
    "64KB": Device(40, 64 * KB),
}
CAPABILITY = {"227KB": 90, "163KB": 80, "99KB": 80, "64KB": 80}
SPILLED = 32
"""Bytes a thread may keep outside registers: some addresses, for one Triton version or another."""


def gemm(
    bits: int,
    m: int,
    *,
    n: int = 4096,
    k: int = 4096,
    group_size: int = 128,
    dtype: torch.dtype = BF16,
    scale_dtype: torch.dtype | None = None,
    zeros: bool = False,
    perm: bool = False,
    bias: bool = False,
    outliers: int | None = None,
    activation: tl.constexpr = NONE,
    gated: bool = False,
    residual: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Arguments of `low_bit_gemm.low_bit_gemm`."""
    scales = torch.empty(-(-k // group_size), n, dtype=scale_dtype or dtype)
    columns = n // 2 if gated else n
    beside: tuple[torch.Tensor | None, ...] = (None, None, None)
    if outliers is not None:
        offsets, at = (torch.empty(size, dtype=torch.int32) for size in (n + 1, outliers))
        beside = (offsets, at, torch.empty(outliers, dtype=dtype))
    return (
        bits,
        torch.empty(m, k, dtype=dtype),
        torch.empty(-(-n // 64), -(-k // 64), bits * 128, dtype=torch.int32),
        scales,
        torch.empty_like(scales) if zeros else None,
        group_size,
        torch.empty(k, dtype=torch.int32) if perm else None,
        torch.empty(n) if bias else None,
        *beside,
        activation.value,
        gated,
        torch.empty(m, columns, dtype=dtype) if residual else None,
        None if out_dtype is None else torch.empty(1, 1),
        torch.empty(m, columns, dtype=out_dtype or dtype),
    )


def launches_of(arguments: tuple[Any, ...], device: Device) -> list[Launch]:
    with recorded(low_bit_gemm, device) as found, recorded(epilogue, device) as after:
        low_bit_gemm.low_bit_gemm(*arguments)
    return found + after


def launch_of(arguments: tuple[Any, ...], device: Device) -> Launch:
    [launch] = launches_of(arguments, device)
    return launch


CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "4 bits, 1 row": ("227KB", gemm(4, 1)),
    "4 bits, 64 rows": ("227KB", gemm(4, 64, zeros=True, bias=True)),
    "4 bits, many rows": ("227KB", gemm(4, 4096)),
    "4 bits, many rows, zeros": ("227KB", gemm(4, 4096, zeros=True, scale_dtype=FP16)),
    "2 bits, many rows": ("227KB", gemm(2, 4096, group_size=64, zeros=True)),
    "2 bits, groups of 16": ("227KB", gemm(2, 256, group_size=16)),
    "3 bits, everything": ("227KB", gemm(3, 4096, zeros=True, perm=True, bias=True)),
    "3 bits, groups of 32": ("163KB", gemm(3, 16, group_size=32, zeros=True, dtype=FP16)),
    "8 bits, many rows": ("227KB", gemm(8, 4096, zeros=True, dtype=FP16)),
    "8 bits, groups of 16": ("163KB", gemm(8, 16, group_size=16)),
    "8 bits, many rows, 163 KB": ("163KB", gemm(8, 4096)),
    "4 bits, many rows, 163 KB": ("163KB", gemm(4, 4096, zeros=True)),
    "8 bits, many rows, 99 KB": ("99KB", gemm(8, 4096, dtype=FP16)),
    "8 bits, many rows, 64 KB": ("64KB", gemm(8, 4096)),
    "4 bits, 1 row, 64 KB": ("64KB", gemm(4, 1, perm=True)),
    "fp32": ("227KB", gemm(4, 4096, dtype=FP32, zeros=True)),
    "fp32, 64 KB": ("64KB", gemm(8, 40, dtype=FP32, group_size=32, k=4090)),
    "outliers, 1 row": ("227KB", gemm(2, 1, outliers=4096 * 41)),
    "outliers, many rows": ("227KB", gemm(3, 4096, outliers=4096 * 41)),
    "outliers, many rows, 163 KB": ("163KB", gemm(3, 4096, outliers=100, zeros=True)),
    "outliers, fp32, 64 KB": ("64KB", gemm(2, 40, dtype=FP32, outliers=100)),
    "gelu, residual": ("227KB", gemm(4, 4096, activation=GELU_ERF, residual=True)),
    "silu, fp8": ("227KB", gemm(4, 16, activation=SILU, out_dtype=FP8)),
    "gates, 1 row, int8": ("227KB", gemm(4, 1, activation=SILU, gated=True, out_dtype=INT8)),
    "gates, many rows": ("227KB", gemm(4, 4096, activation=SILU, gated=True, zeros=True)),
    "gates, everything": (
        "227KB",
        gemm(
            3,
            64,
            zeros=True,
            perm=True,
            bias=True,
            activation=GELU_TANH,
            gated=True,
            residual=True,
            out_dtype=FP8,
        ),
    ),
    "gates, 8 bits, 64 KB": ("64KB", gemm(8, 1, activation=SILU, gated=True)),
    "gates, many rows, 163 KB": ("163KB", gemm(8, 4096, activation=SILU, gated=True)),
    "gates, fp32, 64 KB": ("64KB", gemm(8, 40, dtype=FP32, activation=GELU_ERF, gated=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_into_what_the_device_has(case: str, tmp_path: Path) -> None:
    """The configuration's own estimate of shared memory holds, and values stay in registers."""
    name, arguments = CASES[case]
    device = DEVICES[name]
    compiled = launch_of(arguments, device).compile(CAPABILITY[name])
    bits, x, scales, gated = arguments[0], arguments[1], arguments[3], arguments[12]
    config = gemm_config(
        device, m=x.shape[0], n=scales.shape[1], bits=bits, itemsize=x.element_size(), gated=gated
    )
    estimate = config.shared_memory(bits, x.element_size())
    assert compiled.metadata.shared <= estimate <= device.shared_memory
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= SPILLED and used["LOCAL"] == 0, used


@pytest.mark.parametrize("capability", [80, 90])
def test_gates_that_share_packed_tiles_take_two_launches(capability: int) -> None:
    """The product in fp32, and what follows it."""
    arguments = gemm(
        4, 40, n=2 * 2880 + 2, activation=SILU, gated=True, residual=True, out_dtype=FP8
    )
    launches = launches_of(arguments, DEVICES["163KB"])
    assert [x.kernel.__name__ for x in launches] == ["low_bit_gemm_kernel", "gated_epilogue_kernel"]
    launches[1].compile(capability)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_stay_in_the_thread_that_loaded_them(bits: int) -> None:
    """The packed layout is that of the operand's registers: nothing is exchanged on Hopper."""
    ptx = launch_of(gemm(bits, 4096), DEVICES["227KB"]).compile(90).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert not re.search(r"\bst\.shared", ptx) and "shfl" not in ptx


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 300, 8192])
def test_configuration(m: int, gated: bool, bits: int, itemsize: int, device: Device) -> None:
    config = gemm_config(device, m=m, n=4096, bits=bits, itemsize=itemsize, gated=gated)
    assert not gated or config.tiles % 2 == 0
    assert config.shared_memory(bits, itemsize) <= device.shared_memory
    assert config.block_m >= 16 and config.block_m & (config.block_m - 1) == 0
    # The accumulators of a product and of all of them.
    per_thread = 2 * config.block_m * config.tiles * 64 / (32 * config.num_warps)
    assert per_thread <= 128


def test_configuration_choices() -> None:
    """Few rows: small tiles, so that many processors read the weight; many rows: large ones."""
    device = DEVICES["227KB"]
    blocks = [
        gemm_config(device, m=m, n=4096, bits=4, itemsize=2).block_m for m in (1, 16, 17, 33, 4096)
    ]
    assert blocks == [16, 16, 32, 64, 128]


def test_inputs_of_one_product_lie_in_one_group() -> None:
    for group_size in range(16, 1025, 16):
        size = block_k(group_size)
        assert size in (16, 32, 64) and group_size % size == 0
    assert [block_k(g) for g in (16, 32, 48, 64, 96, 128, 4096)] == [16, 32, 16, 64, 32, 64, 64]
