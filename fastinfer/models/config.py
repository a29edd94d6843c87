"""`ModelConfig`: what the decoder needs to know, from config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Architecture:
    """What sets one family of models apart; a row of `ARCHITECTURES`."""

    name: str
    """`model_type` in config.json and `general.architecture` in a GGUF file."""
    hf_class: str
    """The causal language model in config.json's `architectures`."""
    hf_biases: Callable[[Mapping[str, Any]], dict[str, bool]]
    """The bias fields of `ModelConfig` from config.json."""
    gguf_biases: dict[str, bool]
    """The same for GGUF files, which do not record them."""
    gguf_interleaves_qk: bool
    """GGUF files hold the rows of q and k for the interleaved rotary embedding (pairs 2i, 2i+1)."""


def _llama_biases(fields: Mapping[str, Any]) -> dict[str, bool]:
    attention = bool(fields.get("attention_bias", False))
    return {
        "qkv_bias": attention,
        "attention_out_bias": attention,
        "mlp_bias": bool(fields.get("mlp_bias", False)),
    }


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("llama", "LlamaForCausalLM", _llama_biases, {}, gguf_interleaves_qk=True),
        Architecture(
            "qwen2",
            "Qwen2ForCausalLM",
            lambda fields: {"qkv_bias": True},
            {"qkv_bias": True},
            gguf_interleaves_qk=False,
        ),
    )
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer: RMSNorm, rotary embedding, GQA, gated SiLU MLP.

    Raises:
        ValueError: a size that is not positive, or sizes that do not go together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The context the model was made for, in tokens."""
    norm_eps: float
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    """The output projection is the embedding matrix."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    dtype: torch.dtype = torch.float32
    """The type the weights were saved in (bfloat16 for quantized files)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        architecture(self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"model config: {name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2 or self.head_dim > 512:
            raise ValueError(f"model config: head_dim must be even and <= 512, got {self.head_dim}")
        if not self.norm_eps >= 0 or not self.rope_theta > 0:
            raise ValueError(
                "model config: norm_eps >= 0 and rope_theta > 0 expected, got "
                f"{self.norm_eps} and {self.rope_theta}"
            )

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a Hugging Face config.json.

        Raises:
            ValueError: an unknown architecture, a missing or malformed key, or a feature that is
                not
                supported; named.
        """
        arch = architecture(fields.get("model_type"), fields.get("architectures"))
        _refuse_hf_features(fields)
        heads = _integer(fields, "num_attention_heads")
        hidden = _integer(fields, "hidden_size")
        kv_heads = _integer(fields, "num_key_value_heads", default=heads)
        return cls(
            architecture=arch.name,
            vocab_size=_integer(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(fields, "intermediate_size"),
            num_layers=_integer(fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_integer(fields, "head_dim", default=hidden // max(heads, 1)),
            max_position_embeddings=_integer(fields, "max_position_embeddings"),
            norm_eps=_number(fields, "rms_norm_eps"),
            rope_theta=_hf_rope_theta(fields),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            dtype=_hf_dtype(fields),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=token_ids(fields.get("eos_token_id"), "eos_token_id"),
            **arch.hf_biases(fields),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
        """From the metadata and tensor names of a GGUF file; raises as `from_hf` does."""
        arch = architecture(metadata.get("general.architecture"))
        prefix = arch.name + "."
        fields = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
        _refuse_gguf_features(fields, metadata, tensor_names)
        heads = _integer(fields, "attention.head_count")
        hidden = _integer(fields, "embedding_length")
        head_dim = _integer(fields, "attention.key_length", default=hidden // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if _integer(fields, key, default=head_dim) != head_dim:
                raise ValueError(
                    f"model config: {prefix}{key} = {fields[key]} is not supported: expected the "
                    f"head size, {head_dim}"
                )
        vocab = _integer(
            fields, "vocab_size", default=len(metadata.get("tokenizer.ggml.tokens", ()))
        )
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        return cls(
            architecture=arch.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=_integer(fields, "feed_forward_length"),
            num_layers=_integer(fields, "block_count"),
            num_heads=heads,
            num_kv_heads=_integer(fields, "attention.head_count_kv", default=heads),
            head_dim=head_dim,
            max_position_embeddings=_integer(fields, "context_length"),
            norm_eps=_number(fields, "attention.layer_norm_rms_epsilon"),
            rope_theta=_number(fields, "rope.freq_base", default=10000.0),
            tie_word_embeddings="output.weight" not in tensor_names,
            dtype=torch.bfloat16,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=token_ids(eos, "tokenizer.ggml.eos_token_id"),
            **arch.gguf_biases,
        )


def architecture(name: object, hf_classes: object = None) -> Architecture:
    """The row of `ARCHITECTURES` for a model_type and, where given, config.json's `architectures`.

    Raises:
        ValueError: naming the unknown architecture and the supported ones.
    """
    arch = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if arch is None or (hf_classes and arch.hf_class not in hf_classes):  # type: ignore[operator]
        known = ", ".join(f"{a.name} ({a.hf_class})" for a in ARCHITECTURES.values())
        given = f"{name!r}" + (f" {hf_classes}" if hf_classes else "")
        raise ValueError(f"model config: unknown architecture {given}; supported: {known}")
    return arch


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Token ids from what configurations hold: nothing, one id, or a list of them."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"model config: {key} must be a token id or a list of them, got {value!r}")
    return ids


def _refuse_hf_features(fields: Mapping[str, Any]) -> None:
    """Raises for what would change the result but is not implemented."""
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(
            f"model config: hidden_act {activation!r} is not supported; expected 'silu'"
        )
    quantization = fields.get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise ValueError(f"model config: quantization_config ({method!r}) is not supported")
    layers = fields.get("num_hidden_layers", 0)
    window = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    other = {t for t in fields.get("layer_types") or () if t != "full_attention"}
    if other or (window is not None and fields.get("max_window_layers", 0) < layers):
        raise ValueError(
            f"model config: sliding-window attention ({window or sorted(other)}) is not supported"
        )
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "model config: partial_rotary_factor "
            f"{fields['partial_rotary_factor']} is not supported"
        )


def _hf_rope_theta(fields: Mapping[str, Any]) -> float:
    """The rotary base; `rope_parameters` is how transformers 5 writes it, the others are older."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"model config: rope_parameters must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported; expected 'default'"
        )
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise ValueError("model config: rope_parameters per layer type are not supported")
    where = rope if "rope_theta" in rope else fields
    return _number(where, "rope_theta", default=10000.0)


def _hf_dtype(fields: Mapping[str, Any]) -> torch.dtype:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"model config: dtype must be one of {sorted(DTYPES)}, got {name!r}")
    return dtype


def _refuse_gguf_features(
    fields: Mapping[str, Any], metadata: Mapping[str, Any], tensor_names: Collection[str]
) -> None:
    """Raises for what would change the result but is not implemented."""
    scaling = fields.get("rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensor_names:
        kind = scaling if scaling != "none" else "rope_freqs.weight"
        raise ValueError(f"model config: rope scaling {kind!r} is not supported; expected 'none'")
    for key in ("expert_count", "attention.sliding_window"):
        if fields.get(key):
            raise ValueError(f"model config: {key} = {fields[key]} is not supported")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"model config: a GGUF file in {metadata['split.count']} parts is not supported; "
            "merge them first"
        )


def _integer(fields: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"model config: the key {key!r} is missing")
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model config: {key} must be an integer, got {value!r}")
    return value


def _number(fields: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"model config: the key {key!r} is missing")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"model config: {key} must be a number, got {value!r}")
    return float(value)
