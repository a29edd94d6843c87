"""Quantization to float8_e4m3fn and int8: what the operands of 8-bit GEMMs go through.

x is a matrix [M, K]; of a tensor of any rank, K is the last dimension and M the product of the
others. A scale is shared by a block of `block` = (rows, columns) elements, where -1 means all:

    (1, -1)       per token                      (-1, -1)      per tensor
    (1, 128)      per token and 128 columns      (128, 128)    the blocks of a weight

Blocks at the ends may be partial. Scales multiply: x is about code * scale. They are float32
[ceil(M / rows), ceil(K / columns)]; `out_scale` may have any strides, so that it is written as the
GEMM wants it (DeepGEMM reads the scales of (1, 128) along M: a transposed view of an aligned
[ceil(K / 128), M]).

Stored bits are part of the contract, the same on every backend: each step is a correctly rounded
operation in float32. Errors are ValueError and name the op, the argument, what was expected and
what came.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad

_ops = torch.ops.fastinfer
_quantize_fp8_out = _ops.quantize_fp8.out
_quantize_int8_out = _ops.quantize_int8.out
_quantize_int8_asymmetric_out = _ops.quantize_int8_asymmetric.out

_PER_TOKEN = (1, -1)


def quantize_fp8(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    block: Sequence[int] = (1, -1),
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize to float8_e4m3fn, by scales taken from x or by given ones.

        scale  <- amax(|x|) / 448 of each block; 1 if that is 0
        out    <- x / scale, saturated to +-448 and rounded to the nearest code, ties to even

    Zeros keep their sign. Elements that are NaN after the division have the code 0x7f (NaN): a NaN
    under a given scale, and every element of a block with a NaN under a scale of its own, which is
    NaN then. A block with an infinity has the scale infinity: its finite elements have the zero of
    their sign, and no element of it stands for a finite number (0 * inf is NaN).

    Args:
        x: [..., K], fp32, bf16 or fp16; any strides with a dense last dimension.
        scale: float32, static scales to be used instead: one for each block, with any strides. The
            scale of a single block may also have the shape [1] or [].
        block: (rows, columns) that share a scale, each at least 1, or -1 for all.
        out: [..., K], float8_e4m3fn; receives the codes.
        out_scale: [ceil(M / rows), ceil(K / columns)], float32, any strides; receives the scales,
            also where they were given.

    Returns:
        (codes, scales) (`out` and `out_scale` if given).

    Raises:
        ValueError: shapes, dtypes, strides or `block` do not fit.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022; blocks: DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024.
    """
    refuse_grad("quantize_fp8", x=x, scale=scale, out_scale=out_scale)
    out, out_scale = _receivers("quantize_fp8", x, block, torch.float8_e4m3fn, out, out_scale)
    _quantize_fp8_out(x, scale=scale, block=block, out=out, out_scale=out_scale)
    return out, out_scale


