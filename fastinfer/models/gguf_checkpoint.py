"""A GGUF file as a checkpoint: names translated, weights dequantized and put back in order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastinfer.models.architectures import architecture
from fastinfer.models.checkpoint import CheckpointTensor, extra
from fastinfer.models.config import ModelConfig
from fastinfer.models.gguf_file import GGUFFile, GGUFTensor

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_CHUNK_ELEMENTS = 1 << 20  # dequantized at a time: a few MB, whatever the tensor's size


class GGUFCheckpoint:
    """Config and weights of a GGUF file; raises ValueError as `GGUFFile` and `ModelConfig` do."""

    quantization: str | None = None  # its types are dequantized on load

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = GGUFFile(path)
        try:
            self.config = ModelConfig.from_gguf(
                self.file.metadata, self.file.tensors.keys(), self._rope_factors()
            )
        except ValueError as error:
            raise ValueError(f"GGUF file {path}: {error}") from error
        self._interleaved = architecture(self.config.architecture).gguf_interleaves_qk

    def tensors(self) -> Iterator[CheckpointTensor]:
        """Every tensor of the file."""
        for tensor in self.file.tensors.values():
            slot = slot_name(tensor.name)
            rotated = slot is not None and self._interleaved
            heads = 0
            if rotated and ".attn_q." in tensor.name:
                heads = self.config.num_heads
            elif rotated and ".attn_k." in tensor.name:
                heads = self.config.num_kv_heads
            yield CheckpointTensor(
                tensor.name,
                slot,
                tensor.shape,
                tensor.type.name,
                not tensor.type.name.startswith("I") or tensor.type.name.startswith("IQ"),
                functools.partial(_copy, tensor, heads, self.path),
                is_buffer=tensor.name == _ROPE_FACTORS,
            )

    def _rope_factors(self) -> tuple[float, ...] | None:
        """What each rotary frequency is divided by, where the file says so."""
        tensor = self.file.tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        if len(tensor.shape) != 1:
            raise ValueError(f"tensor {_ROPE_FACTORS}: one dimension expected, got {tensor.shape}")
        values = torch.empty(tensor.shape)
        _copy(tensor, 0, self.path, values)
        return tuple(values.tolist())


def slot_name(name: str) -> str | None:
    """The name in `Decoder.weight_slots` of a GGUF tensor; None if there is none."""
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return None


def _copy(tensor: GGUFTensor, interleaved_heads: int, path: Path, out: Tensor) -> None:
    """Dequantizes ``tensor`` into ``out``, a few rows at a time.

    ``interleaved_heads``: the rows are that many heads whose features were reordered from (i, i +
    D/2) pairs to neighbours; they are put back. The reordered view of ``out`` is [heads, D/2, 2,
    ...], so whole heads are read at a time.
    """
    gguf: Any = extra("gguf.quants", "reading GGUF files")
    data, rows_per_item = tensor.data, 1
    if tensor.data.ndim == 1:
        data = data[None]
        out = out[None]
    if interleaved_heads:
        rows_per_item = tensor.shape[0] // interleaved_heads
        out = out.view(interleaved_heads, 2, rows_per_item // 2, *out.shape[1:]).transpose(1, 2)
    step = max(1, _CHUNK_ELEMENTS // (tensor.shape[-1] * rows_per_item))
    for begin in range(0, len(out), step):
        part = out[begin : begin + step]
        rows = data[begin * rows_per_item : (begin + len(part)) * rows_per_item]
        try:
            values = gguf.dequantize(rows, tensor.type)
        except NotImplementedError as error:
            raise ValueError(f"GGUF file {path}: tensor {tensor.name}: {error}") from error
        part.copy_(torch.from_numpy(values.reshape(part.shape)))
