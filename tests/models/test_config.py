"""`ModelConfig.from_hf`: what it reads, defaults as transformers has them, and what it refuses."""

import dataclasses
from typing import Any

import pytest
import torch

from fastinfer.models import ModelConfig
from fastinfer.models.architectures import ARCHITECTURES
from fastinfer.models.rotary import RopeScaling
from tests.models.tools import CONFIGS, GPT2, TINY

BASE: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}


def test_reads_a_config() -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128009],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
        }
    )
    assert config == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        rope_theta=500000.0,
        dtype=torch.bfloat16,
        bos_token_id=128000,
        eos_token_ids=(128001, 128009),
    )


def test_biases() -> None:
    def biases(**fields: Any) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_hf({**BASE, **fields})
        return config.qkv_bias, config.attention_out_bias, config.mlp_bias

    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases(**qwen2) == (True, False, False)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_missing_keys(key: str) -> None:
    with pytest.raises(ValueError, match=rf"the key '{key}' is missing"):
        ModelConfig.from_hf({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, r"unknown architecture 'mamba'.*supported: llama .*, qwen2 "),
        ({"model_type": "gemma3"}, r"unknown architecture 'gemma3'.*gemma3_text \(Gemma3ForCausal"),
        ({"model_type": None}, "unknown architecture None"),
        ({"model_type": ["llama"]}, "unknown architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": "48"}, "hidden_size must be an integer, got '48'"),
        ({"hidden_size": True}, "hidden_size must be an integer, got True"),
        ({"hidden_size": -48}, "hidden_size must be >= 1, got -48"),
        ({"num_attention_heads": 0}, "num_heads must be >= 1"),
        ({"num_hidden_layers": 0}, "num_layers must be >= 1"),
        ({"num_attention_heads": 33, "num_key_value_heads": 2}, "multiple of num_kv_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": 1024}, "head_dim must be even and <= 512"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; expected one of .*'silu'"),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported; expected a dense"),
        ({"num_experts": 64}, "num_experts = 64 is not supported"),
        ({"vision_config": {"hidden_size": 8}}, "vision_config is not supported; .*text model"),
        ({"rope_parameters": "default"}, "rope_parameters must be an object"),
        ({"rope_theta": 0}, "rope_theta > 0 expected"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding-window"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"torch_dtype": "int8"}, "dtype must be one of"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**BASE, **fields})


# Families.


def fields(kind: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, as transformers 5 writes it."""
    config_class, settings = CONFIGS[kind]
    written: dict[str, Any] = config_class(**settings).to_dict()
    return {**written, "architectures": [ARCHITECTURES[kind].hf_class], **changes}


def read(kind: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(fields(kind, **changes))


def test_windows() -> None:
    def windows(config: ModelConfig) -> list[int | None]:
        layers = range(config.num_layers)
        return [config.sliding_window if config.is_sliding(i) else None for i in layers]

    assert windows(read("llama")) == [None] * 3
    assert windows(read("mistral")) == [7] * 3
    assert windows(read("mistral", sliding_window=None)) == [None] * 3
    base = fields("mistral")
    del base["sliding_window"]
    assert windows(ModelConfig.from_hf(base)) == [4096] * 3  # transformers' default
    assert windows(read("phi3", sliding_window=5)) == [5] * 3
    types = ["full_attention", "sliding_attention", "full_attention"]
    window = {"use_sliding_window": True, "sliding_window": 5}
    for kind in ("qwen2", "qwen3"):
        assert windows(read(kind, sliding_window=5)) == [None] * 3  # not in use
        assert windows(read(kind, **window, layer_types=types)) == [None, 5, None]
        base = {**fields(kind), **window, "max_window_layers": 2}
        del base["layer_types"]
        assert windows(ModelConfig.from_hf(base)) == [None, None, 5]


def test_gemma3_as_it_was_published() -> None:
    """Before transformers 5: bases and pattern in their own keys, head and tie by default."""
    new = read("gemma3_text", sliding_window_pattern=2, layer_types=None, head_dim=16)
    old = fields("gemma3_text", sliding_window_pattern=2, rope_scaling=None)
    for key in ("layer_types", "rope_parameters", "_sliding_window_pattern", "tie_word_embeddings"):
        del old[key]
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}
    config = ModelConfig.from_hf(old)
    assert config == new
    assert config.sliding_layers == (True, False, True, False)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
    assert config.attention_scale == 24**-0.5
    assert config.tie_word_embeddings
    scaled = ModelConfig.from_hf({**old, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope_scaling is not None and scaled.rope_scaling.factor == 8.0
    assert ModelConfig.from_hf({**old, "rope_local_base_freq": 77.0}).local_rope_theta == 77.0


def test_phi3_turns_a_part_of_each_head() -> None:
    assert read("phi3").rotary_size == 8
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert read("phi3", rope_parameters=rope).rotary_size == 6
    assert read("phi3", rope_parameters=None, partial_rotary_factor=0.5).rotary_size == 4


def test_gpt2_sizes() -> None:
    config = ModelConfig.from_hf({"model_type": "gpt2", **GPT2, "layer_norm_epsilon": 1e-5})
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (48, 83, 8)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 6, 6)
    assert read("gpt2", n_inner=None).intermediate_size == 4 * 48
    assert config.tie_word_embeddings


@pytest.mark.parametrize("kind", CONFIGS)
def test_sizes_are_named_as_the_family_names_them(kind: str) -> None:
    for key in ARCHITECTURES[kind].hf_keys.values() or ("hidden_size", "num_hidden_layers"):
        if key == "n_inner":
            continue
        with pytest.raises(ValueError, match=rf"the key '{key}' is missing"):
            ModelConfig.from_hf({k: v for k, v in fields(kind).items() if k != key})


SLIDING = ["sliding_attention"] * 3
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be >= 1, got 0"),
        ("mistral", {"sliding_window": 7.5}, "sliding_window must be an integer"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types .*same type"),
        ("mistral", {"layer_types": [*SLIDING[:2], "full_attention"]}, "layer_types .*same type"),
        ("qwen2", {"layer_types": SLIDING}, "sliding layers, but sliding_window is null"),
        ("qwen3", {"layer_types": SLIDING[:2]}, "layer_types: 3 times 'full_attention' or"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types: 3 times"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types: 3 times"),
        ("qwen3", {"layer_types": [["full_attention"]] * 3}, "layer_types: 3 times"),
        ("qwen3", {"hidden_act": ["silu"]}, r"hidden_act \['silu'\]"),
        ("qwen3", {"num_experts": 128}, "num_experts = 128"),
        ("phi3", {"rope_scaling": LONG}, "'longrope' is not supported for phi3; .*'default'"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "'su' is not supported for phi3"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.4}, "rotary_dim must be"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 1.5}, "rotary_dim must be"),
        ("phi3", {"rope_parameters": [1]}, "rope_parameters must be an object"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("gemma3_text", {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": 3}},
            "full_attention must be",
        ),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: objects"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_parameters.sliding_attention.rope_type .*expected 'default'",
        ),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "pattern must be >= 1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
    ],
)
def test_refused_by_a_family(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(kind, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch_norm"}, "norm must be one of"),
        ({"positions": "alibi"}, "positions must be one of"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"rotary_dim": 18}, "rotary_dim must be even and <= head_dim"),
        ({"sliding_layers": (True, False, True)}, "sliding_layers goes with a sliding_window"),
        ({"sliding_window": 4, "sliding_layers": (True,)}, "sliding_layers goes with"),
        ({"rope_scaling": RopeScaling("factors")}, "8 frequency factors expected, got 0"),
        ({"local_rope_theta": 0.0}, "rope_theta > 0 expected"),
    ],
)
def test_fields_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    config = ModelConfig.from_hf(BASE)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize("scalar", [0, -4, float("nan"), float("inf")])
def test_gemma_scale_that_makes_no_sense(scalar: float) -> None:
    with pytest.raises(ValueError, match="query_pre_attn_scalar must be a finite number > 0"):
        read("gemma3_text", query_pre_attn_scalar=scalar)
