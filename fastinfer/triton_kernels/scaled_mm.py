"""Scaled products of 8-bit matrices: float8_e4m3fn with fp32 sums, int8 with exact ones.

A program makes a tile of the transposed result: the weight is the first operand of the product, so
that few rows of a leave nothing idle. Sums over 128 inputs, which tensor cores of Hopper keep with
fewer digits than fp32, join those of the other blocks in fp32. GPUs without fp8 multiply e4m3 as
fp16, which holds it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fastinfer.triton_kernels.epilogue import epilogue_constants, row_stride, store_result
from fastinfer.triton_kernels.launch import Device, device_of, launch
from fastinfer.triton_kernels.quantization import storable
from fastinfer.triton_kernels.rows import INTERPRETED, to_float

BLOCK = 128
"""Inputs, and features of b, that share a block's scale."""
MAX_INT32_K = (1 << 17) - 1
"""Products of int8 are at most 2^14, so that as many have a sum within int32."""
ONES = 16  # columns of ones: the narrowest product

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_ONES: tl.constexpr = tl.constexpr(ONES)


@dataclass(frozen=True)
class ScaledMmConfig:
    """The tile of a program; printable, and all that tuning may change."""

    block_m: int  # rows of a
    block_n: int  # features of b
    num_warps: int
    num_stages: int
    block_k: int = BLOCK  # inputs of one product; they lie in one block

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that the pipeline and the ones take at most."""
        operands = (self.block_m + self.block_n) * self.block_k * self.num_stages
        result = self.block_n * self.block_m * 4  # on its way to another layout, after the loop
        return max(operands + self.block_k * ONES, result)


C = ScaledMmConfig
# From the largest tile to the smallest; the last one serves any problem. Few rows wait for memory
# alone: many stages.
_TABLE = (
    C(128, 128, 8, 4), C(128, 128, 8, 3), C(64, 128, 4, 3), C(64, 64, 4, 3), C(32, 64, 4, 6),
    C(32, 64, 4, 4), C(16, 64, 4, 8), C(16, 64, 4, 6),
)  # fmt: skip
# e4m3 that becomes fp16 in registers takes many of them.
_DECODED = (C(64, 64, 4, 3), C(32, 64, 4, 4), C(16, 64, 4, 6))
# Rows that are read byte by byte take an address for each.
_BYTEWISE = (C(64, 64, 8, 2, 32), C(16, 64, 4, 2, 32))


def scaled_mm_config(
    device: Device, *, m: int, n: int, k: int, fp8: bool, aligned: bool = True
) -> ScaledMmConfig:
    """The largest tile that fits the device, is filled by the rows and leaves no processor idle.

    `aligned`: rows of a and b begin and end at multiples of 16 bytes.
    """
    table: tuple[ScaledMmConfig, ...] = _TABLE
    if not aligned:
        table = _BYTEWISE
    elif fp8 and not device.fp8:
        table = _DECODED
    for config in table[:-1]:
        programs = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        if (
            config.shared_memory <= device.shared_memory
            and m > config.block_m // 2
            and (programs >= device.num_sms or m <= config.block_m)
            # Sums of 64 bits take twice the registers.
            and (fp8 or k <= MAX_INT32_K or config.block_m * config.block_n <= 64 * 32)
        ):
            return config
    return table[-1]


@triton.jit
def _half(code):
    """e4m3 codes as fp16, exactly: their exponent and mantissa in the place of fp16's give the
    value times 2^-8, subnormals included.
    """
    bits = code.to(tl.int16)
    magnitude = bits & 0x7F
    value = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def _product(weight, a, FP8: tl.constexpr):
    """The sums over one block: fp32 or int32 [features, rows]."""
    if not FP8:
        part = tl.dot(weight, tl.trans(a), out_dtype=tl.int32)
    elif INTERPRETED:
        part = tl.dot(to_float(_half(weight)), tl.trans(to_float(_half(a))))
    elif cuda_capability_geq(8, 9):
        part = tl.dot(weight, tl.trans(a))
    else:
        part = tl.dot(_half(weight), tl.trans(_half(a)))
    return part


@triton.jit
def _feature_scales(pointer, inside, SHARED: tl.constexpr):
    """Of the features [features, 1], or the one they share."""
    if not SHARED:
        scale = tl.load(pointer, mask=inside, other=0.0)
        scale = scale[:, None]
    else:
        scale = tl.load(pointer)
    return scale


@triton.jit(do_not_specialize=["m"])
def scaled_mm_kernel(
    a_ptr,  # [M, K]; bytes if fp8
    b_ptr,  # [N, K]; likewise
    a_scale_ptr,  # [1 or M, 1 or ceil(K / 128)], strides 0 where there is one
    b_scale_ptr,  # [1 or N or ceil(N / 128), 1 or ceil(K / 128)]
    a_zero_ptr,  # [M] or None
    bias_ptr,  # [N] or None
    residual_ptr,  # like out, or None
    out_scale_ptr,  # [1, 1] or None
    out_ptr,  # [M, N], or [M, N / 2] if gated; bytes if fp8
    m,
    n,
    k,
    a_stride,
    b_stride,
    a_scale_stride,
    a_scale_block_stride,
    b_scale_stride,
    b_scale_block_stride,
    a_zero_stride,
    residual_stride,
    out_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_SCALES: tl.constexpr,  # some scale varies along K
    B_SCALE_ROWS: tl.constexpr,  # features that share a scale: 1 or 128
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LONG: tl.constexpr,  # sums exceed int32
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """(a - a_zero) b^T, scaled, + bias, and what follows; neighbours share the weight. If gated,
    half of a program's features are gates, and the others what these multiply.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the result
    SHARED: tl.constexpr = B_SCALE_ROWS != 1 and not GATED
    SUM: tl.constexpr = tl.float32 if FP8 else (tl.int64 if LONG else tl.int32)

    blocks_m = tl.cdiv(m, BLOCK_M)
    row = (tl.program_id(0) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // blocks_m * COLUMNS
    feature = first + tl.arange(0, BLOCK_N)
    width = n
    if GATED:
        width = n // 2
        feature = first + tl.arange(0, BLOCK_N) % COLUMNS
    inside_m, inside_n = row < m, feature < width
    if GATED:
        feature += tl.arange(0, BLOCK_N) // COLUMNS * width
    if FP8 and not INTERPRETED and cuda_capability_geq(8, 9):
        a_ptr = a_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        b_ptr = b_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    row_long, feature_long = row.to(tl.int64), feature.to(tl.int64)
    a_rows = a_ptr + row_long[:, None] * a_stride
    b_rows = b_ptr + feature_long[:, None] * b_stride
    a_scales = a_scale_ptr + row_long * a_scale_stride
    if SHARED:  # by all features of the tile
        b_scales = b_scale_ptr + first.to(tl.int64) // B_SCALE_ROWS * b_scale_stride
    else:
        b_scales = b_scale_ptr + feature_long // B_SCALE_ROWS * b_scale_stride

    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    if HAS_ZERO:  # the sums of b, in each column
        ones = tl.full([BLOCK_K, _ONES], 1, tl.int8)
        columns = tl.zeros([BLOCK_N, _ONES], SUM)
    for begin in range(0, k, BLOCK_K):
        col = begin + tl.arange(0, BLOCK_K)
        inside_k = col < k
        a = tl.load(a_rows + col[None, :], mask=inside_m[:, None] & inside_k[None, :], other=0.0)
        b = tl.load(b_rows + col[None, :], mask=inside_n[:, None] & inside_k[None, :], other=0.0)
        part = _product(b, a, FP8)
        if BLOCK_SCALES:
            a_scale = tl.load(a_scales, mask=inside_m, other=0.0)
            b_scale = _feature_scales(b_scales, inside_n, SHARED)
            blocks = 1  # that end here
            if BLOCK_K < _BLOCK:
                blocks = (begin + BLOCK_K) // _BLOCK - begin // _BLOCK
            a_scales += blocks * a_scale_block_stride
            b_scales += blocks * b_scale_block_stride
            part = part * a_scale[None, :] * b_scale
        acc += part.to(SUM)
        if HAS_ZERO:
            columns += tl.dot(b, ones, out_dtype=tl.int32).to(SUM)

    if HAS_ZERO:
        zero = tl.load(a_zero_ptr + row_long * a_zero_stride, mask=inside_m, other=0)
        less = tl.max(columns, axis=1).to(tl.int64)[:, None] * zero.to(tl.int64)[None, :]
        result = (acc.to(tl.int64) - less).to(tl.float32)
    else:
        result = acc.to(tl.float32)
    if not BLOCK_SCALES:
        a_scale = tl.load(a_scales, mask=inside_m, other=0.0)
        b_scale = _feature_scales(b_scales, inside_n, SHARED)
        result = result * a_scale[None, :] * b_scale
    if HAS_BIAS:
        result += to_float(tl.load(bias_ptr + feature, mask=inside_n, other=0.0))[:, None]
    column = first + tl.arange(0, COLUMNS)
    store_result(
        result, row, column, inside_m[:, None] & (column < width)[None, :], residual_ptr,
        out_scale_ptr, out_ptr, residual_stride, out_stride, ACTIVATION, GATED, HAS_RESIDUAL,
        FORMAT,
    )  # fmt: skip


def _scale_strides(scale: Tensor, rows: int) -> tuple[int, int, int]:
    """Strides of rows and of blocks along K, 0 where one scale serves all, and the rows that share
    a scale.
    """
    count, blocks = scale.shape
    along_k = scale.stride(1) if blocks > 1 else 0
    if count == rows:
        return scale.stride(0), along_k, 1
    if count == 1 and blocks == 1:
        return 0, 0, 1
    return scale.stride(0), along_k, BLOCK


def _aligned(x: Tensor) -> bool:
    """Whether rows begin and end at multiples of 16 bytes."""
    return (x.data_ptr() | x.stride(0) | x.shape[1]) % 16 == 0


def scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero: Tensor | None,
    bias: Tensor | None,
    activation: int,
    gated: bool,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out: Tensor,
) -> None:
    """(a - a_zero) b^T, scaled, + bias, and what follows, to out."""
    (m, k), n = a.shape, b.shape[0]
    fp8 = a.dtype != torch.int8
    config = scaled_mm_config(
        device_of(a.get_device()), m=m, n=n, k=k, fp8=fp8, aligned=_aligned(a) and _aligned(b)
    )
    a_row, a_block, _ = _scale_strides(a_scale, m)
    b_row, b_block, b_rows = _scale_strides(b_scale, n)
    launch(
        scaled_mm_kernel,
        (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),),
        a,
        a.view(torch.uint8) if fp8 else a,
        b.view(torch.uint8) if fp8 else b,
        a_scale,
        b_scale,
        a_zero,
        bias,
        residual,
        out_scale,
        storable(out),
        m,
        n,
        k,
        a.stride(0),
        b.stride(0),
        a_row,
        a_block,
        b_row,
        b_block,
        row_stride(a_zero),
        row_stride(residual),
        out.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        FP8=fp8,
        BLOCK_SCALES=a_block != 0 or b_block != 0,
        B_SCALE_ROWS=b_rows,
        HAS_ZERO=a_zero is not None,
        HAS_BIAS=bias is not None,
        LONG=k > MAX_INT32_K,
        **epilogue_constants(activation, gated, residual, out),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
