"""The paged KV cache: new keys and values written into pages, quantized on the way if asked for.

Errors are ValueError and name the op, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, refuse_grad

_append_paged_kv_cache_ = torch.ops.fastinfer.append_paged_kv_cache_.default

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


def _check_side(name: str, x: Tensor, cache: Tensor, scale: Tensor | None) -> None:
    op = "append_paged_kv_cache_"
    check(op, x.dim() == 3, f"{name}: expected 3 dimensions [T, Hk, D], got {tuple(x.shape)}")
    check(op, cache.dim() == 4, f"{name}_cache: expected 4 dimensions, got {tuple(cache.shape)}")
    check(
        op,
        cache.shape[1] == x.shape[1] and cache.shape[3] == x.shape[2],
        f"{name}_cache: expected {x.shape[1]} heads of size {x.shape[2]}, got {tuple(cache.shape)}",
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
    _check_side("k", k, k_cache, k_scale)
    _check_side("v", v, v_cache, v_scale)
    check(op, v.dtype == k.dtype, f"v: expected dtype {k.dtype} as k, got {v.dtype}")
    check(op, slot_mapping.dtype == torch.int64, "slot_mapping: expected int64")
    check(op, slot_mapping.dim() == 1, "slot_mapping: expected shape [T]")
    for name, tokens in (("v", v.shape[0]), ("slot_mapping", slot_mapping.shape[0])):
        check(op, tokens == k.shape[0], f"{name}: expected {k.shape[0]} tokens as k, got {tokens}")
