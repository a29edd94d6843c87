"""Gated activations: act(gate) * up over rows of [gate, up]."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.rows import row_offset, to_element, to_float, vector_width, walk

NONE, SILU, GELU_ERF, GELU_TANH = (tl.constexpr(i) for i in range(4))
"""In the order of csrc/activation.h."""


@dataclass(frozen=True)
class ActivationConfig:
    """The tile of a program."""

    rows: int
    block: int  # columns; a power of two
    num_warps: int


def activation_config(rows: int, width: int) -> ActivationConfig:
    """8 elements a thread, so that few rows spread over many programs; 16 where there are plenty.

    Elements do not depend on each other: the tile may follow the number of rows.
    """
    tile = 1024 if rows * width < 1 << 22 else 2048
    block = min(tile, max(16, triton.next_power_of_2(width)))
    return ActivationConfig(tile // block, block, 4)


@triton.jit
def _exp(x, ACCURATE: tl.constexpr):
    """e^x for x <= 0.

    The GPU's exp2 of the rounded product x * log2(e) errs by |x| / 2^24, many steps of float32 in
    the tails. ACCURATE adds what the rounding lost.
    """
    if not ACCURATE:
        return tl.exp(x)
    x = tl.maximum(x, -150.0)  # 0 from there on, and no difference of infinities
    high = x * 1.44269504
    lost = tl.fma(x, 1.44269504, -high) + x * 1.9259630e-8
    power = tl.exp2(high)
    return power + power * (lost * 0.69314718)


@triton.jit
def _times_sigmoid(x, s, ACCURATE: tl.constexpr):
    """x * sigmoid(s); with e = exp(-|s|) relative accuracy holds in both tails."""
    e = _exp(-tl.abs(s), ACCURATE)
    return x * tl.where(s < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _normal_tail(z, ACCURATE: tl.constexpr):
    """erfc(z / sqrt 2) / 2 for z in [0, 16], within about 1e-6 relative.

    erfc(z / sqrt 2) exp(z^2 / 2) / 2 is smooth: a polynomial in t = (z - 4) / (z + 4), by least
    squares of the relative error, reweighted towards minimax.
    """
    t = (z - 4.0) / (z + 4.0)
    p = t * -6.23611704e-05 + -0.000163055345
    p = p * t + 0.000657310244
    p = p * t + 0.00049920578
    p = p * t + -0.00849832594
    p = p * t + 0.0308662802
    p = p * t + -0.0717066526
    p = p * t + 0.124379136
    p = p * t + -0.170397744
    p = p * t + 0.094410643
    square = z * z
    result = p * _exp(-0.5 * square, ACCURATE)
    if ACCURATE:
        # The rounding of z^2, up to 128 here, would be the largest error. The square of `high`, the
        # upper half of z's bits, is exact.
        high = (z.to(tl.int32, bitcast=True) & ~0xFFF).to(tl.float32, bitcast=True)
        rest = (high * high - square) + (z - high) * (z + high)
        result *= 1.0 - 0.5 * rest
    return result


@triton.jit
def activation(a, ACTIVATION: tl.constexpr, ACCURATE: tl.constexpr):
    """act(a), elementwise."""
    if ACTIVATION == NONE:
        return a
    if ACTIVATION == SILU:
        return _times_sigmoid(a, a, ACCURATE)
    if ACTIVATION == GELU_TANH:
        # 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2 / pi) (a + 0.044715 a^3)
        return _times_sigmoid(a, 1.5957691216057308 * a * (1.0 + 0.044715 * a * a), ACCURATE)
    tail = _normal_tail(tl.minimum(tl.abs(a), 16.0), ACCURATE)
    return a * tl.where(a < 0.0, tail, 1.0 - tail)


@triton.jit(do_not_specialize=["num_rows", "inner", "x_outer", "x_inner", "out_outer", "out_inner"])
def gated_kernel(
    x_ptr,  # [rows, 2 * width]: gate, up
    out_ptr,  # [rows, width]; may be the gate's half of x
    num_rows,
    inner,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    VECTOR: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """out = act(gate) * up; one tile of ROWS x BLOCK a program, along the columns first."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    tile = tl.program_id(0) // BLOCKS
    cols = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    if NESTED:
        row = tile * ROWS + tl.arange(0, ROWS)
    else:
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (cols < WIDTH)[None, :]
    x_offset = row_offset(row, inner, x_outer, x_inner, NESTED, VECTOR)
    out_offset = row_offset(row, inner, out_outer, out_inner, NESTED, VECTOR)
    gate_ptrs = x_ptr + x_offset[:, None] + cols[None, :]
    gate = to_float(tl.load(gate_ptrs, mask=mask, other=0.0))
    up = to_float(tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0))
    # Half-precision results hide what the fast exponential loses.
    ACCURATE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    y = to_element(activation(gate, ACTIVATION, ACCURATE) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + cols[None, :], y, mask=mask)


def silu_and_mul(x: Tensor, out: Tensor) -> None:
    """out = silu(x[..., :d]) * x[..., d:]."""
    _gated(x, out, SILU)


def gelu_and_mul(x: Tensor, tanh_approx: bool, out: Tensor) -> None:
    """out = gelu(x[..., :d]) * x[..., d:]."""
    _gated(x, out, GELU_TANH if tanh_approx else GELU_ERF)


def _gated(x: Tensor, out: Tensor, kind: tl.constexpr) -> None:
    width = out.shape[-1]
    for rows, (x_start, out_start) in walk(x, out):
        config = activation_config(rows.count, width)
        strides = rows.outer_strides + rows.inner_strides
        launch(
            gated_kernel,
            (triton.cdiv(rows.count, config.rows) * triton.cdiv(width, config.block),),
            x,
            x_start,
            out_start,
            rows.count,
            rows.inner,
            rows.outer_strides[0],
            rows.inner_strides[0],
            rows.outer_strides[1],
            rows.inner_strides[1],
            WIDTH=width,
            ROWS=config.rows,
            BLOCK=config.block,
            NESTED=rows.nested,
            VECTOR=vector_width((x_start, out_start), strides=strides, width=width),
            ACTIVATION=kind,
            num_warps=config.num_warps,
        )
