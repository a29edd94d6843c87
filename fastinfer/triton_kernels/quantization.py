"""How elements become int8 or float8_e4m3fn codes; what the kernels that quantize share.

Stored bits are part of the contract: results are those of correctly rounded float32 steps, the same
as in the CPU kernels. Where the GPU does not convert to fp8 itself, codes are made of integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from fastinfer.triton_kernels.rows import INTERPRETED

COPY, INT8, FP8, INT8_ASYMMETRIC = (tl.constexpr(i) for i in range(4))
FORMATS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
"""Of what is stored under a scale alone; anything else is copied."""


def storable(x: Tensor) -> Tensor:
    """A tensor as kernels store to it: fp8 as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


@triton.jit
def magnitude_bits(value):
    """|value| as integers of the same order, with NaN above infinity: it stays visible."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def usable_scale(scale):
    """A scale that was computed: blocks of zeros get 1, and there is only one NaN."""
    return tl.where(scale == scale, tl.where(scale == 0.0, 1.0, scale), float("nan"))


@triton.jit
def dynamic_scale(largest, FORMAT: tl.constexpr):
    """The scale for values up to a magnitude."""
    LIMIT: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    return usable_scale(tl.div_rn(largest, tl.zeros_like(largest) + LIMIT))


@triton.jit
def encode_e4m3(x):
    """float8_e4m3fn codes of |x| <= 448, to nearest even, by integers; every NaN is 0x7f."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: 20 bits of mantissa go, with rounding; the exponent's bias falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is where the adder rounds a sum with 2^14.
    sum_bits = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0x3C800000, sum_bits - 0x46800000, normal)
    return tl.where(magnitude > 0x7F800000, 0x7F, code | ((bits >> 24) & 0x80))


@triton.jit
def _fma(x, y, z):
    """x * y + z, rounded once."""
    if INTERPRETED:  # the interpreter's own rounds the product as well
        return (x.to(tl.float64) * y.to(tl.float64) + z.to(tl.float64)).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def _quotient(x, scale, inverse):
    """x / scale as IEEE division rounds it, where `_multiplies` holds; a zero keeps its sign.

    The steps, and why they suffice, are those of RowDivision (csrc/cuda/kv_cache/page_rows.cuh).
    """
    # Below 1 / scale by up to 3/2 of the last place, so that `rest` is positive: x = -0 gives -0.
    low = (inverse.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    rest = _fma(-scale, low, tl.full(low.shape, 1.0, tl.float32)) * low
    q = _fma(x, low, x * rest)
    excess = _fma(q, scale, x * -1.0)  # `-x` would be 0 - x, which has another sign at 0
    return _fma(excess, -inverse, q)


@triton.jit
def _multiplies(scale, inverse, largest):
    """Whether `_quotient` may stand for the division in rows of this scale and largest magnitude.

    Nothing overflows, quotients so small that something is lost have the code 0, and the scale's
    mantissa is not one of the last 256, for which there is no proof.
    """
    common = (scale >= 2.0**-80) & (scale <= 2.0**80)
    common &= (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) < 0x7FFF00
    return common & (largest * inverse <= 2.0**30)


@triton.jit
def _round(value):
    """The nearest integers, halves to even, of |value| < 2^22."""
    # 1.5 * 2^23: adding it rounds to an integer, held in the low bits.
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _encode(value, FORMAT: tl.constexpr):
    """Codes of finite values up to the limit, or no more than a rounding beyond it."""
    if FORMAT == INT8:
        code = _round(value).to(tl.int8)
    elif not INTERPRETED and cuda_capability_geq(8, 9):
        # Four at a time: where code takes pairs of `value.to(tl.float8e4nv)` apart and joins them
        # otherwise, ptxas 12.8, which Triton brings, reads some of them from the stack pointer.
        code = tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }
            """,
            "=r,r,r,r,r",
            [value],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        code = encode_e4m3(value).to(tl.uint8)
    return code


@triton.jit
def quantized(value, scale, largest, FORMAT: tl.constexpr, STATIC: tl.constexpr):
    """Codes of value / scale, saturated, in a symmetric format.

    `scale`, and `largest`, the largest magnitude under each scale or more, broadcast to `value`.
    """
    LIMIT: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    # Multiplications take a third of a division's instructions; nearly all tiles allow them.
    if tl.min(_multiplies(scale, inverse, largest).to(tl.int32)) != 0:
        value = _quotient(value, scale, inverse)
        if STATIC:
            value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
        code = _encode(value, FORMAT)
    else:
        value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        nan = value != value
        value = tl.where(value > LIMIT, LIMIT, value)
        value = tl.where(value < -LIMIT, -LIMIT, value)
        if FORMAT == INT8:
            code = tl.where(nan, 0, _encode(value, FORMAT)).to(tl.int8)
        else:
            code = encode_e4m3(value).to(tl.uint8)
    return code


@triton.jit
def zero_point_of(low, scale):
    """The int8 code of 0 in a block whose lowest value is -low, or 0."""
    q = tl.div_rn(low, scale)
    return tl.minimum(tl.where(q == q, _round(q), 0) - 128, 127)


@triton.jit
def quantized_asymmetric(value, scale, largest, zero_point):
    """int8 codes of value / scale around zero points; arguments as in `quantized`."""
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    if tl.min(_multiplies(scale, inverse, largest).to(tl.int32)) != 0:
        code = _round(_quotient(value, scale, inverse))
    else:
        value = tl.div_rn(value, tl.broadcast_to(scale, value.shape))
        code = tl.where(value == value, _round(value), 0)
    return tl.minimum(tl.maximum(code + zero_point, -128), 127).to(tl.int8)
