"""Gated activations: the element-wise middle of a gated feed-forward layer.

x holds the gate in the first half of its last dimension and what the gate multiplies in the
second, as a merged gate-up projection produces them. All arithmetic is in fp32 whatever the
element type, and each result is rounded once. Errors are ValueError and name the op, the argument,
what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad

_silu_and_mul_out = torch.ops.fastinfer.silu_and_mul.out
_gelu_and_mul_out = torch.ops.fastinfer.gelu_and_mul.out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """SwiGLU's activation.

        y = silu(a) * b,   a = x[..., :d],  b = x[..., d:],  silu(a) = a / (1 + exp(-a))

    Args:
        x: [..., 2d], fp32, bf16 or fp16; any strides with a dense last dimension.
        out: [..., d], x's dtype; receives the result and may be x[..., :d] itself.

    Returns:
        [..., d] in x's dtype (`out` if given).

    Raises:
        ValueError: the last dimension is odd, or `out` does not fit.

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    refuse_grad("silu_and_mul", x=x, out=out)
    if out is None:
        out = torch.empty(_half("silu_and_mul", x), dtype=x.dtype, device=x.device)
    _silu_and_mul_out(x, out=out)
    return out


def gelu_and_mul(x: Tensor, *, tanh_approx: bool = False, out: Tensor | None = None) -> Tensor:
    """GEGLU's activation.

        y = gelu(a) * b,   a = x[..., :d],  b = x[..., d:]
        gelu(a) = a / 2 * (1 + erf(a / sqrt(2)))
        gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3)))     if tanh_approx

    Relative accuracy is kept for large negative a, where 1 + erf would cancel.

    Args:
        x: [..., 2d], fp32, bf16 or fp16; any strides with a dense last dimension.
        tanh_approx: the tanh form (Gemma's "gelu_pytorch_tanh").
        out: [..., d], x's dtype; receives the result and may be x[..., :d] itself.

    Returns:
        [..., d] in x's dtype (`out` if given).

    Raises:
        ValueError: the last dimension is odd, or `out` does not fit.

    Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", 2016; Shazeer, "GLU Variants
    Improve Transformer", 2020.
    """
    refuse_grad("gelu_and_mul", x=x, out=out)
    if out is None:
        out = torch.empty(_half("gelu_and_mul", x), dtype=x.dtype, device=x.device)
    _gelu_and_mul_out(x, tanh_approx=tanh_approx, out=out)
    return out


def _half(op: str, x: Tensor) -> tuple[int | torch.SymInt, ...]:
    """The output's shape; refuses what has none."""
    if x.dim() == 0:
        raise ValueError(f"fastinfer::{op}: x: expected at least 1 dimension, got a scalar")
    return (*x.shape[:-1], x.shape[-1] // 2)


def _check_activation(op: str, x: Tensor) -> tuple[int | torch.SymInt, ...]:
    check(op, x.is_floating_point(), f"x: expected a float tensor, got {x.dtype}")
    shape = _half(op, x)
    check(op, x.shape[-1] % 2 == 0, f"x: expected an even last dimension, got {tuple(x.shape)}")
    return shape


@torch.library.register_fake("fastinfer::silu_and_mul")
def _(x: Tensor) -> Tensor:
    return x.new_empty(_check_activation("silu_and_mul", x))


@torch.library.register_fake("fastinfer::silu_and_mul.out")
def _(x: Tensor, *, out: Tensor) -> None:
    check_devices("silu_and_mul", x=x, out=out)
    check_out("silu_and_mul", "out", out, _check_activation("silu_and_mul", x), x.dtype)


@torch.library.register_fake("fastinfer::gelu_and_mul")
def _(x: Tensor, *, tanh_approx: bool = False) -> Tensor:
    return x.new_empty(_check_activation("gelu_and_mul", x))


@torch.library.register_fake("fastinfer::gelu_and_mul.out")
def _(x: Tensor, *, tanh_approx: bool = False, out: Tensor) -> None:
    check_devices("gelu_and_mul", x=x, out=out)
    check_out("gelu_and_mul", "out", out, _check_activation("gelu_and_mul", x), x.dtype)
