"""AWQ: inputs that matter get a finer grid, by scales that the operation before takes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastinfer.ops._common import check
from fastinfer.ops.packed_weights import checked_group_size, scales_of_ranges
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
from fastinfer.quant.statistics import check_hessian, output_error

_EXPONENTS = 20
_SHRINKS = 10
_LEAST_SHRINK = 0.5
_LEAST_SCALE = 1e-4


def awq_scales(
    weights: Sequence[Tensor],
    hessian: Tensor,
    magnitude: Tensor,
    *,
    bits: int,
    group_size: int = 128,
    symmetric: bool = False,
    source: Tensor | None = None,
) -> Tensor:
    """Scales s of inputs: W is quantized as W diag(s), and its inputs are divided by s.

        s = magnitude^a / sqrt(max * min),   a = 0, 1/20, ... 1
        minimise over a: the sum over weights of tr(D H D^T),   D = W - Q(W diag(s)) diag(s)^-1

    a = 0 is s = 1, so that the result is never worse than rounding to nearest.

    Args:
        weights: [N_i, K] each, of the projections that have these inputs.
        hessian: H [K, K], mean of x x^T.
        magnitude: mean of |x| [K].
        bits, group_size, symmetric: as in `fastinfer.ops.quantize_weight`.
        source: int64 [K], or None: which feature of the operation before each input is, where
            several inputs are the same one, as values are that several heads share; they get one
            scale, by the mean of their magnitudes.

    Returns:
        s > 0, fp32 [features of the operation before], which is [K] without `source`.

    Raises:
        ValueError: no weights, NaN or infinity, or shapes that do not go together.

    Lin et al., "AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
    Acceleration", 2023. (There the error is that of a whole block for q, k and v.)
    """
    op = "awq_scales"
    check(op, len(weights) > 0, "weights: expected at least one, got none")
    wide = [checked_weight(op, weight, bits, group_size)[0].float() for weight in weights]
    k = wide[0].shape[1]
    for i, weight in enumerate(wide):
        got = weight.shape[1]
        check(op, got == k, f"weights[{i}]: expected the {k} columns of weights[0], got {got}")
    check_hessian(op, hessian, k, wide[0].device)
    shape = tuple(magnitude.shape)
    check(op, shape == (k,), f"magnitude: expected shape {(k,)}, got {shape}")
    usable = magnitude.isfinite() & (magnitude >= 0)
    if not usable.all():
        at = int((~usable).nonzero()[0])
        raise ValueError(
            f"fastinfer::{op}: magnitude: expected finite numbers >= 0, got "
            f"{float(magnitude[at])} at {at}"
        )
    source = torch.arange(k, device=hessian.device) if source is None else source
    shape = tuple(source.shape)
    check(op, shape == (k,), f"source: expected shape {(k,)}, got {shape}")
    features = int(source.max()) + 1
    found = set(source.tolist())
    whole = found == set(range(features))
    check(op, whole, f"source: expected each of 0 .. {features - 1}, got {len(found)} numbers")
    h = hessian.float()
    sums = torch.zeros(features, dtype=torch.float64, device=h.device)
    mean = sums.index_add(0, source, magnitude.double()) / source.bincount()

    best, least = torch.ones(features, device=h.device), float("inf")
    for exponent in range(_EXPONENTS + 1):
        scales = mean.pow(exponent / _EXPONENTS).clamp(min=_LEAST_SCALE)
        scales = (scales / (scales.max() * scales.min()).sqrt()).float()
        of_input = scales[source]
        error = sum(
            output_error(w - _nearest(w * of_input, bits, group_size, symmetric) / of_input, h)
            for w in wide
        )
        if error < least:
            best, least = scales, error
    return best


def awq(
    weight: Tensor,
    hessian: Tensor,
    *,
    bits: int,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
    clip: bool = True,
) -> Quantized:
    """Rounds to nearest, on ranges that are narrower where that errs less: AWQ's second step.

        low, high = r * min(group, 0), r * max(group, 0),   r = 1, 0.95, ... 0.5
        minimise over r, for each group g of each row: d H[g, g] d^T,   d = (w - Q(w))[g]

    Args:
        weight: [N, K], a float dtype, already multiplied by the scales of its inputs.
        hessian: H [K, K], mean of x x^T over inputs divided by these scales.
        bits, group_size, symmetric, scale_dtype: as in `fastinfer.ops.quantize_weight`.
        clip: False leaves the ranges as they are, as the paper does for q and k.

    Returns:
        The packed weight and its error.

    Raises:
        NotImplementedError, ValueError: as `fastinfer.quant.gptq`.
    """
    op = "awq"
    wide, group_size = checked_weight(op, weight, bits, group_size)
    scale_dtype = checked_scale_dtype(op, scale_dtype, weight)
    k = wide.shape[1]
    check_hessian(op, hessian, k, weight.device)
    groups = grouped(wide, group_size)
    low, high = ranges(groups)
    scales, zeros = scales_of_ranges(low, high, bits, symmetric, scale_dtype)
    if clip:
        blocks = _diagonal_blocks(hessian.to(wide.dtype), group_size)
        least = _group_errors(groups, scales, zeros, bits, blocks)
        for step in range(1, _SHRINKS + 1):
            shrink = 1 - (1 - _LEAST_SHRINK) * step / _SHRINKS
            narrow = scales_of_ranges(shrink * low, shrink * high, bits, symmetric, scale_dtype)
            error = _group_errors(groups, *narrow, bits, blocks)
            better = error < least
            least = torch.where(better, error, least)
            scales, zeros = (
                torch.where(better, new, old)
                for new, old in zip(narrow, (scales, zeros), strict=True)
            )
    codes = encode(groups, scales[..., None].to(wide.dtype), zeros[..., None], bits)
    codes = codes.flatten(1)[:, :k]
    packed = pack(codes, scales, zeros, bits, group_size, symmetric=symmetric)
    return measured(packed, wide, hessian)


def fold_into_norm(
    weight: Tensor, bias: Tensor | None, scales: Tensor, *, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Divides what a norm gives by scales, in a weight that is stored in `dtype`.

    The scales that come back differ from those given by the rounding of the stored weight, so that
    folding changes nothing but what rounds in the computation itself. A bias is rounded as well.

    Args:
        weight: [K]; the norm multiplies by weight + offset.
        bias: [K] or None.
        scales: [K], > 0.
        offset: of the norm's weight.
        dtype: which the weight is stored in.

    Returns:
        weight and bias, with values of `dtype`, and the scales that they really divide by.
    """
    whole = weight.double() + offset
    stored = (whole / scales - offset).to(dtype)
    exact = whole / (stored.double() + offset)
    # Where the norm gives 0 (or almost), it says nothing about the scale.
    usable = exact.isfinite() & (exact > scales / 2) & (exact < scales * 2)
    stored = torch.where(usable, stored, weight.to(dtype))
    exact = torch.where(usable, exact, 1.0).to(scales.dtype)
    new_bias = None if bias is None else (bias / exact).to(dtype).to(bias.dtype)
    return stored.to(weight.dtype), new_bias, exact