def quantize_int8(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    block: Sequence[int] = (1, -1),
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize to int8, symmetrically, by scales taken from x or by given ones.

        scale  <- amax(|x|) / 127 of each block; 1 if that is 0
        out    <- round(x / scale), halves to even, saturated to +-127

    int8 has no NaN. An element that is NaN after the division has the code 0, and the scale of a
    block with a NaN or an infinity is NaN or infinity: no element of it stands for a finite number.
    Under a given scale nothing shows that there was a NaN.

    Args:
        x: [..., K], fp32, bf16 or fp16; any strides with a dense last dimension.
        scale: float32, static scales to be used instead: one for each block, with any strides. The
            scale of a single block may also have the shape [1] or [].
        block: (rows, columns) that share a scale, each at least 1, or -1 for all.
        out: [..., K], int8; receives the codes.
        out_scale: [ceil(M / rows), ceil(K / columns)], float32, any strides; receives the scales,
            also where they were given.

    Returns:
        (codes, scales) (`out` and `out_scale` if given).

    Raises:
        ValueError: shapes, dtypes, strides or `block` do not fit.

    Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022.
    """
    refuse_grad("quantize_int8", x=x, scale=scale, out_scale=out_scale)
    out, out_scale = _receivers("quantize_int8", x, block, torch.int8, out, out_scale)
    _quantize_int8_out(x, scale=scale, block=block, out=out, out_scale=out_scale)
    return out, out_scale


def quantize_int8_asymmetric(
    x: Tensor,
    *,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each token to int8 over the whole range of its elements.

        high, low   <- max(x, 0), min(x, 0) of each row
        scale       <- high / 255 - low / 255; 1 if that is 0
        zero_point  <- min(-128 - round(low / scale), 127)
        out         <- round(x / scale) + zero_point, saturated to -128..127

    so that x is about (code - zero_point) * scale, and 0 is exactly zero_point. Roundings are
    halves to even; what would be rounded from NaN is 0. A row with a NaN or an infinity has the
    scale NaN or infinity, so that no element of it stands for a finite number.

    Args:
        x: [..., K], fp32, bf16 or fp16; any strides with a dense last dimension.
        out: [..., K], int8; receives the codes.
        out_scale: [M, 1], float32, any strides; receives the scales.
        out_zero_point: [M, 1], int32, any strides; receives the zero points.

    Returns:
        (codes, scales, zero points) (`out`, `out_scale` and `out_zero_point` if given).

    Raises:
        ValueError: shapes, dtypes or strides do not fit.

    Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018.
    """
    op = "quantize_int8_asymmetric"
    refuse_grad(op, x=x, out_scale=out_scale)
    out, out_scale = _receivers(op, x, _PER_TOKEN, torch.int8, out, out_scale)
    if out_zero_point is None:
        out_zero_point = torch.empty(_grid(op, x, _PER_TOKEN), dtype=torch.int32, device=x.device)
    _quantize_int8_asymmetric_out(x, out=out, out_scale=out_scale, out_zero_point=out_zero_point)
    return out, out_scale, out_zero_point


_Grid = tuple[int | torch.SymInt, int | torch.SymInt]


def _grid(op: str, x: Tensor, block: Sequence[int]) -> _Grid:
    """The shape of the scales; refuses what has none."""
    if x.dim() == 0:
        raise ValueError(f"fastinfer::{op}: x: expected at least 1 dimension, got a scalar")
    if len(block) != 2 or not all(size >= 1 or size == -1 for size in block):
        raise ValueError(
            f"fastinfer::{op}: block: expected (rows, columns) of at least 1, or -1 for all, "
            f"got {tuple(block)}"
        )
    sizes = (math.prod(x.shape[:-1]), x.shape[-1])
    rows, columns = (
        1 if extent == -1 else -(-size // extent) for size, extent in zip(sizes, block, strict=True)
    )
    return rows, columns


def _receivers(
    op: str,
    x: Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    out: Tensor | None,
    out_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales as they were given, or new ones."""
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out_scale is None:
        out_scale = torch.empty(_grid(op, x, block), dtype=torch.float32, device=x.device)
    return out, out_scale


def _check_quantize(
    op: str,
    x: Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_zero_point: Tensor | None = None,
) -> _Grid:
    """The shape of the scales, if everything fits."""
    check_devices(op, x=x, scale=scale, out=out, out_scale=out_scale, out_zero_point=out_zero_point)
    check(op, x.is_floating_point(), f"x: expected a float tensor, got {x.dtype}")
    grid = _grid(op, x, block)
    if scale is not None and (scale.dim() > 1 or scale.numel() != 1):
        check_out(op, "scale", scale, grid, torch.float32)
    if out is not None:
        check_out(op, "out", out, tuple(x.shape), dtype)
    if out_scale is not None:
        check_out(op, "out_scale", out_scale, grid, torch.float32)
    if out_zero_point is not None:
        check_out(op, "out_zero_point", out_zero_point, grid, torch.int32)
    return grid


@torch.library.register_fake("fastinfer::quantize_fp8")
def _(
    x: Tensor, *, scale: Tensor | None = None, block: Sequence[int] = _PER_TOKEN
) -> tuple[Tensor, Tensor]:
    grid = _check_quantize("quantize_fp8", x, block, torch.float8_e4m3fn, scale=scale)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(grid, dtype=torch.float32)


@torch.library.register_fake("fastinfer::quantize_fp8.out")
def _(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    block: Sequence[int] = _PER_TOKEN,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    _check_quantize(
        "quantize_fp8", x, block, torch.float8_e4m3fn, scale=scale, out=out, out_scale=out_scale
    )


@torch.library.register_fake("fastinfer::quantize_int8")
def _(
    x: Tensor, *, scale: Tensor | None = None, block: Sequence[int] = _PER_TOKEN
) -> tuple[Tensor, Tensor]:
    grid = _check_quantize("quantize_int8", x, block, torch.int8, scale=scale)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(grid, dtype=torch.float32)


@torch.library.register_fake("fastinfer::quantize_int8.out")
def _(
    x: Tensor,
    *,
    scale: Tensor | None = None,
    block: Sequence[int] = _PER_TOKEN,
    out: Tensor,
    out_scale: Tensor,
) -> None:
    _check_quantize(
        "quantize_int8", x, block, torch.int8, scale=scale, out=out, out_scale=out_scale
    )


@torch.library.register_fake("fastinfer::quantize_int8_asymmetric")
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grid = _check_quantize("quantize_int8_asymmetric", x, _PER_TOKEN, torch.int8)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(grid, dtype=torch.float32),
        x.new_empty(grid, dtype=torch.int32),
    )


@torch.library.register_fake("fastinfer::quantize_int8_asymmetric.out")
def _(x: Tensor, *, out: Tensor, out_scale: Tensor, out_zero_point: Tensor) -> None:
    _check_quantize(
        "quantize_int8_asymmetric",
        x,
        _PER_TOKEN,
        torch.int8,
        out=out,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
    )
