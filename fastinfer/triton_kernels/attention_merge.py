"""Merging attention results over disjoint sets of keys: the op, and the last step of split-KV."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastinfer.triton_kernels.launch import launch, next_power_of_2

_TILE = 4096  # elements of a program's tile: heads * splits * value_dim


@triton.jit
def _merge_rows(
    outs, lses, sinks, out_at, lse_at, splits, out_split, lse_split, columns, valid, heads,
    SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """Merges `splits` results of ROWS heads of one token, SPLITS at a time: an online softmax over
    their lse. outs and out_at point to [ROWS] rows, lses and lse_at to [ROWS] numbers.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV], tl.float32)
    store = valid[:, None] & (columns < VALUE_DIM)[None, :]
    for first in range(0, splits, SPLITS):
        split = (first + tl.arange(0, SPLITS)).to(tl.int64)
        there = valid[:, None] & (split < splits)[None, :]
        lse = tl.load(lses[:, None] + split[None, :] * lse_split, mask=there, other=float("-inf"))
        # An empty result may hold anything.
        present = lse != float("-inf")
        at = outs[:, None, None] + split[None, :, None] * out_split + columns[None, None, :]
        mask = present[:, :, None] & (columns < VALUE_DIM)[None, None, :]
        part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        new = tl.maximum(highest, tl.max(lse, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        alpha = tl.exp(highest - base)
        weight = tl.exp(lse - base[:, None])
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        highest = new
    empty = highest == float("-inf")
    merged_lse = tl.where(empty, float("-inf"), highest + tl.log(total))
    if SINKS:
        total += tl.exp(tl.load(sinks + heads, mask=valid, other=0.0) - highest)
    result = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    tl.store(out_at[:, None] + columns[None, :], result.to(out_at.dtype.element_ty), mask=store)
    tl.store(lse_at, merged_lse, mask=valid)


@triton.jit(
    do_not_specialize=["splits", "tokens", "lses_outer", "lses_head", "lse_outer", "lse_head"]
)
def merge_states_kernel(
    outs, lses, sinks, out, lse,
    splits, tokens, num_heads,
    outs_split, outs_outer, outs_token, outs_head, lses_split, lses_outer, lses_head,
    out_outer, out_token, out_head, lse_outer, lse_head,
    SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """merge_attention_states: programs are (sequence * token, block of heads)."""
    sequence = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    _merge_rows(
        outs + sequence * outs_outer + token * outs_token + heads * outs_head,
        lses + sequence * lses_outer + heads * lses_head + token, sinks,
        out + sequence * out_outer + token * out_token + heads * out_head,
        lse + sequence * lse_outer + heads * lse_head + token,
        splits, outs_split, lses_split, tl.arange(0, DV), heads < num_heads, heads,
        SINKS, ROWS, SPLITS, VALUE_DIM, DV,
    )  # fmt: skip


@triton.jit(do_not_specialize=["plan", "plan_rows", "cu_seqlens_q", "lse_outer", "lse_head"])
def merge_splits_kernel(
    partial_out, partial_lse, plan, plan_rows, cu_seqlens_q, sinks, out, lse,
    num_heads, out_outer, out_token, out_head, lse_outer, lse_head,
    SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Merges the pieces that a plan cut: programs are (split tile, block of heads).

    The plan lists its split tiles from its last row backwards; header word 15 counts them.
    """
    if tl.program_id(0) < tl.load(plan + 15):
        item = plan + (plan_rows - 1 - tl.program_id(0)) * 8
        sequence = tl.load(item).to(tl.int64)
        token_begin = tl.load(item + 1)
        count = tl.load(item + 2)
        first_row = tl.load(item + 5)
        splits = tl.load(item + 7)
        if DENSE:
            out += sequence * out_outer
            lse += sequence * lse_outer
        else:
            first_token = tl.load(cu_seqlens_q + sequence).to(tl.int64)
            out += first_token * out_token
            lse += first_token
        heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
        for i in range(count):
            row = (first_row + i).to(tl.int64) * num_heads + heads
            token = (token_begin + i).to(tl.int64)
            _merge_rows(
                partial_out + row * VALUE_DIM, partial_lse + row, sinks,
                out + token * out_token + heads * out_head, lse + heads * lse_head + token,
                splits, count.to(tl.int64) * num_heads * VALUE_DIM,
                count.to(tl.int64) * num_heads, tl.arange(0, DV), heads < num_heads, heads,
                SINKS, ROWS, SPLITS, VALUE_DIM, DV,
            )  # fmt: skip


def tile(num_heads: int, max_splits: int, value_dim: int) -> tuple[int, int]:
    """(heads, splits) of a program's tile. Splits are read at once as far as they fit: one after
    the other, each would wait for memory.
    """
    fitting = max(2, _TILE // next_power_of_2(value_dim))
    splits = min(fitting, next_power_of_2(max_splits), 16)
    return min(fitting // splits, next_power_of_2(num_heads)), splits


def merge_attention_states(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Launches the op's kernel; shapes as in `fastinfer.ops.merge_attention_states`."""
    dense = outs.dim() == 5
    sequences, tokens = (outs.shape[1], outs.shape[2]) if dense else (1, outs.shape[1])
    heads, value_dim = outs.shape[-2:]
    rows, splits = tile(heads, outs.shape[0], value_dim)
    grid = (sequences * tokens, triton.cdiv(heads, rows))
    launch(
        merge_states_kernel, grid, outs,
        outs, lses, sinks, out, lse, outs.shape[0], tokens, heads,
        outs.stride(0), outs.stride(1) if dense else 0, outs.stride(-3), outs.stride(-2),
        lses.stride(0), lses.stride(1) if dense else 0, lses.stride(-2),
        out.stride(0) if dense else 0, out.stride(-3), out.stride(-2),
        lse.stride(0) if dense else 0, lse.stride(-2),
        SINKS=sinks is not None, ROWS=rows, SPLITS=splits, VALUE_DIM=value_dim,
        DV=next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip
