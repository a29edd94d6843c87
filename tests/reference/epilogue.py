"""What follows a matrix product: activation, gating, residual."""

import math

import torch
from torch import Tensor


def _act(y: Tensor, name: str) -> Tensor:
    """act(y)."""
    if name == "silu":
        return y * torch.sigmoid(y)
    if name == "gelu":
        # erfc keeps the digits that 1 + erf loses where y is far below zero.
        return 0.5 * y * torch.special.erfc(-y / math.sqrt(2.0))
    if name == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which keeps its digits where tanh is near -1.
        return y * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3))
    assert name == "none"
    return y


def epilogue(
    y: Tensor, *, activation: str = "none", gated: bool = False, residual: Tensor | None = None
) -> Tensor:
    """act(y), or act(y[..., :d]) * y[..., d:] if gated, + residual; in y's dtype."""
    if gated:
        gate, up = y.chunk(2, -1)
        h = _act(gate, activation) * up
    else:
        h = _act(y, activation)
    return h if residual is None else h + residual.to(y.dtype)
