"""Normalisation: RMSNorm and LayerNorm, alone or fused with a residual add.

All arithmetic is in fp32 whatever the element type, and each result is rounded once. Tensors may
have any rank >= 1 and any strides as long as the last dimension is dense; `weight` and `bias` have
x's dtype or float32. Errors are ValueError and name the op, the argument, what was expected and
what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad

_ops = torch.ops.fastinfer
_rms_norm_out = _ops.rms_norm.out
_fused_add_rms_norm_ = _ops.fused_add_rms_norm_.default
_layer_norm_out = _ops.layer_norm.out
_fused_add_layer_norm_ = _ops.fused_add_layer_norm_.default


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Root-mean-square normalisation over the last dimension.

        y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)

    Args:
        x: [..., hidden], fp32, bf16 or fp16.
        weight: [hidden], x's dtype or fp32.
        eps: added to the mean square, >= 0.
        weight_offset: 1.0 gives Gemma's `1 + weight`.
        out: [..., hidden] like x; receives the result and may be x itself.

    Returns:
        [..., hidden] in x's dtype (`out` if given).

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    refuse_grad("rms_norm", x=x, weight=weight)
    if out is None:
        out = torch.empty_like(x)
    _rms_norm_out(x, weight, eps, weight_offset=weight_offset, out=out)
    return out


def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> None:
    """Residual add and RMSNorm in one pass, in place.

        residual <- residual + x          (rounded to the dtype)
        x        <- rms_norm(residual)    (of the stored sum)

    Bit for bit what the two steps give one after the other.

    Args:
        x: [..., hidden]; receives the normalised sum.
        residual: [..., hidden], x's dtype; receives the sum.
        weight, eps, weight_offset: as in `rms_norm`.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    refuse_grad("fused_add_rms_norm_", x=x, residual=residual, weight=weight)
    _fused_add_rms_norm_(x, residual, weight, eps, weight_offset=weight_offset)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Layer normalisation over the last dimension.

        y = (x - mean(x)) / sqrt(var(x) + eps) * (weight + weight_offset) + bias

    with the biased variance mean((x - mean)^2).

    Args:
        x: [..., hidden], fp32, bf16 or fp16.
        weight: [hidden], x's dtype or fp32.
        bias: [hidden], x's dtype or fp32, or None.
        eps: added to the variance, >= 0.
        weight_offset: added to the weight.
        out: [..., hidden] like x; receives the result and may be x itself.

    Returns:
        [..., hidden] in x's dtype (`out` if given).

    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    refuse_grad("layer_norm", x=x, weight=weight, bias=bias)
    if out is None:
        out = torch.empty_like(x)
    _layer_norm_out(x, weight, bias, eps, weight_offset=weight_offset, out=out)
    return out


def fused_add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
) -> None:
    """Residual add and layer normalisation in one pass, in place.

        residual <- residual + x          (rounded to the dtype)
        x        <- layer_norm(residual)  (of the stored sum)

    Args:
        x: [..., hidden]; receives the normalised sum.
        residual: [..., hidden], x's dtype; receives the sum.
        weight, bias, eps, weight_offset: as in `layer_norm`.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    refuse_grad("fused_add_layer_norm_", x=x, residual=residual, weight=weight, bias=bias)
    _fused_add_layer_norm_(x, residual, weight, bias, eps, weight_offset=weight_offset)


def _check_norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    check_devices(op, x=x, weight=weight, bias=bias, residual=residual, out=out)
    float_rows = x.is_floating_point() and x.dim() >= 1
    check(op, float_rows, f"x: expected a float tensor of rank >= 1, got {x.dtype}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check(op, vector.dim() == 1, f"{name}: expected [hidden], got {tuple(vector.shape)}")
            check(op, vector.shape[0] == x.shape[-1], f"{name}: expected {x.shape[-1]} elements")
    for name, like in (("residual", residual), ("out", out)):
        if like is not None:
            check_out(op, name, like, tuple(x.shape), x.dtype)


@torch.library.register_fake("fastinfer::rms_norm")
def _(x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0) -> Tensor:
    _check_norm("rms_norm", x, weight, None)
    return x.new_empty(x.shape)


@torch.library.register_fake("fastinfer::rms_norm.out")
def _(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, out: Tensor
) -> None:
    _check_norm("rms_norm", x, weight, None, out=out)


@torch.library.register_fake("fastinfer::fused_add_rms_norm_")
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0
) -> None:
    _check_norm("fused_add_rms_norm_", x, weight, None, residual=residual)


@torch.library.register_fake("fastinfer::layer_norm")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
) -> Tensor:
    _check_norm("layer_norm", x, weight, bias)
    return x.new_empty(x.shape)


@torch.library.register_fake("fastinfer::layer_norm.out")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    out: Tensor,
) -> None:
    _check_norm("layer_norm", x, weight, bias, out=out)


@torch.library.register_fake("fastinfer::fused_add_layer_norm_")
def _(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
) -> None:
    _check_norm("fused_add_layer_norm_", x, weight, bias, residual=residual)
