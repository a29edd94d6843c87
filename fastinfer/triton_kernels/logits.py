"""Rows of logits: how they are read and compared, and what the first pass over a row leaves."""

from __future__ import annotations

import triton
import triton.language as tl

from fastinfer.triton_kernels.rows import to_float


@triton.jit
def load_logits(row_ptr, begin, end, span, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The logits [begin, begin + BLOCK) of a row as float32; -inf from `end` on.

    `begin` is a multiple of BLOCK, and `end` of VECTOR: so is where the mask ends.
    """
    begin = tl.multiple_of(begin, BLOCK)
    left = tl.multiple_of(tl.minimum(end - begin, BLOCK).to(tl.int32), VECTOR)
    return to_float(tl.load(row_ptr + begin + span, mask=span < left, other=-float("inf")))


@triton.jit
def key_of(x):
    """float32 as integers of the same order, in which -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(x, SHIFT: tl.constexpr):
    """key_of without the bits that are the same in all values of the element type."""
    return key_of(x) >> SHIFT


@triton.jit
def value_of(rank, SHIFT: tl.constexpr):
    """The float32 of a rank, nearly."""
    bits = (rank << SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def scaled_logits(x, largest, temperature):
    """(x - largest) / temperature, halved before the subtraction, which could overflow."""
    half = (x * 0.5 - largest * 0.5) / temperature
    return half + half


@triton.jit
def row_state(max_ptr, index_ptr, row, splits, SPLITS: tl.constexpr):
    """(largest logit, its lowest index, whether the row is valid) from the parts of a scan."""
    part = tl.arange(0, SPLITS)
    inside = part < splits
    maxima = tl.load(max_ptr + row * splits + part, mask=inside, other=-float("inf"))
    index = tl.load(index_ptr + row * splits + part, mask=inside, other=0)
    any_nan = tl.max((index < 0).to(tl.int32), axis=0) > 0
    index = tl.where(index < 0, -1 - index, index)
    largest = tl.max(maxima, axis=0)
    argmax = tl.min(tl.where(inside & (maxima == largest), index, 1 << 40), axis=0)
    return largest, argmax, (largest > -float("inf")) & (any_nan == 0)
