"""Attention of sequences that share a long prefix, which is read once for all of them.

The keys of a sequence are those of its group's prefix, then its own suffix. Softmax over both is
merged from softmax over each (`merge_attention_states`):

    (out_p, lse_p) = attention of all of a group's queries over its prefix, without a mask
    (out_s, lse_s) = attention of each sequence's queries over its suffix, causal
    out = (exp(lse_p) out_p + exp(lse_s) out_s) / (exp(lse_p) + exp(lse_s) [+ exp(sink)])

The first is one `paged_attention` in which a group is a single sequence with many queries: the
prefix's pages are read once for the group instead of once for each sequence, and the queries fill
the rows of matrix products. What a step reads falls from sequences * (prefix + suffix) keys to
groups * prefix + sequences * suffix.

Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024; Ye et al.,
"Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastinfer.ops._common import refuse_grad
from fastinfer.ops.attention import merge_attention_states, paged_attention, plan_attention

_OP = "shared_prefix_attention"

# How a sequence of few queries is tiled differs from how one of many is: at most 16 rows of queries
# times heads are few. With batch_invariant=True every group gets that many more, empty, queries, so
# that it is tiled alike however many share the prefix.
_EMPTY_QUERIES = 16


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_block_table: Tensor,
    prefix_lens: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_prefix_len: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    prefix_cu_seqlens_q: Tensor | None = None,
    max_prefix_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plans: tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` of sequences that come in groups with a common prefix.

    Equal, but for rounding, to `paged_attention` with the prefix's blocks before each sequence's
    own and prefix_len + seq_len as the lengths. A prefix may have any length; the suffix begins in
    a block of its own. A group of one sequence and a prefix of length 0 are fine, so that sequences
    without a prefix can take part.

    Args:
        q: [T, H, D], as in `paged_attention`. The sequences of a group follow one another.
        k_cache, v_cache, k_scale, v_scale: the pages of prefixes and suffixes, as in
            `paged_attention`.
        prefix_block_table: int32 [G, max_prefix_blocks], the blocks of each group's prefix.
        prefix_lens: int32 [G], contiguous: tokens of each prefix. It is read on the device alone.
        block_table: int32 [B, max_blocks], the blocks of each sequence's suffix.
        cu_seqlens_q: int32 [B + 1], contiguous, as in `paged_attention`.
        seq_lens: int32 [B], contiguous: tokens of each suffix, this step's included: at least as
            many as the sequence has queries, since a mask over the prefix would be needed
            otherwise. On the CPU shorter ones are refused.
        max_prefix_len, max_seqlen_q, max_seqlen_k: at least the longest prefix, the largest number
            of queries of a sequence, and the longest suffix.
        prefix_cu_seqlens_q: int32 [G + 1], contiguous: the queries of group g are
            [prefix_cu_seqlens_q[g], prefix_cu_seqlens_q[g + 1]). None with one group: all of them.
        max_prefix_seqlen_q: at least the largest number of queries of a group; None is T.
        window_left: only -1. What a sliding window sees does not grow with the prefix, and where it
            begins differs from query to query, so there is nothing to share: use
            `paged_attention`.
        window_right: of the suffix; every key of the prefix lies before every query.
        tree_mask: of the step's tokens, as in `paged_attention`.
        plans: what `plan_shared_prefix_attention` made for the same arguments; None plans inside.
        batch_invariant: a row's bits do not depend on the other sequences, nor on how many share
            its prefix. Costs a copy of q and of the prefixes' results.
        out: [T, H, Dv] in q's dtype; receives the result.
        lse: fp32 [H, T]; receives the log-sum-exp.
        scale, causal, softcap, sinks: as in `paged_attention`; a sink enters once.

    Returns:
        (out, lse).

    Raises:
        NotImplementedError: window_left is not -1, or a tensor requires grad.
        ValueError: as in `paged_attention`.
    """
    refuse_grad(
        _OP, q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    _refuse_window(window_left)
    if q.dim() != 3 or v_cache.dim() != 4:
        raise ValueError(
            f"fastinfer::{_OP}: q, v_cache: expected 3 and 4 dimensions, got shapes "
            f"{tuple(q.shape)} and {tuple(v_cache.shape)}"
        )
    total_q, heads, _ = q.shape
    _check_suffixes(cu_seqlens_q, seq_lens)
    group_q = _group_queries(prefix_cu_seqlens_q, prefix_lens, total_q)
    max_group_q = total_q if max_prefix_seqlen_q is None else max_prefix_seqlen_q
    prefix_plan, plan = (None, None) if plans is None else plans
    outs = q.new_empty(2, total_q, heads, v_cache.shape[-1])
    lses = q.new_empty(2, heads, total_q, dtype=torch.float32)
    prefix_q, prefix_out, prefix_lse = q, outs[0], lses[0]
    if batch_invariant:
        tokens = torch.arange(total_q, device=q.device)
        group = torch.searchsorted(group_q[1:], tokens, right=True)
        places = tokens + _EMPTY_QUERIES * group
        group_q, total, max_group_q = _with_empty_queries(group_q, total_q, max_group_q)
        prefix_q = q.new_zeros(total, *q.shape[1:]).index_copy_(0, places, q)
        prefix_out = q.new_empty(total, *outs.shape[2:])
        prefix_lse = lses.new_empty(heads, total)
    paged_attention(
        prefix_q, k_cache, v_cache, prefix_block_table, group_q, prefix_lens,
        max_seqlen_q=max_group_q, max_seqlen_k=max_prefix_len, scale=scale, causal=False,
        softcap=softcap, k_scale=k_scale, v_scale=v_scale, plan=prefix_plan,
        batch_invariant=batch_invariant, out=prefix_out, lse=prefix_lse,
    )  # fmt: skip
    if batch_invariant:
        outs[0].copy_(prefix_out[places])
        lses[0].copy_(prefix_lse[:, places])
    paged_attention(
        q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, scale=scale, causal=causal, window_right=window_right,
        softcap=softcap, tree_mask=tree_mask, k_scale=k_scale, v_scale=v_scale, plan=plan,
        batch_invariant=batch_invariant, out=outs[1], lse=lses[1],
    )  # fmt: skip
    return merge_attention_states(outs, lses, sinks=sinks, out=out, lse=lse)


def plan_shared_prefix_attention(
    prefix_lens: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    total_q: int,
    num_heads: int,
    num_kv_heads: int,
    max_prefix_len: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    prefix_cu_seqlens_q: Tensor | None = None,
    max_prefix_seqlen_q: int | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Plans a step of `shared_prefix_attention` once for all layers of the same shape.

    Args:
        total_q, num_heads, num_kv_heads: T, H and Hk, as in `plan_attention`.
        The others: as `shared_prefix_attention` will be called.

    Returns:
        The plans of the prefixes and of the suffixes; see `plan_attention`.
    """
    _refuse_window(window_left)
    group_q = _group_queries(prefix_cu_seqlens_q, prefix_lens, total_q)
    max_group_q = total_q if max_prefix_seqlen_q is None else max_prefix_seqlen_q
    prefix_total = total_q
    if batch_invariant:
        group_q, prefix_total, max_group_q = _with_empty_queries(group_q, total_q, max_group_q)
    prefix_plan = plan_attention(
        group_q, prefix_lens, total_q=prefix_total, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_seqlen_q=max_group_q, max_seqlen_k=max_prefix_len, causal=False,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    plan = plan_attention(
        cu_seqlens_q, seq_lens, total_q=total_q, num_heads=num_heads, num_kv_heads=num_kv_heads,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal,
        window_right=window_right, batch_invariant=batch_invariant,
    )  # fmt: skip
    return prefix_plan, plan


def _refuse_window(window_left: int) -> None:
    if window_left != -1:
        raise NotImplementedError(
            f"fastinfer::{_OP}: window_left: expected -1, got {window_left}; with a sliding window "
            "there is nothing to share, use paged_attention"
        )


def _group_queries(prefix_cu_seqlens_q: Tensor | None, prefix_lens: Tensor, total_q: int) -> Tensor:
    """cu_seqlens of the groups' queries."""
    if prefix_cu_seqlens_q is not None:
        return prefix_cu_seqlens_q
    if prefix_lens.shape != (1,):
        raise ValueError(
            f"fastinfer::{_OP}: prefix_cu_seqlens_q: required unless there is one group, got "
            f"prefix_lens of shape {tuple(prefix_lens.shape)}"
        )
    return torch.arange(2, dtype=torch.int32, device=prefix_lens.device) * total_q


def _with_empty_queries(group_q: Tensor, total_q: int, max_group_q: int) -> tuple[Tensor, int, int]:
    """Bounds, number and maximum of the groups' queries, with empty ones after each group's own."""
    more = torch.arange(group_q.shape[0], dtype=torch.int32, device=group_q.device) * _EMPTY_QUERIES
    total = total_q + _EMPTY_QUERIES * (group_q.shape[0] - 1)
    return group_q + more, total, max_group_q + _EMPTY_QUERIES


def _check_suffixes(cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
    # A GPU would have to wait for the lengths; a traced graph cannot branch on them.
    if seq_lens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    counts = cu_seqlens_q.diff()
    if counts.shape == seq_lens.shape and (counts > seq_lens).any():
        b = int((counts > seq_lens).nonzero()[0])
        raise ValueError(
            f"fastinfer::{_OP}: seq_lens: expected at least the {int(counts[b])} queries of "
            f"sequence {b}, got {int(seq_lens[b])}: a step's own tokens belong to the suffix"
        )
