"""Quantization of matrices by blocks that share a scale: per token, per tensor, 1x128, 128x128 ...

A program takes the tiles of some pieces. Where a block is small, its piece is all of it, and one
launch does everything; a larger block is cut into pieces, and a launch before finds the largest
magnitudes, which every program of the block then reduces alike. Magnitudes are compared as integers
and their order does not matter, so that results do not depend on how a block is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import device_of, launch
from fastinfer.triton_kernels.quantization import (
    FP8,
    INT8,
    INT8_ASYMMETRIC,
    dynamic_scale,
    magnitude_bits,
    quantized,
    quantized_asymmetric,
    storable,
    usable_scale,
    zero_point_of,
)
from fastinfer.triton_kernels.rows import Rows, to_float, walk_in_order

OWN, GIVEN, FOUND = (tl.constexpr(i) for i in range(3))
"""Where scales come from: the program's own tile, the caller, a launch before."""

MAX_BYTES = 64 << 10  # of a block that fits in the registers of 32 warps
TILE = 4096  # elements of a piece of larger ones


@dataclass(frozen=True)
class QuantizeConfig:
    """The tile of a program: pieces, of one block or of as many, each of rows x columns."""

    pieces: int
    rows: int  # powers of two
    columns: int
    num_warps: int


def quantize_config(
    block_rows: int, block_columns: int, itemsize: int, static: bool
) -> QuantizeConfig:
    """16 elements a thread, as long as 32 warps suffice; small blocks share a program.

    Under given scales nothing of a block needs to be known, and large blocks are always cut.
    """
    rows, columns = triton.next_power_of_2(block_rows), triton.next_power_of_2(block_columns)
    if rows * columns > TILE if static else rows * columns * itemsize > MAX_BYTES:
        columns = min(columns, TILE)
        rows = min(rows, TILE // columns)
    pieces = max(1, 2048 // (rows * columns))
    return QuantizeConfig(pieces, rows, columns, min(32, max(4, pieces * rows * columns // 512)))


def passes_of(blocks: int, pieces: int, num_sms: int) -> tuple[int, int]:
    """(programs that share the first pass over a block, pieces of each): four programs an SM."""
    wanted = min(pieces, max(1, triton.cdiv(4 * num_sms, blocks)))
    steps = triton.cdiv(pieces, wanted)
    return triton.cdiv(pieces, steps), steps


@triton.jit
def _offsets(
    block,  # [pieces]: where each piece is
    piece,
    num_rows,
    block_rows,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The tile [pieces, ROWS, COLUMNS]: its rows [pieces, ROWS, 1], its columns [pieces, 1,
    COLUMNS] and what of it is inside.
    """
    PIECES_ACROSS: tl.constexpr = (BLOCK_COLUMNS + COLUMNS - 1) // COLUMNS
    EVEN: tl.constexpr = NUM_COLUMNS % 16 == 0 and BLOCK_COLUMNS % 16 == 0
    top = (piece // PIECES_ACROSS).to(tl.int64) * ROWS
    left = (piece % PIECES_ACROSS).to(tl.int64) * COLUMNS
    first_row = (block // GRID_COLUMNS).to(tl.int64) * block_rows + top
    first_column = (block % GRID_COLUMNS).to(tl.int64) * BLOCK_COLUMNS + left
    rows_left = tl.minimum(block_rows - top, num_rows - first_row)
    columns_left = tl.minimum(BLOCK_COLUMNS - left, NUM_COLUMNS - first_column)
    # A mask that ends between vectors' elements would forbid vectors.
    columns_left = tl.multiple_of(tl.minimum(columns_left, COLUMNS).to(tl.int32), 16 if EVEN else 1)
    row, column = tl.arange(0, ROWS)[None, :, None], tl.arange(0, COLUMNS)[None, None, :]
    inside = (row < rows_left[:, None, None]) & (column < columns_left[:, None, None])
    return first_row[:, None, None] + row, first_column[:, None, None] + column, inside


@triton.jit
def _row_offset(row, inner, outer_stride, inner_stride, NESTED: tl.constexpr):
    if NESTED:
        return row // inner * outer_stride + row % inner * inner_stride
    return row * outer_stride


@triton.jit(
    do_not_specialize=["num_parts", "num_pieces", "steps", "num_rows", "block_rows", "inner"]
)
def magnitudes_kernel(
    x_ptr,  # [rows, columns]
    parts_ptr,  # [blocks, parts], and if asymmetric once more for what is negative
    num_parts,
    num_pieces,  # of a block
    steps,  # pieces of a part
    num_rows,
    block_rows,
    inner,
    x_outer,
    x_inner,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NESTED: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
):
    """Bits of the largest magnitude in a part of a block, or of those of either sign."""
    block = tl.program_id(0) // num_parts + tl.arange(0, 1)
    first = (tl.program_id(0) % num_parts) * steps
    high = tl.zeros([1, ROWS, COLUMNS], tl.int32)
    low = tl.zeros([1, ROWS, COLUMNS], tl.int32)
    for piece in range(first, tl.minimum(first + steps, num_pieces)):
        row, column, inside = _offsets(
            block, piece + tl.zeros_like(block), num_rows, block_rows, NUM_COLUMNS, BLOCK_COLUMNS,
            GRID_COLUMNS, ROWS, COLUMNS,
        )  # fmt: skip
        x_ptrs = x_ptr + _row_offset(row, inner, x_outer, x_inner, NESTED) + column
        value = to_float(tl.load(x_ptrs, mask=inside, other=0.0))
        if ASYMMETRIC:
            high = tl.maximum(high, value.to(tl.int32, bitcast=True))
            low = tl.maximum(low, value.to(tl.int32, bitcast=True) ^ -0x80000000)
        else:
            high = tl.maximum(high, magnitude_bits(value))
    part = tl.program_id(0)
    tl.store(parts_ptr + part, tl.max(high))
    if ASYMMETRIC:
        tl.store(parts_ptr + tl.num_programs(0) + part, tl.max(low))


@triton.jit
def _found(parts_ptr, block, num_parts, PARTS: tl.constexpr):
    """What the launch before found, of all parts of a block."""
    part = tl.arange(0, PARTS)
    parts_ptrs = parts_ptr + block.to(tl.int64) * num_parts + part
    return tl.max(tl.load(parts_ptrs, mask=part < num_parts, other=0), axis=0)


@triton.jit
def _largest(bits):
    """Of the tile of each piece, as float32."""
    return tl.max(tl.max(bits, axis=2), axis=1)


@triton.jit
def _at(block, row_stride, column_stride, GRID_COLUMNS: tl.constexpr):
    """Where the value of a block is."""
    row, column = (block // GRID_COLUMNS).to(tl.int64), (block % GRID_COLUMNS).to(tl.int64)
    return row * row_stride + column * column_stride


@triton.jit(
    do_not_specialize=["num_blocks", "num_pieces", "num_parts", "num_rows", "block_rows", "inner"]
)
def quantize_kernel(
    x_ptr,  # [rows, columns]
    out_ptr,  # [rows, columns]; bytes if fp8
    given_ptr,  # [grid rows, grid columns], if GIVEN
    parts_ptr,  # as in magnitudes_kernel, if FOUND
    scale_ptr,  # [grid rows, grid columns]
    zero_point_ptr,  # likewise, if asymmetric
    num_blocks,
    num_pieces,  # of a block
    num_parts,
    num_rows,
    block_rows,
    inner,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    given_row_stride,
    given_column_stride,
    scale_row_stride,
    scale_column_stride,
    zero_point_row_stride,
    zero_point_column_stride,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    NESTED: tl.constexpr,
    SOURCE: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Codes of PIECES pieces, and scales; a piece is a block if WHOLE."""
    # Divisions are in the type of what they divide: 32 bits, but for enormous numbers of blocks.
    first = tl.program_id(0).to(num_blocks.dtype) * PIECES
    if WHOLE:
        block = first + tl.arange(0, PIECES)
        piece = tl.zeros_like(block)
        present = tl.arange(0, PIECES) < num_blocks - first
    else:
        block = first // num_pieces + tl.arange(0, 1)
        piece = first % num_pieces + tl.arange(0, 1)
        present = piece >= 0
    row, column, inside = _offsets(
        block, piece, num_rows, block_rows, NUM_COLUMNS, BLOCK_COLUMNS, GRID_COLUMNS, ROWS, COLUMNS
    )
    inside &= present[:, None, None]
    x_ptrs = x_ptr + _row_offset(row, inner, x_outer, x_inner, NESTED) + column
    value = to_float(tl.load(x_ptrs, mask=inside, other=0.0))

    # ---- scales
    if FORMAT == INT8_ASYMMETRIC:
        if SOURCE == FOUND:
            whole = first // num_pieces
            high = _found(parts_ptr, whole, num_parts, PARTS) + tl.zeros([1], tl.int32)
            low = _found(parts_ptr, whole + num_blocks, num_parts, PARTS) + tl.zeros([1], tl.int32)
        else:
            # As integers, what has the other sign is negative.
            bits = value.to(tl.int32, bitcast=True)
            high, low = tl.maximum(_largest(bits), 0), tl.maximum(_largest(bits ^ -0x80000000), 0)
        largest = tl.maximum(high, low).to(tl.float32, bitcast=True)
        high, low = high.to(tl.float32, bitcast=True), low.to(tl.float32, bitcast=True)
        # Divided before they are added, which could overflow.
        steps = tl.zeros_like(high) + 255.0
        scale = usable_scale(tl.div_rn(high, steps) + tl.div_rn(low, steps))
        zero_point = zero_point_of(low, scale)
    else:
        if SOURCE == FOUND:
            found = _found(parts_ptr, first // num_pieces, num_parts, PARTS)
            largest = found + tl.zeros([1], tl.int32)
        else:
            largest = _largest(magnitude_bits(value))
        largest = largest.to(tl.float32, bitcast=True)
        if SOURCE == GIVEN:
            at = _at(block, given_row_stride, given_column_stride, GRID_COLUMNS)
            scale = tl.load(given_ptr + at, mask=present, other=1.0)
        else:
            scale = dynamic_scale(largest, FORMAT)
    once = present & (piece == 0)
    at = _at(block, scale_row_stride, scale_column_stride, GRID_COLUMNS)
    tl.store(scale_ptr + at, scale, mask=once)

    # ---- codes
    scale, largest = scale[:, None, None], largest[:, None, None]
    if FORMAT == INT8_ASYMMETRIC:
        at = _at(block, zero_point_row_stride, zero_point_column_stride, GRID_COLUMNS)
        tl.store(zero_point_ptr + at, zero_point, mask=once)
        code = quantized_asymmetric(value, scale, largest, zero_point[:, None, None])
    else:
        code = quantized(value, scale, largest, FORMAT, SOURCE == GIVEN)
    out_ptrs = out_ptr + _row_offset(row, inner, out_outer, out_inner, NESTED) + column
    tl.store(out_ptrs, code, mask=inside)


def quantize_fp8(
    x: Tensor,
    scale: Tensor | None,
    block_rows: int,
    block_columns: int,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    """out, out_scale = x as float8_e4m3fn, under given scales or under the blocks' own."""
    _quantize(x, scale, block_rows, block_columns, storable(out), out_scale, None, FP8)


def quantize_int8(
    x: Tensor,
    scale: Tensor | None,
    block_rows: int,
    block_columns: int,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    """out, out_scale = x as int8, under given scales or under the blocks' own."""
    _quantize(x, scale, block_rows, block_columns, out, out_scale, None, INT8)


def quantize_int8_asymmetric(
    x: Tensor, out: Tensor, out_scale: Tensor, out_zero_point: Tensor
) -> None:
    """out, out_scale, out_zero_point = x as int8, over the range of each row."""
    columns = max(1, x.shape[-1])
    _quantize(x, None, 1, columns, out, out_scale, out_zero_point, INT8_ASYMMETRIC)


def _quantize(
    x: Tensor,
    given: Tensor | None,
    block_rows: int,
    block_columns: int,
    out: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    form: tl.constexpr,
) -> None:
    rows = walk_in_order(x, out)
    if rows is not None:
        _launch(rows, x, given, block_rows, block_columns, out, scale, zero_point, form)
        return
    # Blocks may reach over any dimensions, so these rows cannot be walked slab by slab.
    staged = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    _quantize(x.contiguous(), given, block_rows, block_columns, staged, scale, zero_point, form)
    out.copy_(staged)


def _launch(
    rows: Rows,
    x: Tensor,
    given: Tensor | None,
    block_rows: int,
    block_columns: int,
    out: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    form: tl.constexpr,
) -> None:
    config = quantize_config(block_rows, block_columns, x.element_size(), given is not None)
    blocks = scale.numel()
    pieces = triton.cdiv(block_rows, config.rows) * triton.cdiv(block_columns, config.columns)
    shape = {
        "NUM_COLUMNS": x.shape[-1],
        "BLOCK_COLUMNS": block_columns,
        "GRID_COLUMNS": scale.shape[1],
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "NESTED": rows.nested,
        "num_warps": config.num_warps,
    }
    source, parts, num_parts = OWN, None, 1
    if given is not None:
        source = GIVEN
    elif pieces > 1:
        source = FOUND
        num_parts, steps = passes_of(blocks, pieces, device_of(x.get_device()).num_sms)
        asymmetric = zero_point is not None
        parts = torch.empty(
            (1 + asymmetric) * blocks * num_parts, dtype=torch.int32, device=x.device
        )
        launch(
            magnitudes_kernel,
            (blocks * num_parts,),
            x,
            x,
            parts,
            num_parts,
            pieces,
            steps,
            rows.count,
            block_rows,
            rows.inner,
            rows.outer_strides[0],
            rows.inner_strides[0],
            ASYMMETRIC=asymmetric,
            **shape,
        )
    launch(
        quantize_kernel,
        (triton.cdiv(blocks, config.pieces) if pieces == 1 else blocks * pieces,),
        x,
        x,
        out,
        given,
        parts,
        scale,
        zero_point,
        blocks,
        pieces,
        num_parts,
        rows.count,
        block_rows,
        rows.inner,
        rows.outer_strides[0],
        rows.inner_strides[0],
        rows.outer_strides[1],
        rows.inner_strides[1],
        *_strides(given),
        *scale.stride(),
        *_strides(zero_point),
        PIECES=config.pieces,
        PARTS=triton.next_power_of_2(num_parts),
        WHOLE=pieces == 1,
        SOURCE=source,
        FORMAT=form,
        **shape,
    )


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Of a value for each block; a single value may have any rank."""
    return x.stride() if x is not None and x.dim() == 2 else (0, 0)
