"""The smallest logit of a row that top-k and top-p keep, found without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

from fastinfer.triton_kernels.logits import (
    load_logits,
    rank_of,
    row_state,
    scaled_logits,
    value_of,
)

LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite float32; -inf is one below
FEW = tl.constexpr(1024)  # a top-k up to which candidates are collected first

# Values are compared by their ranks. Top-k and top-p keep those >= t, the largest rank t for which
# the values >= t amount to at least a target: k in number, or top_p of the mass. Three pivots
# between what is known to reach the target (low) and what is known not to (high) are measured in
# one pass over the row: one in the middle of the ranks, which bounds the number of passes, and two
# that cut the interval of values evenly, which is faster. The search is over when a single value is
# between.


@triton.jit
def _measure(
    source_ptr,
    count,
    a,
    b,
    c,
    largest,
    temperature,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    MASS: tl.constexpr,
):
    """Number and, with MASS, mass of the values >= each of the ranks a, b, c."""
    span = tl.arange(0, BLOCK)
    count_a = tl.zeros([BLOCK], tl.int32)
    count_b = tl.zeros([BLOCK], tl.int32)
    count_c = tl.zeros([BLOCK], tl.int32)
    mass_a = tl.zeros([BLOCK], tl.float32)
    mass_b = tl.zeros([BLOCK], tl.float32)
    mass_c = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, count, BLOCK):
        x = load_logits(source_ptr, begin, count, span, BLOCK, VECTOR)
        rank = rank_of(x, SHIFT)
        in_a, in_b, in_c = rank >= a, rank >= b, rank >= c
        count_a += in_a.to(tl.int32)
        count_b += in_b.to(tl.int32)
        count_c += in_c.to(tl.int32)
        if MASS:
            mass = tl.exp(scaled_logits(x, largest, temperature))
            mass_a += tl.where(in_a, mass, 0.0)
            mass_b += tl.where(in_b, mass, 0.0)
            mass_c += tl.where(in_c, mass, 0.0)
    na = tl.sum(count_a, axis=0).to(tl.int64)
    nb = tl.sum(count_b, axis=0).to(tl.int64)
    nc = tl.sum(count_c, axis=0).to(tl.int64)
    if MASS:
        ga = tl.sum(mass_a.to(tl.float64), axis=0)
        gb = tl.sum(mass_b.to(tl.float64), axis=0)
        gc = tl.sum(mass_c.to(tl.float64), axis=0)
    else:
        ga, gb, gc = na.to(tl.float64), nb.to(tl.float64), nc.to(tl.float64)
    return na, nb, nc, ga, gb, gc


@triton.jit
def _narrow(low, high, num_low, num_high, pivot, number, amount, target):
    """The interval after `pivot` was measured."""
    raise_low = (amount >= target) & (pivot > low)
    drop_high = (amount < target) & (pivot < high)
    return (
        tl.where(raise_low, pivot, low),
        tl.where(drop_high, pivot, high),
        tl.where(raise_low, number, num_low),
        tl.where(drop_high, number, num_high),
    )


@triton.jit
def _between(value, low, high, SHIFT: tl.constexpr):
    """The rank of a value, moved strictly between two ranks."""
    return tl.minimum(tl.maximum(rank_of(value, SHIFT).to(tl.int64), low + 1), high - 1)


@triton.jit
def _search(
    source_ptr,
    count,
    floor,
    limit,
    largest,
    temperature,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    MASS: tl.constexpr,
):
    """The smallest rank that is kept among those >= floor.

    `limit` is k, or with MASS top_p, a share of the mass of all values >= floor.
    """
    low = floor
    high = rank_of(largest, SHIFT).to(tl.int64) + 1
    b = _between(largest - 10.0 * temperature, low, high, SHIFT)
    c = _between(largest - 40.0 * temperature, low, high, SHIFT)
    na, nb, nc, ga, gb, gc = _measure(
        source_ptr, count, low, b, c, largest, temperature, BLOCK, VECTOR, SHIFT, MASS
    )
    target = limit.to(tl.float64)
    if MASS:
        target = target * ga
    num_low, num_high = na, na * 0
    if ga > target:
        low, high, num_low, num_high = _narrow(low, high, num_low, num_high, b, nb, gb, target)
        low, high, num_low, num_high = _narrow(low, high, num_low, num_high, c, nc, gc, target)
        while (high - low > 1) & (num_low - num_high > 1):
            a = low + (high - low) // 2
            bottom, top = value_of(low, SHIFT), value_of(high, SHIFT)
            step = (top - bottom) * 0.333333
            b = _between(bottom + step, low, high, SHIFT)
            c = _between(top - step, low, high, SHIFT)
            na, nb, nc, ga, gb, gc = _measure(
                source_ptr, count, a, b, c, largest, temperature, BLOCK, VECTOR, SHIFT, MASS
            )
            low, high, num_low, num_high = _narrow(low, high, num_low, num_high, a, na, ga, target)
            low, high, num_low, num_high = _narrow(low, high, num_low, num_high, b, nb, gb, target)
            low, high, num_low, num_high = _narrow(low, high, num_low, num_high, c, nc, gc, target)
            if not MASS and num_low == target.to(tl.int64):
                high = low + 1  # exactly k are above
    return low


@triton.jit
def _collect(
    row_ptr,
    vocab,
    k,
    list_ptr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Writes the logits >= a rank, a superset of the k largest, to a list; returns the number of
    them and the rank.

    The k-th largest of the maxima of BLOCK interleaved parts of the row is no larger than the k-th
    largest logit, and seldom much smaller. More than LIST logits are not written, but counted.
    """
    span = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -(1 << 31), tl.int32)
    for begin in range(0, vocab, BLOCK):
        x = load_logits(row_ptr, begin, vocab, span, BLOCK, VECTOR)
        best = tl.maximum(best, rank_of(x, SHIFT))
    low = tl.full([], LOWEST_KEY >> SHIFT, tl.int64)
    high = tl.max(best, axis=0).to(tl.int64) + 1
    if tl.sum((best >= low).to(tl.int32), axis=0) >= k:
        while high - low > 1:
            middle = low + (high - low) // 2
            number = tl.sum((best >= middle).to(tl.int32), axis=0)
            low = tl.where(number >= k, middle, low)
            high = tl.where(number > k, high, tl.where(number == k, middle + 1, middle))
    count = tl.zeros([], tl.int32)
    for begin in range(0, vocab, BLOCK):
        x = load_logits(row_ptr, begin, vocab, span, BLOCK, VECTOR)
        hit = (rank_of(x, SHIFT) >= low).to(tl.int32)
        number = tl.sum(hit, axis=0)
        if number > 0:
            at = count + tl.cumsum(hit, axis=0) - 1
            tl.store(list_ptr + at, x, mask=(hit > 0) & (at < LIST))
            count += number
    tl.debug_barrier()  # other threads of the program read the list
    return count, low


