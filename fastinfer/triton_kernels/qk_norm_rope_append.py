"""From a fused QKV projection to queries and pages in one launch.

A program takes some rows, of a token and a head each, all of q, of k or of v. Every step rounds to
the element type where the op that it stands for would, and the tile of a row is that of `rms_norm`.
Slots and positions are not checked: a token whose slot is negative or past the pool is not
appended, and one whose position is outside the table becomes NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.kv_cache import page_strides, store_rows
from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.norm import norm_config
from fastinfer.triton_kernels.quantization import COPY, FORMATS, storable
from fastinfer.triton_kernels.rows import full_width, to_element, to_float


@triton.jit
def _features(
    row_ptr,  # of the token and head in qkv, [ROWS, 1]
    bias_ptr,  # of the head, [ROWS, 1]
    cols,  # [1, BLOCK]
    mask,
    HAS_BIAS: tl.constexpr,
):
    """Features of rows as float32, after the bias."""
    x = tl.load(row_ptr + cols, mask=mask, other=0.0)
    if HAS_BIAS:
        bias = to_float(tl.load(bias_ptr + cols, mask=mask, other=0.0))
        x = to_element(to_float(x) + bias, x.dtype)
    return to_float(x)


@triton.jit
def _weighted(x, scale, weight_ptr, weight_offset, cols, mask, dtype: tl.constexpr):
    weight = to_float(tl.load(weight_ptr + cols, mask=mask, other=0.0))
    return to_float(to_element(x * scale * (weight + weight_offset), dtype))


@triton.jit
def _heads(
    qkv_ptr,
    bias_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    token,
    column,  # where the heads' rows begin in qkv
    inside,
    qkv_token_stride,
    cos_sin_stride,
    num_positions,
    eps,
    weight_offset,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows [ROWS, BLOCK] of q, k or v, as they are stored: elements."""
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)[None, :]
    mask = inside[:, None] & (cols < DIM)
    column = tl.multiple_of(column, VECTOR)
    row_ptr = qkv_ptr + tl.multiple_of(token * qkv_token_stride + column, VECTOR)[:, None]
    bias_row_ptr = bias_ptr
    if HAS_BIAS:
        bias_row_ptr = bias_ptr + column[:, None]
    x = _features(row_ptr, bias_row_ptr, cols, mask, HAS_BIAS)
    if NORM:
        scale = tl.rsqrt(tl.div_rn(tl.sum(x * x, axis=1), DIM * 1.0) + eps)[:, None]
        x = _weighted(x, scale, weight_ptr, weight_offset, cols, cols < DIM, dtype)
    if PAIRS > 0:
        turned = cols < 2 * PAIRS
        if INTERLEAVED:
            is_first = cols % 2 == 0
            pair = cols // 2
            partner_cols = tl.where(is_first, cols + 1, cols - 1)
        else:
            is_first = cols < PAIRS
            pair = tl.where(is_first, cols, cols - PAIRS)
            partner_cols = tl.where(is_first, cols + PAIRS, cols - PAIRS)
        # The partner is read, and worked out, once more: it is in a cache, while an exchange
        # between threads would go through shared memory.
        partner = _features(row_ptr, bias_row_ptr, partner_cols, mask & turned, HAS_BIAS)
        if NORM:
            partner = _weighted(
                partner, scale, weight_ptr, weight_offset, partner_cols, turned, dtype
            )
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        known = ((position >= 0) & (position < num_positions))[:, None] & turned
        angles = cos_sin_ptr + (position * cos_sin_stride)[:, None] + pair
        cos = tl.load(angles, mask=known, other=float("nan"))
        sin = tl.load(angles + PAIRS, mask=known, other=float("nan"))
        # x1 cos - x2 sin and x1 sin + x2 cos; the product with x1 is not rounded, as in
        # rotary_embedding_.
        rest = tl.where(is_first, -partner * sin, x * cos)
        y = tl.fma(tl.where(is_first, x, partner), tl.where(is_first, cos, sin), rest)
        x = tl.where(turned, y, x)
    return to_element(x, dtype)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "capacity",
        "num_positions",
        "slot_mapping_ptr",
        "positions_ptr",
    ]
)
def qk_norm_rope_append_kernel(
    qkv_ptr,  # [T, HEADS * DIM + KV_HEADS * (DIM + V_DIM)]
    q_out_ptr,  # [T, HEADS, DIM]; may be qkv_ptr
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,  # [T]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [num_positions, 2 * PAIRS]
    bias_ptr,  # [columns of qkv]
    q_weight_ptr,  # [DIM]
    k_weight_ptr,  # [DIM]
    k_scale_ptr,
    v_scale_ptr,
    tokens,
    capacity,
    num_positions,
    qkv_token_stride,
    q_token_stride,
    q_head_stride,
    cos_sin_stride,
    k_cache_block_stride,
    k_cache_head_stride,
    k_cache_slot_stride,
    k_scale_block_stride,
    k_scale_head_stride,
    k_scale_slot_stride,
    v_cache_block_stride,
    v_cache_head_stride,
    v_cache_slot_stride,
    v_scale_block_stride,
    v_scale_head_stride,
    v_scale_slot_stride,
    eps: tl.float32,
    weight_offset: tl.float32,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    V_ROWS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_STATIC: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_STATIC: tl.constexpr,
):
    """The first programs take rows of q, the next ones of k, and the last ones of v."""
    program = tl.program_id(0).to(tl.int64)
    q_rows = tokens.to(tl.int64) * HEADS
    kv_rows = tokens.to(tl.int64) * KV_HEADS
    q_programs = (q_rows + ROWS - 1) // ROWS
    k_programs = (kv_rows + ROWS - 1) // ROWS
    if program < q_programs:
        row = program * ROWS + tl.arange(0, ROWS)
        inside = row < q_rows
        token, head = row // HEADS, row % HEADS
        q = _heads(
            qkv_ptr, bias_ptr, q_weight_ptr, positions_ptr, cos_sin_ptr, token, head * DIM, inside,
            qkv_token_stride, cos_sin_stride, num_positions, eps, weight_offset, DIM, BLOCK, VECTOR,
            HAS_BIAS, Q_NORM, PAIRS, INTERLEAVED,
        )  # fmt: skip
        cols = tl.arange(0, BLOCK)[None, :]
        target = tl.multiple_of(token * q_token_stride + head * q_head_stride, VECTOR)
        # q_out may be qkv: every thread has read a feature and its partner before one is written.
        tl.debug_barrier()
        tl.store(q_out_ptr + target[:, None] + cols, q, mask=inside[:, None] & (cols < DIM))
    elif program < q_programs + k_programs:
        row = (program - q_programs) * ROWS + tl.arange(0, ROWS)
        token, head = row // KV_HEADS, row % KV_HEADS
        slot = tl.load(slot_mapping_ptr + token, mask=row < kv_rows, other=-1)
        inside = (slot >= 0) & (slot < capacity)
        k = _heads(
            qkv_ptr, bias_ptr, k_weight_ptr, positions_ptr, cos_sin_ptr, token,
            HEADS * DIM + head * DIM, inside, qkv_token_stride, cos_sin_stride, num_positions, eps,
            weight_offset, DIM, BLOCK, VECTOR, HAS_BIAS, K_NORM, PAIRS, INTERLEAVED,
        )  # fmt: skip
        store_rows(
            k, k_cache_ptr, k_scale_ptr, head, slot // BLOCK_SIZE, slot % BLOCK_SIZE, inside,
            k_cache_block_stride, k_cache_head_stride, k_cache_slot_stride, k_scale_block_stride,
            k_scale_head_stride, k_scale_slot_stride, K_FORMAT, K_STATIC, DIM, BLOCK, VECTOR,
        )  # fmt: skip
    else:
        # Names of their own: these may be of another shape than those of the branches above.
        v_row = (program - q_programs - k_programs) * V_ROWS + tl.arange(0, V_ROWS)
        v_token, v_head = v_row // KV_HEADS, v_row % KV_HEADS
        v_slot = tl.load(slot_mapping_ptr + v_token, mask=v_row < kv_rows, other=-1)
        v_inside = (v_slot >= 0) & (v_slot < capacity)
        v = _heads(
            qkv_ptr, bias_ptr, None, positions_ptr, cos_sin_ptr, v_token,
            (HEADS + KV_HEADS) * DIM + v_head * V_DIM, v_inside, qkv_token_stride, cos_sin_stride,
            num_positions, eps, weight_offset, V_DIM, V_BLOCK, VECTOR, HAS_BIAS, False, 0, False,
        )  # fmt: skip
        store_rows(
            v, v_cache_ptr, v_scale_ptr, v_head, v_slot // BLOCK_SIZE, v_slot % BLOCK_SIZE,
            v_inside, v_cache_block_stride, v_cache_head_stride, v_cache_slot_stride,
            v_scale_block_stride, v_scale_head_stride, v_scale_slot_stride, V_FORMAT, V_STATIC,
            V_DIM, V_BLOCK, VECTOR,
        )  # fmt: skip


