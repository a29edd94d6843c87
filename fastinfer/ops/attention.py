"""Attention: dense, ragged and paged, its plans, and the merging of partial results.

One definition serves the three ops. For query i and key j of one sequence and one head

    s_ij  = scale * q_i . k_j                       (softcap c > 0: s_ij = c * tanh(s_ij / c))
    out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) [+ exp(sink)])
    lse_i = ln sum_j exp(s_ij)                      (natural logarithm, without the sink)

over the keys j that query i sees. With Sq queries and Sk keys query i stands at position
p_i = Sk - Sq + i, so the last query stands at the last key (bottom right). It sees key j if

    j <= p_i                  with causal=True (the same as window_right=0),
    j >= p_i - window_left    with window_left >= 0,
    j <= p_i + window_right   with window_right >= 0 and causal=False.

A `tree_mask` (speculative verification) takes the place of causal among the step's own tokens,
which are the last Sq keys: query i sees all keys before them, and of them those whose bit is set
in its mask. A mask holds the token itself and its ancestors, so a token's position is
Sk - Sq + popcount(mask) - 1, and windows compare those positions.

A query that sees nothing gives out 0 and lse -inf. Keys and values that no query sees may hold
anything, NaN as well: they never reach the result. Query head h reads KV head h // (H // Hk)
(grouped queries). Everything is computed in float32 and rounded once. With batch_invariant=True a
row has the same bits whatever else is in the batch; without it, long key ranges may be cut to keep
all threads busy, and where depends on the batch.

The dense and the ragged op also take q, k and v in float8_e4m3fn. An element then stands for itself
times the scale of its head, `q_scale[h]`, `k_scale[hk]` or `v_scale[hk]` (None: 1):

    s_ij  = scale * (q_scale q_i) . (k_scale k_j),  and v_scale v_j takes the place of v_j.

The result is bf16 or fp16. Weights are not rounded to e4m3; on Hopper they are to bf16, as those
of bf16 queries.

Errors are ValueError and name the op, the argument, what was expected and what came. None of the
ops has a derivative: tensors that require grad are refused while grad mode is on.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library
import fastinfer.ops._attention_fakes  # noqa: F401  (registers them)
from fastinfer.ops._attention_sizes import (
    PLAN_COLUMNS,
    attention_outputs,
    attention_plan_size,
    paged_attention_workspace_size,
)
from fastinfer.ops._common import refuse_grad

_ops = torch.ops.fastinfer
_flash_attention_out = _ops.flash_attention.out
_flash_attention_varlen_out = _ops.flash_attention_varlen.out
_paged_attention_out = _ops.paged_attention.out
_plan_attention_out = _ops.plan_attention.out
_merge_attention_states_out = _ops.merge_attention_states.out

__all__ = [
    "attention_plan_size",
    "flash_attention",
    "flash_attention_varlen",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_workspace_size",
    "plan_attention",
]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a dense batch; the formula is at the head of this module.

    Args:
        q: [B, Sq, H, D], fp32, bf16, fp16 or float8_e4m3fn; D is 1 to 512. Any strides with a dense
            last dimension, here and for all float tensors, so [B, H, S, D] storage is a transposed
            view.
        k: [B, Sk, Hk, D] in q's dtype; H is a multiple of Hk.
        v: [B, Sk, Hk, Dv] in q's dtype; Dv is 1 to 512 and may differ from D.
        scale: factor of the scores; None is 1 / sqrt(D).
        causal: a query sees no key after its own position.
        window_left, window_right: how many positions before and after its own a query sees; -1 is
            no limit.
        softcap: c in c * tanh(s / c), in units of the scaled score; 0 is off.
        sinks: fp32 [H], a logit per head that takes part in the denominator of `out` alone.
        tree_mask: int64 [B, Sq], Sq <= 64; bit j of a query's mask: it sees query token j.
        q_scale, k_scale, v_scale: fp32 [H], [Hk] and [Hk], contiguous: factors of q, k and v in
            float8_e4m3fn, refused with other dtypes; None is 1.
        batch_invariant: a row's bits do not depend on the rest of the batch.
        out: [B, Sq, H, Dv] in q's dtype, or for float8_e4m3fn bf16 (the default) or fp16; receives
            the result.
        lse: fp32 [B, H, Sq]; receives the log-sum-exp.

    Returns:
        (out, lse).

    Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023; Milakov and Gimelshein,
    "Online normalizer calculation for softmax", 2018; sinks: Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", 2023; tree masks: Miao et al., "SpecInfer", 2023.
    """
    refuse_grad(
        "flash_attention", q=q, k=k, v=v, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    out, lse = attention_outputs("flash_attention", q, "v", v, True, out, lse)
    _flash_attention_out(
        q, k, v, scale=scale, causal=causal, window_left=window_left, window_right=window_right,
        softcap=softcap, sinks=sinks, tree_mask=tree_mask, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale, batch_invariant=batch_invariant, out=out, lse=lse,
    )  # fmt: skip
    return out, lse


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths, packed one after the other.

    Sequence b has queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]) and keys
    [cu_seqlens_k[b], cu_seqlens_k[b + 1]); either may be empty.

    Args:
        q: [Tq, H, D], fp32, bf16, fp16 or float8_e4m3fn; D is 1 to 512.
        k: [Tk, Hk, D] in q's dtype; H is a multiple of Hk.
        v: [Tk, Hk, Dv] in q's dtype; Dv is 1 to 512.
        cu_seqlens_q: int32 [B + 1], contiguous, from 0 to Tq, never decreasing.
        cu_seqlens_k: int32 [B + 1], contiguous, from 0 to Tk, never decreasing.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length; on the CPU a longer
            sequence is refused.
        tree_mask: int64 [Tq], at most 64 queries a sequence.
        out: [Tq, H, Dv] in q's dtype, or for float8_e4m3fn bf16 (the default) or fp16; receives the
            result.
        lse: fp32 [H, Tq]; receives the log-sum-exp.
        scale, causal, window_left, window_right, softcap, sinks, q_scale, k_scale, v_scale,
        batch_invariant: as in `flash_attention`.

    Returns:
        (out, lse).

    Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023.
    """
    refuse_grad(
        "flash_attention_varlen", q=q, k=k, v=v, sinks=sinks, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    out, lse = attention_outputs("flash_attention_varlen", q, "v", v, False, out, lse)
    _flash_attention_varlen_out(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        scale=scale, causal=causal, window_left=window_left, window_right=window_right,
        softcap=softcap, sinks=sinks, tree_mask=tree_mask, q_scale=q_scale, k_scale=k_scale,
        v_scale=v_scale, batch_invariant=batch_invariant, out=out, lse=lse,
    )  # fmt: skip
    return out, lse


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ragged queries over a paged cache.

    Decoding (1 query), a chunk of a prompt, and verification of drafted tokens are the same op with
    different numbers of queries, and may be mixed in one call. The step's own keys and values are
    in the cache already (`append_paged_kv_cache_`).

    Args:
        q: [T, H, D], fp32, bf16 or fp16; D is 1 to 512.
        k_cache: [num_blocks, Hk, block_size, D], block_size a multiple of 8 from 8 to 512; q's
            dtype, int8 or float8_e4m3fn. Any strides with a dense last dimension.
        v_cache: [num_blocks, Hk, block_size, Dv]; its dtype is independent of k_cache's.
        block_table: int32 [B, max_blocks], any strides. Entry i of row b is the block of sequence
            b's tokens [i * block_size, (i + 1) * block_size). Entries past its length may hold
            anything.
        cu_seqlens_q: int32 [B + 1], contiguous: sequence b's queries are
            [cu_seqlens_q[b], cu_seqlens_q[b + 1]), the last tokens of the sequence.
        seq_lens: int32 [B], contiguous: tokens of each sequence in the cache, this step's included.
        max_seqlen_q, max_seqlen_k: at least the largest number of queries and the largest length.
            On the CPU larger lengths, and used blocks outside the cache, are refused.
        causal: on by default, unlike in the other two ops.
        tree_mask: int64 [T], at most 64 queries a sequence.
        k_scale, v_scale: fp32 factor of a quantized cache, value = scale * stored:
            [num_blocks, Hk, block_size] (per token and head) or [Hk] (per head).
        plan: what `plan_attention` made for the same lengths, heads, maxima and windows; None plans
            inside.
        workspace: fp32, contiguous, at least `paged_attention_workspace_size(...)` elements of
            scratch space; None allocates what the plan needs.
        out: [T, H, Dv] in q's dtype; receives the result.
        lse: fp32 [H, T]; receives the log-sum-exp.
        scale, window_left, window_right, softcap, sinks, batch_invariant: as in `flash_attention`.

    Returns:
        (out, lse).

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    2023; Dao et al., "Flash-Decoding for long-context inference", 2023; Miao et al., "SpecInfer",
    2023.
    """
    refuse_grad(
        "paged_attention", q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    out, lse = attention_outputs("paged_attention", q, "v_cache", v_cache, False, out, lse)
    _paged_attention_out(
        q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, scale=scale, causal=causal, window_left=window_left,
        window_right=window_right, softcap=softcap, sinks=sinks, tree_mask=tree_mask,
        k_scale=k_scale, v_scale=v_scale, plan=plan, batch_invariant=batch_invariant,
        workspace=workspace, out=out, lse=lse,
    )  # fmt: skip
    return out, lse


def plan_attention(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    total_q: int,
    num_heads: int,
    num_kv_heads: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    batch_invariant: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Plans a step of `paged_attention` once for all layers that have the same heads and windows.

    A plan lists which query tokens attend to which piece of their sequence's keys, so that all
    processors have about equal work. It is opaque; csrc/checks/attention_plan.h describes it.

    Args:
        cu_seqlens_q: int32 [B + 1], as in `paged_attention`.
        seq_lens: int32 [B], as in `paged_attention`.
        total_q: T, the number of query tokens.
        num_heads, num_kv_heads: H and Hk.
        max_seqlen_q, max_seqlen_k, causal, window_left, window_right, batch_invariant: as
            `paged_attention` will be called. A tree mask needs nothing special.
        out: int32 [attention_plan_size(...), 8], contiguous; receives the plan.

    Returns:
        int32 [attention_plan_size(...), 8] (`out` if given).
    """
    if out is None:
        if seq_lens.dim() != 1:
            raise ValueError(
                "fastinfer::plan_attention: seq_lens: expected 1 dimension [batch], "
                f"got shape {tuple(seq_lens.shape)}"
            )
        rows = attention_plan_size(
            seq_lens.shape[0], total_q, num_heads, num_kv_heads, max_seqlen_k
        )
        out = seq_lens.new_empty((rows, PLAN_COLUMNS), dtype=torch.int32)
    _plan_attention_out(
        cu_seqlens_q, seq_lens, total_q=total_q, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        window_left=window_left, window_right=window_right, batch_invariant=batch_invariant,
        out=out,
    )  # fmt: skip
    return out


def merge_attention_states(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention results over disjoint sets of keys into the result over all of them.

        out = sum_s exp(lse_s) out_s / (sum_s exp(lse_s) [+ exp(sink)])
        lse = ln sum_s exp(lse_s)

    A result with lse -inf is empty: its `out` is ignored and may be NaN. If all are empty the
    merged row is 0 with lse -inf.

    Args:
        outs: [S, T, H, Dv] or dense [S, B, Sq, H, Dv], fp32, bf16 or fp16; S >= 1, Dv is 1 to 512.
        lses: fp32 [S, H, T] or [S, B, H, Sq], as the attention ops return them.
        sinks: fp32 [H]. A sink enters once: here, and not in the results that are merged.
        out: [T, H, Dv] or [B, Sq, H, Dv] in outs' dtype; receives the result.
        lse: fp32 [H, T] or [B, H, Sq]; receives the log-sum-exp.

    Returns:
        (out, lse).

    Ye et al., "Cascade Inference", 2024; Dao et al., "Flash-Decoding", 2023.
    """
    op = "merge_attention_states"
    refuse_grad(op, outs=outs, lses=lses, sinks=sinks)
    if outs.dim() == 0 or lses.dim() == 0:
        raise ValueError(
            f"fastinfer::{op}: outs, lses: expected at least 1 dimension, got a scalar"
        )
    out = outs.new_empty(outs.shape[1:]) if out is None else out
    lse = lses.new_empty(lses.shape[1:]) if lse is None else lse
    _merge_attention_states_out(outs, lses, sinks=sinks, out=out, lse=lse)
    return out, lse
