"""Round to nearest, measured as the other quantizers are."""

from __future__ import annotations

import torch
from torch import Tensor

from fastinfer.ops import quantize_weight
from fastinfer.quant.grid import Quantized, checked_weight, measured
from fastinfer.quant.statistics import check_hessian


def rtn(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> Quantized:
    """`fastinfer.ops.quantize_weight`, and how it does on calibration data.

    Args:
        weight: [N, K], a float dtype.
        hessian: [K, K], mean of x x^T; for the error alone.
        bits, group_size, symmetric, scale_dtype: as in `quantize_weight`.

    Raises:
        NotImplementedError, ValueError: as `quantize_weight`; ValueError for NaN or infinity in
            hessian, or another shape of it.
    """
    wide, _ = checked_weight("rtn", weight, bits, group_size)
    check_hessian("rtn", hessian, weight.shape[1], weight.device)
    packed = quantize_weight(weight, bits, group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    return measured(packed, wide, hessian)