def qk_norm_rope_append_(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Bias, norm of q and k, rotation and append of every token."""
    tokens, heads, dim = q_out.shape
    num_blocks, kv_heads, block_size, value_dim = v_cache.shape
    config = norm_config(dim, qkv.element_size(), centre=False)
    v_block = max(16, triton.next_power_of_2(value_dim))
    v_rows = max(1, 2048 // v_block)
    programs = (
        triton.cdiv(tokens * heads, config.rows)
        + triton.cdiv(tokens * kv_heads, config.rows)
        + triton.cdiv(tokens * kv_heads, v_rows)
    )
    launch(
        qk_norm_rope_append_kernel,
        (programs,),
        qkv,
        qkv,
        q_out,
        storable(k_cache),
        storable(v_cache),
        slot_mapping,
        positions,
        cos_sin,
        bias,
        q_weight,
        k_weight,
        k_scale,
        v_scale,
        tokens,
        num_blocks * block_size,
        0 if cos_sin is None else cos_sin.shape[0],
        qkv.stride(0),
        *q_out.stride()[:2],
        0 if cos_sin is None else cos_sin.stride(0),
        *page_strides(k_cache, k_scale),
        *page_strides(v_cache, v_scale),
        eps,
        weight_offset,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        DIM=dim,
        BLOCK=config.block,
        V_ROWS=v_rows,
        V_DIM=value_dim,
        V_BLOCK=v_block,
        VECTOR=_vector(qkv, q_out, k_cache, v_cache),
        HAS_BIAS=bias is not None,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        PAIRS=0 if cos_sin is None else cos_sin.shape[1] // 2,
        INTERLEAVED=interleaved,
        K_FORMAT=FORMATS.get(k_cache.dtype, COPY),
        K_STATIC=k_scale is not None and k_scale.dim() == 1,
        V_FORMAT=FORMATS.get(v_cache.dtype, COPY),
        V_STATIC=v_scale is not None and v_scale.dim() == 1,
        num_warps=config.num_warps,
    )


def _vector(qkv: Tensor, q_out: Tensor, k_cache: Tensor, v_cache: Tensor) -> int:
    """Elements at a multiple of which every row begins, wherever it is: those of 16 bytes, or 1.

    No more where pages hold bytes: that would give sums another order than they have in `rms_norm`.
    """
    full = full_width(qkv)
    strides = (
        qkv.stride(0),
        *q_out.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        k_cache.shape[3],
        v_cache.shape[3],
    )
    return 1 if any(stride % full for stride in strides) else full
