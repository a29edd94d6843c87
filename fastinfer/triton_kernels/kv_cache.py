"""New tokens written into pages: copied, or quantized to int8 or float8_e4m3fn.

Stored bits are part of the contract: results are those of correctly rounded float32 steps, the same
as in the CPU kernels. Where the GPU does not convert to fp8 itself, codes are made of integers.
Slots are not checked: a token whose slot is negative or past the pool is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.rows import INTERPRETED, full_width, to_float

COPY, INT8, FP8 = (tl.constexpr(i) for i in range(3))
FORMATS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


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
def _fma(x, y, z):
    """x * y + z, rounded once."""
    if INTERPRETED:  # the interpreter's own rounds the product as well
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def _quotient(x, scale, inverse):
    """x / scale as IEEE division rounds it, where `_multiplies` holds; a zero keeps its sign.

    The steps, and why they suffice, are those of RowDivision (csrc/cuda/kv_cache/page_rows.cuh).
    """
    # Below 1 / scale by up to 3/2 of the last place, so that `rest` is positive: x = -0 gives -0.
    low = (inverse.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    rest = _fma(-scale, low, tl.full(low.shape, 1.0, tl.float32)) * low
    q = _fma(x, low, x * rest)
    excess = _fma(q, scale, x * -1.0)  # `-x` would be 0 - x, which has another sign at 0
    return _fma(excess, -inverse, q)


@triton.jit
def _multiplies(scale, inverse, largest):
    """Whether `_quotient` may stand for the division in rows of this scale and largest magnitude.

    Nothing overflows, quotients so small that something is lost have the code 0, and the scale's
    mantissa is not one of the last 256, for which there is no proof.
    """
    common = (scale >= 2.0**-80) & (scale <= 2.0**80)
    common &= (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) < 0x7FFF00
    return common & (largest * inverse <= 2.0**30)


@triton.jit
def _encode(value, FORMAT: tl.constexpr):
    """Codes of finite values up to the limit, or no more than a rounding beyond it."""
    if FORMAT == INT8:
        # 1.5 * 2^23: adding it rounds to an integer, held in the low bits.
        code = (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif not INTERPRETED and cuda_capability_geq(8, 9):
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = encode_e4m3(value).to(tl.uint8)
    return code


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
        LIMIT: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
        value = to_float(x)
        # As integers magnitudes keep their order, with NaN above infinity: it stays visible.
        magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest = tl.max(magnitude, axis=1).to(tl.float32, bitcast=True)
        if STATIC:
            scale = tl.load(scale_ptr + head * scale_head_stride, mask=inside, other=1.0)
        else:
            scale = tl.div_rn(largest, tl.zeros_like(largest) + LIMIT)
            scale = tl.where(scale == 0.0, 1.0, scale)
            at = block * scale_block_stride + head * scale_head_stride + offset * scale_slot_stride
            tl.store(scale_ptr + at, scale, mask=inside)
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
        # Multiplications take a third of a division's instructions; nearly all tiles allow them.
        multiplies = _multiplies(scale, inverse, largest)
        if tl.min(multiplies.to(tl.int32), axis=0) != 0:
            value = _quotient(value, scale[:, None], inverse[:, None])
            if STATIC:
                value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
            code = _encode(value, FORMAT)
        else:
            value = tl.div_rn(value, tl.zeros_like(value) + scale[:, None])
            nan = value != value
            value = tl.where(value > LIMIT, LIMIT, value)
            value = tl.where(value < -LIMIT, -LIMIT, value)
            if FORMAT == INT8:
                code = tl.where(nan, 0, _encode(value, FORMAT)).to(tl.int8)
            else:
                code = encode_e4m3(value).to(tl.uint8)
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
