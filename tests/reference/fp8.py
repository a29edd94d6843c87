"""Attention of e4m3 queries, keys and values: what they stand for, and a yardstick for kernels.

The reference of an e4m3 call is that of the dequantized tensors. The yardstick is what
tensor cores of that format allow: weights exp(s - largest s) are rounded to e4m3 before they meet
the values, and everything else is float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.attention import visible_keys, weighted_sum
from tests.reference.threads import single_threaded

FP8 = torch.float8_e4m3fn
_WEIGHT_SCALE = 256.0  # the largest weight is 1, the largest power of 2 in e4m3 is 256


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """What e4m3 [..., H, D] with a scale for each head, [H], stands for; None is 1."""
    return x.to(dtype) if scale is None else x.to(dtype) * scale.to(dtype)[:, None]


@single_threaded
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    **visibility,
) -> Tensor:
    """Dense, on dequantized float32 q [B, Sq, H, D], k and v -> float32 out [B, Sq, H, Dv]."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    outs = []
    for b in range(q.shape[0]):
        mask = None if tree_mask is None else tree_mask[b]
        visible = visible_keys(num_queries, num_keys, tree_mask=mask, **visibility).to(q.device)
        keys, values = (x[b].transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = q[b].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(visible, scores, -torch.inf)
        # One key more, of no weight: rows without keys have a maximum too.
        largest = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).amax(-1, keepdim=True)
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        weights = torch.where(visible, torch.exp(scores - largest), 0.0)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[:, None, None] - largest)
        rounded = (weights * _WEIGHT_SCALE).to(FP8).float() / _WEIGHT_SCALE
        out = weighted_sum(rounded, values, visible) / total
        outs.append(torch.where(visible.any(-1)[None, :, None], out, 0.0).transpose(0, 1))
    return torch.stack(outs)
