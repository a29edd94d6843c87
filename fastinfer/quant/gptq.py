"""GPTQ: column after column is rounded, and what is left of the row makes up for the error."""

from __future__ import annotations

import torch
from torch import Tensor

from fastinfer.ops._common import check
from fastinfer.ops.packed_weights import scales_of_ranges
from fastinfer.quant.grid import (
    Quantized,
    checked_scale_dtype,
    checked_weight,
    encode,
    grouped,
    measured,
    pack,
    ranges,
)
from fastinfer.quant.recipe import ORDERS
from fastinfer.quant.statistics import check_hessian

# Columns whose errors are carried to those after them at once. A multiple of all group sizes but
# the whole row, so that a group has all its corrections when its range is taken.
_BLOCK = 128
_LEAST_DAMPING = 1e-6
_DAMPINGS = 8


def gptq(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group_size: int = 128,
    symmetric: bool = False,
    order: str = "none",
    damping: float = 0.01,
    scale_dtype: torch.dtype | None = None,
) -> Quantized:
    """Codes that keep the outputs on calibration data, tr((W - W') H (W - W')^T), small.

    Columns are rounded one by one. After each, the columns F that are not rounded yet take the
    values that minimise the objective given those that are, R:

        W[:, F] = W[:, F] + (W - W')[:, R] H[R, F] H[F, F]^-1

    which is done step by step by the rows of the upper factor U of H^-1 = U^T U: the error of
    column j, divided by U[j, j], times U[j, j + 1:], is subtracted from the columns after it.

    A column that no input ever reached (H[j, j] = 0) is rounded to nearest and changes no other.
    H is damped by `damping` times its mean diagonal, and where that is not positive definite by
    ten times as much, and so on.

    Args:
        weight: [N, K], a float dtype. Computes in fp32, or float64 for such a weight.
        hessian: H [K, K], mean (or sum) of x x^T over inputs x; it is factored in float64.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128, or K or -1. The last group may be partial.
        symmetric: without zero points.
        order: in which columns are rounded, and what groups are; with 2 bits, "none" may do no
            better than rounding to nearest. "none": as they stand; a group's
            range is that of its weights when its first column is reached. "act": by descending
            H[j, j], and groups are neighbours in that order; the result of several groups has a
            `perm`. "static":
            in the same order, but groups are neighbours as they stand, with the ranges that they
            have in the beginning; no `perm`. "group": whole groups by descending largest H[j, j],
            inside a group by descending H[j, j]; ranges as in "none", no `perm`. (A partial group
            comes last.)
        damping: at least 0.
        scale_dtype: fp16, bf16 or fp32; None is weight's dtype, or fp32 for a wider one.

    Returns:
        The packed weight, on the grid of `fastinfer.ops.quantize_weight`, and its error.

    Raises:
        NotImplementedError: weight requires grad.
        ValueError: NaN or infinity in weight or hessian, a hessian of another shape or with
            eigenvalues far below 0, or an argument that is not as above.

    Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", 2022; "group": Gafni et al., "Dual Precision Quantization for Efficient and
    Accurate Deep Neural Networks Inference", 2025 (group-aware reordering).
    """
    op = "gptq"
    known = order in ORDERS
    check(op, known, f"order: expected one of {ORDERS}, got {order!r}")
    check(op, damping >= 0, f"damping: expected at least 0, got {damping}")
    wide, group_size = checked_weight(op, weight, bits, group_size)
    scale_dtype = checked_scale_dtype(op, scale_dtype, weight)
    n, k = wide.shape
    check_hessian(op, hessian, k, weight.device)
    columns = _column_order(hessian.diagonal(), order, group_size)
    groups = torch.arange(k, device=weight.device) if order == "act" else columns
    group_of = (groups // group_size).tolist()
    factor = _inverse_factor(op, hessian.double()[columns][:, columns], damping).to(wide.dtype)

    count = -(-k // group_size)
    scales = wide.new_empty(n, count, dtype=scale_dtype)
    zeros = wide.new_empty(n, count)
    if order == "static":
        low, high = ranges(grouped(wide, group_size))
        scales, zeros = scales_of_ranges(low, high, bits, symmetric, scale_dtype)
    rest = wide.t()[columns]  # [K, N]: a column is contiguous
    codes = torch.empty_like(rest, dtype=torch.uint8)
    for begin in range(0, k, _BLOCK):
        end = min(begin + _BLOCK, k)
        errors = torch.empty_like(rest[begin:end])
        for j in range(begin, end):
            group = group_of[j]
            if order != "static" and (j == 0 or group != group_of[j - 1]):
                low, high = ranges(rest[j : j + _size(group, group_size, k)].t())
                scales[:, group], zeros[:, group] = scales_of_ranges(
                    low, high, bits, symmetric, scale_dtype
                )
            scale, zero = scales[:, group].to(rest.dtype), zeros[:, group]
            code = encode(rest[j], scale, zero, bits)
            codes[j] = code
            error = (rest[j] - scale * (code - zero)) / factor[j, j]
            rest[j + 1 : end] -= factor[j, j + 1 : end, None] * error
            errors[j - begin] = error
        rest[end:] -= factor[begin:end, end:].t() @ errors

    # Where all columns are one group, its codes can stay where they are.
    perm = columns if order == "act" and count > 1 else None
    if perm is None:
        codes = torch.empty_like(codes).index_copy_(0, columns, codes)
    packed = pack(codes.t(), scales, zeros, bits, group_size, symmetric=symmetric, perm=perm)
    return measured(packed, wide, hessian)


def _size(group: int, group_size: int, k: int) -> int:
    """Columns of a group, of which the last one may be partial."""
    return min(group_size, k - group * group_size)


def _column_order(diagonal: Tensor, order: str, group_size: int) -> Tensor:
    """int64 [K]: the columns in the order in which they are rounded."""
    k = len(diagonal)
    if order == "none":
        return torch.arange(k, device=diagonal.device)
    by_diagonal = diagonal.argsort(descending=True, stable=True)
    if order != "group":
        return by_diagonal
    whole = k // group_size
    largest = diagonal[: whole * group_size].view(whole, group_size).amax(1)
    rank = torch.full((-(-k // group_size),), whole, device=diagonal.device)
    rank[largest.argsort(descending=True, stable=True)] = torch.arange(
        whole, device=diagonal.device
    )
    return by_diagonal[rank[by_diagonal // group_size].argsort(stable=True)]


def _inverse_factor(op: str, hessian: Tensor, damping: float) -> Tensor:
    """Upper U with U^T U = (H + damping)^-1, from the Cholesky factor of H read backwards.

    With J the reversal: J H J = L L^T, so H = (J L J)(J L J)^T, and U is the inverse of J L J.
    """
    # Where no input came at all, any diagonal rounds to nearest.
    mean = float(hessian.diagonal().mean()) or 1.0
    for _ in range(_DAMPINGS):
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not info and lower.isfinite().all():
            unit = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
            factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), unit, upper=True)
            return factor
        damping = max(10 * damping, _LEAST_DAMPING)
    raise ValueError(
        f"fastinfer::{op}: hessian: expected a positive semidefinite matrix, got one that is not "
        f"positive definite with {damping / 10:g} times its mean diagonal added"
    )
