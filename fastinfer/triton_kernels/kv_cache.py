"""New tokens written into pages: copied, or quantized to int8 or float8_e4m3fn.

Stored bits are part of the contract (see `quantization`). Slots are not checked: a token whose slot
is negative or past the pool is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.quantization import (
    COPY,
    FORMATS,
    dynamic_scale,
    magnitude_bits,
    quantized,
    storable,
)
from fastinfer.triton_kernels.rows import full_width, to_float


@dataclass(frozen=True)
class AppendConfig:
    """The tiles of a program: some rows, of a token and a head each, of K and of V."""

    rows: int
    k_block: int  # elements of a row; a power of two
    v_block: int
    num_warps: int


def append_config(rows: int, k_dim: int, v_dim: int) -> AppendConfig:
    """A warp a program: its rows agree without a barrier. A thread has 16 elements of K and of V:
    bytes are stored in vectors of 16.
    """
    k_block, v_block = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    largest = max(k_block, v_block)
    per_program = min(max(1, 512 // largest), triton.next_power_of_2(rows))
    return AppendConfig(per_program, k_block, v_block, 1 if largest <= 512 else 4)


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
    block, head, offset = block.to(tl.int64), head.to(tl.int64), offset.to(tl.int64)
    target = block * cache_block_stride + head * cache_head_stride + offset * cache_slot_stride
    target = tl.multiple_of(target, VECTOR)
    cache_ptrs = cache_ptr + target[:, None] + col
    if FORMAT == COPY:
        tl.store(cache_ptrs, x, mask=mask)
    else:
        value = to_float(x)
        largest = tl.max(magnitude_bits(value), axis=1).to(tl.float32, bitcast=True)
        if STATIC:
            scale = tl.load(scale_ptr + head * scale_head_stride, mask=inside, other=1.0)
        else:
            scale = dynamic_scale(largest, FORMAT)
            at = block * scale_block_stride + head * scale_head_stride + offset * scale_slot_stride
            tl.store(scale_ptr + at, scale, mask=inside)
        code = quantized(value, scale[:, None], largest[:, None], FORMAT, STATIC)
        tl.store(cache_ptrs, code, mask=mask)


@triton.jit
def _load_rows(
    x_ptr,  # [T, heads, dim]
    token,
    head,
    present,
    token_stride,
    head_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows (token, head) of K, or of V; also those without a slot, not to wait for slots."""
    col = tl.arange(0, BLOCK)[None, :]
    source = token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    source = tl.multiple_of(source, VECTOR)
    return tl.load(x_ptr + source[:, None] + col, mask=present[:, None] & (col < DIM), other=0.0)


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
    """Program i writes the i-th ROWS rows of K and of V."""
    # Divisions are in the type of what they divide: 32 bits, but for enormous pools.
    first = tl.program_id(0).to(num_rows.dtype) * ROWS
    row = first + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    present = tl.arange(0, ROWS) < num_rows - first
    slot = tl.load(slot_mapping_ptr + token, mask=present, other=-1)
    k = _load_rows(
        k_ptr, token, head, present, k_token_stride, k_head_stride, K_DIM, K_BLOCK, K_VECTOR
    )
    v = _load_rows(
        v_ptr, token, head, present, v_token_stride, v_head_stride, V_DIM, V_BLOCK, V_VECTOR
    )
    inside = (slot >= 0) & (slot < capacity)
    slot = tl.where(inside, slot, 0).to(capacity.dtype)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    store_rows(
        k, k_cache_ptr, k_scale_ptr, head, block, offset, inside, k_cache_block_stride,
        k_cache_head_stride, k_cache_slot_stride, k_scale_block_stride, k_scale_head_stride,
        k_scale_slot_stride, K_FORMAT, K_STATIC, K_DIM, K_BLOCK, K_VECTOR,
    )  # fmt: skip
    store_rows(
        v, v_cache_ptr, v_scale_ptr, head, block, offset, inside, v_cache_block_stride,
        v_cache_head_stride, v_cache_slot_stride, v_scale_block_stride, v_scale_head_stride,
        v_scale_slot_stride, V_FORMAT, V_STATIC, V_DIM, V_BLOCK, V_VECTOR,
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
        (triton.cdiv(tokens * heads, config.rows),),
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
