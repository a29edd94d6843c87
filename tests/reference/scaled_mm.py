"""Scaled products of 8-bit matrices."""

from typing import Any

import torch
from torch import Tensor

from tests.reference.epilogue import epilogue
from tests.reference.threads import single_threaded

BLOCK = 128


def _spread(scale: Tensor, rows: int, k: int, block_rows: int) -> Tensor:
    """A scale's element for each of a matrix [rows, K]."""
    if scale.shape[0] not in (1, rows):
        scale = scale.repeat_interleave(block_rows, 0)[:rows]
    if scale.shape[1] != 1:
        scale = scale.repeat_interleave(BLOCK, 1)[:, :k]
    return scale.expand(rows, k)


@single_threaded
def fp8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    factors: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """The product of what the codes stand for, rounded to `factors` and `dtype` first, and the
    `epilogue`.
    """
    (m, k), n = a.shape, b.shape[0]
    x = a.double() * _spread(a_scale, m, k, 1).double()
    weight = b.double() * _spread(b_scale, n, k, BLOCK).double()
    x, weight = (t.to(factors or dtype).to(dtype) for t in (x, weight))
    out = x @ weight.T
    return epilogue(out if bias is None else out + bias.to(dtype), **options)


@single_threaded
def int8_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Tensor:
    """The exact sums, scaled in `dtype`: first by a's scale, then by b's; and the `epilogue`."""
    out = int8_sums(a, b, a_zero).to(dtype) * a_scale.to(dtype) * b_scale.to(dtype).T
    return epilogue(out if bias is None else out + bias.to(dtype), **options)


def int8_sums(a: Tensor, b: Tensor, a_zero: Tensor | None = None) -> Tensor:
    """The sums of (a - a_zero) b, int64."""
    codes = a.long() if a_zero is None else a.long() - a_zero.long()
    return (codes.cpu() @ b.long().cpu().T).to(a.device)
