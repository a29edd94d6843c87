"""plan_attention on the device: work items of about equal size for a persistent kernel.

The layout is that of csrc/checks/attention_plan.h, with two more words in the header: word 14
counts the wide items, which come first, and word 15 the tiles that are split. The plan's last rows
list these tiles (a copy of each one's first item), backwards, for the kernel that merges.

A sequence is narrow if all rows of its step (query tokens times the heads of a group) fit into one
small tile, which streams keys at the speed of memory; others are cut into wide tiles. Where the
keys of a tile are cut follows from the total work of the step, read from the lengths on the device,
so a captured step stays balanced when lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import device_of, launch, next_power_of_2

NARROW_ROWS = (16, 32, 64)
WIDE_ROWS = 128

MIN_SPLIT = 256  # keys: csrc/checks/attention_plan.h
_MAX_PARTIAL_ROWS = 1024  # likewise
_MAGIC = 0x46493031
_UNITS_PER_SM = 4  # how finely the work is cut: enough for an even load, few enough to merge


@dataclass(frozen=True)
class Tiles:
    """How many query tokens a tile of a step has; ``wide`` is 0 where no sequence is wide."""

    narrow_rows: int
    narrow: int
    wide: int


def choose_tiles(max_seqlen_q: int, group: int, batch_invariant: bool) -> Tiles:
    """The tiles of a step, from what is declared about it.

    With batch_invariant the border between narrow and wide does not depend on other sequences.
    """
    rows = max_seqlen_q * group
    all_narrow = rows <= (NARROW_ROWS[0] if batch_invariant else NARROW_ROWS[-1])
    narrow_rows = max(NARROW_ROWS[0], next_power_of_2(rows)) if all_narrow else NARROW_ROWS[0]
    narrow = max(1, narrow_rows // group)
    return Tiles(narrow_rows, narrow, 0 if all_narrow else max(1, WIDE_ROWS // group))


@triton.jit
def _pieces(low, high, piece):
    """How many pieces a range has when cut at multiples of `piece`; at least 1."""
    return tl.maximum(tl.cdiv(high, piece) - low // piece, 1)


# What changes from step to step: no new code for that.
_VARYING = [
    "cu_seqlens_q", "seq_lens", "plan", "plan_rows", "num_sequences", "total_q", "batch_invariant",
    "max_seqlen_q", "max_seqlen_k", "window_left", "window_right", "slots", "max_partial_rows",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def plan_kernel(
    cu_seqlens_q, seq_lens, plan, plan_rows,
    num_sequences, total_q, num_heads, num_kv_heads, batch_invariant, max_seqlen_q, max_seqlen_k,
    window_left, window_right, slots, max_partial_rows,
    GROUP: tl.constexpr, NARROW_LIMIT: tl.constexpr, NARROW_TOKENS: tl.constexpr,
    WIDE_TOKENS: tl.constexpr, MIN_SPLIT: tl.constexpr, LEFT: tl.constexpr,
    INVARIANT: tl.constexpr, MAGIC: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program b writes the items of sequence b; the last one the header and the zeros.

    Each of them looks at all sequences to know where its items go.
    """
    b = tl.arange(0, B)
    there = b < num_sequences
    begin = tl.load(cu_seqlens_q + b, mask=there, other=0)
    queries = tl.load(cu_seqlens_q + b + 1, mask=there, other=0) - begin
    keys = tl.load(seq_lens + b, mask=there, other=0)
    narrow = queries * GROUP <= NARROW_LIMIT
    tile_tokens = tl.where(narrow, NARROW_TOKENS, WIDE_TOKENS)
    tiles = tl.cdiv(queries, tile_tokens)
    # The keys that a sequence's tokens see lie in [low, keys). There may be a tree mask, whose
    # tokens may stand one position before the step.
    low = tl.zeros([B], tl.int32)
    span = keys
    if LEFT:
        low = tl.maximum(keys - queries - 1 - window_left, 0)
        span = tl.minimum(keys, window_left + tile_tokens + 1)
    # Under a causal mask the average tile of a long prompt sees half of the step's own keys.
    work = tl.sum((tiles * (span - tl.minimum(queries, span) // 2)).to(tl.int64), 0)
    if INVARIANT:
        piece = 0x40000000 + 0 * slots  # nothing is cut; a number that a loop may change
    else:
        share = tl.cdiv(work * num_kv_heads, slots)
        piece = tl.maximum(tl.cdiv(share, MIN_SPLIT) * MIN_SPLIT, MIN_SPLIT).to(tl.int32)
    splits = _pieces(low, keys, piece)
    rows = tl.where(splits > 1, queries * splits, 0)
    while tl.sum(rows, 0) > max_partial_rows:
        piece *= 2
        splits = _pieces(low, keys, piece)
        rows = tl.where(splits > 1, queries * splits, 0)

    items = tiles * splits
    wide_items = tl.where(narrow, 0, items)
    narrow_items = tl.where(narrow, items, 0)
    merged = tl.where(splits > 1, tiles, 0)
    num_wide = tl.sum(wide_items, 0)
    me = tl.program_id(0)
    if me < num_sequences:
        mine = b == me
        before = b < me
        first_query = tl.sum(tl.where(mine, queries, 0), 0)
        my_keys = tl.sum(tl.where(mine, keys, 0), 0)
        my_low = tl.sum(tl.where(mine, low, 0), 0)
        my_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
        my_splits = tl.sum(tl.where(mine, splits, 0), 0)
        my_tokens = tl.sum(tl.where(mine, tile_tokens, 0), 0)
        is_narrow = tl.sum(tl.where(mine & narrow, 1, 0), 0)
        first_item = tl.sum(tl.where(before, wide_items, 0), 0)
        first_narrow = num_wide + tl.sum(tl.where(before, narrow_items, 0), 0)
        first_item = tl.where(is_narrow != 0, first_narrow, first_item)
        first_row = tl.sum(tl.where(before, rows, 0), 0)
        first_merged = tl.sum(tl.where(before, merged, 0), 0)
        first_piece = my_low // piece
        for chunk in range(0, my_tiles * my_splits, CHUNK):
            i = chunk + tl.arange(0, CHUNK)
            real = i < my_tiles * my_splits
            tile = my_tiles - 1 - i // my_splits  # the last tile sees most keys, and goes first
            split = i % my_splits
            q_begin = tile * my_tokens
            q_count = tl.minimum(my_tokens, first_query - q_begin)
            k_begin = tl.maximum((first_piece + split) * piece, my_low)
            k_end = tl.minimum((first_piece + split + 1) * piece, my_keys)
            k_begin = tl.minimum(k_begin, k_end)
            partial = tl.where(my_splits > 1, first_row + q_begin * my_splits + split * q_count, -1)
            at = plan + (2 + first_item + i) * 8
            _store_item(at, real, me, q_begin, q_count, k_begin, k_end, partial, split, my_splits)
            at = plan + (plan_rows - 1 - first_merged - tile) * 8
            head = real & (split == 0) & (my_splits > 1)
            _store_item(at, head, me, q_begin, q_count, k_begin, k_end, partial, split, my_splits)
    else:
        num_items = tl.sum(items, 0)
        num_merged = tl.sum(merged, 0)
        w = tl.arange(0, 16)
        header = tl.where(w == 0, MAGIC, 0)
        header = tl.where(w == 1, num_items, header)
        header = tl.where(w == 2, tl.sum(rows, 0), header)
        header = tl.where(w == 3, num_sequences, header)
        header = tl.where(w == 4, total_q, header)
        header = tl.where(w == 5, num_heads, header)
        header = tl.where(w == 6, num_kv_heads, header)
        header = tl.where(w == 7, batch_invariant, header)
        header = tl.where(w == 8, max_seqlen_q, header)
        header = tl.where(w == 9, max_seqlen_k, header)
        header = tl.where(w == 10, window_left, header)
        header = tl.where(w == 11, window_right, header)
        header = tl.where(w == 14, num_wide, header)
        header = tl.where(w == 15, num_merged, header)
        tl.store(plan + w, header)
        # The rest is zero, so that equal lengths give equal plans.
        for row in range(2 + num_items, plan_rows - num_merged, CHUNK):
            at = (row + tl.arange(0, CHUNK)) * 8
            free = row + tl.arange(0, CHUNK) < plan_rows - num_merged
            for column in tl.static_range(8):
                tl.store(plan + at + column, 0, mask=free)


@triton.jit
def _store_item(at, mask, sequence, q_begin, q_count, k_begin, k_end, partial, split, splits):
    tl.store(at, sequence + tl.zeros_like(q_begin), mask=mask)
    tl.store(at + 1, q_begin, mask=mask)
    tl.store(at + 2, q_count, mask=mask)
    tl.store(at + 3, k_begin, mask=mask)
    tl.store(at + 4, k_end, mask=mask)
    tl.store(at + 5, partial, mask=mask)
    tl.store(at + 6, split, mask=mask)
    tl.store(at + 7, splits + tl.zeros_like(q_begin), mask=mask)


def partial_rows(total_q: int, max_seqlen_k: int) -> int:
    """The most token rows that a plan leaves unmerged, as csrc/checks/attention_plan.h has it."""
    return min(_MAX_PARTIAL_ROWS, total_q * -(-max_seqlen_k // MIN_SPLIT))


def plan_rows(num_sequences: int, total_q: int, group: int, max_seqlen_k: int) -> int:
    """Rows of a plan, likewise."""
    most_tiles = total_q // max(1, NARROW_ROWS[0] // group) + num_sequences
    return 2 + most_tiles + partial_rows(total_q, max_seqlen_k)


def plan_attention(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    total_q: int,
    num_heads: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_left: int,
    window_right: int,
    batch_invariant: bool,
    out: Tensor,
) -> None:
    """Launches the plan kernel; arguments as in `fastinfer.ops.plan_attention`."""
    group = num_heads // num_kv_heads
    tiles = choose_tiles(max_seqlen_q, group, batch_invariant)
    sequences = seq_lens.shape[0]
    slots = device_of(seq_lens.get_device()).num_sms * _UNITS_PER_SM
    block = max(16, next_power_of_2(sequences))
    limit = 2**31 - 1
    launch(
        plan_kernel, (sequences + 1,), seq_lens,
        cu_seqlens_q, seq_lens, out, out.shape[0],
        sequences, total_q, num_heads, num_kv_heads, int(batch_invariant), max_seqlen_q,
        max_seqlen_k, min(window_left, limit // 4), min(window_right, limit // 4), slots,
        partial_rows(total_q, max_seqlen_k),
        GROUP=group, NARROW_LIMIT=tiles.narrow_rows, NARROW_TOKENS=tiles.narrow,
        WIDE_TOKENS=tiles.wide or tiles.narrow, MIN_SPLIT=MIN_SPLIT,
        LEFT=window_left >= 0, INVARIANT=batch_invariant, MAGIC=_MAGIC,
        B=block, CHUNK=128, num_warps=4 if block <= 1024 else 16,
    )  # fmt: skip
