"""What may follow a matrix product y [M, N], on every op of the kind:

    h = act(y)                              [M, N]
    h = act(y[:, :N / 2]) * y[:, N / 2:]    [M, N / 2], if gated
    h = h + residual
    out = h, or the 8-bit codes of h / out_scale

The wrappers' docstrings describe the arguments; here is what their fakes check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastinfer.ops._common import check, check_devices, check_out

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh")
QUANTIZED = (torch.float8_e4m3fn, torch.int8)
"""Dtypes of results that need a scale."""

Size = int | torch.SymInt


def result_columns(features: Size, gated: bool) -> Size:
    """Of the result of a product with so many features."""
    return features // 2 if gated else features


def given_options(activation: str, gated: bool, **others: Any) -> dict[str, Any]:
    """Of a product's options those that are not their defaults (None, of the others): torch takes
    about 0.3 us for each that it is given.
    """
    options = {name: value for name, value in others.items() if value is not None}
    if activation != "none":
        options["activation"] = activation
    if gated:
        options["gated"] = True
    return options


def check_epilogue(
    op: str,
    like: Tensor,
    shape: tuple[Size, Size],
    dtype: torch.dtype,
    floats: tuple[torch.dtype, ...],
    *,
    activation: str = "none",
    gated: bool = False,
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Size, Size]:
    """The result's shape.

    Args:
        like: a tensor on the device where all are.
        shape: of the product, [M, N].
        dtype: of the result.
        floats: the dtypes that residuals and results may have beside `QUANTIZED`.
    """
    check_devices(op, like=like, residual=residual, out_scale=out_scale, out=out)
    known = activation in ACTIVATIONS
    check(op, known, f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    m, n = shape
    check(op, not gated or n % 2 == 0, f"gated: expected an even number of features, got {n}")
    result = m, result_columns(n, gated)
    accepted = (*floats, *QUANTIZED)
    check(op, dtype in accepted, f"out_dtype: expected one of {accepted}, got {dtype}")
    if residual is not None:
        check(
            op,
            residual.dtype in floats,
            f"residual: expected one of {floats}, got {residual.dtype}",
        )
        check_out(op, "residual", residual, result, residual.dtype)
    quantized = dtype in QUANTIZED
    check(
        op,
        quantized == (out_scale is not None),
        f"out_scale: expected {'float32 [1, 1]' if quantized else 'none'} since the result is "
        f"{dtype}, got {'none' if out_scale is None else 'a tensor'}",
    )
    if out_scale is not None:
        check_out(op, "out_scale", out_scale, (1, 1), torch.float32)
    if out is not None:
        check_out(op, "out", out, result, dtype)
    return result
