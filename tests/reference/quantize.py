"""Quantization to int8 and float8_e4m3fn; defined by float32 steps, so bit-exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.threads import single_threaded

FP8_NAN = 0x7F


@single_threaded
def quantize_fp8(
    x: Tensor, *, scale: Tensor | None = None, block: Sequence[int] = (1, -1)
) -> tuple[Tensor, Tensor]:
    """(codes like x, scales [ceil(M / rows), ceil(K / columns)])."""
    value, scale = _scaled(x, scale, block, 448.0)
    codes = value.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[value.isnan()] = FP8_NAN
    return codes.view(x.shape), scale


@single_threaded
def quantize_int8(
    x: Tensor, *, scale: Tensor | None = None, block: Sequence[int] = (1, -1)
) -> tuple[Tensor, Tensor]:
    """(codes like x, scales [ceil(M / rows), ceil(K / columns)])."""
    value, scale = _scaled(x, scale, block, 127.0)
    codes = value.round().clamp(-127.0, 127.0).nan_to_num(nan=0.0).to(torch.int8)
    return codes.view(x.shape), scale


@single_threaded
def quantize_int8_asymmetric(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes like x, scales [M, 1], zero points [M, 1])."""
    value = x.float().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    # A column of zeros more: the range includes 0.
    value = torch.nn.functional.pad(value, (0, 1))
    high, low = value.amax(1, keepdim=True), value.amin(1, keepdim=True)
    scale = _usable(high / 255.0 - low / 255.0)
    zero_point = (-128 - _rounded(low / scale)).clamp(-128, 127)
    codes = (_rounded(value / scale) + zero_point).clamp(-128, 127)[:, :-1]
    return codes.to(torch.int8).reshape(x.shape), scale, zero_point


def _scaled(
    x: Tensor, scale: Tensor | None, block: Sequence[int], limit: float
) -> tuple[Tensor, Tensor]:
    """x / scale as a matrix, and the scales."""
    value = x.float().reshape(math.prod(x.shape[:-1]), x.shape[-1])
    extents = [max(1, n) if b == -1 else b for n, b in zip(value.shape, block, strict=True)]
    grid = [1 if b == -1 else -(-n // b) for n, b in zip(value.shape, block, strict=True)]
    if scale is None:
        scale = torch.ones(grid, device=x.device)
        for i in range(grid[0]):
            rows = value[i * extents[0] : (i + 1) * extents[0]]
            for j, part in enumerate(rows.split(extents[1], dim=1)[: grid[1]]):
                if part.numel():
                    scale[i, j] = _usable(part.abs().amax() / limit)
    scale = scale.reshape(grid).clone()
    of_row, of_column = (
        torch.arange(n, device=x.device) // e for n, e in zip(value.shape, extents, strict=True)
    )
    return value / scale[of_row[:, None], of_column], scale


def _usable(scale: Tensor) -> Tensor:
    """1 for 0, and the only NaN there is for any of them."""
    return torch.where(scale == 0, 1.0, torch.where(scale.isnan(), torch.nan, scale))


def _rounded(x: Tensor) -> Tensor:
    return x.round().nan_to_num(nan=0.0).to(torch.int32)
