"""What calibration keeps of a projection's inputs, and how much worse other weights do on them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastinfer.ops._common import check


class InputStatistics:
    """Sums over the inputs x [T, K] of a projection; memory is K^2 numbers whatever T is.

    Products are formed in fp32 (float64 for such inputs), and added up in float64.

    Args:
        features: K.
        device: of the inputs.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.count = 0
        """Tokens so far."""
        self._products = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._magnitudes = torch.zeros(features, dtype=torch.float64, device=device)

    def add(self, x: Tensor) -> None:
        """Inputs [..., K], any float dtype."""
        x = x.flatten(0, -2).to(torch.promote_types(x.dtype, torch.float32))
        self.count += len(x)
        self._products += x.t() @ x
        self._magnitudes += x.abs().sum(0, dtype=torch.float64)

    @property
    def hessian(self) -> Tensor:
        """mean of x x^T, float64 [K, K]: half the second derivative of the mean squared error of a
        product, in each row of its weight.
        """
        return self._products / max(self.count, 1)

    @property
    def magnitude(self) -> Tensor:
        """mean of |x|, float64 [K]."""
        return self._magnitudes / max(self.count, 1)


def output_error(difference: Tensor, hessian: Tensor) -> float:
    """mean over tokens of |x D^T|^2 = tr(D H D^T), for the difference D [N, K] of two weights."""
    d = difference.to(hessian.dtype)
    return max(float(((d @ hessian) * d).sum()), 0.0)


def check_hessian(op: str, hessian: Tensor, k: int, device: torch.device) -> None:
    """`hessian` is a finite float matrix [K, K] on the weight's device; ValueError."""
    shape = tuple(hessian.shape)
    check(op, shape == (k, k), f"hessian: expected shape {(k, k)}, got {shape}")
    floats = hessian.is_floating_point()
    check(op, floats, f"hessian: expected a float tensor, got {hessian.dtype}")
    same = hessian.device == device
    check(op, same, f"hessian: expected on the weight's device {device}, got {hessian.device}")
    finite = hessian.isfinite()
    if not finite.all():
        i, j = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"fastinfer::{op}: hessian: expected finite values, got {float(hessian[i, j])} at "
            f"[{i}, {j}]"
        )
