"""`DecoderLayer`: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.models.architectures import WeightNames
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.linear import Linear
from fastinfer.models.norm import NORMS, Norm, RMSNorm

_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": functools.partial(ops.gelu_and_mul, tanh_approx=True),
}


@dataclass(frozen=True)
class AttentionStep:
    """What all layers with the same kind of attention share in one step."""

    plan: Tensor
    window_left: int
    cos_sin: Tensor | None
    """The rotary table; None: positions are in the embeddings."""
    batch_invariant: bool


class DecoderLayer(nn.Module):
    """One layer; ``config`` says which norms, biases and activation it has.

    With ``quantization`` its projections are quantized, as `Linear` says; with ``deferred`` they
    have no memory before `allocate`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(n_in: int, n_out: int, bias: bool) -> Linear:
            return Linear(
                n_in,
                n_out,
                bias=bias,
                dtype=dtype,
                device=device,
                quantization=quantization,
                deferred=deferred,
            )

        def norm(size: int, wanted: bool = True) -> Norm | None:
            return make_norm(config, size, dtype, device) if wanted else None

        def head_norm() -> RMSNorm:
            offset = config.norm_weight_offset
            return RMSNorm(
                head_dim, eps=config.norm_eps, weight_offset=offset, dtype=dtype, device=device
            )

        self.input_norm = make_norm(config, hidden, dtype, device)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * head_dim, config.qkv_bias)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm else None
        self.attention_out = linear(heads * head_dim, hidden, config.attention_out_bias)
        self.attention_post_norm = norm(hidden, config.post_norms)
        self.mlp_norm = make_norm(config, hidden, dtype, device)
        self.up = linear(hidden, (1 + config.gated_mlp) * width, config.mlp_bias)
        self.down = linear(width, hidden, config.mlp_bias)
        self.mlp_post_norm = norm(hidden, config.post_norms)
        self._activation = _GATED[config.activation]
        if not config.gated_mlp:
            self._activation = functools.partial(_ungated, self._activation)

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        step: AttentionStep,
    ) -> Tensor:
        """Adds ``hidden`` (None at the first layer) to ``residual``; returns what to add next."""
        if hidden is None:
            hidden = self.input_norm(residual)
        else:
            self.input_norm.add_inplace(hidden, residual)
        hidden = self._attention(hidden, k_cache, v_cache, batch, step)
        if self.attention_post_norm is not None:
            self.attention_post_norm.into(hidden, hidden)
        self.mlp_norm.add_inplace(hidden, residual)
        out: Tensor = self.down(self._activation(self.up(hidden)))
        if self.mlp_post_norm is not None:
            self.mlp_post_norm.into(out, out)
        return out

    def _attention(
        self, hidden: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, step: AttentionStep
    ) -> Tensor:
        config = self.config
        heads = config.num_heads
        qkv = self.qkv(hidden)
        q = qkv[:, : heads * config.head_dim].view(-1, heads, config.head_dim)
        ops.qk_norm_rope_append_(
            qkv,
            q,
            k_cache,
            v_cache,
            batch.slot_mapping,
            positions=None if step.cos_sin is None else batch.positions,
            cos_sin=step.cos_sin,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=config.norm_eps,
            weight_offset=config.norm_weight_offset,
        )
        attended, _ = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=config.attention_scale,
            window_left=step.window_left,
            plan=step.plan,
            batch_invariant=step.batch_invariant,
        )
        out: Tensor = self.attention_out(attended.flatten(1))
        return out

    def pack(self) -> None:
        """Brings the filled projections into the layout that they are used in."""
        for linear in (self.qkv, self.attention_out, self.up, self.down):
            linear.pack()

    def projections(self, names: WeightNames) -> dict[str, tuple[Linear, int]]:
        """Where those of `weight_slots` go that are weights of projections: into which one, and the
        first of their output features there.
        """
        found = {}
        for parts, linear, sizes in self._merged(names):
            first = 0
            for name, size in zip(parts, sizes, strict=True):
                found[name + ".weight"] = linear, first
                first += size
        return found

    def weight_slots(self, names: WeightNames) -> dict[str, Tensor]:
        """As `Decoder.weight_slots`, for this layer."""
        slots: dict[str, Tensor] = {}
        for name, norm in (
            (names.input_norm, self.input_norm),
            (names.q_norm, self.q_norm),
            (names.k_norm, self.k_norm),
            (names.attention_post_norm, self.attention_post_norm),
            (names.mlp_norm, self.mlp_norm),
            (names.mlp_post_norm, self.mlp_post_norm),
        ):
            if norm is not None:
                slots |= module_slots(norm, name)
        for parts, linear, sizes in self._merged(names):
            slots |= _linear_slots(linear, parts, sizes, names.transposed)
        return slots

    def _merged(self, names: WeightNames) -> Iterator[tuple[Sequence[str], Linear, Sequence[int]]]:
        """Projections with the parts that a checkpoint holds of each, and the parts' features."""
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for parts, linear, sizes in (
            (names.qkv, self.qkv, (q, kv, kv)),
            (names.attention_out, self.attention_out, (config.hidden_size,)),
            (names.up, self.up, (config.intermediate_size,) * (1 + config.gated_mlp)),
            (names.down, self.down, (config.hidden_size,)),
        ):
            yield parts, linear, sizes if len(parts) > 1 else (sum(sizes),)


def make_norm(config: ModelConfig, size: int, dtype: torch.dtype, device: torch.device) -> Norm:
    """A norm of the kind that the model has."""
    return NORMS[config.norm](
        size,
        eps=config.norm_eps,
        weight_offset=config.norm_weight_offset,
        dtype=dtype,
        device=device,
    )


def module_slots(module: nn.Module, name: str) -> dict[str, Tensor]:
    """The parameters of a module under its name in checkpoints."""
    return {f"{name}.{n}": p.data for n, p in module.named_parameters(recurse=False)}


def _linear_slots(
    linear: Linear, parts: Sequence[str], sizes: Sequence[int], transposed: bool
) -> dict[str, Tensor]:
    """Views of a merged projection, a part each."""
    slots = {}
    for name, slot in zip(parts, torch.split(linear.plain_weight(), list(sizes)), strict=True):
        slots[name + ".weight"] = slot.t() if transposed else slot
    if linear.bias is not None:
        for name, slot in zip(parts, torch.split(linear.bias.data, list(sizes)), strict=True):
            slots[name + ".bias"] = slot
    return slots


def _ungated(gated: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The activation alone, as a gate of ones.

    torch's own activations round some elements differently by where they lie in the tensor, which
    would let a token's result depend on the batch.
    """
    return gated(torch.cat((x, torch.ones_like(x)), -1))
