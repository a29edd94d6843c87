"""The supported families of models: what sets each apart, as rows of a table.

A row says how a family's configuration is read and what its checkpoints call the weights. What the
decoder computes follows from the fields of `ModelConfig` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastinfer.models.fields import integer, number, optional_integer, unsupported
from fastinfer.models.rotary import RopeScaling, hf_scaling

Fields = Mapping[str, Any]
HEAD = "lm_head.weight"
"""What all families call the output projection."""
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""The name in config.json and in `ModelConfig.activation`."""


@dataclass(frozen=True)
class WeightNames:
    """What a family's checkpoints call the modules; those of a layer come after its own name.

    Projections that the decoder merges are one name each, or a single one where the checkpoint
    holds them merged as well.
    """

    prefix: str = "model."
    embed_tokens: str = "model.embed_tokens"
    embed_positions: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_out: tuple[str, ...] = ("self_attn.o_proj",)
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    mlp_post_norm: str = ""
    transposed: bool = False
    """Projections are stored [in_features, out_features]."""
    prefix_optional: bool = False
    """Some checkpoints leave the prefix out."""
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Ends of names of tensors that are no weights: they follow from the config."""


@dataclass(frozen=True)
class Architecture:
    """What sets one family of models apart; a row of `ARCHITECTURES`."""

    name: str
    """`model_type` in config.json."""
    hf_class: str
    """The causal language model in config.json's `architectures`."""
    hf: Callable[[Fields], dict[str, Any]]
    """Fields of `ModelConfig` from config.json, beyond the ones that all families share."""
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    """The shared keys of config.json that this family calls otherwise."""
    gguf: dict[str, Any] | None = None
    """Fields of `ModelConfig` for GGUF files, which do not record them; None: not read from GGUF,
    where `general.architecture` is the name."""
    gguf_interleaves_qk: bool = False
    """GGUF files hold the rows of q and k for the interleaved rotary embedding (pairs 2i, 2i+1)."""
    names: WeightNames = WeightNames()


def _biases(fields: Fields) -> dict[str, Any]:
    bias = bool(fields.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias}


def _activation(fields: Fields, key: str, default: str) -> dict[str, Any]:
    name = fields.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"model config: {key} {name!r} is not supported; expected one of {[*ACTIVATIONS]}"
        )
    return {"activation": ACTIVATIONS[name]}


def _object(fields: Fields, key: str) -> Fields:
    """The object under a key; empty where it is missing or null."""
    value = fields.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"model config: {key} must be an object, got {value!r}")
    return value


def _rope_object(fields: Fields) -> Fields:
    """What says how all layers turn: `rope_scaling`, or `rope_parameters` of transformers 5."""
    rope = _object(fields, "rope_scaling") or _object(fields, "rope_parameters")
    if any(isinstance(v, Mapping) for v in rope.values()):
        raise ValueError("model config: rope_parameters per layer type are not supported")
    return rope


def _rope(fields: Fields) -> dict[str, Any]:
    """The rotary embedding of a model whose layers all turn whole heads."""
    rope = _rope_object(fields)
    both = {**fields, **rope}
    partial = number(both, "partial_rotary_factor", default=1.0)
    if partial != 1.0:
        raise unsupported("partial_rotary_factor", partial, "1.0")
    return {
        "rope_theta": number(both, "rope_theta", default=10000.0),
        "rope_scaling": _scaling(rope, fields),
    }


def _scaling(rope: Fields, fields: Fields) -> RopeScaling | None:
    return hf_scaling(
        rope,
        max_position_embeddings=integer(fields, "max_position_embeddings"),
        original_context=optional_integer(fields, "original_max_position_embeddings", default=None),
    )


