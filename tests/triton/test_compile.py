"""Every Triton kernel compiles for sm_90 and sm_80, on a machine without a GPU.

A case is a call of an op's launcher. What the launcher would launch is recorded instead and
compiled to a cubin, as Triton itself would specialise it for these arguments. To cover a new
kernel, add calls of its launcher to `CASES`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import fastinfer.triton_kernels as kernels
from fastinfer.triton_kernels.launch import INTERPRETED, Device
from tests.triton.recording import BF16, FP16, FP32, Launch, recorded, resources

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="TRITON_INTERPRET=1 makes kernels that cannot be compiled"
)

DEVICES = {90: Device(132, 227 << 10), 80: Device(108, 163 << 10)}
SHARED_MEMORY = 64 << 10
"""What these kernels may use: even the smallest GPUs have it (R33)."""
SPILLED = 32
"""Bytes a thread may keep outside registers: some addresses, for one Triton version or another."""


# ------------------------------------------------------------------------------------------ cases


def _rows(rows: int, hidden: int, dtype: torch.dtype, *, odd: bool = False) -> Tensor:
    """Rows at aligned addresses, or `odd`: one element past them and with an odd stride."""
    if not odd:
        return torch.empty(rows, hidden, dtype=dtype)
    return torch.empty(rows, hidden + 3, dtype=dtype)[:, 1 : 1 + hidden]


def _rms_norm(hidden: int, dtype: torch.dtype, *, odd: bool = False) -> tuple[Any, ...]:
    weight = torch.empty(hidden, dtype=dtype)
    return (_rows(2, hidden, dtype, odd=odd), weight, 1e-6, 0.0, _rows(2, hidden, dtype))


def _add_norm(hidden: int, dtype: torch.dtype, *bias: Tensor | None) -> tuple[Any, ...]:
    x, residual = (_rows(2, hidden, dtype) for _ in range(2))
    return (x, residual, torch.empty(hidden), *bias, 1e-6, 0.0)


def _layer_norm(hidden: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x, out = (torch.empty(2, 3, hidden, dtype=dtype).transpose(0, 1) for _ in range(2))
    return (x, torch.empty(hidden), torch.empty(hidden), 1e-5, 0.0, out)


def _gated(width: int, dtype: torch.dtype, *options: bool, rows: int = 2) -> tuple[Any, ...]:
    return (_rows(rows, 2 * width, dtype), *options, _rows(rows, width, dtype))


def _rotary(dtype: torch.dtype, head_dim: int, *, interleaved: bool) -> tuple[Any, ...]:
    qkv = torch.empty(3, 32 + 8 + 8, head_dim, dtype=dtype)
    positions = torch.empty(3, dtype=torch.int64)
    table = torch.empty(64, head_dim // 2 * 2)
    return (qkv[:, :32], qkv[:, 32:40], positions, table, interleaved)


def _append(
    dtype: torch.dtype,
    k_storage: torch.dtype,
    v_storage: torch.dtype,
    *,
    dim: int = 128,
    static: bool = False,
) -> tuple[Any, ...]:
    k, v = (torch.empty(9, 8, dim, dtype=dtype) for _ in range(2))
    caches = [torch.empty(4, 8, 16, dim, dtype=storage) for storage in (k_storage, v_storage)]
    size = (8,) if static else (4, 8, 16)
    scales = [None if s == dtype else torch.empty(size) for s in (k_storage, v_storage)]
    return (k, v, *caches, torch.empty(9, dtype=torch.int64), *scales)


def _qk_norm_rope(
    dtype: torch.dtype,
    storage: torch.dtype,
    *,
    dim: int = 128,
    rotary_dim: int = 128,
    norm: bool = False,
    interleaved: bool = False,
) -> tuple[Any, ...]:
    qkv = torch.empty(9, (32 + 8 + 8) * dim, dtype=dtype)
    caches = [torch.empty(4, 8, 16, dim, dtype=storage) for _ in range(2)]
    indices = [torch.empty(9, dtype=torch.int64) for _ in range(2)]
    weights = [torch.empty(dim, dtype=dtype) if norm else None for _ in range(2)]
    scales = [None if storage == dtype else torch.empty(4, 8, 16) for _ in range(2)]
    bias = torch.empty(qkv.shape[1], dtype=dtype) if norm else None
    q_out = torch.empty(9, 32, dim, dtype=dtype)
    table = torch.empty(64, rotary_dim)
    return (
        qkv, q_out, *caches, *indices, table, bias, *weights, 1e-6, 0.0, interleaved, *scales
    )  # fmt: skip


def _sample(
    rows: int, vocab: int, dtype: torch.dtype, *names: str, draws: bool = True
) -> tuple[Any, ...]:
    dtypes = {"top_k": torch.int32, "top_p": FP32, "min_p": FP32}
    given = [torch.empty(rows, dtype=d) if n in names else None for n, d in dtypes.items()]
    temperature, seeds, positions = (
        torch.empty(rows, dtype=d) if draws else None for d in (FP32, torch.int64, torch.int64)
    )
    token_ids, valid = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    logits = _rows(rows, vocab, dtype)
    return (logits, temperature, *given, seeds, positions, token_ids, valid)


def _quantize(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    block: tuple[int, int],
    storage: torch.dtype = torch.float8_e4m3fn,
    *,
    static: bool = False,
    odd: bool = False,
) -> tuple[Any, ...]:
    block_rows, block_columns = (
        size if extent == -1 else extent
        for size, extent in zip((rows, columns), block, strict=True)
    )
    scale = torch.empty(-(-rows // block_rows), -(-columns // block_columns))
    given = torch.empty_like(scale) if static else None
    x, out = _rows(rows, columns, dtype, odd=odd), torch.empty(rows, columns, dtype=storage)
    return (x, given, block_rows, block_columns, out, scale)


def _quantize_asymmetric(rows: int, columns: int, dtype: torch.dtype) -> tuple[Any, ...]:
    zero_point = torch.empty(rows, 1, dtype=torch.int32)
    out = torch.empty(rows, columns, dtype=torch.int8)
    return (_rows(rows, columns, dtype), out, torch.empty(rows, 1), zero_point)


FP8, INT8 = torch.float8_e4m3fn, torch.int8

CASES: dict[str, tuple[str, Callable[[], tuple[Any, ...]]]] = {
    "rms_norm/head": ("rms_norm", lambda: _rms_norm(128, BF16)),
    "rms_norm/4096": ("rms_norm", lambda: _rms_norm(4096, BF16)),
    "rms_norm/odd": ("rms_norm", lambda: _rms_norm(4096, BF16, odd=True)),
    "rms_norm/head/odd": ("rms_norm", lambda: _rms_norm(128, BF16, odd=True)),
    "rms_norm/28672": ("rms_norm", lambda: _rms_norm(28672, BF16)),
    "rms_norm/looped": ("rms_norm", lambda: _rms_norm(40000, BF16)),
    "layer_norm/8192": ("layer_norm", lambda: _layer_norm(8192, BF16)),
    "layer_norm/32768": ("layer_norm", lambda: _layer_norm(32768, BF16)),
    "layer_norm/nested": ("layer_norm", lambda: _layer_norm(4096, FP16)),
    "fused_add_rms_norm/8192": ("fused_add_rms_norm_", lambda: _add_norm(8192, BF16)),
    "fused_add_layer_norm/32768": (
        "fused_add_layer_norm_",
        lambda: _add_norm(32768, BF16, torch.empty(32768)),
    ),
    "fused_add_layer_norm/16384/fp32": (
        "fused_add_layer_norm_",
        lambda: _add_norm(16384, FP32, torch.empty(16384)),
    ),
    "fused_add_layer_norm/looped": (
        "fused_add_layer_norm_",
        lambda: _add_norm(40000, BF16, None),
    ),
    "silu/bf16": ("silu_and_mul", lambda: _gated(14336, BF16)),
    "silu/fp32": ("silu_and_mul", lambda: _gated(1000, FP32)),
    "silu/many": ("silu_and_mul", lambda: _gated(8192, BF16, rows=512)),
    "gelu/erf": ("gelu_and_mul", lambda: _gated(8192, BF16, False)),
    "gelu/erf/fp32": ("gelu_and_mul", lambda: _gated(33, FP32, False)),
    "gelu/tanh": ("gelu_and_mul", lambda: _gated(8192, FP16, True)),
    "quantize_fp8/token": ("quantize_fp8", lambda: _quantize(512, 4096, BF16, (1, -1))),
    "quantize_fp8/token/odd": (
        "quantize_fp8",
        lambda: _quantize(5, 2881, FP32, (1, -1), odd=True),
    ),
    "quantize_fp8/token/28672": ("quantize_fp8", lambda: _quantize(64, 28672, BF16, (1, -1))),
    "quantize_fp8/token/cut": ("quantize_fp8", lambda: _quantize(2, 40000, BF16, (1, -1))),
    "quantize_fp8/tensor": ("quantize_fp8", lambda: _quantize(512, 4096, BF16, (-1, -1))),
    "quantize_fp8/1x128": ("quantize_fp8", lambda: _quantize(512, 4096, BF16, (1, 128))),
    "quantize_fp8/128x128": ("quantize_fp8", lambda: _quantize(512, 4096, BF16, (128, 128))),
    "quantize_fp8/128x128/fp32": ("quantize_fp8", lambda: _quantize(130, 304, FP32, (128, 128))),
    "quantize_fp8/static": (
        "quantize_fp8",
        lambda: _quantize(512, 4096, BF16, (-1, -1), static=True),
    ),
    "quantize_fp8/column": ("quantize_fp8", lambda: _quantize(512, 100, FP16, (-1, 1))),
    "quantize_int8/token": ("quantize_int8", lambda: _quantize(512, 4096, BF16, (1, -1), INT8)),
    "quantize_int8/1x128/static": (
        "quantize_int8",
        lambda: _quantize(512, 4096, BF16, (1, 128), INT8, static=True),
    ),
    "quantize_int8_asymmetric/4096": (
        "quantize_int8_asymmetric",
        lambda: _quantize_asymmetric(512, 4096, BF16),
    ),
    "quantize_int8_asymmetric/cut": (
        "quantize_int8_asymmetric",
        lambda: _quantize_asymmetric(2, 40000, FP32),
    ),
    "rotary/neox": ("rotary_embedding_", lambda: _rotary(BF16, 128, interleaved=False)),
    "rotary/neox/fp32": ("rotary_embedding_", lambda: _rotary(FP32, 80, interleaved=False)),
    "rotary/interleaved": ("rotary_embedding_", lambda: _rotary(BF16, 128, interleaved=True)),
    "append/bf16": ("append_paged_kv_cache_", lambda: _append(BF16, BF16, BF16)),
    "append/int8": ("append_paged_kv_cache_", lambda: _append(BF16, INT8, INT8)),
    "append/fp8": ("append_paged_kv_cache_", lambda: _append(BF16, FP8, FP8)),
    "append/mixed": ("append_paged_kv_cache_", lambda: _append(FP32, INT8, FP32, dim=72)),
    "append/static": (
        "append_paged_kv_cache_",
        lambda: _append(FP16, FP8, INT8, static=True),
    ),
    "qk_norm_rope/bf16": ("qk_norm_rope_append_", lambda: _qk_norm_rope(BF16, BF16)),
    "qk_norm_rope/norm": ("qk_norm_rope_append_", lambda: _qk_norm_rope(BF16, FP8, norm=True)),
    "qk_norm_rope/fp32": (
        "qk_norm_rope_append_",
        lambda: _qk_norm_rope(FP32, INT8, dim=72, rotary_dim=40, norm=True, interleaved=True),
    ),
    "sample/greedy": ("sample", lambda: _sample(256, 4000, BF16, draws=False)),
    "sample/greedy/one": ("sample", lambda: _sample(1, 151936, FP32, draws=False)),
    "sample/plain": ("sample", lambda: _sample(64, 128256, BF16)),
    "sample/filters": ("sample", lambda: _sample(1, 128256, FP32, "top_k", "top_p", "min_p")),
    "sample/filters/bf16": ("sample", lambda: _sample(256, 50257, BF16, "top_k", "top_p")),
    "sample/top_p": ("sample", lambda: _sample(64, 32000, FP32, "top_p")),
}
"""Name -> the op and what makes the arguments of its launcher."""


def launches_of(case: str, capability: int = 90) -> list[Launch]:
    """What the case's launcher launches."""
    op, make = CASES[case]
    module = importlib.import_module(f"{kernels.__name__}.{kernels.LAUNCHERS[op]}")
    with recorded(module, DEVICES[capability]) as launches:
        getattr(module, op)(*make())
    assert launches
    return launches


