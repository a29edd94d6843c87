"""The paged KV cache: new keys and values written into pages, quantized on the way if asked for.

Errors are ValueError and name the op, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, refuse_grad

_append_paged_kv_cache_ = torch.ops.fastinfer.append_paged_kv_cache_.default
_qk_norm_rope_append_ = torch.ops.fastinfer.qk_norm_rope_append_.default

_QUANTIZED = (torch.int8, torch.float8_e4m3fn)


def append_paged_kv_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value heads into the slot that `slot_mapping` gives it, in place.

        k_cache[slot // block_size, h, slot % block_size] <- k[t, h]     slot = slot_mapping[t]

    and the same for v. A token with a negative slot is skipped. Slots must be distinct: which of
    several tokens with one slot is kept is not defined.

    A cache of dtype int8 or float8_e4m3fn is quantized, value = scale * stored, K and V
    independently of each other. Its scale tensor is one of

    * [num_blocks, Hk, block_size], one scale for each token and head, written here:

          scale  <- amax(|x|) / 127 (int8) or / 448 (float8_e4m3fn); 1 for a row of zeros
          stored <- round(x / scale), halves to even, all of it in float32

      A NaN or an infinity in a row makes its scale NaN or infinite, so that it stays visible.
    * [Hk], one static scale for each head, read here; x / scale saturates at +-127 or +-448. A NaN
      is stored as NaN in float8_e4m3fn and as 0 in int8, which has none.

    Args:
        k: [T, Hk, D], fp32, bf16 or fp16; any strides with a dense last dimension, D in 1..512.
        v: [T, Hk, Dv], k's dtype.
        k_cache: [num_blocks, Hk, block_size, D], k's dtype, int8 or float8_e4m3fn; any strides
            with a dense last dimension. block_size is a multiple of 8 up to 512.
        v_cache: [num_blocks, Hk, block_size, Dv], likewise.
        slot_mapping: int64 [T]; block * block_size + offset, or negative.
        k_scale, v_scale: float32, of any strides; required with a quantized cache, refused with a
            float one.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also a slot beyond the cache,
            before anything is written.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023; formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    refuse_grad(
        "append_paged_kv_cache_",
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _append_paged_kv_cache_(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def qk_norm_rope_append_(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """From a fused QKV projection to queries and pages in one pass, in place.

    A row of qkv holds H query heads and Hk key heads of size D, and Hk value heads of size Dv, one
    after the other. For each token t

        q, k, v            <- split(qkv[t] + bias)
        q, k               <- rms_norm(q, q_weight), rms_norm(k, k_weight)     over each head
        q, k               <- rotated by cos_sin[positions[t]]
        q_out[t]           <- q
        k_cache, v_cache   <- k, v at slot_mapping[t], quantized if asked for

    where a step whose arguments are None is left out. Every step rounds to qkv's dtype: the results
    are, bit for bit, those of an addition, `rms_norm`, `rotary_embedding_` and
    `append_paged_kv_cache_` one after the other. (On Hopper the sums of norms over heads that are
    no whole number of 16-byte vectors, or more than 32 of them, are ordered otherwise.) A token
    with a negative slot is not appended; its query is computed all the same.

    Args:
        qkv: [T, H * D + Hk * (D + Dv)], fp32, bf16 or fp16; any stride between rows.
        q_out: [T, H, D], qkv's dtype; receives the queries. Any strides with a dense last
            dimension; it may be the query columns of qkv themselves, `qkv[:, : H * D].view(T, H,
            D)`, and may not overlap qkv otherwise.
        k_cache: [num_blocks, Hk, block_size, D], as in `append_paged_kv_cache_`; D in 1..512.
        v_cache: [num_blocks, Hk, block_size, Dv], likewise.
        slot_mapping: int64 [T]; distinct slots, or negative.
        positions: int64 [T]; rows of cos_sin. Given together with cos_sin.
        cos_sin: float32 [P, R], R even and at most D: see `rotary_embedding_`, `rotary_cos_sin`.
        bias: [H * D + Hk * (D + Dv)], qkv's dtype.
        q_weight, k_weight: [D], qkv's dtype or fp32.
        eps: added to the mean square, >= 0.
        weight_offset: 1.0 gives Gemma's `1 + weight`.
        interleaved: how features are paired, as in `rotary_embedding_`.
        k_scale, v_scale: scales of quantized pages, as in `append_paged_kv_cache_`.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also a slot beyond the cache or a
            position outside [0, P), before anything is written.

    There is no overload that returns q: ops that work in place return nothing.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021; Henry et al.,
    "Query-Key Normalization for Transformers", 2020.
    """
    refuse_grad(
        "qk_norm_rope_append_",
        qkv=qkv,
        q_out=q_out,
        k_cache=k_cache,
        v_cache=v_cache,
        cos_sin=cos_sin,
        bias=bias,
        q_weight=q_weight,
        k_weight=k_weight,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    _qk_norm_rope_append_(
        qkv,
        q_out,
        k_cache,
        v_cache,
        slot_mapping,
        positions=positions,
        cos_sin=cos_sin,
        bias=bias,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        weight_offset=weight_offset,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _check_side(
    op: str, name: str, x: Tensor, dim: int | torch.SymInt, cache: Tensor, scale: Tensor | None
) -> None:
    """The pages and scales of K, or of V: cache is 4-D, its dtype and scale fit x's."""
    check(op, cache.dim() == 4, f"{name}_cache: expected 4 dimensions, got {tuple(cache.shape)}")
    check(
        op,
        cache.shape[3] == dim,
        f"{name}_cache: expected heads of size {dim}, got {tuple(cache.shape)}",
    )
    check(
        op,
        cache.dtype == x.dtype or cache.dtype in _QUANTIZED,
        f"{name}_cache: expected dtype {x.dtype}, int8 or float8_e4m3fn, got {cache.dtype}",
    )
    quantized = cache.dtype in _QUANTIZED
    check(
        op,
        quantized == (scale is not None),
        f"{name}_scale: expected {'a tensor' if quantized else 'none'} with {cache.dtype} pages",
    )
    if scale is not None:
        check(op, scale.dtype == torch.float32, f"{name}_scale: expected float32")
        check(
            op,
            scale.dim() in (1, 3),
            f"{name}_scale: expected shape [Hk] or [num_blocks, Hk, block_size]",
        )
        expected = (cache.shape[1],) if scale.dim() == 1 else tuple(cache.shape[:3])
        for got, size in zip(scale.shape, expected, strict=True):
            check(op, got == size, f"{name}_scale: expected shape {expected}")


