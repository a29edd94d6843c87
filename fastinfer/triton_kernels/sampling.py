"""Sampling: temperature, top-k, top-p and min-p, and a seeded Gumbel-max draw, without a sort.

Up to four launches, in which programs split a row's vocabulary:

    scan        the largest logit, its lowest index and whether there is a NaN
    threshold   the smallest logit that top-k and top-p keep, one program a row
    draw        the highest perturbed logit among the kept ones
    finish      the best of a row's programs

Parameters are read on the device, and rows that need no draw skip it. A row's token depends on
nothing but the row: sums have a fixed order, scores are compared in float64 and ties go to the
lowest token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import device_of, launch
from fastinfer.triton_kernels.rows import full_width, to_float

LOWEST_KEY = tl.constexpr(-2139095040)  # of the lowest finite float32; -inf is one below
FEW = tl.constexpr(1024)  # a top-k up to which candidates are collected first
LIST = 4096  # tokens that can be collected of a row
UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that are the same in all values of the type of a sign."""


@dataclass(frozen=True)
class SampleConfig:
    """How a row of logits is cut."""

    splits: int  # programs of a row
    chunk: int  # tokens of a program, a multiple of block
    block: int  # tokens of a step; a power of two
    num_warps: int
    threshold_block: int
    threshold_warps: int


