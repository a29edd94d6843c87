"""Matrix products of 8-bit activations with 8-bit weights, scaled: what fastinfer/ops/quantize.py
makes goes in here.

b is a weight [N, K] as nn.Linear holds it: N output features, K input features, dense along K.
Scales are float32 and multiply. They are read through any strides, so that transposed views (the
scales of (1, 128) blocks along M, as DeepGEMM reads them) are taken as they are.

Products are exact and summed in fp32 or as integers, scaled in fp32, what follows is in fp32, and
the result is rounded once. Where a GPU multiplies fp8, its tensor cores sum up to 512 products at a
time with the digits that they keep (on Hopper some 13 bits below the largest), and those sums are
added in fp32. Errors are ValueError and name the op, the argument, what was expected and what came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad
from fastinfer.ops._epilogue import QUANTIZED, Size, check_epilogue, given_options, result_columns

_fp8_scaled_mm_out = torch.ops.fastinfer.fp8_scaled_mm.out
_int8_scaled_mm_out = torch.ops.fastinfer.int8_scaled_mm.out

_BLOCK = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fp8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer of float8_e4m3fn activations and weights, and what follows it.

        y[m, n] = a_scale b_scale sum_k a[m, k] b[n, k] + bias[n]
        h = act(y), or act(y[:, :N / 2]) * y[:, N / 2:] if gated
        out = h + residual, or the 8-bit codes of (h + residual) / out_scale

    Where a scale varies along K, each block's sum over its 128 inputs is scaled in fp32. The two
    scales may be of different kinds.

    Args:
        a: [M, K], float8_e4m3fn, K >= 1; any stride between rows, each dense.
        b: [N, K], likewise, N >= 1.
        a_scale: float32, any strides: [1, 1] for all of a, [M, 1] per row, or [M, ceil(K / 128)]
            per row and 128 inputs. The last block may be partial.
        b_scale: float32, any strides: [1, 1] for all of b, [N, 1] per feature, or
            [ceil(N / 128), ceil(K / 128)] per 128 features and 128 inputs, likewise.
        bias: [N], the result's dtype or fp32, contiguous, or None; any of the three float dtypes
            where the result is in 8 bits.
        out_dtype: of the result: fp32, bf16, fp16, float8_e4m3fn or int8. None: that of `out`, or
            bf16.
        activation: act: "none", "silu", "gelu" (by erf) or "gelu_tanh".
        gated: whether the product's halves become one: b is [gate; up] along N, which is even. The
            result has N / 2 columns.
        residual: like the result, fp32, bf16 or fp16, any stride between rows; added after all but
            quantization. `out` may be the residual itself.
        out_scale: float32 [1, 1], for results in 8 bits, as in `quantize_fp8` and `quantize_int8`
            with a given scale: saturated, ties to even; or None.
        out: [M, N], or [M, N / 2] if gated, dense in its rows; receives the result.

    Returns:
        [M, N], or [M, N / 2] if gated (`out` if given).

    Raises:
        ValueError: shapes, dtypes or strides do not fit.

    A NaN of a or of the residual stays in its row; float8_e4m3fn has a code for it, int8 shows it
    as 0. On CPU a row's bits do not depend on the other rows; on a GPU sums may be ordered
    otherwise for another number of rows or another alignment. There, rows of a and b that begin and
    end at multiples of 16 bytes are read faster.

    Micikevicius et al., "FP8 Formats for Deep Learning", 2022; blocks: DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024.
    """
    refuse_grad(
        "fp8_scaled_mm", a=a, b=b, a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual,
        out_scale=out_scale, out=out,
    )  # fmt: skip
    if out is None:
        out = _new_result("fp8_scaled_mm", a, b, gated, out_dtype)
    options = given_options(
        activation, gated, residual=residual, out_scale=out_scale, out_dtype=out_dtype
    )
    _fp8_scaled_mm_out(a, b, a_scale, b_scale, bias, **options, out=out)
    return out


