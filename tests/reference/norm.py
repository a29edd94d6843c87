"""Normalisation and activations."""

import torch
from torch import Tensor

from tests.reference.epilogue import epilogue
from tests.reference.threads import single_threaded


@single_threaded
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""
    x = x.to(dtype)
    variance = x.square().mean(-1, keepdim=True)
    return x / torch.sqrt(variance + eps) * (weight.to(dtype) + weight_offset)


@single_threaded
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the biased variance."""
    centred = x.to(dtype) - x.to(dtype).mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    out = centred / torch.sqrt(variance + eps) * (weight.to(dtype) + weight_offset)
    return out if bias is None else out + bias.to(dtype)


def add_to_residual(x: Tensor, residual: Tensor) -> Tensor:
    """The residual stream after the addition, rounded once to the residual's dtype."""
    return (residual.double() + x.double()).to(residual.dtype)


@single_threaded
def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **options
) -> tuple[Tensor, Tensor]:
    """(x, residual) afterwards: the sum is stored first, then the stored sum is normalised."""
    residual = add_to_residual(x, residual)
    return rms_norm(residual, weight, eps, **options), residual


@single_threaded
def fused_add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options,
) -> tuple[Tensor, Tensor]:
    """(x, residual) afterwards: the sum is stored first, then the stored sum is normalised."""
    residual = add_to_residual(x, residual)
    return layer_norm(residual, weight, bias, eps, **options), residual


@single_threaded
def silu_and_mul(x: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """silu(a) * b for x = [a, b] along the last dimension."""
    return epilogue(x.to(dtype), activation="silu", gated=True)


@single_threaded
def gelu_and_mul(
    x: Tensor, *, tanh_approx: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    """gelu(a) * b for x = [a, b]; gelu by erf, or by its tanh approximation."""
    return epilogue(x.to(dtype), activation="gelu_tanh" if tanh_approx else "gelu", gated=True)
