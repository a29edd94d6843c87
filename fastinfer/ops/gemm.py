"""Matrix products with quantized weights: activations in floats, weights in 2, 3, 4 or 8 bits.

A weight W [N, K] (N output features, K input features) is stored as unsigned codes q of so many
bits, with a scale and a zero point for each output feature and each group of `group_size` input
features:

    W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),   g = k // group_size

Codes are multiplied exactly and summed in fp32, a group's sum is scaled in fp32, and the result is
rounded once: weights are never rounded to 16 bits. Errors are ValueError and name the op, the
argument, what was expected and what came.

`qweight` holds the codes in the layout of fastinfer/ops/packed_weights.py, which also makes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad

_BITS = (2, 3, 4, 8)
_OUT = {bits: getattr(torch.ops.fastinfer, f"int{bits}_gemm").out for bits in _BITS}
_TILE = 64
_GROUP_UNIT = 16


def int4_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with a weight of 4-bit codes.

        y = x W^T + bias,   W[n, k] = scales[g, n] * (q[n, k] - zeros[g, n]),   g = k // group_size

    With `perm`, column k of W multiplies x[:, perm[k]] (act-order).

    Args:
        x: [M, K], fp32, bf16 or fp16, K >= 1; any stride between rows, each dense.
        qweight: int32 [ceil(N / 64), ceil(K / 64), 512], the packed codes q,
            contiguous; on Hopper fastest at an address that is a multiple of 16.
        scales: [ceil(K / group_size), N], fp32, bf16 or fp16 whatever x is, contiguous.
        zeros: like scales; any float values. None: 8 everywhere (symmetric codes).
        group_size: input features that share a scale: a positive multiple of 16, or at least K.
            The last group may be partial.
        perm: int32 [K], values in [0, K), or None.
        bias: [N], x's dtype or fp32, or None.
        out: [M, N] in x's dtype, dense in its rows; receives the result.

    Returns:
        [M, N] in x's dtype (`out` if given).

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also an entry of perm outside
            [0, K), which on a GPU makes NaN.

    On CPU a row's bits do not depend on the other rows; on a GPU sums may be ordered otherwise for
    another number of rows.

    Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", 2022; Lin et al., "AWQ: Activation-aware Weight Quantization", 2023.
    """
    return _gemm(4, x, qweight, scales, zeros, group_size, perm, bias, out)


def int2_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with a weight of 2-bit codes.

    As `int4_gemm`, but for:

    Args:
        qweight: int32 [ceil(N / 64), ceil(K / 64), 256].
        zeros: None: 2 everywhere.
        x, scales, group_size, perm, bias, out: as there.

    Returns:
        [M, N] in x's dtype (`out` if given).
    """
    return _gemm(2, x, qweight, scales, zeros, group_size, perm, bias, out)


def int3_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with a weight of 3-bit codes.

    As `int4_gemm`, but for:

    Args:
        qweight: int32 [ceil(N / 64), ceil(K / 64), 384].
        zeros: None: 4 everywhere.
        x, scales, group_size, perm, bias, out: as there.

    Returns:
        [M, N] in x's dtype (`out` if given).
    """
    return _gemm(3, x, qweight, scales, zeros, group_size, perm, bias, out)


def int8_gemm(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    group_size: int = 128,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Linear layer with a weight of 8-bit codes.

    As `int4_gemm`, but for:

    Args:
        qweight: int32 [ceil(N / 64), ceil(K / 64), 1024].
        zeros: None: 128 everywhere.
        x, scales, group_size, perm, bias, out: as there.

    Returns:
        [M, N] in x's dtype (`out` if given).
    """
    return _gemm(8, x, qweight, scales, zeros, group_size, perm, bias, out)


def _gemm(
    bits: int,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    perm: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    refuse_grad(f"int{bits}_gemm", x=x, scales=scales, zeros=zeros, bias=bias, out=out)
    if out is None:
        out = torch.empty(_result_shape(bits, x, scales), dtype=x.dtype, device=x.device)
    _OUT[bits](x, qweight, scales, zeros, group_size=group_size, perm=perm, bias=bias, out=out)
    return out


def _result_shape(bits: int, x: Tensor, scales: Tensor) -> tuple[int | torch.SymInt, ...]:
    """[M, N]; refuses what has none."""
    for name, tensor, layout in (("x", x, "[M, K]"), ("scales", scales, "[groups, N]")):
        if tensor.dim() != 2:
            raise ValueError(
                f"fastinfer::int{bits}_gemm: {name}: expected 2 dimensions {layout}, "
                f"got {tuple(tensor.shape)}"
            )
    return x.shape[0], scales.shape[1]


def _check_gemm(
    bits: int,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    perm: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None,
) -> tuple[int | torch.SymInt, ...]:
    """The result's shape."""
    op = f"int{bits}_gemm"
    check_devices(
        op, x=x, qweight=qweight, scales=scales, zeros=zeros, perm=perm, bias=bias, out=out
    )
    for name, tensor in (("x", x), ("scales", scales)):
        check(op, tensor.is_floating_point(), f"{name}: expected floats, got {tensor.dtype}")
    shape = _result_shape(bits, x, scales)
    n, k = shape[1], x.shape[1]
    check(op, k >= 1, "x: expected at least 1 column")
    check(op, n >= 1, "scales: expected at least 1 column")
    grouped = group_size >= 1 and (group_size % _GROUP_UNIT == 0 or group_size >= k)
    check(op, grouped, f"group_size: expected a multiple of {_GROUP_UNIT}, got {group_size}")
    tiles = ((n + _TILE - 1) // _TILE, (k + _TILE - 1) // _TILE, bits * 128)
    groups = (k + group_size - 1) // group_size
    check_out(op, "scales", scales, (groups, n), scales.dtype)
    check_out(op, "qweight", qweight, tiles, torch.int32)
    if zeros is not None:
        check_out(op, "zeros", zeros, (groups, n), scales.dtype)
    if perm is not None:
        check_out(op, "perm", perm, (k,), torch.int32)
    if bias is not None:
        check_out(op, "bias", bias, (n,), torch.float32 if bias.dtype != x.dtype else x.dtype)
    if out is not None:
        check_out(op, "out", out, shape, x.dtype)
    return shape


def _register_fakes(bits: int) -> None:
    @torch.library.register_fake(f"fastinfer::int{bits}_gemm")
    def functional(
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        group_size: int = 128,
        perm: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        args = (x, qweight, scales, zeros, group_size, perm, bias)
        return x.new_empty(_check_gemm(bits, *args, out=None))

    @torch.library.register_fake(f"fastinfer::int{bits}_gemm.out")
    def into(
        x: Tensor,
        qweight: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        group_size: int = 128,
        perm: Tensor | None = None,
        bias: Tensor | None = None,
        out: Tensor,
    ) -> None:
        _check_gemm(bits, x, qweight, scales, zeros, group_size, perm, bias, out)


for _bits in _BITS:
    _register_fakes(_bits)
