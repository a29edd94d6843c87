"""New tokens written into pages: copied, or quantized to int8 or float8_e4m3fn.

Stored bits are part of the contract: every step is correctly rounded float32 or integer
arithmetic, the same as in the CPU kernels. fp8 codes are made of integers, so that GPUs without the
type store them too. Slots are not checked: a token whose slot is negative or past the pool is
skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.rows import full_width, to_float

COPY, INT8, FP8 = (tl.constexpr(i) for i in range(3))
FORMATS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


@dataclass(frozen=True)
class AppendConfig:
    """The tile of a program: some rows, of a token and a head each, of K or of V."""

    rows: int
    k_block: int  # elements of a row; a power of two
    v_block: int
    num_warps: int


def append_config(rows: int, k_dim: int, v_dim: int) -> AppendConfig:
    """2048 elements a program, 16 a thread: bytes are stored in vectors of 16."""
    k_block, v_block = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    per_program = max(1, 2048 // max(k_block, v_block))
    return AppendConfig(min(per_program, triton.next_power_of_2(rows)), k_block, v_block, 4)


@triton.jit
def encode_e4m3(x):
    """float8_e4m3fn codes of |x| <= 448, to nearest even, by integers; NaN keeps its sign."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: 20 bits of mantissa go, with rounding; the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is where the adder rounds a sum with 2^14.
    sum_bits = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, sum_bits - 0x46800000, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def store_rows(
    x,  # [rows, BLOCK]: elements
    cache_ptr,  # [num_blocks, heads, block_size, dim]; bytes if fp8
    scale_ptr,  # [num_blocks, heads, block_size] or [heads]
    head,
    block,
    offset,
    inside,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    FORMAT: tl.constexpr,
    STATIC: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows, each of a head, to their slots."""
    col = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (col < DIM)
    target = block * cache_block_stride + head * cache_head_stride + offset * cache_slot_stride
    target = tl.multiple_of(target, VECTOR)
    cache_ptrs = cache_ptr + target[:, None] + col
    if FORMAT == COPY:
        tl.store(cache_ptrs, x, mask=mask)
    else:
        LIMIT: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
        value = to_float(x)
        if STATIC:
            scale = tl.load(scale_ptr + head * scale_head_stride, mask=inside, other=1.0)
        else:
            # As integers magnitudes keep their order, with NaN above infinity: it stays visible.
            magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
            scale = tl.div_rn(largest, tl.zeros_like(largest) + LIMIT)
            scale = tl.where(scale == 0.0, 1.0, scale)
            at = block * scale_block_stride + head * scale_head_stride + offset * scale_slot_stride
            tl.store(scale_ptr + at, scale, mask=inside)
        value = tl.div_rn(value, tl.zeros_like(value) + scale[:, None])
        value = tl.where(value > LIMIT, LIMIT, value)
        value = tl.where(value < -LIMIT, -LIMIT, value)
        if FORMAT == INT8:
            # 1.5 * 2^23: adding it rounds to an integer, held in the low bits.
            code = (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
            code = tl.where(value == value, code, 0)
        else:
            code = encode_e4m3(value)
        tl.store(cache_ptrs, code.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _append(
    x_ptr,  # [T, heads, dim]
    cache_ptr,
    scale_ptr,
    token,
    head,
    block,
    offset,
    inside,
    x_token_stride,
    x_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    scale_block_stride,
    scale_head_stride,
    scale_slot_stride,
    FORMAT: tl.constexpr,
    STATIC: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows (token, head) of K, or of V, to their slots."""
    col = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (col < DIM)
    source = tl.multiple_of(token * x_token_stride + head * x_head_stride, VECTOR)
    x = tl.load(x_ptr + source[:, None] + col, mask=mask, other=0.0)
    store_rows(
        x, cache_ptr, scale_ptr, head, block, offset, inside, cache_block_stride,
        cache_head_stride, cache_slot_stride, scale_block_stride, scale_head_stride,
        scale_slot_stride, FORMAT, STATIC, DIM, BLOCK, VECTOR,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "capacity", "slot_mapping_ptr"])
