"""Attention and the merging of partial results."""

import math

import torch
from torch import Tensor

from tests.reference.threads import single_threaded


def popcount(mask: Tensor) -> Tensor:
    """Number of set bits of each int64, the sign bit included."""
    bits = torch.arange(64, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).sum(-1)


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Which key each query of one sequence sees: bool [num_queries, num_keys].

    Queries are the sequence's last tokens, so query i stands at num_keys - num_queries + i. With a
    tree mask, a token's place is the depth that its mask gives it, as a query and as a key.
    """
    first = num_keys - num_queries  # key index of query 0; negative if there are more queries
    key_index = torch.arange(num_keys)
    query_position = first + torch.arange(num_queries)
    key_position = key_index
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if tree_mask is not None and num_queries > 0:
        tree_mask = tree_mask.cpu()
        query_position = first + popcount(tree_mask) - 1
        in_step = key_index >= first
        token = (key_index - first).clamp(0, num_queries - 1)
        key_position = torch.where(in_step, query_position[token], key_index)
        visible = ~in_step | ((tree_mask[:, None] >> token) & 1).bool()
    elif causal:
        window_right = 0
    distance = key_position[None, :] - query_position[:, None]
    if window_left >= 0:
        visible = visible & (distance >= -window_left)
    if window_right >= 0:
        visible = visible & (distance <= window_right)
    return visible


@single_threaded
def attend(
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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Sq, H, D], k [Sk, Hk, D], v [Sk, Hk, Dv] -> out [Sq, H, Dv], lse [H, Sq]."""
    num_queries, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    group = num_heads // k.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    queries = q.to(dtype).transpose(0, 1)  # [H, Sq, D]
    keys = k.to(dtype).transpose(0, 1).repeat_interleave(group, 0)  # [H, Sk, D]
    values = v.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
    visible = visible_keys(
        num_queries,
        num_keys,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        tree_mask=tree_mask,
    ).to(q.device)
    if num_keys == 0:
        out = torch.zeros(num_queries, num_heads, v.shape[-1], dtype=dtype, device=q.device)
        return out, torch.full((num_heads, num_queries), -torch.inf, dtype=dtype, device=q.device)

    scores = queries @ keys.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(visible, scores, -torch.inf)
    largest = scores.amax(-1, keepdim=True)  # [H, Sq, 1]
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.where(visible, torch.exp(scores - largest), 0.0)
    total = weights.sum(-1, keepdim=True)
    lse = torch.log(total) + largest
    denominator = total
    if sinks is not None:
        # A sink far above every score makes this infinite, and the weights 0: the right limit.
        denominator = total + torch.exp(sinks.to(dtype)[:, None, None] - largest)
    empty = ~visible.any(-1)[None, :, None]
    out = weighted_sum(weights / denominator.masked_fill(empty, 1.0), values, visible)
    out = torch.where(empty, 0.0, out)
    lse = torch.where(empty, -torch.inf, lse)
    return out.transpose(0, 1), lse.squeeze(-1)


def weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights @ values, where a NaN or infinity counts exactly for the rows that see it."""
    out = weights @ torch.where(values.isfinite(), values, 0.0)
    if values.isfinite().all():
        return out
    seen = visible.double()
    plus = seen @ values.isposinf().double() > 0
    minus = seen @ values.isneginf().double() > 0
    nan = seen @ values.isnan().double() > 0
    out = torch.where(plus, torch.inf, out)
    out = torch.where(minus, -torch.inf, out)
    return torch.where(nan | (plus & minus), torch.nan, out)


@single_threaded
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, tree_mask: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """Dense: q [B, Sq, H, D] -> out [B, Sq, H, Dv], lse [B, H, Sq]."""
    rows = []
    for b in range(q.shape[0]):
        mask = None if tree_mask is None else tree_mask[b]
        rows.append(attend(q[b], k[b], v[b], tree_mask=mask, **options))
    if not rows:
        dtype = options.get("dtype", torch.float64)
        batch, seqlen, heads, _ = q.shape
        out = torch.empty(batch, seqlen, heads, v.shape[-1], dtype=dtype, device=q.device)
        return out, torch.empty(batch, heads, seqlen, dtype=dtype, device=q.device)
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


@single_threaded
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    tree_mask: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Ragged: q [Tq, H, D] -> out [Tq, H, Dv], lse [H, Tq]."""
    keys = list(zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True))
    return _ragged(
        q,
        [(k[begin:end], v[begin:end]) for begin, end in keys],
        v.shape[-1],
        cu_seqlens_q,
        tree_mask,
        options,
    )


def _ragged(
    q: Tensor,
    sequences: list[tuple[Tensor, Tensor]],
    value_dim: int,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None,
    options: dict,
) -> tuple[Tensor, Tensor]:
    dtype = options.get("dtype", torch.float64)
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for (k, v), begin, end in zip(sequences, bounds[:-1], bounds[1:], strict=True):
        mask = None if tree_mask is None else tree_mask[begin:end]
        out[begin:end], lse[:, begin:end] = attend(q[begin:end], k, v, tree_mask=mask, **options)
    return out, lse


def read_pages(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """The first `length` tokens of one sequence: [length, Hk, D] in `dtype`, dequantized.

    Only the pages that hold them are looked at.
    """
    block_size = cache.shape[2]
    used = blocks[: -(-length // block_size)].long()
    tokens = cache[used].to(dtype).transpose(1, 2).flatten(0, 1)[:length]
    if scale is None:
        return tokens
    if scale.dim() == 1:
        return tokens * scale.to(dtype)[None, :, None]
    return tokens * scale[used].to(dtype).transpose(1, 2).flatten(0, 1)[:length, :, None]


@single_threaded
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    causal: bool = True,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Ragged queries over pages: q [T, H, D] -> out [T, H, Dv], lse [H, T]."""
    dtype = options.get("dtype", torch.float64)
    sequences = [
        (
            read_pages(k_cache, k_scale, block_table[b], length, dtype),
            read_pages(v_cache, v_scale, block_table[b], length, dtype),
        )
        for b, length in enumerate(seq_lens.tolist())
    ]
    options = {**options, "causal": causal}
    return _ragged(q, sequences, v_cache.shape[-1], cu_seqlens_q, tree_mask, options)


@single_threaded
def merge_attention_states(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """outs [S, ..., T, H, Dv], lses [S, ..., H, T] -> out [..., T, H, Dv], lse [..., H, T]."""
    lses = lses.to(dtype)
    largest = lses.amax(0)  # [..., H, T]
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - largest)  # [S, ..., H, T]
    total = weights.sum(0)
    denominator = total
    if sinks is not None:
        denominator = total + torch.exp(sinks.to(dtype)[:, None] - largest)
    per_row = weights.transpose(-1, -2).unsqueeze(-1)  # [S, ..., T, H, 1]
    summed = torch.where(per_row == 0, 0.0, outs.to(dtype) * per_row).sum(0)
    empty = (total == 0).transpose(-1, -2).unsqueeze(-1)
    divisor = denominator.transpose(-1, -2).unsqueeze(-1)
    out = torch.where(empty, 0.0, summed / divisor.masked_fill(empty, 1.0))
    return out, torch.log(total) + largest
