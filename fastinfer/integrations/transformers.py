"""`attn_implementation="fastinfer"` for transformers models; importing this registers it.

    import fastinfer.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fastinfer")

Causal masks (padded on either side, through sliding windows, of packed sequences, over dynamic and
static caches) become ranges of keys, which `flash_attention` and `flash_attention_varlen` take;
grouped heads, softcap and sinks as well. Queries that are padding result in 0.

What the ops do not take goes to torch's attention with the same meaning: other masks, gradients,
dropout, position biases, float64, heads larger than 512, and, while a model is being traced, masks
that depend on the contents of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from fastinfer import ops
from fastinfer.integrations.key_ranges import KeyRanges, bounds_of_one_row
from fastinfer.integrations.transformers_masks import attention_mask as make_mask
from fastinfer.nn.norm import OP_DTYPES, wants_grad

NAME = "fastinfer"
_MAX_HEAD_DIM = 512


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a transformers layer; the formula is that of `fastinfer.ops.flash_attention`.

    Args:
        module: the layer; without `is_causal`, its attribute of this name counts.
        query: [B, H, Sq, D].
        key, value: [B, Hk, Sk, D].
        attention_mask: what the model made of its inputs, or any mask of bools or floats
            [B, 1 or H, Sq, Sk].
        dropout, scaling, softcap, position_bias: as in transformers.
        s_aux: [H], the logits of sinks.
        cu_seq_lens_q, cu_seq_lens_k: the bounds of sequences packed into one row, where there is no
            mask that says it.
        output_attentions: whether the weights are wanted as well.

    Windows are what masks say; a layer's `sliding_window` is not looked at.

    Returns:
        [B, Sq, H, D] and, with output_attentions, [B, H, Sq, Sk].

    Raises:
        ValueError: a mask that is none of these, or bounds for several rows.
    """
    query, key, value = _of_one_dtype(query, key, value)
    softcap = softcap or None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    ranges, mask = _ranges_or_mask(attention_mask, bool(causal))
    if cu_seq_lens_q is not None and ranges is not None and ranges.bounds is None:
        if query.shape[0] != 1:
            raise ValueError(
                "fastinfer attention: cu_seq_lens_q: expected sequences packed into one row, got "
                f"{query.shape[0]} rows"
            )
        given = cu_seq_lens_q, cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
        ranges = KeyRanges(bounds_of_one_row(*given, query.shape[2]), ranges.window)
    if (
        mask is not None
        or dropout > 0.0
        or position_bias is not None
        or output_attentions
        or query.dtype not in OP_DTYPES
        or max(query.shape[-1], value.shape[-1]) > _MAX_HEAD_DIM
        or wants_grad(query, key, value, s_aux)
    ):
        if ranges is not None:
            mask = ranges.dense(query.shape[0], query.shape[2], key.shape[2], query.device)
        exact: dict[str, Any] = {
            "dropout": dropout,
            "scaling": scaling,
            "position_bias": position_bias,
        }
        if softcap is None and s_aux is None and not output_attentions:
            return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **exact)
        return _attention_by_formula(
            module, query, key, value, mask, softcap=softcap, s_aux=s_aux, **exact
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "causal": ranges is not None,
        "window_left": ranges.window - 1 if ranges is not None else -1,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.float(),
    }
    if ranges is None or ranges.bounds is None:
        return ops.flash_attention(q, k, v, **options)[0], None
    return _ragged_attention(q, k, v, ranges, options), None


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast hands them to torch's attention, where rotation has made some of them fp32."""
    device = tensors[0].device.type
    if len({x.dtype for x in tensors}) == 1 or not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def _ranges_or_mask(mask: Tensor | None, causal: bool) -> tuple[KeyRanges | None, Tensor | None]:
    """Ranges, a mask, or neither where every query sees every key."""
    if mask is None:
        return (KeyRanges(None, 0) if causal else None), None
    ranges = KeyRanges.of_mask(mask)
    if ranges is not None:
        return ranges, None
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "fastinfer attention: attention_mask: expected None, what the model made of a 2D mask, "
            f"or bools or floats [B, heads, Sq, Sk], got {mask.dtype} {tuple(mask.shape)}"
        )
    return None, mask


def _ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, options: dict[str, Any]
) -> Tensor:
    """Attention of [B, S, H, D] within ranges; 0 for queries outside of any."""
    batch, num_queries = q.shape[:2]
    flat_k, key_row = _tokens(k)
    flat_v, value_row = _tokens(v)
    if key_row != value_row:
        flat_k, flat_v, key_row = k.flatten(0, 1), v.flatten(0, 1), k.shape[1]
    cu_seqlens_q, cu_seqlens_k = ranges.cumulative_lengths(key_row)
    # What lies between two segments is the end of a row and the beginning of another one.
    between = 1 if num_queries == 1 else 2
    out, _ = ops.flash_attention_varlen(
        q.flatten(0, 1),
        flat_k,
        flat_v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=between * num_queries,
        max_seqlen_k=2 * key_row,
        **options,
    )
    return out.view(batch, num_queries, *out.shape[1:])


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """[B, S, H, D] as [T, H, D], and how many tokens one row is from the next.

    Where rows are a whole number of tokens apart, as in a cache [B, H, S, D], nothing is copied:
    the tokens between are there but belong to no row.
    """
    batch, size = x.shape[:2]
    if batch == 1:
        return x[0], size
    row, token = x.stride()[:2]
    if torch.compiler.is_compiling() or not token or row % token or row // token < size:
        return x.flatten(0, 1), size
    distance = row // token
    shape = ((batch - 1) * distance + size, *x.shape[2:])
    return x.as_strided(shape, x.stride()[1:]), distance


def _attention_by_formula(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention and its weights, step by step, in fp32 at least; a row that sees nothing is 0."""
    group = query.shape[1] // key.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if s_aux is None:
        weights = scores.softmax(-1)
    else:
        sinks = s_aux.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, 0.0)
    weights = F.dropout(weights, dropout, module.training)
    out = (weights @ v.repeat_interleave(group, 1)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights.to(query.dtype)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, make_mask)
