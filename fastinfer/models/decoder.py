"""One configurable decoder: what a model computes follows from its `ModelConfig`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.models.architectures import HEAD, architecture
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.layer import AttentionStep, DecoderLayer, make_norm, module_slots
from fastinfer.models.linear import Linear, empty
from fastinfer.models.rotary import rotary_table


@dataclass(frozen=True)
class _AttentionKind:
    """What the attention of some layers has in common."""

    window_left: int
    """Tokens seen before the token itself; -1: all."""
    table: str | None
    """The buffer with their rotary table; None: they turn nothing."""


class Decoder(nn.Module):
    """A decoder-only transformer for inference: weights have no gradient.

    Args:
        config: its shape.
        dtype: of weights and activations.
        device: where it runs.
        max_model_len: positions that occur, 0 .. max_model_len - 1; sizes the rotary tables (and
            sets the frequencies of "dynamic" rope scaling).
        quantization: one of `fastinfer.models.linear.QUANTIZATIONS`: what layers' projections
            become when they are packed; embeddings, norms and the output projection are not
            quantized. None: nothing is.
        deferred: the weights of projections have no memory before `Linear.allocate`, for those that
            are given as codes instead (`Linear.set_codes`).

    The weights are unset until `weight_slots` are filled; plain weights of a layer that is
    quantized or deferred have memory between `Linear.allocate` and the layer's `pack` only. On the
    CPU in fp32, after `pack_weights`, each token's result is the same bit for bit whatever else is
    in the batch and however its prompt was cut into chunks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        quantization: str | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.quantization = quantization
        self.deferred = deferred
        self.embed_tokens = empty((config.vocab_size, config.hidden_size), dtype, device)
        self.embed_positions: nn.Parameter | None = None
        if config.positions == "learned":
            shape = (config.max_position_embeddings, config.hidden_size)
            self.embed_positions = empty(shape, dtype, device)
        # Rounded to the type of the weights, as the models were trained.
        scale = config.hidden_size**0.5 if config.scaled_embedding else 1.0
        self._embedding_scale = torch.tensor(scale).to(dtype).item()
        self._kinds, self._kind_of_layer = _attention_kinds(config, max_model_len)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config, dtype=dtype, device=device, quantization=quantization, deferred=deferred
            )
            for _ in range(config.num_layers)
        )
        self.norm = make_norm(config, config.hidden_size, dtype, device)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
            deferred=deferred,
        )
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        for name, (theta, scaling) in {
            "cos_sin": (config.rope_theta, config.rope_scaling),
            "local_cos_sin": (config.local_rope_theta, None),
        }.items():
            if theta is not None and any(kind.table == name for kind in self._kinds):
                table = rotary_table(theta, config.rotary_size, scaling, max_model_len, device)
                self.register_buffer(name, table, persistent=False)

    def forward(self, batch: Batch, kv_caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Computes a step; writes the tokens' keys and values into the pages.

        Args:
            batch: T tokens of B sequences.
            kv_caches: per layer its keys and values, each [num_blocks, num_kv_heads, block_size,
                head_dim].

        Returns:
            [T, hidden_size], after the last norm.
        """
        residual = self.embed(batch)
        if not len(residual):
            return residual
        hidden: Tensor | None = None
        for layer, step, (k_cache, v_cache) in zip(
            self.layers, self.layer_steps(batch), kv_caches, strict=True
        ):
            hidden = layer(hidden, residual, k_cache, v_cache, batch, step)
        assert hidden is not None
        self.norm.add_inplace(hidden, residual)
        return hidden

    def embed(self, batch: Batch) -> Tensor:
        """What goes into the first layer, a fresh [T, hidden_size]."""
        residual = F.embedding(batch.input_ids, self.embed_tokens)
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        if self.embed_positions is not None:
            residual.add_(F.embedding(batch.positions, self.embed_positions))
        return residual

    def layer_steps(self, batch: Batch) -> list[AttentionStep]:
        """What each layer's attention needs in a step; layers of one kind share it."""
        steps = self._attention_steps(batch)
        return [steps[kind] for kind in self._kind_of_layer]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of R rows [R, hidden_size] that `forward` returned."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def weight_slots(self) -> dict[str, Tensor]:
        """Where each weight of a checkpoint goes: views into the (merged) parameters.

        The names, and whether projections lie transposed, are those of the architecture's Hugging
        Face checkpoints; a loader for another naming translates. Weights that are filled once are
        packed by `pack_weights`; there are no slots after it.
        """
        names = architecture(self.config.architecture).names
        slots = {names.embed_tokens + ".weight": self.embed_tokens.data}
        if self.embed_positions is not None:
            slots[names.embed_positions + ".weight"] = self.embed_positions.data
        for i in range(len(self.layers)):
            slots |= self.layer_slots(i)
        slots |= module_slots(self.norm, names.norm)
        if not self.config.tie_word_embeddings:
            slots[HEAD] = self.lm_head.plain_weight()
        return slots

    def layer(self, i: int) -> DecoderLayer:
        """A layer by its number."""
        layer = self.layers[i]
        assert isinstance(layer, DecoderLayer)
        return layer

    def layer_slots(self, i: int) -> dict[str, Tensor]:
        """Those of `weight_slots` that are a layer's."""
        names = architecture(self.config.architecture).names
        slots = self.layer(i).weight_slots(names)
        return {f"{names.layers}.{i}.{name}": slot for name, slot in slots.items()}

    def layer_projections(self, i: int) -> dict[str, tuple[Linear, int]]:
        """As `DecoderLayer.projections`, by the names of `weight_slots`."""
        names = architecture(self.config.architecture).names
        found = self.layer(i).projections(names)
        return {f"{names.layers}.{i}.{name}": place for name, place in found.items()}

    def pack_weights(self) -> None:
        """Brings the filled projections into their fastest layout, one by one."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _attention_steps(self, batch: Batch) -> list[AttentionStep]:
        """Plans the step, once for each window."""
        config = self.config
        batch_invariant = batch.input_ids.device.type == "cpu"
        plans: dict[int, Tensor] = {}
        steps = []
        for kind in self._kinds:
            if kind.window_left not in plans:
                plans[kind.window_left] = ops.plan_attention(
                    batch.cu_seqlens_q,
                    batch.seq_lens,
                    total_q=batch.input_ids.shape[0],
                    num_heads=config.num_heads,
                    num_kv_heads=config.num_kv_heads,
                    max_seqlen_q=batch.max_seqlen_q,
                    max_seqlen_k=batch.max_seqlen_k,
                    window_left=kind.window_left,
                    batch_invariant=batch_invariant,
                )
            table = None if kind.table is None else self.get_buffer(kind.table)
            steps.append(
                AttentionStep(plans[kind.window_left], kind.window_left, table, batch_invariant)
            )
        return steps


def _attention_kinds(
    config: ModelConfig, max_model_len: int
) -> tuple[list[_AttentionKind], list[int]]:
    """The kinds of attention that occur, and which one each layer has."""
    kinds: dict[_AttentionKind, int] = {}
    of_layer = []
    for layer in range(config.num_layers):
        sliding = config.is_sliding(layer)
        window = config.sliding_window if sliding else None
        # A window that no sequence outgrows hides nothing.
        left = -1 if window is None or window >= max_model_len else window - 1
        table: str | None = "cos_sin"
        if sliding and config.local_rope_theta is not None:
            table = "local_cos_sin"
        if config.positions != "rotary":
            table = None
        of_layer.append(kinds.setdefault(_AttentionKind(left, table), len(kinds)))
    return list(kinds), of_layer
