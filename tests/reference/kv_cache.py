"""New keys and values on their way into pages."""

import torch
from torch import Tensor

from tests.reference.norm import rms_norm
from tests.reference.rotary import rotary_embedding_
from tests.reference.threads import single_threaded

INT8_MAX = 127.0
FP8_MAX = 448.0


def quantize_rows(x: Tensor, storage: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, Hk, D] -> (stored [T, Hk, D], scale [T, Hk]); defined in float32, so bit-exact.

    Without a scale, one is taken from each row: amax / 127 or amax / 448, and 1 for a zero row.
    """
    limit = INT8_MAX if storage == torch.int8 else FP8_MAX
    x = x.float()
    if scale is None:
        scale = x.abs().amax(-1) / limit
        scale = torch.where(scale == 0, 1.0, scale)
    else:
        scale = scale.float().expand(x.shape[:2])
    scaled = x / scale.unsqueeze(-1)
    if storage == torch.int8:
        scaled = torch.round(scaled)
    return scaled.clamp(-limit, limit).to(storage), scale


@single_threaded
def append_paged_kv_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The caches and scales as they are afterwards: (k_cache, v_cache, k_scale, v_scale)."""
    k_cache, k_scale = _append(k, k_cache, slot_mapping, k_scale)
    v_cache, v_scale = _append(v, v_cache, slot_mapping, v_scale)
    return k_cache, v_cache, k_scale, v_scale


def _append(
    x: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    block_size = cache.shape[2]
    tokens = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[tokens]
    block, offset = slots // block_size, slots % block_size
    rows = x[tokens]
    cache = cache.clone()
    if scale is None:
        cache[block, :, offset] = rows
        return cache, None
    per_token = scale.dim() == 3
    stored, row_scale = quantize_rows(rows, cache.dtype, None if per_token else scale)
    cache.view(torch.uint8)[block, :, offset] = stored.view(torch.uint8)
    if per_token:
        scale = scale.clone()
        scale[block, :, offset] = row_scale
    return cache, scale


@single_threaded
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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(q_out, k_cache, v_cache, k_scale, v_scale) afterwards.

    q_out and pages that are not quantized are in `dtype`; what is quantized is rounded to qkv's.
    """
    heads, dim = q_out.shape[1:]
    kv_heads, value_dim = v_cache.shape[1], v_cache.shape[3]
    x = qkv.to(dtype) if bias is None else qkv.to(dtype) + bias.to(dtype)
    parts = x.split((heads * dim, kv_heads * dim, kv_heads * value_dim), dim=1)
    q, k = parts[0].unflatten(1, (heads, dim)), parts[1].unflatten(1, (kv_heads, dim))
    v = parts[2].unflatten(1, (kv_heads, value_dim))
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps, weight_offset=weight_offset, dtype=dtype)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps, weight_offset=weight_offset, dtype=dtype)
    if positions is not None and cos_sin is not None:
        q, turned = rotary_embedding_(
            q, k, positions, cos_sin, interleaved=interleaved, dtype=dtype
        )
        assert turned is not None
        k = turned
    stored = []
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is None:
            stored.append(_append(rows, cache.to(dtype), slot_mapping, None))
        else:
            stored.append(_append(rows.to(qkv.dtype), cache, slot_mapping, scale))
    return q, stored[0][0], stored[1][0], stored[0][1], stored[1][1]
