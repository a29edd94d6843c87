"""The norms of the decoder: `RMSNorm` and `LayerNorm`, alone or after a residual add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.models.linear import empty


class Norm(nn.Module):
    """A normalisation over the last dimension, which has ``size`` features.

    Args:
        size: of what is normalised.
        eps: added to the mean square or variance.
        weight_offset: added to the weights as they are stored.
        dtype: of the weights.
        device: where they are.
    """

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        weight_offset: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = empty((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """A fresh tensor like x."""
        out = torch.empty_like(x)
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """out <- norm(x); out may be x itself, and x a view."""
        raise NotImplementedError

    def add_inplace(self, x: Tensor, residual: Tensor) -> None:
        """residual <- residual + x; x <- norm(residual)."""
        raise NotImplementedError

    def fill_neutral(self) -> None:
        """Weights that change nothing."""
        self.weight.data.fill_(1.0 - self.weight_offset)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""

    def into(self, x: Tensor, out: Tensor) -> None:
        ops.rms_norm(x, self.weight, self.eps, weight_offset=self.weight_offset, out=out)

    def add_inplace(self, x: Tensor, residual: Tensor) -> None:
        offset = self.weight_offset
        ops.fused_add_rms_norm_(x, residual, self.weight, self.eps, weight_offset=offset)


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias; arguments as `Norm`."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        weight_offset: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(size, eps=eps, weight_offset=weight_offset, dtype=dtype, device=device)
        self.bias = empty((size,), dtype, device)

    def into(self, x: Tensor, out: Tensor) -> None:
        offset = self.weight_offset
        ops.layer_norm(x, self.weight, self.bias, self.eps, weight_offset=offset, out=out)

    def add_inplace(self, x: Tensor, residual: Tensor) -> None:
        offset = self.weight_offset
        ops.fused_add_layer_norm_(
            x, residual, self.weight, self.bias, self.eps, weight_offset=offset
        )

    def fill_neutral(self) -> None:
        super().fill_neutral()
        self.bias.data.zero_()


NORMS: dict[str, type[Norm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}
