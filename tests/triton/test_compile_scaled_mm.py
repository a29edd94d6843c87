"""The scaled products compile into what each kind of GPU has: sm_90, sm_89 and sm_80, and the
smaller shared memory of others.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from fastinfer.triton_kernels import scaled_mm
from fastinfer.triton_kernels.activation import GELU_ERF, GELU_TANH, NONE, SILU
from fastinfer.triton_kernels.launch import INTERPRETED, Device
from fastinfer.triton_kernels.scaled_mm import BLOCK, MAX_INT32_K, scaled_mm_config
from tests.triton.recording import BF16, FP8, FP16, FP32, INT8, Launch, recorded, resources

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="TRITON_INTERPRET=1 makes kernels that cannot be compiled"
)

KB = 1 << 10
DEVICES = {
    "227KB": Device(132, 227 * KB),
    "163KB": Device(108, 163 * KB, fp8=False),
    "99KB": Device(84, 99 * KB),
    "64KB": Device(40, 64 * KB, fp8=False),
}
CAPABILITY = {"227KB": 90, "163KB": 80, "99KB": 89, "64KB": 80}
SPILLED = 64
"""Bytes a thread may keep outside registers: some addresses, for one Triton version or another."""


def mm(
    storage: torch.dtype,
    m: int,
    *,
    n: int = 4096,
    k: int = 4096,
    blocks: bool = False,
    zero: bool = False,
    bias: bool = False,
    activation: tl.constexpr = NONE,
    gated: bool = False,
    residual: bool = False,
    dtype: torch.dtype = BF16,
) -> tuple[Any, ...]:
    """Arguments of `scaled_mm.scaled_mm`."""
    k_blocks = -(-k // BLOCK)
    columns = n // 2 if gated else n
    return (
        torch.empty(m, k, dtype=storage),
        torch.empty(n, k, dtype=storage),
        torch.empty(k_blocks, m).T if blocks else torch.empty(m, 1),
        torch.empty(-(-n // BLOCK), k_blocks) if blocks else torch.empty(n, 1),
        torch.empty(m, 1, dtype=torch.int32) if zero else None,
        torch.empty(n) if bias else None,
        activation.value,
        gated,
        torch.empty(m, columns, dtype=BF16) if residual else None,
        torch.empty(1, 1) if dtype in (FP8, INT8) else None,
        torch.empty(m, columns, dtype=dtype),
    )


def launch_of(arguments: tuple[Any, ...], device: Device) -> Launch:
    with recorded(scaled_mm, device) as found:
        scaled_mm.scaled_mm(*arguments)
    [launch] = found
    return launch


CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "fp8, 1 row": ("227KB", mm(FP8, 1)),
    "fp8, 64 rows": ("227KB", mm(FP8, 64, bias=True)),
    "fp8, many rows": ("227KB", mm(FP8, 4096, dtype=FP32)),
    "fp8, blocks, 16 rows": ("227KB", mm(FP8, 16, blocks=True)),
    "fp8, blocks, many rows": ("227KB", mm(FP8, 4096, blocks=True, bias=True)),
    "fp8, odd sizes": ("227KB", mm(FP8, 100, n=1001, k=2885, blocks=True)),
    "fp8 as fp16, 1 row": ("64KB", mm(FP8, 1)),
    "fp8 as fp16, many rows": ("163KB", mm(FP8, 4096, dtype=FP16)),
    "fp8 as fp16, blocks": ("163KB", mm(FP8, 4096, blocks=True)),
    "fp8, 99 KB": ("99KB", mm(FP8, 4096)),
    "fp8, blocks, 99 KB": ("99KB", mm(FP8, 4096, blocks=True)),
    "int8, 1 row": ("227KB", mm(INT8, 1, zero=True)),
    "int8, many rows": ("227KB", mm(INT8, 4096)),
    "int8, many rows, zeros": ("227KB", mm(INT8, 4096, zero=True, bias=True)),
    "int8, long": ("227KB", mm(INT8, 300, k=MAX_INT32_K + 1, n=512, zero=True)),
    "int8, many rows, 163 KB": ("163KB", mm(INT8, 4096, zero=True)),
    "int8, many rows, 99 KB": ("99KB", mm(INT8, 4096)),
    "int8, 32 rows, 64 KB": ("64KB", mm(INT8, 32, zero=True)),
    "fp8, odd sizes, many rows": ("227KB", mm(FP8, 4096, k=2881, blocks=True)),
    "fp8 as fp16, odd sizes, many rows": ("64KB", mm(FP8, 4096, k=2881, blocks=True)),
    "int8, odd sizes, many rows": ("227KB", mm(INT8, 4096, k=2881, zero=True)),
    "int8, odd sizes, 1 row": ("163KB", mm(INT8, 1, k=2881, zero=True)),
    "fp8, gelu, residual": ("227KB", mm(FP8, 4096, activation=GELU_ERF, residual=True)),
    "fp8, gates, fp8": ("227KB", mm(FP8, 4096, activation=SILU, gated=True, dtype=FP8)),
    "fp8, blocks, gates": (
        "227KB",
        mm(FP8, 16, blocks=True, activation=SILU, gated=True, residual=True),
    ),
    "fp8 as fp16, gates": ("163KB", mm(FP8, 4096, activation=SILU, gated=True, dtype=FP8)),
    "int8, gates, int8": ("163KB", mm(INT8, 1, zero=True, activation=SILU, gated=True, dtype=INT8)),
    "int8, gates, odd sizes": (
        "227KB",
        mm(INT8, 4096, n=2 * 2883, k=2881, bias=True, activation=GELU_TANH, gated=True),
    ),
    "int8, few rows to fp8": ("227KB", mm(INT8, 5, n=128, k=100, bias=True, dtype=FP8)),
    "int8, odd sizes": ("163KB", mm(INT8, 33, n=131, k=130, zero=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_into_what_the_device_has(case: str, tmp_path: Path) -> None:
    """The configuration's own estimate of shared memory holds, and values stay in registers."""
    name, arguments = CASES[case]
    device = DEVICES[name]
    compiled = launch_of(arguments, device).compile(CAPABILITY[name])
    (m, k), n = arguments[0].shape, arguments[1].shape[0]
    fp8, aligned = arguments[0].dtype == FP8, k % 16 == 0
    config = scaled_mm_config(device, m=m, n=n, k=k, fp8=fp8, aligned=aligned)
    assert compiled.metadata.shared <= config.shared_memory <= device.shared_memory
    used = resources(compiled, tmp_path)
    assert used["STACK"] <= SPILLED and used["LOCAL"] == 0, used


