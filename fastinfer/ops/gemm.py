"""Matrix products with quantized weights: activations in floats, weights in 2, 3, 4 or 8 bits.

A weight W [N, K] (N output features, K input features) is stored as unsigned codes q of so many
bits, with a scale and a zero point for each output feature and each group of `group_size` input
features:

    W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),   g = k // group_size

Sums are formed in fp32, what follows the product is in fp32, and the result is rounded once. Codes
are multiplied exactly, and a group's sum is scaled in fp32; on Hopper, with more than 16 rows of x
in 16 bits, scales and then weights are rounded to x's type instead, as dequantizing them would.
Errors are ValueError and name the op, the argument, what was expected and what came.

`qweight` holds the codes in the layout of fastinfer/ops/packed_weights.py, which also makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

import fastinfer._library
import fastinfer.tuning
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad
from fastinfer.ops._epilogue import Size, check_epilogue, given_options, result_columns

_BITS = {f"int{bits}_gemm": bits for bits in (2, 3, 4, 8)}
_OUT = {op: getattr(torch.ops.fastinfer, op).out for op in _BITS}
_TILE = 64
_GROUP_UNIT = 16

fastinfer.tuning.load()  # what was measured here goes before the default choice

_Arguments = ParamSpec("_Arguments")


def _low_bit_gemm(
    op: str,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    outlier_offsets: Tensor | None = None,
    outlier_columns: Tensor | None = None,
    outlier_values: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with a weight of {bits}-bit codes, and what comes before and after it.

        y = x W^T + bias,   W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),   g = k // group_size
        W[n, columns[i]] += values[i],   offsets[n] <= i < offsets[n + 1],   if there are outliers
        h = act(y), or act(y[:, :N / 2]) * y[:, N / 2:] if gated
        out = h + residual, or the 8-bit codes of (h + residual) / out_scale

    With `norm_weight`, x is rms_norm(x, norm_weight, norm_eps, weight_offset=norm_weight_offset).
    With `perm`, column k of W multiplies x[:, perm[k]] (act-order). A gated weight is [gate; up]
    along N, the projections of a feed-forward layer as one.

    Args:
        x: [M, K], fp32, bf16 or fp16, K >= 1; any stride between rows, each dense.
        qweight: int32 [ceil(N / 64), ceil(K / 64), {words}], the packed codes q,
            contiguous; on Hopper fastest at an address that is a multiple of 16.
        scales: [ceil(K / group_size), N], fp32, bf16 or fp16 whatever x is, contiguous.
        zeros: like scales; any float values. None: {middle} everywhere (symmetric codes).
        group_size: input features that share a scale: a positive multiple of 16, or at least K.
            The last group may be partial.
        perm: int32 [K], values in [0, K), or None.
        bias: [N], x's dtype or fp32, or None.
        activation: act: "none", "silu", "gelu" (by erf) or "gelu_tanh".
        gated: whether the product's halves become one; N is even then. The result has N / 2
            columns.
        residual: like the result, in x's dtype, any stride between rows; added after all but
            quantization. `out` may be the residual itself.
        out_scale: float32 [1, 1], for results in 8 bits, as in `quantize_fp8` and `quantize_int8`
            with a given scale: saturated, ties to even; or None.
        out_dtype: of the result: x's, float8_e4m3fn or int8. None: that of `out`, or x's.
        norm_weight: [K], x's dtype or fp32, or None: x is not normalised.
        norm_eps, norm_weight_offset: as in `rms_norm`.
        outlier_offsets, outlier_columns, outlier_values: weights beside the codes, all three or
            None: a sparse matrix [N, K] that is added to W, by features (CSR). Feature n has the
            entries offsets[n] to offsets[n + 1] (without), any number of them; entry i is
            values[i] in column columns[i] of W (with `perm`, it multiplies x[:, perm[columns[i]]]).
            int32 [N + 1], ascending from 0 to the number of entries; int32 [entries], values in
            [0, K); fp32, bf16 or fp16 [entries].
        out: [M, N], or [M, N / 2] if gated, dense in its rows; receives the result.

    Returns:
        [M, N], or [M, N / 2] if gated (`out` if given).

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also an entry of perm or of
            outlier_columns outside [0, K), which on a GPU makes NaN, and offsets that are not as
            above, which on a GPU may take other entries, but none outside.

    A NaN of x or of the residual stays in its row; float8_e4m3fn has a code for it, int8 shows it
    as 0. On CPU a row's bits do not depend on the other rows; on a GPU sums may be ordered
    otherwise for another number of rows.

    Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", 2022; Lin et al., "AWQ: Activation-aware Weight Quantization", 2023; outliers:
    Dettmers et al., "SpQR: A Sparse-Quantized Representation for Near-Lossless LLM Weight
    Compression", 2023.
    """
    refuse_grad(
        op, x=x, scales=scales, zeros=zeros, bias=bias, residual=residual, out_scale=out_scale,
        norm_weight=norm_weight, outlier_values=outlier_values, out=out,
    )  # fmt: skip
    if out is None:
        m, n = _product_shape(op, x, scales)
        dtype = x.dtype if out_dtype is None else out_dtype
        out = torch.empty((m, result_columns(n, gated)), dtype=dtype, device=x.device)
    options = given_options(
        activation, gated, perm=perm, bias=bias, residual=residual, out_scale=out_scale,
        out_dtype=out_dtype, outlier_offsets=outlier_offsets, outlier_columns=outlier_columns,
        outlier_values=outlier_values,
    )  # fmt: skip
    if norm_weight is not None:
        options |= {
            "norm_weight": norm_weight,
            "norm_eps": norm_eps,
            "norm_weight_offset": norm_weight_offset,
        }
    _OUT[op](x, qweight, scales, zeros, group_size=group_size, **options, out=out)
    return out


