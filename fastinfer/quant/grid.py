"""The values that a low-bit weight can have: scales and zero points, rounding, packing.

The grid is that of `fastinfer.ops.quantize_weight`, of one group of one row:

    low, high = min(group, 0), max(group, 0), or narrower where weights are clipped
    q = clamp(round(w / scale) + zero, 0, 2^bits - 1)          w' = scale * (q - zero)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastinfer.ops._common import check, refuse_grad
from fastinfer.ops.packed_weights import (
    SCALE_DTYPES,
    PackedWeight,
    check_finite,
    checked_group_size,
    pack_codes,
    packed_shape,
)
from fastinfer.quant.statistics import output_error


class Quantized(NamedTuple):
    """What a quantizer returns."""

    weight: PackedWeight
    error: float
    """tr((W - W') H (W - W')^T), the mean squared error of a token's outputs, summed over them."""
    relative_error: float
    """The error divided by tr(W H W^T), the mean square of the outputs; 0 where both are 0."""


def measured(packed: PackedWeight, weight: Tensor, hessian: Tensor) -> Quantized:
    """A packed weight with its error against the weight that it stands for."""
    error = output_error(weight - packed.dequantize(weight.dtype), hessian)
    whole = output_error(weight, hessian)
    return Quantized(packed, error, error / whole if whole > 0 else 0.0)


def checked_weight(op: str, weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, int]:
    """The weight [N, K] in fp32 or float64, and the group size, of which -1 is K.

    Raises:
        NotImplementedError: weight requires grad.
        ValueError: no finite float matrix, or bits or a group size that there is not.
    """
    refuse_grad(op, weight=weight)
    matrix = weight.is_floating_point() and weight.dim() == 2 and weight.numel() > 0
    got = f"{weight.dtype} {tuple(weight.shape)}"
    check(op, matrix, f"weight: expected a float tensor [N, K], got {got}")
    n, k = weight.shape
    packed_shape(n, k, bits)
    check_finite(op, weight)
    compute = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(compute), checked_group_size(op, group_size, k)


def checked_scale_dtype(op: str, dtype: torch.dtype | None, weight: Tensor) -> torch.dtype:
    """The dtype of scales; None: the weight's, or fp32 for a wider one."""
    if dtype is None:
        return weight.dtype if weight.dtype in SCALE_DTYPES else torch.float32
    known = dtype in SCALE_DTYPES
    check(op, known, f"scale_dtype: expected one of {SCALE_DTYPES}, got {dtype}")
    return dtype


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """[N, G, group_size] of [N, K]; zeros fill up the last group, which widens no range."""
    n, k = weight.shape
    groups = -(-k // group_size)
    return pad(weight, (0, groups * group_size - k)).view(n, groups, group_size)


def ranges(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest of each group, along the last dimension; 0 is among them."""
    return groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)


def encode(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes as floats; all broadcast."""
    return ((weight / scale).round() + zero).clamp(0, 2**bits - 1)


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    perm: Tensor | None = None,
) -> PackedWeight:
    """The packed weight of codes [N, K], in packed order of columns, with scales and zeros [N, G]
    (zeros, any float dtype, are 2^(bits - 1) and are left out if symmetric).
    """
    n, k = codes.shape
    stored = None if symmetric else zeros.t().to(scales.dtype).contiguous()
    return PackedWeight(
        pack_codes(codes.to(torch.uint8), bits),
        scales.t().contiguous(),
        stored,
        None if perm is None else perm.int(),
        bits,
        group_size,
        (n, k),
    )
