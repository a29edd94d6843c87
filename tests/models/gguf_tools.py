"""Writes tiny GGUF files."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fastinfer.models.gguf_checkpoint import _LAYER_NAMES, _NAMES

# A byte-level BPE over a few characters, with special tokens. "Ġ" is the byte of a space.
TOKENS = ["<|end|>", "<|start|>", "<|call|>", *"abcdeABC0123456789!\u0120\u010a", "ab", "abc", "12"]
TYPES = [3, 3, 4, *[1] * (len(TOKENS) - 3)]
MERGES = ["a b", "ab c", "1 2"]


def tokenizer_fields(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    """The tokenizer's metadata."""
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in {**fields, **changes}.items()}


def write_gguf(
    path: Path,
    model: Any,
    *,
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
    metadata: dict[str, Any] | None = None,
    leave_out: str = "",
    more_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Writes a transformers model as llama.cpp's converter does; a metadata None removes a key."""
    config = model.config
    arch = config.model_type
    fields: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.vocab_size": config.vocab_size,
        **tokenizer_fields(),
        **(metadata or {}),
    }
    architecture = fields.pop("general.architecture", arch)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add_field(writer, key, value)
    names = {v: k for k, v in _NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        parts = name.split(".")
        if name not in names:
            layer_names = {v: k for k, v in _LAYER_NAMES.items()}
            short = layer_names[".".join(parts[3:-1])]
            names[name] = f"blk.{parts[2]}.{short}.{parts[-1]}"
        data = tensor.numpy()
        if arch == "llama" and parts[-2] in ("q_proj", "k_proj"):
            heads = len(data) // config.head_dim
            data = data.reshape(heads, 2, config.head_dim // 2, *data.shape[1:])
            data = np.ascontiguousarray(data.swapaxes(1, 2).reshape(tensor.shape))
        kind = (quantized or {}).get(parts[-2])
        if kind is not None:
            writer.add_tensor(names[name], gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], data)
    for name, data in (more_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a metadata field, its type taken from the value; None leaves it out."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