def _layers(fields: Fields, window: int | None, default: Callable[[int], bool]) -> dict[str, Any]:
    """The window and the layers that have it: `layer_types`, or those that ``default`` names."""
    count = integer(fields, "num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        types = [SLIDING if window is not None and default(i) else FULL for i in range(count)]
    known = isinstance(types, list) and all(t in (FULL, SLIDING) for t in types)
    if not known or len(types) != count:
        raise ValueError(
            f"model config: layer_types: {count} times {FULL!r} or {SLIDING!r} expected, got "
            f"{types!r}"
        )
    sliding = tuple(t == SLIDING for t in types)
    if not any(sliding):
        return {}
    if window is None:
        raise ValueError("model config: layer_types has sliding layers, but sliding_window is null")
    return {"sliding_window": window, "sliding_layers": None if all(sliding) else sliding}


def _uniform_window(fields: Fields, default: int | None) -> dict[str, Any]:
    """A window that all layers have, or none."""
    window = optional_integer(fields, "sliding_window", default=default)
    layers = _layers(fields, window, lambda layer: True)
    if layers.get("sliding_window") != window or layers.get("sliding_layers"):
        expected = f"the same type for all layers, as sliding_window = {window} has it"
        raise unsupported("layer_types", fields["layer_types"], expected)
    return layers


def _llama(fields: Fields) -> dict[str, Any]:
    types = {t for t in fields.get("layer_types") or () if t != FULL}
    window = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    if types or window is not None:
        raise ValueError(
            f"model config: sliding-window attention ({window or sorted(types)}) is not supported "
            "for llama; expected model_type 'mistral'"
        )
    return {
        **_biases(fields),
        **_rope(fields),
        **_activation(fields, "hidden_act", "silu"),
        "mlp_bias": bool(fields.get("mlp_bias", False)),
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    return {
        **_rope(fields),
        **_activation(fields, "hidden_act", "silu"),
        **_uniform_window(fields, 4096),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    use = bool(fields.get("use_sliding_window", False))
    window = optional_integer(fields, "sliding_window", default=4096) if use else None
    first = integer(fields, "max_window_layers", default=28)
    return {
        **_rope(fields),
        **_activation(fields, "hidden_act", "silu"),
        **_layers(fields, window, lambda layer: layer >= first),
        "qkv_bias": True,
    }


def _qwen3(fields: Fields) -> dict[str, Any]:
    return {
        **_qwen2(fields),
        **_biases(fields),
        "qk_norm": True,
        "head_dim": integer(fields, "head_dim", default=128),
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    rope = _rope_object(fields)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported for phi3; expected 'default'"
        )
    partial = {**fields, **rope}
    heads = max(integer(fields, "num_attention_heads"), 1)
    head_dim = integer(fields, "head_dim", default=integer(fields, "hidden_size") // heads)
    return {
        "rope_theta": number(partial, "rope_theta", default=10000.0),
        "rotary_dim": int(head_dim * number(partial, "partial_rotary_factor", default=1.0)),
        **_activation(fields, "hidden_act", "silu"),
        **_uniform_window(fields, None),
    }


def _gemma3(fields: Fields) -> dict[str, Any]:
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if fields.get(key) is not None:
            raise unsupported(key, fields[key], "null")
    if fields.get("use_bidirectional_attention"):
        raise unsupported("use_bidirectional_attention", True, "false")
    rope = _object(fields, "rope_parameters")
    if not {*rope} <= {FULL, SLIDING}:
        raise ValueError(
            f"model config: rope_parameters: objects {FULL!r} and {SLIDING!r} expected, got "
            f"{dict(rope)!r}"
        )
    full = {**_object(rope, FULL), **_object(fields, "rope_scaling")}
    local = _object(rope, SLIDING)
    if hf_scaling(local, max_position_embeddings=1) is not None:
        raise unsupported(f"rope_parameters.{SLIDING}.rope_type", local, "'default'")
    pattern = integer(fields, "sliding_window_pattern", default=6)
    if pattern < 1:
        raise ValueError(f"model config: sliding_window_pattern must be >= 1, got {pattern}")
    scalar = number(fields, "query_pre_attn_scalar", default=256.0)
    if not 0 < scalar < math.inf:
        raise ValueError(
            f"model config: query_pre_attn_scalar must be a finite number > 0, got {scalar}"
        )
    window = optional_integer(fields, "sliding_window", default=4096)
    theta = number(fields, "rope_theta", default=1e6)
    local_theta = number(fields, "rope_local_base_freq", default=10000.0)
    return {
        **_biases(fields),
        **_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        **_layers(fields, window, lambda layer: (layer + 1) % pattern != 0),
        "rope_theta": number(full, "rope_theta", default=theta),
        "rope_scaling": _scaling(full, fields),
        "local_rope_theta": number(local, "rope_theta", default=local_theta),
        "head_dim": integer(fields, "head_dim", default=256),
        "qk_norm": True,
        "post_norms": True,
        "norm_weight_offset": 1.0,
        "scaled_embedding": True,
        "attention_scale": scalar**-0.5,
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", True)),
    }


def _gpt2(fields: Fields) -> dict[str, Any]:
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.get(key):
            raise unsupported(key, fields[key], "false")
    hidden = integer(fields, "n_embd")
    return {
        **_activation(fields, "activation_function", "gelu_new"),
        "intermediate_size": integer(fields, "n_inner", default=4 * hidden),
        "norm": "layer_norm",
        "positions": "learned",
        "gated_mlp": False,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "attention_scale": None if fields.get("scale_attn_weights", True) else 1.0,
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", True)),
    }


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("llama", "LlamaForCausalLM", _llama, gguf={}, gguf_interleaves_qk=True),
        Architecture("mistral", "MistralForCausalLM", _mistral),
        Architecture("qwen2", "Qwen2ForCausalLM", _qwen2, gguf={"qkv_bias": True}),
        Architecture("qwen3", "Qwen3ForCausalLM", _qwen3, gguf={"qk_norm": True}),
        Architecture(
            "phi3",
            "Phi3ForCausalLM",
            _phi3,
            names=WeightNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        ),
        Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _gemma3,
            names=WeightNames(
                attention_post_norm="post_attention_layernorm",
                mlp_norm="pre_feedforward_layernorm",
                mlp_post_norm="post_feedforward_layernorm",
            ),
        ),
        Architecture(
            "gpt2",
            "GPT2LMHeadModel",
            _gpt2,
            hf_keys={
                "hidden_size": "n_embd",
                "intermediate_size": "n_inner",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "n_positions",
                "rms_norm_eps": "layer_norm_epsilon",
            },
            names=WeightNames(
                prefix="transformer.",
                embed_tokens="transformer.wte",
                embed_positions="transformer.wpe",
                layers="transformer.h",
                norm="transformer.ln_f",
                input_norm="ln_1",
                qkv=("attn.c_attn",),
                attention_out=("attn.c_proj",),
                mlp_norm="ln_2",
                up=("mlp.c_fc",),
                down=("mlp.c_proj",),
                transposed=True,
                prefix_optional=True,
                buffers=(".attn.bias", ".attn.masked_bias"),
            ),
        ),
    )
}


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


def gguf_architecture(name: object) -> Architecture:
    """The row for a GGUF file's `general.architecture`; raises as `architecture`."""
    arch = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if arch is None or arch.gguf is None:
        known = ", ".join(a.name for a in ARCHITECTURES.values() if a.gguf is not None)
        raise ValueError(
            f"model config: unknown architecture {name!r} of a GGUF file; supported: {known}"
        )
    return arch
