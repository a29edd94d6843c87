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
from fastinfer.triton_kernels.logits import key_of, load_logits, row_state, scaled_logits
from fastinfer.triton_kernels.rows import full_width
from fastinfer.triton_kernels.sampling_threshold import LOWEST_KEY, threshold_kernel

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


def sample_config(rows: int, vocab: int, num_sms: int, draws: bool = True) -> SampleConfig:
    """Eight programs an SM or a few more; three where nothing is drawn, so that they only read and
    leave less to merge. The threshold's sums may not depend on the batch.

    The programs of a row are a power of two, so that few batch sizes need a kernel of their own.
    """
    block = min(2048, max(128, triton.next_power_of_2(vocab)))
    steps = triton.cdiv(vocab, block)
    wanted = triton.cdiv((8 if draws else 3) * num_sms, rows)
    per_row = min(steps, triton.next_power_of_2(wanted))
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
        x = load_logits(row_ptr, begin, end, span, BLOCK, VECTOR)
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
    largest, _, valid = row_state(max_ptr, index_ptr, row, tl.num_programs(1), SPLITS)
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
                lowest = tl.maximum(lowest, key_of(bound))
        bar = tl.full([], -float("inf"), tl.float32)  # a little below the best score
        for begin in range(first, end, BLOCK):
            x = load_logits(row_ptr, begin, end, span, BLOCK, VECTOR)
            kept = key_of(x) >= lowest
            lead = tl.where(kept, scaled_logits(x, largest, temperature) - bar, -float("inf"))
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
    _, token, valid = row_state(max_ptr, index_ptr, row, splits, SPLITS)
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
    draws = temperature is not None
    config = sample_config(rows, vocab, device_of(device.index or 0).num_sms, draws)
    splits = config.splits
    full = full_width(logits)
    vector = full if logits.stride(0) % full == 0 and vocab % full == 0 else 1
    row = (logits, logits.stride(0), vocab)
    padded = triton.next_power_of_2(splits)
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