@triton.jit(do_not_specialize=["vocab", "splits"])
def threshold_kernel(
    logits_ptr,  # [B, vocab]
    row_stride,
    vocab,
    max_ptr,  # [B, splits]
    index_ptr,  # [B, splits]
    splits,
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or none
    top_p_ptr,  # [B] or none
    list_ptr,  # [B, LIST], if there is a top-k
    lowest_ptr,  # [B]: the smallest key that is kept
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The smallest logit that top-k and top-p keep; one row a program."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + tl.multiple_of(row * row_stride, VECTOR)
    vocab = vocab.to(tl.int64)
    largest, _, valid = row_state(max_ptr, index_ptr, row, splits, SPLITS)
    temperature = tl.load(temperature_ptr + row)
    low = tl.full([], LOWEST_KEY >> SHIFT, tl.int64)
    if valid & (largest < float("inf")) & (temperature > 0.0):
        count = vocab
        listed = vocab < 0
        if top_k_ptr is not None:
            k = tl.load(top_k_ptr + row)
            if (k > 0) & (k < vocab):
                if (k <= FEW) & (k <= BLOCK // 2):
                    found, low = _collect(
                        row_ptr, vocab, k, list_ptr + row * LIST, BLOCK, LIST, VECTOR, SHIFT
                    )
                    listed = found <= LIST
                    count = tl.where(listed, found.to(tl.int64), vocab)
                if listed:
                    low = _search(
                        list_ptr + row * LIST,
                        count,
                        low,
                        k,
                        largest,
                        temperature,
                        BLOCK,
                        1,
                        SHIFT,
                        False,
                    )
                else:
                    low = _search(
                        row_ptr, count, low, k, largest, temperature, BLOCK, VECTOR, SHIFT, False
                    )
        if top_p_ptr is not None:
            p = tl.load(top_p_ptr + row)
            if p < 1.0:
                if top_k_ptr is not None:
                    if listed:
                        low = _search(
                            list_ptr + row * LIST,
                            count,
                            low,
                            p,
                            largest,
                            temperature,
                            BLOCK,
                            1,
                            SHIFT,
                            True,
                        )
                    else:
                        low = _search(
                            row_ptr, count, low, p, largest, temperature, BLOCK, VECTOR, SHIFT, True
                        )
                else:
                    low = _search(
                        row_ptr, count, low, p, largest, temperature, BLOCK, VECTOR, SHIFT, True
                    )
    tl.store(lowest_ptr + row, (low << SHIFT).to(tl.int32))
