"""Rotary position embedding of q and k in one launch.

Positions are not range-checked: a token whose position is outside the table becomes NaN, and
nothing outside the table is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.rows import full_width, to_element, to_float


@dataclass(frozen=True)
class RotaryConfig:
    """The tile of a program: some heads of one token."""

    heads: int
    block: int  # pairs; a power of two
    num_warps: int


def rotary_config(heads: int, rotary_dim: int) -> RotaryConfig:
    """About 512 pairs a program, 8 for each of 64 threads, whose token's cos and sin serve all."""
    block = max(4, triton.next_power_of_2(rotary_dim // 2))
    per_program = min(triton.next_power_of_2(heads), max(1, 512 // block))
    return RotaryConfig(per_program, block, 2)


@triton.jit
def _turn(
    x_ptr,  # [heads, head_dim] of one token
    first_head,
    num_heads,
    head_stride,
    cos,
    sin,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Turns the pairs (i, i + PAIRS), or (2i, 2i + 1), of HEADS heads."""
    head = first_head + tl.arange(0, HEADS)
    rows = x_ptr + tl.multiple_of(head.to(tl.int64) * head_stride, VECTOR)[:, None]
    inside = (head < num_heads)[:, None]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, :]
        mask = inside & (col < 2 * PAIRS)
        pairs = to_float(tl.load(rows + col, mask=mask, other=0.0))
        x1, x2 = tl.split(tl.reshape(pairs, (HEADS, BLOCK, 2)))
        y = tl.join(x1 * cos - x2 * sin, x1 * sin + x2 * cos)
        y = tl.reshape(y, (HEADS, 2 * BLOCK))
        tl.store(rows + col, to_element(y, dtype), mask=mask)
    else:
        col = tl.arange(0, BLOCK)[None, :]
        mask = inside & (col < PAIRS)
        x1 = to_float(tl.load(rows + col, mask=mask, other=0.0))
        x2 = to_float(tl.load(rows + PAIRS + col, mask=mask, other=0.0))
        tl.store(rows + col, to_element(x1 * cos - x2 * sin, dtype), mask=mask)
        tl.store(rows + PAIRS + col, to_element(x1 * sin + x2 * cos, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_positions", "positions_ptr"])
def rotary_kernel(
    q_ptr,  # [T, q_heads, head_dim]
    k_ptr,  # [T, k_heads, head_dim]
    positions_ptr,  # [T]
    cos_sin_ptr,  # [num_positions, 2 * pairs]: cos, then sin
    num_positions,
    cos_sin_stride,
    q_heads,
    q_token_stride,
    q_head_stride,
    k_heads,
    k_token_stride,
    k_head_stride,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    VECTOR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_K: tl.constexpr,
):
    """Program (t, i): the i-th HEADS heads of token t, first those of q and then those of k."""
    token = tl.program_id(0).to(tl.int64)
    q_programs = (q_heads + HEADS - 1) // HEADS
    part = tl.program_id(1)

    position = tl.load(positions_ptr + token)
    col = tl.arange(0, BLOCK)
    known = (position >= 0) & (position < num_positions) & (col < PAIRS)
    row = cos_sin_ptr + position * cos_sin_stride
    cos = tl.load(row + col, mask=known, other=float("nan"))[None, :]
    sin = tl.load(row + PAIRS + col, mask=known, other=float("nan"))[None, :]

    if part < q_programs:
        offset = tl.multiple_of(token * q_token_stride, VECTOR)
        _turn(
            q_ptr + offset, part * HEADS, q_heads, q_head_stride, cos, sin, PAIRS, BLOCK, HEADS,
            VECTOR, INTERLEAVED,
        )  # fmt: skip
    elif HAS_K:
        offset = tl.multiple_of(token * k_token_stride, VECTOR)
        _turn(
            k_ptr + offset, (part - q_programs) * HEADS, k_heads, k_head_stride, cos, sin, PAIRS,
            BLOCK, HEADS, VECTOR, INTERLEAVED,
        )  # fmt: skip


def rotary_embedding_(
    q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor, interleaved: bool
) -> None:
    """Turns the first R features of each head of q and k by their token's angles."""
    tokens, q_heads, _ = q.shape
    k_heads = 0 if k is None else k.shape[1]
    rotary_dim = cos_sin.shape[1]
    pairs = rotary_dim // 2
    config = rotary_config(max(q_heads, k_heads), rotary_dim)
    full = full_width(q)
    strides = [*q.stride()[:2], *(() if k is None else k.stride()[:2])]
    begins = rotary_dim if interleaved else pairs
    vector = 1 if begins % full or any(stride % full for stride in strides) else full
    launch(
        rotary_kernel,
        (tokens, triton.cdiv(q_heads, config.heads) + triton.cdiv(k_heads, config.heads)),
        q,
        q,
        k,
        positions,
        cos_sin,
        cos_sin.shape[0],
        cos_sin.stride(0),
        q_heads,
        q.stride(0),
        q.stride(1),
        k_heads,
        0 if k is None else k.stride(0),
        0 if k is None else k.stride(1),
        PAIRS=pairs,
        BLOCK=config.block,
        HEADS=config.heads,
        VECTOR=vector,
        INTERLEAVED=interleaved,
        HAS_K=k is not None,
        num_warps=config.num_warps,
    )