def int8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer of int8 activations and weights, and what follows it.

        y[m, n] = a_scale b_scale sum_k (a[m, k] - a_zero[m]) b[n, k] + bias[n]
        out is made of y as in `fp8_scaled_mm`

    Sums are exact for any K, and so are the sums of b that `a_zero` takes: y has three roundings in
    fp32 (of the sum, and of either scale's product) and the bias's.

    Args:
        a: [M, K], int8, K >= 1; any stride between rows, each dense.
        b: [N, K], likewise, N >= 1; symmetric codes.
        a_scale: float32, any strides: [1, 1] for all of a, or [M, 1] per row.
        b_scale: float32, any strides: [1, 1] for all of b, or [N, 1] per feature.
        a_zero: int32 [M, 1], any strides: what stands for 0 in a row of asymmetric codes (the zero
            points of `quantize_int8_asymmetric`), or None.
        bias, out_dtype, activation, gated, residual, out_scale, out: as in `fp8_scaled_mm`.

    Returns:
        [M, N], or [M, N / 2] if gated (`out` if given).

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    refuse_grad(
        "int8_scaled_mm", a_scale=a_scale, b_scale=b_scale, bias=bias, residual=residual,
        out_scale=out_scale, out=out,
    )  # fmt: skip
    if out is None:
        out = _new_result("int8_scaled_mm", a, b, gated, out_dtype)
    options = given_options(
        activation, gated, residual=residual, out_scale=out_scale, out_dtype=out_dtype
    )
    _int8_scaled_mm_out(a, b, a_scale, b_scale, a_zero, bias, **options, out=out)
    return out


def _new_result(
    op: str, a: Tensor, b: Tensor, gated: bool, out_dtype: torch.dtype | None
) -> Tensor:
    m, n = _product_shape(op, a, b)
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    return torch.empty((m, result_columns(n, gated)), dtype=dtype, device=a.device)


def _product_shape(op: str, a: Tensor, b: Tensor) -> tuple[Size, Size]:
    """[M, N]; refuses what has none."""
    for name, tensor, layout in (("a", a, "[M, K]"), ("b", b, "[N, K]")):
        if tensor.dim() != 2:
            raise ValueError(
                f"fastinfer::{op}: {name}: expected 2 dimensions {layout}, "
                f"got {tuple(tensor.shape)}"
            )
    return a.shape[0], b.shape[0]


def _check_scale(op: str, name: str, scale: Tensor, shapes: tuple[tuple[Size, Size], ...]) -> None:
    """One of the shapes. Known ones are compared first, so that where one of them fits nothing is
    asked of a number of rows that is not known when a program is traced.
    """
    check(op, scale.dtype == torch.float32, f"{name}: expected torch.float32, got {scale.dtype}")
    known_first = sorted(shapes, key=lambda shape: not all(isinstance(size, int) for size in shape))
    fits = scale.dim() == 2 and any(
        scale.shape[0] == rows and scale.shape[1] == columns for rows, columns in known_first
    )
    check(op, fits, f"{name}: expected a shape of {shapes}, got {tuple(scale.shape)}")


def _check_scaled_mm(
    op: str,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    **epilogue: Any,
) -> tuple[tuple[Size, Size], torch.dtype]:
    """The result's shape and dtype."""
    check_devices(op, a=a, b=b, a_scale=a_scale, b_scale=b_scale, a_zero=a_zero, bias=bias)
    fp8 = op == "fp8_scaled_mm"
    shape = m, n = _product_shape(op, a, b)
    k = a.shape[1]
    check(op, k >= 1, "a: expected at least 1 column")
    check(op, n >= 1, "b: expected at least 1 row")
    stored = torch.float8_e4m3fn if fp8 else torch.int8
    check_out(op, "a", a, (m, k), stored)
    check_out(op, "b", b, (n, k), stored)
    k_blocks = (k + _BLOCK - 1) // _BLOCK
    a_shapes: tuple[tuple[Size, Size], ...] = ((m, 1), (1, 1))
    b_shapes: tuple[tuple[Size, Size], ...] = ((n, 1), (1, 1))
    if fp8:
        a_shapes += ((m, k_blocks),)
        b_shapes += (((n + _BLOCK - 1) // _BLOCK, k_blocks),)
    _check_scale(op, "a_scale", a_scale, a_shapes)
    _check_scale(op, "b_scale", b_scale, b_shapes)
    if a_zero is not None:
        check_out(op, "a_zero", a_zero, (m, 1), torch.int32)
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)
    if bias is not None:
        fits = bias.dtype in _DTYPES if dtype in QUANTIZED else bias.dtype in (dtype, torch.float32)
        check(op, fits, f"bias: expected {dtype} or torch.float32, got {bias.dtype}")
        check_out(op, "bias", bias, (n,), bias.dtype)
    return check_epilogue(op, a, shape, dtype, _DTYPES, out=out, **epilogue), dtype


def _register_fakes(op: str) -> None:
    def checked(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *args: Any, **options: Any
    ) -> tuple[tuple[Size, Size], torch.dtype]:
        if op == "fp8_scaled_mm":
            args = (None, *args)  # no a_zero
        return _check_scaled_mm(op, a, b, a_scale, b_scale, *args, **options)

    @torch.library.register_fake(f"fastinfer::{op}")
    def functional(a: Tensor, *args: Any, **options: Any) -> Tensor:
        shape, dtype = checked(a, *args, **options)
        return a.new_empty(shape, dtype=dtype)

    @torch.library.register_fake(f"fastinfer::{op}.out")
    def into(*args: Any, **options: Any) -> None:
        checked(*args, **options)


for _op in ("fp8_scaled_mm", "int8_scaled_mm"):
    _register_fakes(_op)
