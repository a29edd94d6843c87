"""Attention layers of transformers' decoders with one projection and rotary embedding in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastinfer import ops
from fastinfer.integrations.transformers import attention
from fastinfer.nn._apart import list_apart
from fastinfer.nn.merged_linear import MergedLinear
from fastinfer.nn.norm import OP_DTYPES, wants_grad
from fastinfer.nn.rotary import rotate

# What a layer may have that is no part of its result, or that is looked at below.
_ATTRIBUTES = {
    "training", "config", "layer_idx", "layer_type", "head_dim", "num_key_value_groups",
    "num_key_value_heads", "scaling", "attention_dropout", "is_causal", "sliding_window",
    "is_sliding", "attn_logit_softcapping",
}  # fmt: skip
_SPLIT = ("q_proj", "k_proj", "v_proj")
_CHILDREN = {*_SPLIT, "qkv_proj", "o_proj", "q_norm", "k_norm"}


class Rotation(NamedTuple):
    """What `RotaryTables` hands to the layers in the place of cosines and sines."""

    cos_sin: Tensor
    """fp32 [P, R]: a row for each position."""
    rows: Tensor
    """int64 [B * S]: each token's row."""


class RotaryTables(nn.Module):
    """Makes the table of cosines and sines of a step once, for all layers.

        cos_sin[t] = [cos(position_t * inv_freq), sin(position_t * inv_freq)] * attention_scaling

    Angles are computed in float64 and results kept in fp32, whatever the model's dtype.

    Args:
        original: transformers' module; its frequencies are read at each call.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    @staticmethod
    def agrees(original: Any) -> bool:
        """Whether transformers' module has the cosines and sines that this one computes."""
        types = original.rope_type if isinstance(original.rope_type, dict) else {None: None}
        positions, tables = torch.arange(7)[None], RotaryTables(original)
        for layer_type in types:
            device = next(original.buffers()).device
            x, options = torch.zeros(1, 7, 1, device=device), {}
            if layer_type is not None:
                options = {"layer_type": layer_type}
            cos, sin = original(x, positions.to(device), **options)
            got = tables(x, positions.to(device), **options).cos_sin
            half = cos.shape[-1] // 2
            expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
            repeated = torch.equal(cos[..., :half], cos[..., half:])
            if not repeated or not torch.allclose(got, expected, rtol=0.0, atol=1e-5):
                return False
        return True

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
        """The rotation of tokens [B, S, hidden] at position_ids [B or 1, S]."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq = getattr(self.original, f"{prefix}inv_freq")
        scaling = getattr(self.original, f"{prefix}attention_scaling")
        angles = position_ids.flatten()[:, None].double() * inv_freq.to(x.device).double()
        table = torch.cat((angles.cos(), angles.sin()), -1) * scaling
        rows = torch.arange(position_ids.numel(), device=x.device).view(position_ids.shape)
        return Rotation(table.float(), rows.expand(x.shape[:2]).flatten().contiguous())


class MergedAttention(nn.Module):
    """A decoder's attention layer: [q | k | v] = qkv_proj(x), norms of heads, rotary, o_proj.

    Args:
        original: a layer for which `why_not` knows no reason. Its projections are copied into one
            where they are apart; all else is kept. State_dicts have the names of the original.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        config = original.config
        self.config = config
        self.layer_idx = original.layer_idx
        self.head_dim = original.head_dim
        self.scaling = original.scaling
        self.is_causal = original.is_causal
        self.attention_dropout = original.attention_dropout
        self.num_key_value_groups = original.num_key_value_groups
        window = getattr(config, "sliding_window", None)
        self.sliding_window = getattr(original, "sliding_window", window)
        if hasattr(original, "qkv_proj"):
            self.qkv_proj: nn.Module = original.qkv_proj
        else:
            parts = {name: getattr(original, name) for name in _SPLIT}
            self.qkv_proj = MergedLinear(list(parts.values())).linear
            if isinstance(self.qkv_proj, nn.Linear):
                sizes = {name: part.out_features for name, part in parts.items()}
                list_apart(self, {"qkv_proj": sizes})
        self.o_proj = original.o_proj
        self.q_norm = getattr(original, "q_norm", None)
        self.k_norm = getattr(original, "k_norm", None)
        self.train(original.training)

    @staticmethod
    def why_not(layer: nn.Module) -> str | None:
        """Why a layer cannot be replaced, as far as its parts tell; None: it can be tried."""
        children = {name for name, _ in layer.named_children()}
        attributes = {name for name in vars(layer) if not name.startswith("_")}
        unknown = children - _CHILDREN | attributes - _ATTRIBUTES
        unknown |= {name for name, _ in layer.named_parameters(recurse=False)}
        unknown |= {name for name, _ in layer.named_buffers(recurse=False)}
        if unknown:
            return f"has parts that are not understood: {', '.join(sorted(unknown))}"
        if getattr(layer, "attn_logit_softcapping", None) is not None:
            return "has softcapped scores"
        # OLMo's layers ask their config; few random tokens would not come that far.
        if getattr(getattr(layer, "config", None), "clip_qkv", None) is not None:
            return "clips projections"
        return None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | Rotation | None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the layers of transformers: the result [B, S, hidden], and weights if there are any.

        Args:
            hidden_states: [B, S, hidden].
            position_embeddings: a `Rotation`, or cosines and sines [B, S, R]; None: no rotation.
            attention_mask: as the model made it.
            cache, past_key_values: transformers' cache, by its present or former name.
        """
        batch, size = hidden_states.shape[:2]
        qkv = self.qkv_proj(hidden_states).view(batch, size, -1, self.head_dim)
        kv_heads = qkv.shape[2] // (self.num_key_value_groups + 2)
        q, k, v = qkv.split([qkv.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if any(
            m is not None and m._forward_hooks for m in (self.qkv_proj, self.q_norm, self.k_norm)
        ):
            q, k = q.clone(), k.clone()  # a hook may have kept what would be written over
        if position_embeddings is not None:
            q, k = _rotated(q, k, _rotation(position_embeddings, batch))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        cache = past_key_values if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=options)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attention)
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **options,
        )
        return self.o_proj(out.reshape(batch, size, -1)), weights


def _rotation(embeddings: tuple[Tensor, Tensor] | Rotation, batch: int) -> Rotation:
    if isinstance(embeddings, Rotation):
        return embeddings
    # Cosines and sines come twice, for both features of a pair.
    cos, sin = (x[..., : x.shape[-1] // 2].expand(batch, -1, -1) for x in embeddings)
    table = torch.cat((cos, sin), -1).flatten(0, 1).float()
    return Rotation(table, torch.arange(len(table), device=table.device))


def _rotated(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """q and k [B, S, heads, D] turned; where they are if nobody wants a gradient."""
    if wants_grad(q, k) or q.dtype not in OP_DTYPES:
        return rotate(q, k, rotation.rows, rotation.cos_sin)
    flat_q, flat_k = (x.view(-1, *x.shape[2:]) for x in (q, k))
    ops.rotary_embedding_(flat_q, flat_k, rotation.rows, rotation.cos_sin)
    return q, k
