"""`ModelConfig`: what the decoder needs to know, from config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastinfer.models.architectures import architecture, gguf_architecture
from fastinfer.models.fields import integer, number, token_ids, unsupported
from fastinfer.models.rotary import RopeScaling, gguf_scaling

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHOICES = {
    "norm": ("rms_norm", "layer_norm"),
    "positions": ("rotary", "learned"),
    "activation": ("silu", "gelu", "gelu_tanh"),
}
# The sizes that every config.json has, under these keys or a family's own.
_HF_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer.

    By default RMSNorm before attention and MLP, rotary embedding, GQA and a gated SiLU MLP.

    Raises:
        ValueError: a size that is not positive, or sizes that do not go together.
    """

    architecture: str
    """A key of `ARCHITECTURES`, which knows the checkpoints' names; all else follows from the
    other fields."""
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
    norm: str = "rms_norm"
    """Either "rms_norm" or "layer_norm" (with biases)."""
    norm_weight_offset: float = 0.0
    """Added to the stored weights of norms; dummy weights make the sum 1."""
    qk_norm: bool = False
    """Queries and keys get an RMSNorm per head before the rotary embedding."""
    post_norms: bool = False
    """What attention and MLP give is normalised before it is added to the residual stream."""
    activation: str = "silu"
    """One of "silu", "gelu" (by erf) and "gelu_tanh"."""
    gated_mlp: bool = True
    """down(activation(gate x) * up x); otherwise down(activation(up x))."""
    positions: str = "rotary"
    """Either "rotary" or "learned" (added to the embeddings)."""
    rotary_dim: int | None = None
    """The first features of each head that are turned; None: all."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """A token sees itself and the sliding_window - 1 tokens before it, in the layers that have
    one; None: all."""
    sliding_layers: tuple[bool, ...] | None = None
    """Which layers have the window; None: all."""
    local_rope_theta: float | None = None
    """The rotary base of sliding layers, which are not scaled, where it is their own."""
    attention_scale: float | None = None
    """Multiplies the scores; None: 1 / sqrt(head_dim)."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden_size), rounded to the model's type."""
    dtype: torch.dtype = torch.float32
    """The type the weights were saved in (bfloat16 for quantized files)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        architecture(self.architecture)
        for name in (*_HF_SIZES, "num_kv_heads", "head_dim", "sliding_window", "rotary_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model config: {name} must be >= 1, got {value}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"model config: {name} must be one of {choices}, got {getattr(self, name)!r}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2 or self.head_dim > 512:
            raise ValueError(f"model config: head_dim must be even and <= 512, got {self.head_dim}")
        if self.rotary_size % 2 or self.rotary_size > self.head_dim:
            raise ValueError(
                f"model config: rotary_dim must be even and <= head_dim ({self.head_dim}), got "
                f"{self.rotary_size}"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic" and self.rotary_size < 4:
            raise ValueError(
                "model config: rope scaling 'dynamic': at least 4 rotary features expected, got "
                f"{self.rotary_size}"
            )
        if scaling is not None and scaling.kind == "factors":
            expected, got = self.rotary_size // 2, len(scaling.frequency_factors)
            if got != expected:
                raise ValueError(
                    f"model config: rope scaling: {expected} frequency factors expected, got {got}"
                )
        if self.sliding_layers is not None and (
            self.sliding_window is None or len(self.sliding_layers) != self.num_layers
        ):
            raise ValueError(
                f"model config: sliding_layers goes with a sliding_window and {self.num_layers} "
                f"layers, got {self.sliding_window} and {len(self.sliding_layers)}"
            )
        thetas = [t for t in (self.rope_theta, self.local_rope_theta) if t is not None]
        if not self.norm_eps >= 0 or not all(t > 0 for t in thetas):
            raise ValueError(
                "model config: norm_eps >= 0 and rope_theta > 0 expected, got "
                f"{self.norm_eps} and {', '.join(map(str, thetas))}"
            )

    @property
    def rotary_size(self) -> int:
        """How many features of each head are turned."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def max_context(self) -> int:
        """The longest context that can be asked for, in tokens.

        Usually `max_position_embeddings`; rope scaling may stretch its original context beyond it.
        """
        if self.rope_scaling is None:
            return self.max_position_embeddings
        stretched = int(self.rope_scaling.original_context * self.rope_scaling.factor)
        return max(self.max_position_embeddings, stretched)

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has the sliding window."""
        if self.sliding_window is None:
            return False
        return self.sliding_layers is None or self.sliding_layers[layer]

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a Hugging Face config.json.

        A `quantization_config` is left aside: how weights are stored changes no shape.

        Raises:
            ValueError: an unknown architecture, a missing or malformed key, or a feature that is
                not supported; named.
        """
        arch = architecture(fields.get("model_type"), fields.get("architectures"))
        _refuse_hf_features(fields)
        keys = {name: arch.hf_keys.get(key, key) for name, key in _HF_SIZES.items()}
        own = arch.hf(fields)
        values = {n: integer(fields, key) for n, key in keys.items() if n not in own}
        heads, hidden = values["num_heads"], values["hidden_size"]
        values["num_kv_heads"] = integer(fields, "num_key_value_heads", default=heads)
        values["head_dim"] = integer(fields, "head_dim", default=hidden // max(heads, 1))
        shared: dict[str, Any] = {
            "architecture": arch.name,
            "norm_eps": number(fields, arch.hf_keys.get("rms_norm_eps", "rms_norm_eps")),
            "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
            "dtype": _hf_dtype(fields),
            "bos_token_id": fields.get("bos_token_id"),
            "eos_token_ids": token_ids(fields.get("eos_token_id"), "eos_token_id"),
        }
        return cls(**{**shared, **values, **own})

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        tensor_names: Collection[str],
        rope_factors: tuple[float, ...] | None = None,
    ) -> ModelConfig:
        """From the metadata and tensor names of a GGUF file; raises as `from_hf` does.

        Args:
            metadata: all keys.
            tensor_names: of all tensors.
            rope_factors: the values of `rope_freqs.weight`, where the file has it.
        """
        arch = gguf_architecture(metadata.get("general.architecture"))
        prefix = arch.name + "."
        fields = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
        _refuse_gguf_features(fields, metadata)
        heads = integer(fields, "attention.head_count")
        hidden = integer(fields, "embedding_length")
        context = integer(fields, "context_length")
        head_dim = integer(fields, "attention.key_length", default=hidden // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if integer(fields, key, default=head_dim) != head_dim:
                raise ValueError(
                    f"model config: {prefix}{key} = {fields[key]} is not supported: expected the "
                    f"head size, {head_dim}"
                )
        vocab = integer(
            fields, "vocab_size", default=len(metadata.get("tokenizer.ggml.tokens", ()))
        )
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        return cls(
            architecture=arch.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=integer(fields, "feed_forward_length"),
            num_layers=integer(fields, "block_count"),
            num_heads=heads,
            num_kv_heads=integer(fields, "attention.head_count_kv", default=heads),
            head_dim=head_dim,
            max_position_embeddings=context,
            norm_eps=number(fields, "attention.layer_norm_rms_epsilon"),
            rope_theta=number(fields, "rope.freq_base", default=10000.0),
            rope_scaling=gguf_scaling(fields, context, rope_factors),
            tie_word_embeddings="output.weight" not in tensor_names,
            dtype=torch.bfloat16,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=token_ids(eos, "tokenizer.ggml.eos_token_id"),
            **(arch.gguf or {}),
        )


def _refuse_hf_features(fields: Mapping[str, Any]) -> None:
    """Raises for what would change the result but is not implemented in any family."""
    for key in _EXPERTS:
        if fields.get(key):
            raise unsupported(key, fields[key], "a dense model")
    if fields.get("vision_config"):
        raise ValueError("model config: vision_config is not supported; expected a text model")


def _hf_dtype(fields: Mapping[str, Any]) -> torch.dtype:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"model config: dtype must be one of {sorted(DTYPES)}, got {name!r}")
    return dtype


def _refuse_gguf_features(fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Raises for what would change the result but is not implemented."""
    for key in ("expert_count", "attention.sliding_window"):
        if fields.get(key):
            raise ValueError(f"model config: {key} = {fields[key]} is not supported")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"model config: a GGUF file in {metadata['split.count']} parts is not supported; "
            "merge them first"
        )
