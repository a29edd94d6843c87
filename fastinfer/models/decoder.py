"""One configurable decoder: what a model computes follows from its `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.linear import Linear, empty


@dataclass
class _Step:
    """What all layers of one step share."""

    batch: Batch
    cos_sin: Tensor
    plan: Tensor
    batch_invariant: bool


class Decoder(nn.Module):
    """A decoder-only transformer for inference: weights have no gradient.

    Args:
        config: its shape.
        dtype: of weights and activations.
        device: where it runs.
        max_model_len: positions that occur, 0 .. max_model_len - 1; sizes the rotary table.

    The weights are unset until `weight_slots` are filled. On the CPU in fp32, after
    `pack_weights`, each token's result is the same bit for bit whatever else is in the batch and
    however its prompt was cut into chunks.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_model_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = empty((config.vocab_size, config.hidden_size), dtype, device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)
        )
        self.norm = empty((config.hidden_size,), dtype, device)
        self.lm_head = Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        table = ops.rotary_cos_sin(inverse_frequencies(config), max_model_len).to(device)
        self.register_buffer("cos_sin", table, persistent=False)
        self.cos_sin: Tensor

    def forward(self, batch: Batch, kv_caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Computes a step; writes the tokens' keys and values into the pages.

        Args:
            batch: T tokens of B sequences.
            kv_caches: per layer its keys and values, each [num_blocks, num_kv_heads, block_size,
                head_dim].

        Returns:
            [T, hidden_size], after the last norm.
        """
        config = self.config
        residual = F.embedding(batch.input_ids, self.embed_tokens)
        if not len(residual):
            return residual
        batch_invariant = residual.device.type == "cpu"
        plan = ops.plan_attention(
            batch.cu_seqlens_q,
            batch.seq_lens,
            total_q=len(residual),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            batch_invariant=batch_invariant,
        )
        step = _Step(batch, self.cos_sin, plan, batch_invariant)
        hidden: Tensor | None = None
        for layer, (k_cache, v_cache) in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, residual, k_cache, v_cache, step)
        assert hidden is not None
        ops.fused_add_rms_norm_(hidden, residual, self.norm, config.norm_eps)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of R rows [R, hidden_size] that `forward` returned."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def weight_slots(self) -> dict[str, Tensor]:
        """Where each weight of a checkpoint goes: views into the (merged) parameters.

        The names are the ones that most families use in Hugging Face checkpoints; a loader for
        another naming translates. Weights that are filled once are packed by `pack_weights`; there
        are no slots after it.
        """
        slots: dict[str, Tensor] = {"model.embed_tokens.weight": self.embed_tokens.data}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            for name, slot in layer.weight_slots().items():
                slots[f"model.layers.{i}.{name}"] = slot
        slots["model.norm.weight"] = self.norm.data
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = _weight(self.lm_head)
        return slots

    def pack_weights(self) -> None:
        """Brings the filled projections into their fastest layout, one by one."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        hidden, width = config.hidden_size, config.intermediate_size
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

        def linear(n_in: int, n_out: int, bias: bool) -> Linear:
            return Linear(n_in, n_out, bias=bias, dtype=dtype, device=device)

        self.input_norm = empty((hidden,), dtype, device)
        self.qkv = linear(hidden, (heads + 2 * kv_heads) * head_dim, config.qkv_bias)
        self.attention_out = linear(heads * head_dim, hidden, config.attention_out_bias)
        self.mlp_norm = empty((hidden,), dtype, device)
        self.gate_up = linear(hidden, 2 * width, config.mlp_bias)
        self.down = linear(width, hidden, config.mlp_bias)

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: _Step,
    ) -> Tensor:
        """Adds ``hidden`` (None at the first layer) to ``residual``; returns what to add next."""
        config, batch = self.config, step.batch
        if hidden is None:
            hidden = ops.rms_norm(residual, self.input_norm, config.norm_eps)
        else:
            ops.fused_add_rms_norm_(hidden, residual, self.input_norm, config.norm_eps)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.qkv(hidden).view(-1, heads + 2 * kv_heads, config.head_dim)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        ops.rotary_embedding_(q, k, batch.positions, step.cos_sin)
        ops.append_paged_kv_cache_(k, v, k_cache, v_cache, batch.slot_mapping)
        attended, _ = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            plan=step.plan,
            batch_invariant=step.batch_invariant,
        )
        hidden = self.attention_out(attended.flatten(1))
        ops.fused_add_rms_norm_(hidden, residual, self.mlp_norm, config.norm_eps)
        out: Tensor = self.down(ops.silu_and_mul(self.gate_up(hidden)))
        return out

    def weight_slots(self) -> dict[str, Tensor]:
        """As `Decoder.weight_slots`, for this layer."""
        config = self.config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        slots = {
            "input_layernorm.weight": self.input_norm.data,
            "post_attention_layernorm.weight": self.mlp_norm.data,
        }
        for linear, parts in (
            (self.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
            (self.attention_out, {"self_attn.o_proj": config.hidden_size}),
            (
                self.gate_up,
                {
                    "mlp.gate_proj": config.intermediate_size,
                    "mlp.up_proj": config.intermediate_size,
                },
            ),
            (self.down, {"mlp.down_proj": config.hidden_size}),
        ):
            sizes = list(parts.values())
            for name, slot in zip(parts, torch.split(_weight(linear), sizes), strict=True):
                slots[name + ".weight"] = slot
            if linear.bias is not None:
                for name, slot in zip(parts, torch.split(linear.bias.data, sizes), strict=True):
                    slots[name + ".bias"] = slot
        return slots


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """The rotary embedding's inverse frequencies theta^(-2i/head_dim), fp32 [head_dim / 2].

    In fp32 and in this order of operations, since that is what models were trained with.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / (config.rope_theta**exponents)


def _weight(linear: Linear) -> Tensor:
    if linear.weight is None:
        raise RuntimeError("Decoder.weight_slots: the weights are packed and can no longer be set")
    return linear.weight.data
