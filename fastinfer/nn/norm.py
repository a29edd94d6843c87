"""`RMSNorm` and `LayerNorm`: torch's modules of these names, computed by the ops."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer import ops

OP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), as `torch.nn.RMSNorm`.

    The mean is over the dimensions of `normalized_shape`, the last ones of x. The constructor and
    the state_dict are torch's, and so are results, but that all of it is computed in fp32 and
    rounded once.

    Args:
        normalized_shape: the last dimensions of x, or the size of the last one.
        eps: added to the mean square; None is the fp32 epsilon, 1.19e-7, as in torch.
        elementwise_affine: whether there is a weight.
        device, dtype: of the weight.
        weight_offset: added to the weight; 1.0 gives Gemma's `1 + weight`. New weights are
            1 - weight_offset, which changes nothing.

    x is [..., *normalized_shape]. The op computes x in fp32, bf16 or fp16 with a weight of x's
    dtype or fp32; torch's own functions compute any other dtype, a norm without weight, and what
    a gradient is wanted of.

    Raises:
        ValueError, RuntimeError: shapes do not fit; from the op or from torch.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset  # new weights, which torch's __init__ makes, need it
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Weights that change nothing."""
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like x."""
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if not _op_takes(x, self.weight, None):
            return self._differentiable(x, eps)
        rows, weight = _rows(x, self.normalized_shape), self.weight.flatten()
        y = ops.rms_norm(rows, weight, eps, weight_offset=self.weight_offset)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        """What sets this norm apart, for print()."""
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return super().extra_repr() + offset

    def _differentiable(self, x: Tensor, eps: float) -> Tensor:
        """The formula by torch's functions, in fp32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight: Tensor | None = self.weight
        if weight is not None:
            weight = weight.to(wide) + self.weight_offset
        elif self.weight_offset:
            weight = x.new_full(self.normalized_shape, 1.0 + self.weight_offset, dtype=wide)
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, as `torch.nn.LayerNorm`.

    Mean and (biased) variance are over the dimensions of `normalized_shape`, the last ones of x.
    The constructor and the state_dict are torch's: (normalized_shape, eps, elementwise_affine,
    bias, device, dtype). The op computes x in fp32, bf16 or fp16 with weights of x's dtype or fp32;
    torch's own function computes any other dtype, a norm without weight, and what a gradient is
    wanted of.

    Raises:
        ValueError, RuntimeError: shapes do not fit; from the op or from torch.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like x."""
        if not _op_takes(x, self.weight, self.bias):
            return super().forward(x)
        rows, weight = _rows(x, self.normalized_shape), self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        return ops.layer_norm(rows, weight, bias, self.eps).view(x.shape)


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is to record what is done with these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _op_takes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    if weight is None or x.dtype not in OP_DTYPES or wants_grad(x, weight, bias):
        return False
    return all(p is None or p.dtype in (x.dtype, torch.float32) for p in (weight, bias))


def _rows(x: Tensor, normalized_shape: tuple[int, ...] | Any) -> Tensor:
    """x with the normalised dimensions as one, its last and dense."""
    shape = tuple(normalized_shape)
    leading = x.dim() - len(shape)
    if leading < 0 or tuple(x.shape[leading:]) != shape:
        raise ValueError(f"x: expected shape [..., {', '.join(map(str, shape))}], got {x.shape}")
    rows = x if len(shape) == 1 else x.reshape(*x.shape[:leading], math.prod(shape))
    return rows if rows.stride(-1) == 1 else rows.contiguous()