def sample_config(rows: int, vocab: int, num_sms: int) -> SampleConfig:
    """Enough programs for eight an SM; the threshold's sums may not depend on the batch.

    The programs of a row are a power of two, so that few batch sizes need a kernel of their own.
    """
    block = min(2048, max(128, triton.next_power_of_2(vocab)))
    steps = triton.cdiv(vocab, block)
    per_row = min(steps, triton.next_power_of_2(max(1, triton.cdiv(8 * num_sms, rows))))
    chunk = triton.cdiv(steps, per_row) * block
    threshold_block = min(LIST, block * 2) if vocab > block else block
    return SampleConfig(
        triton.cdiv(vocab, chunk),
        chunk,
        block,
        max(1, block // 256),
        threshold_block,
        max(1, threshold_block // 256),
    )


# ------------------------------------------------------------------------------------- elements


@triton.jit
def _load(row_ptr, begin, end, span, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """The logits [begin, begin + BLOCK) of a row as float32; -inf from `end` on.

    `begin` is a multiple of BLOCK, and `end` of VECTOR: so is where the mask ends.
    """
    begin = tl.multiple_of(begin, BLOCK)
    left = tl.multiple_of(tl.minimum(end - begin, BLOCK).to(tl.int32), VECTOR)
    return to_float(tl.load(row_ptr + begin + span, mask=span < left, other=-float("inf")))


@triton.jit
def _key(x):
    """float32 as integers of the same order, in which -0 and 0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rank(x, SHIFT: tl.constexpr):
    """_key without the bits that are the same in all values of the element type."""
    return _key(x) >> SHIFT


@triton.jit
def _value(rank, SHIFT: tl.constexpr):
    """The float32 of a rank, nearly."""
    bits = (rank << SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, largest, temperature):
    """(x - largest) / temperature, halved before the subtraction, which could overflow."""
    half = (x * 0.5 - largest * 0.5) / temperature
    return half + half


# ----------------------------------------------------------------------------------------- scan


@triton.jit(do_not_specialize=["vocab", "splits"])
def scan_kernel(
    logits_ptr,  # [B, vocab]
    row_stride,
    vocab,
    max_ptr,  # [B, splits]
    index_ptr,  # [B, splits]; -1 - index where a NaN was seen
    token_ptr,  # [B], if there is one split and no draw
    valid_ptr,  # [B]
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    FINAL: tl.constexpr,
):
    """The largest logit of a chunk and its lowest index."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_ptr = logits_ptr + tl.multiple_of(row * row_stride, VECTOR)
    first = split.to(tl.int64) * CHUNK
    end = tl.minimum(first + CHUNK, vocab)
    span = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    step_of = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int1)
    for begin in range(first, end, BLOCK):
        x = _load(row_ptr, begin, end, span, BLOCK, VECTOR)
        nan |= x != x
        above = x > best
        best = tl.where(above, x, best)
        step_of = tl.where(above, ((begin - first) // BLOCK).to(tl.int32), step_of)
    largest = tl.max(best, axis=0)
    at = step_of.to(tl.int64) * BLOCK + span
    index = first + tl.min(tl.where(best == largest, at, CHUNK), axis=0)
    any_nan = tl.max(nan.to(tl.int32), axis=0) > 0
    if FINAL:
        tl.store(token_ptr + row, index)
        tl.store(valid_ptr + row, (largest > -float("inf")) & (any_nan == 0))
    else:
        out = row * tl.num_programs(1) + split
        tl.store(max_ptr + out, largest)
        tl.store(index_ptr + out, tl.where(any_nan, -1 - index, index))


@triton.jit
def _row_state(max_ptr, index_ptr, row, splits, SPLITS: tl.constexpr):
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


# ------------------------------------------------------------------------------------ threshold
#
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
        x = _load(source_ptr, begin, count, span, BLOCK, VECTOR)
        rank = _rank(x, SHIFT)
        in_a, in_b, in_c = rank >= a, rank >= b, rank >= c
        count_a += in_a.to(tl.int32)
        count_b += in_b.to(tl.int32)
        count_c += in_c.to(tl.int32)
        if MASS:
            mass = tl.exp(_scaled(x, largest, temperature))
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
    return tl.minimum(tl.maximum(_rank(value, SHIFT).to(tl.int64), low + 1), high - 1)


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
    high = _rank(largest, SHIFT).to(tl.int64) + 1
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
            bottom, top = _value(low, SHIFT), _value(high, SHIFT)
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
        x = _load(row_ptr, begin, vocab, span, BLOCK, VECTOR)
        best = tl.maximum(best, _rank(x, SHIFT))
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
        x = _load(row_ptr, begin, vocab, span, BLOCK, VECTOR)
        hit = (_rank(x, SHIFT) >= low).to(tl.int32)
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
    largest, _, valid = _row_state(max_ptr, index_ptr, row, splits, SPLITS)
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


# ----------------------------------------------------------------------------------------- draw


@triton.jit
def _words(first, seed, position, BLOCK: tl.constexpr):
    """Random 32-bit words of the tokens [first, first + BLOCK): token i has word i % 4 of
    Philox4x32-10 with the key `seed` and the counter (i // 4, position low, position high, 0).
    """
    counter = tl.arange(0, BLOCK // 4) + first // 4
    c0 = counter.to(tl.uint32)
    c1 = tl.zeros_like(c0) + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = tl.zeros_like(c0) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        left = c0.to(tl.uint64) * 0xD2511F53
        right = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = right.to(tl.uint32)
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = left.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BLOCK,))


@triton.jit(do_not_specialize=["vocab", "splits"])
def draw_kernel(
    logits_ptr,  # [B, vocab]
    row_stride,
    vocab,
    max_ptr,  # [B, splits]
    index_ptr,  # [B, splits]
    temperature_ptr,  # [B]
    min_p_ptr,  # [B] or none
    seed_ptr,  # [B] or none
    position_ptr,  # [B] or none
    lowest_ptr,  # [B] or none
    score_ptr,  # [B, splits]: -inf without a candidate
    drawn_ptr,  # [B, splits]
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The highest (logit - max) / T + g of a chunk, g = -log(-log(u)), u = (r + 1/2) / 2^32.

    Scores are float64, but few tokens need one: since g > d means -log(u) < exp(-d), and 1 - u <=
    -log(u), a token can only beat the score s if 1 - u < exp(x - s). That is tested in float32,
    with a margin for its rounding, so the outcome is that of scoring every token.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, _, valid = _row_state(max_ptr, index_ptr, row, tl.num_programs(1), SPLITS)
    temperature = tl.load(temperature_ptr + row)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], -1, tl.int64)
    if valid & (largest < float("inf")) & (temperature > 0.0):
        row_ptr = logits_ptr + tl.multiple_of(row * row_stride, VECTOR)
        first = split.to(tl.int64) * CHUNK
        end = tl.minimum(first + CHUNK, vocab)
        span = tl.arange(0, BLOCK)
        seed = tl.zeros([], tl.int64)
        position = tl.zeros([], tl.int64)
        if seed_ptr is not None:
            seed = tl.load(seed_ptr + row)
        if position_ptr is not None:
            position = tl.load(position_ptr + row)
        lowest = tl.full([], LOWEST_KEY, tl.int32)
        if lowest_ptr is not None:
            lowest = tl.load(lowest_ptr + row)
        largest64, temperature64 = largest.to(tl.float64), temperature.to(tl.float64)
        min_p = tl.zeros([], tl.float64)
        if min_p_ptr is not None:
            min_p = tl.load(min_p_ptr + row).to(tl.float64)
            if min_p > 0.0:
                # Skips whole steps; a little low, since the exact test is below.
                drop = -tl.log(min_p) * temperature64
                bound = largest64 - drop - 1e-6 * (drop + tl.abs(largest64))
                bound = tl.maximum(bound, -3.4e38).to(tl.float32)
                lowest = tl.maximum(lowest, _key(bound))
        bar = tl.full([], -float("inf"), tl.float32)  # a little below the best score
        for begin in range(first, end, BLOCK):
            x = _load(row_ptr, begin, end, span, BLOCK, VECTOR)
            kept = _key(x) >= lowest
            lead = tl.where(kept, _scaled(x, largest, temperature) - bar, -float("inf"))
            # 1 - u is at least 2^-33 = exp(-22.9).
            if tl.max(lead, axis=0) > -23.0:
                words = _words(begin, seed, position, BLOCK)
                # 2^24 (1 - u), rounded down.
                rest = ((words ^ 0xFFFFFFFF) >> 8).to(tl.int32).to(tl.float32)
                candidate = kept & (rest < tl.exp(lead) * 16777216.0)
                if tl.max(candidate.to(tl.int32), axis=0) > 0:
                    scaled = (x.to(tl.float64) - largest64) / temperature64
                    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
                    score = scaled - tl.log(-tl.log(u))
                    if min_p_ptr is not None:
                        candidate = candidate & (tl.exp(scaled) >= min_p)
                    score = tl.where(candidate, score, -float("inf"))
                    top = tl.max(score, axis=0)
                    if top > best:
                        best = top
                        token = begin + tl.min(tl.where(score == top, span, BLOCK), axis=0)
                        # float32 errs by a few roundings of x and, at temperatures near the
                        # smallest float, by half of that float over T.
                        margin = 1e-4 + 1e-6 * tl.abs(top) + 2.802596928649634e-45 / temperature64
                        bar = (top - margin).to(tl.float32)
    out = row * tl.num_programs(1) + split
    tl.store(score_ptr + out, best)
    tl.store(drawn_ptr + out, token)


@triton.jit(do_not_specialize=["vocab", "splits"])
def finish_kernel(
    max_ptr,  # [B, splits]
    index_ptr,  # [B, splits]
    splits,
    score_ptr,  # [B, splits] or none: no draw
    drawn_ptr,  # [B, splits] or none
    token_ptr,  # [B]
    valid_ptr,  # [B]
    SPLITS: tl.constexpr,
):
    """The best of a row's chunks; the largest logit where nothing was drawn."""
    row = tl.program_id(0).to(tl.int64)
    _, token, valid = _row_state(max_ptr, index_ptr, row, splits, SPLITS)
    if score_ptr is not None:
        part = tl.arange(0, SPLITS)
        inside = part < splits
        score = tl.load(score_ptr + row * splits + part, mask=inside, other=-float("inf"))
        drawn = tl.load(drawn_ptr + row * splits + part, mask=inside, other=-1)
        best = tl.max(score, axis=0)
        if best > -float("inf"):
            token = tl.min(tl.where(inside & (score == best), drawn, 1 << 40), axis=0)
    tl.store(token_ptr + row, token)
    tl.store(valid_ptr + row, valid)


# ------------------------------------------------------------------------------------- launcher


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    token_ids: Tensor,
    valid: Tensor,
) -> None:
    """Draws a token a row. Settings are not range-checked; a missing seed or position is 0."""
    rows, vocab = logits.shape
    device = logits.device
    config = sample_config(rows, vocab, device_of(device.index or 0).num_sms)
    splits = config.splits
    full = full_width(logits)
    vector = full if logits.stride(0) % full == 0 and vocab % full == 0 else 1
    row = (logits, logits.stride(0), vocab)
    padded = triton.next_power_of_2(splits)
    draws = temperature is not None
    cut = {"BLOCK": config.block, "VECTOR": vector, "num_warps": config.num_warps}

    final = splits == 1 and not draws
    maxima = index = None
    if not final:
        maxima = torch.empty((rows, splits), dtype=torch.float32, device=device)
        index = torch.empty((rows, splits), dtype=torch.int64, device=device)
    launch(
        scan_kernel,
        (rows, splits),
        logits,
        *row,
        maxima,
        index,
        token_ids,
        valid,
        CHUNK=config.chunk,
        FINAL=final,
        **cut,
    )
    if final:
        return
    lowest = score = drawn = None
    if draws and (top_k is not None or top_p is not None):
        lowest = torch.empty(rows, dtype=torch.int32, device=device)
        collected = None
        if top_k is not None:
            size = (rows, config.threshold_block)
            collected = torch.empty(size, dtype=torch.float32, device=device)
        launch(
            threshold_kernel,
            (rows,),
            logits,
            *row,
            maxima,
            index,
            splits,
            temperature,
            top_k,
            top_p,
            collected,
            lowest,
            SPLITS=padded,
            BLOCK=config.threshold_block,
            LIST=config.threshold_block,
            VECTOR=vector,
            SHIFT=UNUSED_BITS[logits.dtype],
            num_warps=config.threshold_warps,
        )
    if draws:
        score = torch.empty((rows, splits), dtype=torch.float64, device=device)
        drawn = torch.empty((rows, splits), dtype=torch.int64, device=device)
        launch(
            draw_kernel,
            (rows, splits),
            logits,
            *row,
            maxima,
            index,
            temperature,
            min_p,
            seeds,
            positions,
            lowest,
            score,
            drawn,
            SPLITS=padded,
            CHUNK=config.chunk,
            **cut,
        )
    launch(
        finish_kernel,
        (rows,),
        logits,
        maxima,
        index,
        splits,
        score,
        drawn,
        token_ids,
        valid,
        SPLITS=padded,
        num_warps=1,
    )