# ------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize("capability", [90, 80], ids=lambda c: f"sm_{c}")
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(case: str, capability: int, tmp_path: Path) -> None:
    """To a cubin that fits the smallest shared memory and keeps its values in registers."""
    for launch in launches_of(case, capability):
        compiled = launch.compile(capability)
        assert compiled.metadata.shared <= SHARED_MEMORY
        used = resources(compiled, tmp_path)
        assert used["STACK"] <= SPILLED and used["LOCAL"] == 0, (launch.kernel.__name__, used)


def launched_kernels(module: Any) -> set[str]:
    """The names of the kernels that a module's source hands to `launch`."""
    assert module.__file__ is not None
    calls = [
        node
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return {ast.unparse(call.args[0]) for call in calls if call.func.id == "launch"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted({kernels.LAUNCHERS[op] for op, _ in CASES.values()}))
def test_every_launched_kernel_has_a_case(name: str) -> None:
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    cases = [case for case, (op, _) in CASES.items() if kernels.LAUNCHERS[op] == name]
    covered = {launch.kernel.__name__ for case in cases for launch in launches_of(case)}
    expected = launched_kernels(module)
    assert expected and expected <= covered
    assert all(isinstance(getattr(module, kernel), JITFunction) for kernel in expected)


@pytest.mark.parametrize(
    ("case", "loads", "stores"),
    [
        ("rms_norm/head", 2, 1), ("rms_norm/4096", 2, 1), ("fused_add_rms_norm/8192", 2, 2),
        ("silu/bf16", 2, 1), ("gelu/erf", 2, 1), ("rotary/neox", 2, 2),
        ("rotary/interleaved", 2, 2), ("append/bf16", 1, 1), ("qk_norm_rope/bf16", 3, 3),
        ("sample/greedy/one", 1, 0), ("quantize_fp8/token", 2, 1), ("quantize_fp8/1x128", 2, 1),
        ("quantize_fp8/static", 2, 1), ("quantize_int8/token", 2, 1),
        ("quantize_int8_asymmetric/4096", 2, 1), ("quantize_fp8/128x128", 2, 1),
    ],
)  # fmt: skip
def test_aligned_rows_move_16_bytes_at_a_time(case: str, loads: int, stores: int) -> None:
    ptx = launches_of(case)[0].compile(90).asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= loads
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) >= stores


def layouts_of_sums(case: str) -> list[tuple[str, str]]:
    """The shape and the layout of each tile that the case's kernel sums."""
    text = launches_of(case)[0].compile(90).asm["ttgir"]
    aliases = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r"tt\.reduce.*?\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\)", text, re.DOTALL)
    return [(shape, aliases[layout]) for shape, layout in sums]


@pytest.mark.parametrize("case", ["rms_norm/head", "rms_norm/4096"])
def test_sums_have_one_order_at_every_address(case: str) -> None:
    """R31: the layout of what is summed is the same for aligned and for odd rows."""
    aligned = layouts_of_sums(case)
    assert len(aligned) == 1
    assert layouts_of_sums(f"{case.removesuffix('/4096')}/odd") == aligned


def test_fused_norms_sum_in_the_order_of_rms_norm() -> None:
    (alone,) = layouts_of_sums("rms_norm/head")
    assert layouts_of_sums("qk_norm_rope/norm") == [alone, alone]