def _nearest(weight: Tensor, bits: int, group_size: int, symmetric: bool) -> Tensor:
    k = weight.shape[1]
    groups = grouped(weight, checked_group_size("awq_scales", group_size, k))
    scale, zero = scales_of_ranges(*ranges(groups), bits, symmetric, torch.float32)
    scale, zero = scale[..., None], zero[..., None]
    values = scale * (encode(groups, scale, zero, bits) - zero)
    return values.flatten(1)[:, :k]


def _diagonal_blocks(hessian: Tensor, group_size: int) -> Tensor:
    """[G, group_size, group_size]; the last one is filled up with zeros."""
    k = len(hessian)
    blocks = hessian.new_zeros(-(-k // group_size), group_size, group_size)
    for g, begin in enumerate(range(0, k, group_size)):
        block = hessian[begin : begin + group_size, begin : begin + group_size]
        blocks[g, : len(block), : len(block)] = block
    return blocks


def _group_errors(
    groups: Tensor, scales: Tensor, zeros: Tensor, bits: int, blocks: Tensor
) -> Tensor:
    """d H[g, g] d^T of each group [N, G]."""
    scale, zero = scales[..., None].to(groups.dtype), zeros[..., None]
    d = (groups - scale * (encode(groups, scale, zero, bits) - zero)).transpose(0, 1)
    return ((d @ blocks) * d).sum(-1).t()
