"""The functions of the package flash-attn, with its signatures, on fastinfer's attention ops.

Existing code changes one import:

    from fastinfer.flash_attn import flash_attn_func, flash_attn_with_kvcache

The signatures and meanings are those of flash-attn 2.8: tensors are [batch, seqlen, heads, size]
or [total, heads, size], causal masks are aligned at the bottom right, window_size is inclusive on
both sides and negative for no limit, softcap <= 0 is off, lse is fp32 [batch, heads, seqlen_q] or
[heads, total_q]. A query that sees nothing gives out 0 and, as there, lse *plus* infinity (the ops
of fastinfer give minus infinity).

What differs: fp32, any device, head sizes up to 512, and v may have a head size of its own. There
is no derivative. Refused as NotImplementedError, by name: dropout, ALiBi slopes, left-padded
caches, and tensors that require grad while grad mode is on. deterministic and num_splits are
accepted: results are deterministic in any case, and how keys are split is planned on the device.

Where flash-attn returns attention probabilities (return_attn_probs=True, for tests of dropout),
the third result is empty, as it is there without dropout.

Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.ops._common import refuse_grad

Result = Tensor | tuple[Tensor, Tensor, Tensor]

_MAX_BLOCK = 512  # tokens of a block, which is a multiple of ...
_BLOCK_STEP = 8


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention over a dense batch.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hk, D]; H is a multiple of Hk.
        v: [B, Sk, Hk, Dv].
        softmax_scale: factor of the scores; None is 1 / sqrt(D).

    Returns:
        out [B, Sq, H, Dv], or (out, lse [B, H, Sq], empty) with return_attn_probs.
    """
    name = "flash_attn_func"
    _refuse(name, dropout_p, alibi_slopes, q=q, k=k, v=v)
    q, k, v = map(_dense_last, (q, k, v))
    left, right = _window(window_size)
    out, lse = ops.flash_attention(
        q, k, v, scale=softmax_scale, causal=causal, window_left=left, window_right=right,
        softcap=max(softcap, 0.0),
    )  # fmt: skip
    return _result(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with kv [B, Sk, 2, Hk, D], read in place."""
    _refuse("flash_attn_kvpacked_func", dropout_p, alibi_slopes, q=q, kv=kv)
    k, v = kv.unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with qkv [B, S, 3, H, D], read in place."""
    _refuse("flash_attn_qkvpacked_func", dropout_p, alibi_slopes, qkv=qkv)
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention over sequences of different lengths, packed one after the other.

    Args:
        q: [Tq, H, D].
        k: [Tk, Hk, D], or with a block table [num_blocks, page_size, Hk, D].
        v: [Tk, Hk, Dv], or [num_blocks, page_size, Hk, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1]. With a block table the differences of
            cu_seqlens_k are the lengths.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's length.
        block_table: int32 [B, max_blocks], the pages of each sequence, of a multiple of 8
            tokens.

    Returns:
        out [Tq, H, Dv], or (out, lse [H, Tq], empty) with return_attn_probs.
    """
    name = "flash_attn_varlen_func"
    _refuse(name, dropout_p, alibi_slopes, q=q, k=k, v=v)
    q, k, v = map(_dense_last, (q, k, v))
    left, right = _window(window_size)
    if block_table is None:
        out, lse = ops.flash_attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, scale=softmax_scale, causal=causal, window_left=left,
            window_right=right, softcap=max(softcap, 0.0),
        )  # fmt: skip
    else:
        k_pages, v_pages, table = _pages(k, v, block_table)
        out, lse = ops.paged_attention(
            q, k_pages, v_pages, table, cu_seqlens_q, cu_seqlens_k.diff(),
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=softmax_scale,
            causal=causal, window_left=left, window_right=right, softcap=max(softcap, 0.0),
        )  # fmt: skip
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with kv [Tk, 2, Hk, D], read in place."""
    _refuse("flash_attn_varlen_kvpacked_func", dropout_p, alibi_slopes, q=q, kv=kv)
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with qkv [T, 3, H, D], read in place."""
    _refuse("flash_attn_varlen_qkvpacked_func", dropout_p, alibi_slopes, qkv=qkv)
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache, into which the new keys and values are written first.

    The lengths stay on the device, so a captured call is right for whatever they are when it is
    replayed. The cache is read where it is if its rows (pages, or whole sequences) are a multiple
    of 8 tokens long and, where they are longer than 512, K and V are laid out alike; another one is
    copied for each call.

    Args:
        q: [B, Sq, H, D].
        k_cache, v_cache: [cache rows, S, Hk, D], or with a block table [num_blocks, page_size, Hk,
            D]; v_cache may have another head size.
        k, v: [B, Snew, Hk, D] new keys and values; they are written, in place, after the
            cache_seqlens tokens that are there, which must be given then.
        rotary_cos, rotary_sin: [positions, R / 2]; the first R features of k and q are rotated: k
            and, if causal or windowed, q at positions cache_seqlens, cache_seqlens + 1, ...; else
            all of q at position cache_seqlens. Need k and v. Neither q nor k is changed.
        cache_seqlens: tokens in the cache before this call, a number or int32 [B]; None if it is
            full.
        cache_batch_idx: int [B], the cache row of each sequence; None is 0, 1, 2, ...
        block_table: int32 [B, max_blocks], the pages of each sequence, of a multiple of 8
            tokens.
        rotary_interleaved: pairs of features are neighbours, or else R / 2 apart.

    Returns:
        out [B, Sq, H, Dv], or (out, lse [B, H, Sq]) with return_softmax_lse.
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, 0.0, alibi_slopes, q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    if cache_leftpad is not None:
        raise NotImplementedError(f"fastinfer.flash_attn.{name}: cache_leftpad is not supported")
    _check(name, (k is None) == (v is None), "k, v: expected both or neither")
    _check(name, k is None or cache_seqlens is not None, "cache_seqlens: required with k and v")
    _check(
        name, (rotary_cos is None) == (rotary_sin is None), "rotary_cos, rotary_sin: expected both"
    )
    _check(name, rotary_cos is None or k is not None, "rotary_cos: expected k and v as well")
    _check(name, q.dim() == 4, f"q: expected [B, Sq, H, D], got shape {tuple(q.shape)}")
    _check(name, k_cache.dim() == 4, f"k_cache: expected 4 dimensions, got {k_cache.dim()}")
    _check(name, v_cache.dim() == 4, f"v_cache: expected 4 dimensions, got {v_cache.dim()}")
    batch, seqlen_q = q.shape[:2]
    if block_table is not None:
        _check(name, cache_batch_idx is None, "cache_batch_idx: expected None with block_table")
        table = block_table
    elif cache_batch_idx is not None:
        table = cache_batch_idx.to(torch.int32).unsqueeze(1)
    else:
        rows = k_cache.shape[0]
        _check(name, batch <= rows, f"k_cache: expected at least {batch} rows, got {rows}")
        table = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
    capacity = table.shape[1] * k_cache.shape[1]
    added = 0 if k is None else k.shape[1]
    _check(name, added <= capacity, f"k: expected at most {capacity} tokens, got {added}")
    if isinstance(cache_seqlens, Tensor):
        longest = capacity
    else:
        length = capacity if cache_seqlens is None else cache_seqlens
        longest = length + added
        _check(
            name, length >= 0 and longest <= capacity,
            f"cache_seqlens: expected 0 to {capacity - added}, got {length}",
        )  # fmt: skip
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)

    q = _dense_last(q)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        cos_sin = (rotary_cos, rotary_sin, rotary_interleaved)
        q = _rotated(q, cache_seqlens, causal or max(window_size) >= 0, *cos_sin)
        k = _rotated(k, cache_seqlens, True, *cos_sin)
    if k is not None and v is not None and added > 0:
        _write(_dense_last(k), _dense_last(v), k_cache, v_cache, table, cache_seqlens)
    k_pages, v_pages, table = _pages(k_cache, v_cache, table)
    left, right = _window(window_size)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    out, lse = ops.paged_attention(
        q.reshape(batch * seqlen_q, *q.shape[2:]), k_pages, v_pages, table, starts,
        cache_seqlens + added, max_seqlen_q=seqlen_q, max_seqlen_k=longest, scale=softmax_scale,
        causal=causal, window_left=left, window_right=right, softcap=max(softcap, 0.0),
    )  # fmt: skip
    out = out.view(batch, seqlen_q, *out.shape[1:])
    if not return_softmax_lse:
        return out
    lse = lse.view(q.shape[2], batch, seqlen_q).transpose(0, 1)
    return out, _empty_as_infinity(lse.contiguous())


# ---- arguments


def _check(name: str, condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"fastinfer.flash_attn.{name}: {message}")


def _refuse(
    name: str, dropout_p: float, alibi_slopes: Tensor | None, **tensors: Tensor | None
) -> None:
    if dropout_p > 0.0:
        raise NotImplementedError(
            f"fastinfer.flash_attn.{name}: dropout_p: only 0.0 is supported, got {dropout_p}; "
            "dropout is for training"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(f"fastinfer.flash_attn.{name}: alibi_slopes is not supported")
    refuse_grad(name, **tensors)


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _window(window_size: tuple[int, int]) -> tuple[int, int]:
    left, right = window_size
    return max(left, -1), max(right, -1)


def _empty_as_infinity(lse: Tensor) -> Tensor:
    return lse.masked_fill_(lse == -math.inf, math.inf)


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    return (out, _empty_as_infinity(lse), out.new_empty(0)) if return_attn_probs else out


# ---- caches


def _positions(first: Tensor, count: int, advance: bool) -> Tensor:
    """int64 [B, count]: first[b], and if `advance` one more for each token."""
    steps = torch.arange(count, device=first.device) * int(advance)
    return first.unsqueeze(1) + steps


def _rotated(
    x: Tensor, first: Tensor, advance: bool, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """A copy of x [B, S, H, D], turned by the rows of cos and sin at its tokens' positions."""
    positions = _positions(first, x.shape[1], advance).flatten()
    cos_sin = torch.cat([cos[positions], sin[positions]], -1).float()
    rows = torch.arange(positions.shape[0], device=x.device)
    turned = x.clone(memory_format=torch.contiguous_format)
    ops.rotary_embedding_(turned.flatten(0, 1), None, rows, cos_sin, interleaved=interleaved)
    return turned


def _write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, first: Tensor
) -> None:
    """Writes new tokens [B, S, Hk, D] into the rows of the caches, from position first[b] on."""
    in_place = _block_size(k_cache, v_cache) > 0
    if in_place:
        k_cache, v_cache, table = _pages(k_cache, v_cache, table)
    size = k_cache.shape[2 if in_place else 1]
    positions = _positions(first, k.shape[1], True)
    rows, offsets = table.gather(1, positions // size).long(), positions % size
    if in_place:
        slots = (rows * size + offsets).flatten()
        k, v = (x.reshape(slots.shape[0], *x.shape[2:]) for x in (k, v))
        ops.append_paged_kv_cache_(k, v, k_cache, v_cache, slots)
    else:
        k_cache[rows, offsets], v_cache[rows, offsets] = k, v


def _block_size(k: Tensor, v: Tensor) -> int:
    """Into blocks of how many tokens the rows of two caches [rows, tokens, Hk, D] can be cut, where
    they are, so that both have the same numbers; 0 if they cannot.
    """
    tokens = k.shape[1]
    if k.shape[0] == 1 or (tokens <= _MAX_BLOCK and tokens % _BLOCK_STEP == 0):
        common = tokens
    elif k.stride(0) * v.stride(1) == v.stride(0) * k.stride(1) and k.stride(1) > 0:
        apart, remainder = divmod(k.stride(0), k.stride(1))  # rows, in tokens
        common = math.gcd(tokens, apart) if remainder == 0 else 0
    else:
        common = 0
    sizes = range(_MAX_BLOCK, 0, -_BLOCK_STEP)
    return next((size for size in sizes if common > 0 and common % size == 0), 0)


def _pages(k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens [rows, tokens, Hk, D] as the ops' blocks [blocks, Hk, block_size, D], and the
    table of rows as a table of blocks. Views where possible.
    """
    rows, tokens = k.shape[:2]
    if v.shape[:2] != (rows, tokens):
        raise ValueError(
            f"fastinfer.flash_attn: v_cache: expected [{rows}, {tokens}, ...] as k_cache, "
            f"got shape {tuple(v.shape)}"
        )
    if tokens % _BLOCK_STEP and table.shape[1] > 1:
        raise ValueError(
            f"fastinfer.flash_attn: k_cache: expected pages of a multiple of {_BLOCK_STEP} tokens, "
            f"got {tokens}"
        )
    if rows * tokens == 0:  # nothing to attend to: any block will do
        k, v = (x.new_zeros(1, x.shape[2], _BLOCK_STEP, x.shape[3]) for x in (k, v))
        return k, v, table
    size = _block_size(k, v)
    if size == 0:
        size = _BLOCK_STEP
        padding = (0, 0, 0, 0, 0, -tokens % size)
        k, v = (torch.nn.functional.pad(x, padding).contiguous() for x in (k, v))
        tokens = k.shape[1]
        if tokens > size:
            size = _block_size(k, v)
    if size == tokens:
        return k.transpose(1, 2), v.transpose(1, 2), table
    step = k.stride(0) // (size * k.stride(1)) if rows > 1 else tokens // size
    blocks = (rows - 1) * step + tokens // size

    def cut(x: Tensor) -> Tensor:
        strides = (size * x.stride(1), x.stride(2), x.stride(1), x.stride(3))
        return x.as_strided((blocks, x.shape[2], size, x.shape[3]), strides)

    within = torch.arange(tokens // size, dtype=torch.int32, device=table.device)
    return cut(k), cut(v), (table.unsqueeze(-1) * step + within).flatten(1)
