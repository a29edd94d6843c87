"""What follows a matrix product, in its kernels: activation, gating, residual, quantization.

Kernels of products make tiles of the transposed result, [features, rows]. Of a gated product a
tile's first half are gates and its second half what they multiply.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.activation import activation
from fastinfer.triton_kernels.launch import launch
from fastinfer.triton_kernels.quantization import COPY, FORMATS, magnitude_bits, quantized, storable
from fastinfer.triton_kernels.rows import to_element, to_float


def epilogue_constants(
    act: int, gated: bool, residual: Tensor | None, out: Tensor
) -> dict[str, Any]:
    """The constexprs of a kernel that calls `store_result`."""
    return {
        "ACTIVATION": act,
        "GATED": gated,
        "HAS_RESIDUAL": residual is not None,
        "FORMAT": FORMATS.get(out.dtype, COPY),
    }


def row_stride(x: Tensor | None) -> int:
    """0 where there is none."""
    return 0 if x is None else x.stride(0)


@triton.jit
def store_result(
    y,  # [features, rows]
    row,  # [rows]
    column,  # [features, or half of them]: of the result
    mask,  # [rows, columns]
    residual_ptr,  # [M, columns] or None
    out_scale_ptr,  # [1, 1] or None
    out_ptr,  # [M, columns]; bytes if fp8
    residual_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """out = act(y) + residual, or act(gate) * up + residual, or the codes of that."""
    row = row.to(tl.int64)[:, None]
    if GATED:
        HALF: tl.constexpr = y.shape[0] // 2
        gate, up = tl.split(y.reshape(2, HALF, y.shape[1]).permute(1, 2, 0))
    else:
        gate = y
    # Half-precision results hide what the fast exponential loses.
    ACCURATE: tl.constexpr = out_ptr.dtype.element_ty.primitive_bitwidth != 16
    h = activation(gate, ACTIVATION, ACCURATE)
    if GATED:
        h *= up
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + row * residual_stride + column[None, :], mask=mask, other=0.0
        )
        h += to_float(tl.trans(residual))
    if FORMAT == COPY:
        result = to_element(h, out_ptr.dtype.element_ty)
    else:
        scale = tl.load(out_scale_ptr + tl.zeros([1, 1], tl.int32))
        largest = tl.max(tl.max(magnitude_bits(h), axis=1), axis=0) + tl.zeros([1, 1], tl.int32)
        result = quantized(h, scale, largest.to(tl.float32, bitcast=True), FORMAT, True)
    tl.store(out_ptr + row * out_stride + column[None, :], tl.trans(result), mask=mask)


@triton.jit(do_not_specialize=["m"])
def gated_epilogue_kernel(
    y_ptr,  # [M, 2 * width]: gate, up; fp32
    residual_ptr,  # [M, width] or None
    out_scale_ptr,  # [1, 1] or None
    out_ptr,  # [M, width]; bytes if fp8
    m,
    width,
    residual_stride,
    out_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The epilogue of a product that was stored; a tile of ROWS x COLUMNS a program."""
    blocks = tl.cdiv(width, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    first = (tl.program_id(0) % blocks) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    of_both = tl.arange(0, 2 * COLUMNS)
    feature = first + of_both % COLUMNS
    y = tl.load(
        y_ptr
        + row.to(tl.int64)[None, :] * (2 * width)
        + (feature + of_both // COLUMNS * width)[:, None],
        mask=(feature < width)[:, None] & (row < m)[None, :],
        other=0.0,
    )
    store_result(
        y, row, column, (row < m)[:, None] & (column < width)[None, :], residual_ptr, out_scale_ptr,
        out_ptr, residual_stride, out_stride, ACTIVATION, GATED, HAS_RESIDUAL, FORMAT,
    )  # fmt: skip


ROWS, COLUMNS = 4, 256


def gated_epilogue(
    y: Tensor, act: int, residual: Tensor | None, out_scale: Tensor | None, out: Tensor
) -> None:
    """out = act(y[:, :d]) * y[:, d:] + residual, or its codes; y is fp32 and contiguous."""
    m, width = out.shape
    launch(
        gated_epilogue_kernel,
        (triton.cdiv(m, ROWS) * triton.cdiv(width, COLUMNS),),
        y,
        y,
        residual,
        out_scale,
        storable(out),
        m,
        width,
        row_stride(residual),
        out.stride(0),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        **epilogue_constants(act, True, residual, out),
        num_warps=4,
    )