def append_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,  # [T]
    k_scale_ptr,
    v_scale_ptr,
    num_rows,  # T * heads
    capacity,
    k_token_stride,
    k_head_stride,
    k_cache_block_stride,
    k_cache_head_stride,
    k_cache_slot_stride,
    k_scale_block_stride,
    k_scale_head_stride,
    k_scale_slot_stride,
    v_token_stride,
    v_head_stride,
    v_cache_block_stride,
    v_cache_head_stride,
    v_cache_slot_stride,
    v_scale_block_stride,
    v_scale_head_stride,
    v_scale_slot_stride,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_STATIC: tl.constexpr,
    K_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_VECTOR: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_STATIC: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_VECTOR: tl.constexpr,
):
    """Program (i, 0) writes the i-th ROWS rows of K, program (i, 1) those of V."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slot_mapping_ptr + token, mask=row < num_rows, other=-1)
    inside = (slot >= 0) & (slot < capacity)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    if tl.program_id(1) == 0:
        _append(
            k_ptr, k_cache_ptr, k_scale_ptr, token, head, block, offset, inside, k_token_stride,
            k_head_stride, k_cache_block_stride, k_cache_head_stride, k_cache_slot_stride,
            k_scale_block_stride, k_scale_head_stride, k_scale_slot_stride, K_FORMAT, K_STATIC,
            K_DIM, K_BLOCK, K_VECTOR,
        )  # fmt: skip
    else:
        _append(
            v_ptr, v_cache_ptr, v_scale_ptr, token, head, block, offset, inside, v_token_stride,
            v_head_stride, v_cache_block_stride, v_cache_head_stride, v_cache_slot_stride,
            v_scale_block_stride, v_scale_head_stride, v_scale_slot_stride, V_FORMAT, V_STATIC,
            V_DIM, V_BLOCK, V_VECTOR,
        )  # fmt: skip


def append_paged_kv_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Writes each token's k and v into its slot, and scales per token and head if they are 3-D."""
    tokens, heads, k_dim = k.shape
    v_dim = v.shape[2]
    num_blocks, _, block_size, _ = k_cache.shape
    config = append_config(tokens * heads, k_dim, v_dim)
    launch(
        append_kernel,
        (triton.cdiv(tokens * heads, config.rows), 2),
        k,
        k,
        v,
        storable(k_cache),
        storable(v_cache),
        slot_mapping,
        k_scale,
        v_scale,
        tokens * heads,
        num_blocks * block_size,
        *k.stride()[:2],
        *page_strides(k_cache, k_scale),
        *v.stride()[:2],
        *page_strides(v_cache, v_scale),
        HEADS=heads,
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        K_FORMAT=FORMATS.get(k_cache.dtype, COPY),
        K_STATIC=k_scale is not None and k_scale.dim() == 1,
        K_DIM=k_dim,
        K_BLOCK=config.k_block,
        K_VECTOR=_vector(k, k_cache),
        V_FORMAT=FORMATS.get(v_cache.dtype, COPY),
        V_STATIC=v_scale is not None and v_scale.dim() == 1,
        V_DIM=v_dim,
        V_BLOCK=config.v_block,
        V_VECTOR=_vector(v, v_cache),
        num_warps=config.num_warps,
    )


def storable(cache: Tensor) -> Tensor:
    """A cache as kernels store to it: fp8 as bytes."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def page_strides(cache: Tensor, scale: Tensor | None) -> tuple[int, ...]:
    """Of blocks, heads and slots; and of the scales' blocks, heads and slots."""
    scales: tuple[int, ...] = (0, 0, 0)
    if scale is not None:
        scales = scale.stride() if scale.dim() == 3 else (0, scale.stride(0), 0)
    return (*cache.stride()[:3], *scales)


def _vector(x: Tensor, cache: Tensor) -> int:
    """Elements at a multiple of which every row begins, in x and in the cache: 16 bytes' or 1."""
    full = max(full_width(x), full_width(cache))
    strides = (*x.stride()[:2], *cache.stride()[:3], x.shape[2])
    return 1 if any(stride % full for stride in strides) else full