@torch.library.register_fake("fastinfer::append_paged_kv_cache_")
def _(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    op = "append_paged_kv_cache_"
    check_devices(
        op,
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    for name, x, cache, scale in (("k", k, k_cache, k_scale), ("v", v, v_cache, v_scale)):
        check(op, x.dim() == 3, f"{name}: expected 3 dimensions [T, Hk, D], got {tuple(x.shape)}")
        _check_side(op, name, x, x.shape[2], cache, scale)
        heads = x.shape[1]
        check(op, cache.shape[1] == heads, f"{name}_cache: expected {heads} heads")
    check(op, v.dtype == k.dtype, f"v: expected dtype {k.dtype} as k, got {v.dtype}")
    check(op, slot_mapping.dtype == torch.int64, "slot_mapping: expected int64")
    check(op, slot_mapping.dim() == 1, "slot_mapping: expected shape [T]")
    for name, tokens in (("v", v.shape[0]), ("slot_mapping", slot_mapping.shape[0])):
        check(op, tokens == k.shape[0], f"{name}: expected {k.shape[0]} tokens as k, got {tokens}")


@torch.library.register_fake("fastinfer::qk_norm_rope_append_")
def _(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    op = "qk_norm_rope_append_"
    check_devices(
        op,
        qkv=qkv,
        q_out=q_out,
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=slot_mapping,
        positions=positions,
        cos_sin=cos_sin,
        bias=bias,
        q_weight=q_weight,
        k_weight=k_weight,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check(op, qkv.dim() == 2, f"qkv: expected 2 dimensions, got {tuple(qkv.shape)}")
    check(op, qkv.is_floating_point(), f"qkv: expected a float tensor, got {qkv.dtype}")
    check(op, q_out.dim() == 3, f"q_out: expected shape [T, H, D], got {tuple(q_out.shape)}")
    check(op, q_out.dtype == qkv.dtype, f"q_out: expected dtype {qkv.dtype}, got {q_out.dtype}")
    tokens, heads, dim = q_out.shape
    _check_side(op, "k", qkv, dim, k_cache, k_scale)
    check(op, v_cache.dim() == 4, f"v_cache: expected 4 dimensions, got {tuple(v_cache.shape)}")
    kv_heads, value_dim = v_cache.shape[1], v_cache.shape[3]
    _check_side(op, "v", qkv, value_dim, v_cache, v_scale)
    check(op, k_cache.shape[1] == kv_heads, f"v_cache: expected {k_cache.shape[1]} heads")
    columns = heads * dim + kv_heads * (dim + value_dim)
    check(op, qkv.shape[1] == columns, f"qkv: expected {columns} columns, got {qkv.shape[1]}")
    check(op, (positions is None) == (cos_sin is None), "positions, cos_sin: expected both or none")
    if cos_sin is not None:
        check(op, cos_sin.dtype == torch.float32, f"cos_sin: expected float32, got {cos_sin.dtype}")
        check(op, cos_sin.dim() == 2, f"cos_sin: expected shape [P, R], got {tuple(cos_sin.shape)}")
        check(
            op,
            cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= dim,
            f"cos_sin: expected an even number of columns up to {dim}, got {cos_sin.shape[1]}",
        )
    vectors = (("bias", bias, columns), ("q_weight", q_weight, dim), ("k_weight", k_weight, dim))
    for name, vector, size in vectors:
        if vector is not None:
            check(op, vector.dim() == 1, f"{name}: expected 1 dimension, got {vector.dim()}")
            check(op, vector.shape[0] == size, f"{name}: expected {size} elements")
    for name, index in (("slot_mapping", slot_mapping), ("positions", positions)):
        if index is not None:
            check(op, index.dtype == torch.int64, f"{name}: expected int64, got {index.dtype}")
            check(op, index.dim() == 1, f"{name}: expected shape [T], got {tuple(index.shape)}")
            check(op, index.shape[0] == tokens, f"{name}: expected {tokens} tokens as q_out")
    check(op, qkv.shape[0] == tokens, f"qkv: expected {tokens} tokens as q_out")