def _of(
    op: str, function: Callable[Concatenate[str, _Arguments], Tensor]
) -> Callable[_Arguments, Tensor]:
    """The wrapper of one op: its name, its documentation and its arguments are those of `function`
    for the op's bits.
    """

    def gemm(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Tensor:
        return function(op, *args, **kwargs)

    bits, signature = _BITS[op], inspect.signature(function)
    gemm.__name__ = gemm.__qualname__ = op
    gemm.__doc__ = (function.__doc__ or "").format(
        bits=bits, words=bits * 128, middle=2 ** (bits - 1)
    )
    gemm.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    return gemm


int2_gemm = _of("int2_gemm", _low_bit_gemm)
int3_gemm = _of("int3_gemm", _low_bit_gemm)
int4_gemm = _of("int4_gemm", _low_bit_gemm)
int8_gemm = _of("int8_gemm", _low_bit_gemm)


def _product_shape(op: str, x: Tensor, scales: Tensor) -> tuple[Size, Size]:
    """[M, N]; refuses what has none."""
    for name, tensor, layout in (("x", x, "[M, K]"), ("scales", scales, "[groups, N]")):
        if tensor.dim() != 2:
            raise ValueError(
                f"fastinfer::{op}: {name}: expected 2 dimensions {layout}, "
                f"got {tuple(tensor.shape)}"
            )
    return x.shape[0], scales.shape[1]


def _check_gemm(
    op: str,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    outlier_offsets: Tensor | None = None,
    outlier_columns: Tensor | None = None,
    outlier_values: Tensor | None = None,
    out: Tensor | None = None,
    **epilogue: Any,
) -> tuple[tuple[Size, Size], torch.dtype]:
    """The result's shape and dtype."""
    check_devices(
        op, x=x, qweight=qweight, scales=scales, zeros=zeros, perm=perm, bias=bias,
        norm_weight=norm_weight, outlier_offsets=outlier_offsets, outlier_columns=outlier_columns,
        outlier_values=outlier_values,
    )  # fmt: skip
    for name, tensor in (("x", x), ("scales", scales)):
        check(op, tensor.is_floating_point(), f"{name}: expected floats, got {tensor.dtype}")
    shape = _product_shape(op, x, scales)
    n, k = shape[1], x.shape[1]
    check(op, k >= 1, "x: expected at least 1 column")
    check(op, n >= 1, "scales: expected at least 1 column")
    grouped = group_size >= 1 and (group_size % _GROUP_UNIT == 0 or group_size >= k)
    check(op, grouped, f"group_size: expected a multiple of {_GROUP_UNIT}, got {group_size}")
    tiles = ((n + _TILE - 1) // _TILE, (k + _TILE - 1) // _TILE, _BITS[op] * 128)
    groups = (k + group_size - 1) // group_size
    check_out(op, "scales", scales, (groups, n), scales.dtype)
    check_out(op, "qweight", qweight, tiles, torch.int32)
    if zeros is not None:
        check_out(op, "zeros", zeros, (groups, n), scales.dtype)
    if perm is not None:
        check_out(op, "perm", perm, (k,), torch.int32)
    for name, vector, size in (("bias", bias, n), ("norm_weight", norm_weight, k)):
        if vector is not None:
            dtype = torch.float32 if vector.dtype != x.dtype else x.dtype
            check_out(op, name, vector, (size,), dtype)
    outliers = (outlier_offsets, outlier_columns, outlier_values)
    given = sum(tensor is not None for tensor in outliers)
    names = "outlier_offsets, outlier_columns, outlier_values"
    check(op, given in (0, 3), f"{names}: expected all three or none, got {given} of them")
    if outlier_offsets is not None and outlier_columns is not None and outlier_values is not None:
        check_out(op, "outlier_offsets", outlier_offsets, (n + 1,), torch.int32)
        entries = (outlier_columns.numel(),)
        check_out(op, "outlier_columns", outlier_columns, entries, torch.int32)
        check_out(op, "outlier_values", outlier_values, entries, outlier_values.dtype)
    check(op, norm_eps >= 0, f"norm_eps: expected a number >= 0, got {norm_eps}")
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    return check_epilogue(op, x, shape, dtype, (x.dtype,), out=out, **epilogue), dtype


def _register_fakes(op: str) -> None:
    @torch.library.register_fake(f"fastinfer::{op}")
    def functional(x: Tensor, *args: Any, **options: Any) -> Tensor:
        shape, dtype = _check_gemm(op, x, *args, **options)
        return x.new_empty(shape, dtype=dtype)

    @torch.library.register_fake(f"fastinfer::{op}.out")
    def into(*args: Any, **options: Any) -> None:
        _check_gemm(op, *args, **options)


for _op in _BITS:
    _register_fakes(_op)
