"""`ModelConfig.from_hf`: what it reads, defaults as transformers has them, and what it refuses."""

from typing import Any

import pytest
import torch

from fastinfer.models import ModelConfig
from fastinfer.models.decoder import inverse_frequencies
from tests.models.tools import TINY, tiny_model

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


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("theta", [None, 1e6, 31415.9])
def test_frequencies_are_bit_equal_to_transformers(kind: str, theta: float | None) -> None:
    hf = tiny_model(kind, **({} if theta is None else {"rope_theta": theta}))
    config = ModelConfig.from_hf(hf.config.to_dict())
    assert config.rope_theta == (theta or 10000.0)
    assert torch.equal(inverse_frequencies(config), hf.model.rotary_emb.inv_freq)


def test_both_ways_to_write_rope() -> None:
    old = ModelConfig.from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "default"}})
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert old == ModelConfig.from_hf({**BASE, "rope_parameters": rope})


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
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \('gptq'\)"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ({"rope_parameters": "default"}, "rope_parameters must be an object"),
        ({"rope_theta": 0}, "rope_theta > 0 expected"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
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