@pytest.mark.parametrize(
    ("case", "instruction"),
    [
        ("fp8, 1 row", r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3"),
        ("fp8, blocks, many rows", r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3"),
        ("fp8, 99 KB", r"mma\.sync\S*\.f32\.e4m3\.e4m3\.f32"),
        ("fp8 as fp16, many rows", r"mma\.sync\S*\.f32\.f16\.f16\.f32"),
        ("int8, many rows", r"wgmma\.mma_async\S*\.s32\.s8\.s8"),
        ("int8, many rows, 163 KB", r"mma\.sync\S*\.s32\.s8\.s8\.s32"),
    ],
)
def test_tensor_cores_take_the_codes(case: str, instruction: str) -> None:
    name, arguments = CASES[case]
    ptx = launch_of(arguments, DEVICES[name]).compile(CAPABILITY[name]).asm["ptx"]
    assert re.search(instruction, ptx)


@pytest.mark.parametrize("case", ["int8, few rows to fp8", "fp8, gates, fp8"])
def test_pairs_of_codes_are_not_taken_apart(case: str) -> None:
    """ptxas 12.8 takes wrong bits then (`_encode` in quantization.py): by a shift, by prmt, by
    mov.b32 with something else. Two pairs make a word of four codes, and nothing else reads them.
    """
    name, arguments = CASES[case]
    ptx = launch_of(arguments, DEVICES[name]).compile(CAPABILITY[name]).asm["ptx"]
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(\S+),", ptx))
    assert pairs
    for line in map(str.strip, ptx.splitlines()):
        made = re.match(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s|\.reg\s", line)
        if made or not pairs & set(re.findall(r"[%\w$]+", line)):
            continue
        joined = re.fullmatch(r"mov\.b32\s+\S+, \{(\S+), (\S+)\};", line)
        assert joined and pairs.issuperset(joined.groups()) and joined[1] != joined[2], line


def test_blocks_of_row_scaled_fp8_are_summed_in_fp32() -> None:
    """Tensor cores of Hopper keep fewer digits: what they sum over 128 inputs is added outside."""
    ptx = launch_of(mm(FP8, 4096), DEVICES["227KB"]).compile(90).asm["ptx"]
    assert len(re.findall(r"\badd\.(?:rn\.)?f32", ptx)) >= 64


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("k", [128, 4096, MAX_INT32_K + 1])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 300, 8192])
@pytest.mark.parametrize("aligned", [True, False])
def test_configuration(m: int, k: int, fp8: bool, device: Device, aligned: bool) -> None:
    for n in (1, 4096, 100000):
        config = scaled_mm_config(device, m=m, n=n, k=k, fp8=fp8, aligned=aligned)
        assert config.shared_memory <= device.shared_memory
        assert config.block_m >= 16 and config.block_m & (config.block_m - 1) == 0
        # A tile's features, and the inputs of a product, share a block's scale.
        assert BLOCK % config.block_n == 0 and BLOCK % config.block_k == 0
        per_thread = 2 * config.block_m * config.block_n / (32 * config.num_warps)
        assert per_thread * (2 if k > MAX_INT32_K and not fp8 else 1) <= 128


def test_configuration_choices() -> None:
    """Few rows: small tiles, so that many processors read the weight; many rows: large ones."""
    device = DEVICES["227KB"]
    blocks = [
        scaled_mm_config(device, m=m, n=8192, k=4096, fp8=True).block_m
        for m in (1, 16, 17, 33, 4096)
    ]
    assert blocks == [16, 16, 32, 64, 128]
