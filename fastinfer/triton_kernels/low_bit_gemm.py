"""Matrix products with weights of 2, 3, 4 and 8 bits in the packed layout of fastinfer/ops/gemm.py.

A program makes a tile of the transposed result: the weight is the first operand of the product,
since its packed tiles are that operand's registers. Codes minus the middle of their range are exact
in every element type, so tensor cores multiply integers; sums are in fp32, and each group's gets
its scale there. What a zero differs from the middle enters by way of the sum of x over the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.activation import NONE
from fastinfer.triton_kernels.epilogue import (
    epilogue_constants,
    gated_epilogue,
    row_stride,
    store_result,
)
from fastinfer.triton_kernels.launch import Device, device_of, launch
from fastinfer.triton_kernels.quantization import storable
from fastinfer.triton_kernels.rows import INTERPRETED, to_float

TILE = 64
"""Features and inputs of a packed tile."""
STEP = 16
"""Inputs of a packed tile's unit along K."""

_TILE: tl.constexpr = tl.constexpr(TILE)
_STEP: tl.constexpr = tl.constexpr(STEP)


@dataclass(frozen=True)
class GemmConfig:
    """The tile of a program; printable, and all that tuning may change."""

    block_m: int  # rows of x
    tiles: int  # packed tiles along N
    num_warps: int
    num_stages: int

    def shared_memory(self, bits: int, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline and the decoded weight take at most."""
        x = self.block_m * TILE * itemsize
        words = self.tiles * bits * 512
        # On its way to another layout; 16-bit weights are where tensor cores take them.
        weight = self.tiles * TILE * TILE * itemsize if itemsize == 4 else 0
        result = self.tiles * TILE * self.block_m * 4  # likewise, after the loop
        return max((x + words) * self.num_stages + weight, result)


C = GemmConfig
# From the largest tile to the smallest; the last one serves any problem. Few rows wait for memory
# alone: many stages.
_HALF = (C(128, 2, 8, 4), C(64, 2, 8, 3), C(64, 1, 4, 4), C(32, 1, 4, 6), C(16, 1, 4, 8))
# fp32 has no tensor cores that keep its precision: small tiles, so that registers suffice.
_FULL_PRECISION = (C(32, 1, 4, 2), C(16, 1, 4, 2))
# A packed tile of gates and one of what they multiply.
_GATED_HALF = (C(128, 2, 8, 4), C(64, 2, 8, 3), C(32, 2, 4, 4), C(16, 2, 4, 6))
_GATED_FULL_PRECISION = (C(32, 2, 8, 2), C(16, 2, 8, 2))


def gemm_config(
    device: Device, *, m: int, n: int, bits: int, itemsize: int, gated: bool = False
) -> GemmConfig:
    """The largest tile that fits the device, is filled by the rows and leaves no processor idle."""
    table: tuple[GemmConfig, ...]
    if gated:
        table = _GATED_FULL_PRECISION if itemsize == 4 else _GATED_HALF
    else:
        table = _FULL_PRECISION if itemsize == 4 else _HALF
    for config in table[:-1]:
        programs = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.tiles * TILE)
        if (
            config.shared_memory(bits, itemsize) <= device.shared_memory
            and m > config.block_m // 2
            and (programs >= device.num_sms or m <= config.block_m)
        ):
            return config
    return table[-1]


def block_k(group_size: int) -> int:
    """Inputs of one product: 64, or as many as lie in one group wherever they begin."""
    return min(TILE, group_size & -group_size)


@triton.jit
def _codes(
    packed, tile_stride, tiles, apart, step,
    BITS: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The codes of some steps of a packed tile: [features, inputs].

    A word has the codes of one or more steps, or, for 8 bits, half of one's. It is halved again and
    again, which keeps a lane's codes in the thread that loaded its words, and the axes are put in
    order: no thread needs another's.
    """
    STEPS_OF_WORD: tl.constexpr = 2 if BITS == 2 else 1
    WORDS_OF_STEP: tl.constexpr = 2 if BITS == 8 else 1
    PAIRS: tl.constexpr = 2 // WORDS_OF_STEP  # values of r // 2 in a word
    LOADED: tl.constexpr = STEPS // STEPS_OF_WORD if STEPS > STEPS_OF_WORD else 1
    TAKEN: tl.constexpr = STEPS // LOADED  # steps out of a loaded word

    if BITS == 3:
        codes = _words_of_3_bits(packed, tile_stride, tiles, apart, step, TILES, STEPS, GATED)
    else:
        index = tl.arange(0, TILES * 4 * 32 * LOADED * WORDS_OF_STEP)
        part = index % WORDS_OF_STEP
        loaded = index // WORDS_OF_STEP % LOADED
        lane = index // (WORDS_OF_STEP * LOADED) % 32
        row16 = index // (WORDS_OF_STEP * LOADED * 32) % 4
        tile = index // (WORDS_OF_STEP * LOADED * 32 * 4)
        word = row16 * (4 // STEPS_OF_WORD) + step // STEPS_OF_WORD + loaded
        word = word * WORDS_OF_STEP + part
        tile, inside = _tile(tile, tiles, apart, TILES, GATED)
        codes = _word(packed, tile_stride, tile, inside, lane, word)
        codes = codes >> (BITS * 4 * (step % STEPS_OF_WORD))
    HALVES: tl.constexpr = (TAKEN * PAIRS).bit_length()
    for half in tl.static_range(HALVES):
        codes = tl.join(codes, codes >> (BITS << (HALVES - 1 - half)))
    codes = tl.join(codes, codes >> 16) & ((1 << BITS) - 1)
    codes = codes.reshape(TILES, 4, 8, 4, LOADED, WORDS_OF_STEP, TAKEN, PAIRS, 2, 2)
    codes = codes.permute(0, 1, 8, 2, 4, 6, 5, 7, 3, 9)
    return codes.reshape(TILES * _TILE, STEPS * _STEP)


@triton.jit
def _tile(tile, tiles, apart, TILES: tl.constexpr, GATED: tl.constexpr):
    """Where a program's tile is, and whether it is. Of a gated weight, what gates multiply lies
    `apart` tiles behind them.
    """
    inside = tile < tiles
    if GATED:
        inside = tile % (TILES // 2) < tiles
        tile = tile % (TILES // 2) + tile // (TILES // 2) * apart
    return tile, inside


@triton.jit
def _word(packed, tile_stride, tile, inside, lane, word):
    """A numbered word of a lane of a tile."""
    offset = tile * tile_stride + word // 4 * 128 + lane * 4 + word % 4
    return tl.load(packed + offset, mask=inside, other=0)


@triton.jit
def _words_of_3_bits(
    packed, tile_stride, tiles, apart, step,
    TILES: tl.constexpr, STEPS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Steps 0 to 2 have a word each; the last step's codes are gathered from what these leave, the
    upper four bits of their halves.
    """
    index = tl.arange(0, TILES * 4 * 32)
    tile, inside = _tile(index // (4 * 32), tiles, apart, TILES, GATED)
    row16, lane = index // 32 % 4, index % 32
    a = _word(packed, tile_stride, tile, inside, lane, 3 * row16)
    b = _word(packed, tile_stride, tile, inside, lane, 3 * row16 + 1)
    c = _word(packed, tile_stride, tile, inside, lane, 3 * row16 + 2)
    d = ((a >> 12) & 0x00070007) | ((b >> 9) & 0x00380038) | ((c >> 6) & 0x01C001C0)
    d = d | ((a >> 6) & 0x02000200) | ((b >> 5) & 0x04000400) | ((c >> 4) & 0x08000800)
    if STEPS == 4:
        words = tl.join(tl.join(a, c), tl.join(b, d))
    elif STEPS == 2:
        words = tl.join(tl.where(step == 0, a, c), tl.where(step == 0, b, d))
    else:
        words = tl.where(step == 0, a, tl.where(step == 1, b, tl.where(step == 2, c, d)))
    return words


@triton.jit
def _add_outliers(
    acc,  # [features, rows]
    x_ptr, row, inside_m, x_stride, k,
    feature, inside_n, perm_ptr, offsets_ptr, columns_ptr, values_ptr, num_outliers,
    HAS_PERM: tl.constexpr,
):  # fmt: skip
    """acc + outliers x^T: the features' entries one after the other, all features at a time.

    In fp32 they are summed in parts of some entries: then what rounding loses grows with the length
    of a part and their number, not with all entries. Results in 16 bits lose more when stored.

    Nothing outside x and the entries is read whatever these are; a column outside makes NaN.
    """
    IN_PARTS: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    LENGTH: tl.constexpr = 16
    begin = tl.load(offsets_ptr + feature, mask=inside_n, other=0)
    end = tl.load(offsets_ptr + feature + 1, mask=inside_n, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), num_outliers)
    end = tl.minimum(tl.maximum(end, 0), num_outliers)
    x_rows = x_ptr + row.to(tl.int64)[None, :] * x_stride
    part = tl.zeros_like(acc)
    # Not in stages: an entry says where the next load is.
    for i in tl.range(0, tl.max(end - begin, axis=0), num_stages=1):
        there = i < end - begin
        column = tl.load(columns_ptr + begin + i, mask=there, other=0)
        value = to_float(tl.load(values_ptr + begin + i, mask=there, other=0.0))
        known = (column >= 0) & (column < k)
        if HAS_PERM:
            column = tl.load(perm_ptr + column, mask=there & known, other=0)
            known &= (column >= 0) & (column < k)
        mask = (there & known)[:, None] & inside_m[None, :]
        x = to_float(tl.load(x_rows + column[:, None], mask=mask, other=0.0))
        product = tl.where(known, value, float("nan"))[:, None] * x
        if IN_PARTS:
            part += product
            complete = i % LENGTH == LENGTH - 1
            acc += tl.where(complete, part, 0.0)
            part = tl.where(complete, 0.0, part)
        else:
            acc += product
    if IN_PARTS:
        acc += part
    return acc


@triton.jit(do_not_specialize=["m", "num_outliers"])
def low_bit_gemm_kernel(
    x_ptr,  # [M, K]
    qweight_ptr,  # [ceil(N / 64), ceil(K / 64), BITS * 128]
    scales_ptr,  # [groups, N]
    zeros_ptr,  # [groups, N] or None
    perm_ptr,  # [K] or None
    bias_ptr,  # [N] or None
    outlier_offsets_ptr,  # [N + 1] or None
    outlier_columns_ptr,  # [num_outliers] or None
    outlier_values_ptr,  # likewise
    residual_ptr,  # like out, or None
    out_scale_ptr,  # [1, 1] or None
    out_ptr,  # [M, N], or [M, N / 2] if gated; bytes if fp8
    m,
    n,
    k,
    group_size,
    num_outliers,
    x_stride,
    residual_stride,
    out_stride,
    BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_PERM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTLIERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """x W^T + bias, and what follows, for BLOCK_M rows and TILES * 64 features; neighbours share
    the weight. If gated, N / 2 is a multiple of 64, and half of the features are gates.
    """
    BLOCK_N: tl.constexpr = TILES * _TILE
    BLOCK_K: tl.constexpr = STEPS * _STEP
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # fp32 has the digits for q - zero itself.
    SUBTRACT: tl.constexpr = HAS_ZEROS and dtype == tl.float32

    blocks_m = tl.cdiv(m, BLOCK_M)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the result
    first_tile = tl.program_id(0) // blocks_m * (COLUMNS // _TILE)
    row = (tl.program_id(0) % blocks_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = first_tile * _TILE + tl.arange(0, BLOCK_N)
    apart = 0
    width = n
    if GATED:
        apart = (n // (2 * _TILE)).to(tl.int64)
        width = n // 2
        feature = first_tile * _TILE + tl.arange(0, BLOCK_N) % COLUMNS
    inside_m, inside_n = row < m, feature < width
    if GATED:
        feature += tl.arange(0, BLOCK_N) // COLUMNS * width
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    tile_stride = tl.cdiv(k, _TILE) * (BITS * 128)
    packed = qweight_ptr + first_tile.to(tl.int64) * tile_stride
    tiles = tl.cdiv(width, _TILE) - first_tile

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(0, k, BLOCK_K):
        col = begin + tl.arange(0, BLOCK_K)
        inside_k = col < k
        mask = inside_m[:, None] & inside_k[None, :]
        if HAS_PERM:
            # What lies outside x makes NaN and is not read.
            col = tl.load(perm_ptr + col, mask=inside_k, other=0)
            known = (col >= 0) & (col < k)
            other = tl.where(known, 0.0, float("nan"))
            x = tl.load(x_rows + col[None, :], mask=mask & known[None, :], other=other[None, :])
        else:
            x = tl.load(x_rows + col[None, :], mask=mask, other=0.0)
        tile_words = packed + begin // _TILE * (BITS * 128)
        step = 0 if STEPS == 4 else begin // _STEP % 4
        codes = _codes(tile_words, tile_stride, tiles, apart, step, BITS, TILES, STEPS, GATED)
        # 2^23 with a code in its last bits is their sum: faster than a conversion.
        weight = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        group = (begin // group_size).to(tl.int64) * n + feature
        scale = to_float(tl.load(scales_ptr + group, mask=inside_n, other=0.0))
        if HAS_ZEROS:
            zero = to_float(tl.load(zeros_ptr + group, mask=inside_n, other=0.0))
        if SUBTRACT:
            weight -= zero[:, None]
        else:
            weight -= MIDDLE
        if INTERPRETED:  # which has no bf16 products
            part = tl.dot(weight, tl.trans(to_float(x)))
        else:
            part = tl.dot(weight.to(dtype), tl.trans(x), input_precision="ieee")
        if HAS_ZEROS and not SUBTRACT:
            part -= (zero - MIDDLE)[:, None] * tl.sum(to_float(x), axis=1)[None, :]
        acc += scale[:, None] * part

    if HAS_OUTLIERS:
        acc = _add_outliers(
            acc, x_ptr, row, inside_m, x_stride, k, feature, inside_n, perm_ptr,
            outlier_offsets_ptr, outlier_columns_ptr, outlier_values_ptr, num_outliers, HAS_PERM,
        )  # fmt: skip
    if HAS_BIAS:
        acc += to_float(tl.load(bias_ptr + feature, mask=inside_n, other=0.0))[:, None]
    column = first_tile * _TILE + tl.arange(0, COLUMNS)
    store_result(
        acc, row, column, inside_m[:, None] & (column < width)[None, :], residual_ptr,
        out_scale_ptr, out_ptr, residual_stride, out_stride, ACTIVATION, GATED, HAS_RESIDUAL,
        FORMAT,
    )  # fmt: skip


def low_bit_gemm(
    bits: int,
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    perm: Tensor | None,
    bias: Tensor | None,
    outlier_offsets: Tensor | None,
    outlier_columns: Tensor | None,
    outlier_values: Tensor | None,
    activation: int,
    gated: bool,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out: Tensor,
) -> None:
    """x W^T + bias, and what follows, to out; group_size is a multiple of 16."""
    (m, k), n = x.shape, scales.shape[1]
    if gated and n // 2 % TILE != 0:
        # Packed tiles hold gates and what other gates multiply.
        y = torch.empty((m, n), dtype=torch.float32, device=x.device)
        low_bit_gemm(
            bits, x, qweight, scales, zeros, group_size, perm, bias, outlier_offsets,
            outlier_columns, outlier_values, NONE.value, False, None, None, y,
        )  # fmt: skip
        gated_epilogue(y, activation, residual, out_scale, out)
        return
    device = device_of(x.get_device())
    config = gemm_config(device, m=m, n=n, bits=bits, itemsize=x.element_size(), gated=gated)
    launch(
        low_bit_gemm_kernel,
        (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.tiles * TILE),),
        x,
        x,
        qweight,
        scales,
        zeros,
        perm,
        bias,
        outlier_offsets,
        outlier_columns,
        outlier_values,
        residual,
        out_scale,
        storable(out),
        m,
        n,
        k,
        group_size,
        0 if outlier_columns is None else outlier_columns.numel(),
        x.stride(0),
        row_stride(residual),
        out.stride(0),
        BITS=bits,
        BLOCK_M=config.block_m,
        TILES=config.tiles,
        STEPS=block_k(group_size) // STEP,
        HAS_ZEROS=zeros is not None,
        HAS_PERM=perm is not None,
        HAS_BIAS=bias is not None,
        HAS_OUTLIERS=outlier_offsets is not None,
        **epilogue_constants(activation, gated, residual, out),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
