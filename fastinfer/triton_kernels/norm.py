"""RMSNorm and LayerNorm, alone or fused with a residual add.

A program holds the tile of its rows in registers, so each element is read once and written once;
only rows beyond 64 KB are read again. How the sum over a row is ordered must depend on
`hidden` alone, since a row's result may depend neither on the batch nor on its address: the tile
and the warps are a function of `hidden`, and the layout of the tile is kept that of vector loads
where an address forbids them (see `_keep_layout`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.rows import (
    INTERPRETED,
    Rows,
    full_width,
    row_offset,
    to_element,
    to_float,
    vector_width,
    walk,
)

MAX_BYTES = 64 << 10  # of a row that fits in the registers of 32 warps
LOOP_TILE = 8192  # elements of a step where rows are longer


@dataclass(frozen=True)
class NormConfig:
    """How a row of `hidden` elements is worked on."""

    rows: int  # of a program
    block: int  # elements of a row held at once; a power of two
    looped: bool  # whether the row is longer than that
    num_warps: int


def norm_config(hidden: int, itemsize: int, centre: bool) -> NormConfig:
    """The same for every number of rows, so that a row's sum is always ordered alike.

    16 elements a thread: two 16-byte loads in flight, and few enough registers for the threads of
    several programs. With `centre` twice as many, since fewer warps wait less for each other's
    sums. Short rows (q and k norms over a head) share a program.
    """
    if hidden * itemsize > MAX_BYTES:
        return NormConfig(1, LOOP_TILE, True, 16)
    block = max(16, triton.next_power_of_2(hidden))
    rows = max(1, 2048 // block)
    warps = min(16, block // 1024) if centre else min(32, block // 512)
    return NormConfig(rows, block, False, max(4, warps))


@triton.jit
def _read(
    x_ptr,
    residual_ptr,
    x_offset,
    residual_offset,
    anchor_ptr,
    never,
    cols,
    mask,
    FUSED: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    """The elements that are normalised, as float32: x, or residual + x as it will be stored."""
    x = tl.load(x_ptr + x_offset[:, None] + cols[None, :], mask=mask, other=0.0)
    if ANCHORED:
        x = _keep_layout(x, anchor_ptr, never, cols, mask)
    value = to_float(x)
    if FUSED:
        r = tl.load(residual_ptr + residual_offset[:, None] + cols[None, :], mask=mask, other=0.0)
        value = to_float(to_element(to_float(r) + value, x_ptr.dtype.element_ty))
    return value


@triton.jit
def _keep_layout(x, anchor_ptr, never, cols, mask):
    """x, held as if it had been read by vector loads.

    The compiler gives a tile the layout of the widest access in its neighbourhood. Where x is not
    aligned, that width comes from this load of an aligned address, which is never carried out.
    """
    pointers = anchor_ptr + cols[None, :] + tl.zeros_like(mask).to(tl.int32)
    return tl.where(never, tl.load(pointers, mask=mask & never, other=0.0), x)


@triton.jit
def _guess_mean(
    x_ptr,
    residual_ptr,
    x_offset,
    residual_offset,
    inside,
    HIDDEN: tl.constexpr,
    FUSED: tl.constexpr,
):
    """The mean of a row's first elements: few enough that every thread reads them for itself."""
    FIRST: tl.constexpr = 4 if HIDDEN >= 4 else 1
    total = tl.zeros_like(x_offset).to(tl.float32)
    for i in tl.static_range(FIRST):
        x = to_float(tl.load(x_ptr + x_offset + i, mask=inside, other=0.0))
        if FUSED:
            r = tl.load(residual_ptr + residual_offset + i, mask=inside, other=0.0)
            x = to_float(to_element(to_float(r) + x, x_ptr.dtype.element_ty))
        total += x
    return total * (1.0 / FIRST)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _moments(x, HIDDEN: tl.constexpr):
    """The means of x and of x^2 by rows, behind one barrier."""
    if INTERPRETED:  # which walks a reduction of its own element by element
        total, square = tl.sum(x, axis=1), tl.sum(x * x, axis=1)
    else:
        total, square = tl.reduce((x, x * x), 1, _add_pairs)
    return tl.div_rn(total, HIDDEN * 1.0), tl.div_rn(square, HIDDEN * 1.0)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "inner",
        "x_outer",
        "x_inner",
        "out_outer",
        "out_inner",
        "residual_outer",
        "residual_inner",
    ]
)
def norm_kernel(
    x_ptr,  # [rows, hidden]
    residual_ptr,  # [rows, hidden]; read, and written with the sum
    out_ptr,  # [rows, hidden]; may be x_ptr
    weight_ptr,  # [hidden]
    bias_ptr,  # [hidden]
    anchor_ptr,  # aligned, never read
    num_rows,
    inner,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    out_outer,
    out_inner,
    eps: tl.float32,
    weight_offset: tl.float32,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPED: tl.constexpr,
    NESTED: tl.constexpr,
    VECTOR: tl.constexpr,
    CENTRE: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ANCHORED: tl.constexpr,
):
    """out = (x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, by rows.

    The mean is mean + low: low is what float32 rounded off, much beside a large mean. Without
    CENTRE it is 0. FUSED: x is residual + x, rounded, and stored in residual.
    """
    if NESTED:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    x_offset = row_offset(row, inner, x_outer, x_inner, NESTED, VECTOR)
    out_offset = row_offset(row, inner, out_outer, out_inner, NESTED, VECTOR)
    if FUSED:
        residual_offset = row_offset(row, inner, residual_outer, residual_inner, NESTED, VECTOR)
    else:
        residual_offset = x_offset
    never = num_rows < 0
    span = tl.arange(0, BLOCK)

    if LOOPED:
        # Every pass adds x to the residual again, and the last one stores both: no pass reads what
        # another thread wrote.
        mean = tl.zeros([ROWS], tl.float32)
        low = tl.zeros([ROWS], tl.float32)
        if CENTRE:
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for begin in range(0, HIDDEN, BLOCK):
                cols = begin + span
                mask = inside[:, None] & (cols < HIDDEN)[None, :]
                total += _read(
                    x_ptr, residual_ptr, x_offset, residual_offset, anchor_ptr, never, cols, mask,
                    FUSED, ANCHORED,
                )  # fmt: skip
            mean = tl.div_rn(tl.sum(total, axis=1), HIDDEN * 1.0)
        square = tl.zeros([ROWS, BLOCK], tl.float32)
        rest = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, HIDDEN, BLOCK):
            cols = begin + span
            mask = inside[:, None] & (cols < HIDDEN)[None, :]
            x = _read(
                x_ptr, residual_ptr, x_offset, residual_offset, anchor_ptr, never, cols, mask,
                FUSED, ANCHORED,
            )  # fmt: skip
            if CENTRE:
                x = tl.where(mask, x - mean[:, None], 0.0)
                rest += x
            square += x * x
        variance = tl.div_rn(tl.sum(square, axis=1), HIDDEN * 1.0)
        if CENTRE:
            low = tl.div_rn(tl.sum(rest, axis=1), HIDDEN * 1.0)
            variance -= low * low
        scale = tl.rsqrt(variance + eps)
        for begin in range(0, HIDDEN, BLOCK):
            cols = begin + span
            mask = inside[:, None] & (cols < HIDDEN)[None, :]
            x = _read(
                x_ptr, residual_ptr, x_offset, residual_offset, anchor_ptr, never, cols, mask,
                FUSED, ANCHORED,
            )  # fmt: skip
            if FUSED:
                tl.store(
                    residual_ptr + residual_offset[:, None] + cols[None, :],
                    to_element(x, residual_ptr.dtype.element_ty),
                    mask=mask,
                )
            if CENTRE:
                x = x - mean[:, None]
            _write(
                out_ptr, out_offset, x, low, scale, weight_ptr, bias_ptr, weight_offset, cols,
                mask, HIDDEN, CENTRE, HAS_BIAS,
            )  # fmt: skip
    else:
        # A guess of the mean costs no barrier, and lets both sums be taken at once; not where rows
        # are so long that registers are scarce.
        GUESSED: tl.constexpr = CENTRE and BLOCK <= 16384
        if GUESSED:
            mean = _guess_mean(
                x_ptr, residual_ptr, x_offset, residual_offset, inside, HIDDEN, FUSED
            )  # fmt: skip
        mask = inside[:, None] & (span < HIDDEN)[None, :]
        x = _read(
            x_ptr, residual_ptr, x_offset, residual_offset, anchor_ptr, never, span, mask, FUSED,
            ANCHORED,
        )  # fmt: skip
        if FUSED:
            if GUESSED:  # nobody may still be reading what is now stored
                tl.debug_barrier()
            tl.store(
                residual_ptr + residual_offset[:, None] + span[None, :],
                to_element(x, residual_ptr.dtype.element_ty),
                mask=mask,
            )
        low = tl.zeros([ROWS], tl.float32)
        if CENTRE:
            if not GUESSED:
                mean = tl.div_rn(tl.sum(x, axis=1), HIDDEN * 1.0)
            low, square = _moments(tl.where(mask, x - mean[:, None], 0.0), HIDDEN)
            if GUESSED:
                # Where the guess is far off, most of the difference below would cancel, and x
                # minus the guess has lost digits: again, from x.
                far = low * low > 0.5 * square
                if tl.max(far.to(tl.int32), axis=0) > 0:
                    mean += tl.where(far, low, 0.0)
                    low, square = _moments(tl.where(mask, x - mean[:, None], 0.0), HIDDEN)
            x -= mean[:, None]
            variance = square - low * low
        else:
            variance = tl.div_rn(tl.sum(x * x, axis=1), HIDDEN * 1.0)
        scale = tl.rsqrt(variance + eps)
        _write(
            out_ptr, out_offset, x, low, scale, weight_ptr, bias_ptr, weight_offset, span,
            mask, HIDDEN, CENTRE, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def _write(
    out_ptr,
    out_offset,
    x,
    mean,
    scale,
    weight_ptr,
    bias_ptr,
    weight_offset,
    cols,
    mask,
    HIDDEN: tl.constexpr,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # In the shape of a one-row tile, so that x's layout serves the weight as well.
    cols = cols[None, :]
    weight = to_float(tl.load(weight_ptr + cols, mask=cols < HIDDEN, other=0.0))
    if CENTRE:
        x = x - mean[:, None]
    y = x * scale[:, None] * (weight + weight_offset)
    if HAS_BIAS:
        bias = to_float(tl.load(bias_ptr + cols, mask=cols < HIDDEN, other=0.0))
        y += bias
    y = to_element(y, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset[:, None] + cols, y, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float, out: Tensor) -> None:
    """out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""
    _norm(x, None, out, weight, None, eps, weight_offset, centre=False)


def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float
) -> None:
    """residual += x, then x = rms_norm(residual)."""
    _norm(x, residual, x, weight, None, eps, weight_offset, centre=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, weight_offset: float, out: Tensor
) -> None:
    """out = (x - mean(x)) / sqrt(var(x) + eps) * (weight + weight_offset) + bias."""
    _norm(x, None, out, weight, bias, eps, weight_offset, centre=True)


def fused_add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
) -> None:
    """residual += x, then x = layer_norm(residual)."""
    _norm(x, residual, x, weight, bias, eps, weight_offset, centre=True)


def _norm(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    *,
    centre: bool,
) -> None:
    tensors = (x, out) if residual is None else (x, out, residual)
    for rows, starts in walk(*tensors):
        _launch(rows, starts, x, weight, bias, eps, weight_offset, centre)


def _launch(
    rows: Rows,
    starts: tuple[Tensor, ...],
    like: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    centre: bool,
) -> None:
    hidden = like.shape[-1]
    config = norm_config(hidden, like.element_size(), centre)
    fused = len(starts) == 3
    vector = vector_width(starts, strides=rows.outer_strides + rows.inner_strides, width=hidden)
    full = full_width(like)
    anchored = vector < full and hidden % full == 0
    last = 2 if fused else 0
    launch(
        norm_kernel,
        (triton.cdiv(rows.count, config.rows),),
        like,
        starts[0],
        starts[2] if fused else None,
        starts[1],
        weight,
        bias,
        torch.empty(0, dtype=like.dtype, device=like.device) if anchored else None,
        rows.count,
        rows.inner,
        rows.outer_strides[0],
        rows.inner_strides[0],
        rows.outer_strides[last],
        rows.inner_strides[last],
        rows.outer_strides[1],
        rows.inner_strides[1],
        eps,
        weight_offset,
        HIDDEN=hidden,
        ROWS=config.rows,
        BLOCK=config.block,
        LOOPED=config.looped,
        NESTED=rows.nested,
        VECTOR=vector,
        CENTRE=centre,
        FUSED=fused,
        HAS_BIAS=bias is not None,
        ANCHORED=anchored,
        num_warps=config.num_warps,
    )
