"""RoPE scaling: frequencies bit for bit, and logits beyond the original context."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastinfer.models import ModelConfig, load
from fastinfer.models.rotary import inverse_frequencies, rotary_table
from tests.helpers import assert_accurate
from tests.models.tools import (
    TINY,
    paged_greedy,
    paged_logits,
    save,
    tiny_model,
    transformers_float64_logits,
    transformers_greedy,
    transformers_logits,
)

CPU = torch.device("cpu")
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn_defaults": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "yarn_one_pair": {"rope_type": "yarn", **YARN, "beta_fast": 0.6, "beta_slow": 0.5},
    "yarn_untruncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn_attention_factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.7},
    "yarn_mscale": {"rope_type": "yarn", **YARN, "mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn_mscale_alone": {"rope_type": "yarn", **YARN, "mscale": 1.5},
}
IDS = [1, *range(3, 95), *range(5, 40)]  # 128 tokens


def scaled(kind: str, name: str, theta: float = 100.0, **changes: Any) -> Any:
    """A transformers model with a scaling; with theta 100 its pairs turn at telling speeds."""
    rope = {**SCALINGS[name], "rope_theta": theta}
    return tiny_model(kind, **{"max_position_embeddings": 128, "rope_parameters": rope, **changes})


def frequencies(config: ModelConfig, max_model_len: int = 128) -> torch.Tensor:
    return inverse_frequencies(
        config.rope_theta, config.rotary_size, config.rope_scaling, max_model_len
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("theta", [None, 1e6, 31415.9])
def test_default_frequencies_are_bit_equal(kind: str, theta: float | None) -> None:
    hf = tiny_model(kind, **({} if theta is None else {"rope_theta": theta}))
    config = ModelConfig.from_hf(hf.config.to_dict())
    assert config.rope_theta == (theta or 10000.0)
    assert torch.equal(frequencies(config), hf.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("theta", [100.0, 10000.0, 31415.9])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_bit_equal(name: str, theta: float) -> None:
    hf = scaled("llama", name, theta)
    config = ModelConfig.from_hf(hf.config.to_dict())
    rotary = hf.model.rotary_emb
    assert torch.equal(frequencies(config), rotary.inv_freq)
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    assert factor == rotary.attention_scaling
    if name != "default":
        assert not torch.equal(rotary.inv_freq, inverse_frequencies(theta, 16))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_yarn_of_usual_sizes(head_dim: int) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    hf = tiny_model(
        "qwen3",
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={**rope, "rope_theta": 1e6},
    )
    config = ModelConfig.from_hf(hf.config.to_dict())
    assert torch.equal(frequencies(config), hf.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("length", [1, 64, 65, 100, 4096])
def test_dynamic_frequencies_are_bit_equal(length: int) -> None:
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    hf = tiny_model("llama", rope_parameters=rope)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf.config, CPU, seq_len=length)
    config = ModelConfig.from_hf(hf.config.to_dict())
    assert torch.equal(frequencies(config, length), expected)
    plain = torch.equal(expected, inverse_frequencies(10000.0, 16))
    assert plain == (length <= 64)


def test_the_table() -> None:
    """Angles in float64; the attention factor multiplies both cosines and sines."""
    hf = scaled("llama", "yarn_attention_factor")
    config = ModelConfig.from_hf(hf.config.to_dict())
    table = rotary_table(config.rope_theta, 16, config.rope_scaling, 1000, CPU)
    angles = torch.arange(1000).double()[:, None] * hf.model.rotary_emb.inv_freq.double()
    expected = torch.cat((angles.cos(), angles.sin()), -1) * 1.7
    assert table.dtype == torch.float32
    assert (table - expected).abs().max() < 1.7 * 2**-23


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn_attention_factor"])
def test_logits_beyond_the_original_context(tmp_path: Path, kind: str, name: str) -> None:
    hf = scaled(kind, name, **({"sliding_window": 50} if kind == "mistral" else {}))
    decoder = load(save(hf, tmp_path)).decoder
    ours = paged_logits(decoder, [IDS], 40)[0]
    reference = transformers_float64_logits(hf, IDS)
    assert_accurate(ours, reference, transformers_logits(hf, IDS), multiple=3.0)
    prompt = IDS[:50]
    assert paged_greedy(decoder, [prompt], 32, chunk=20) == [transformers_greedy(hf, prompt, 32)]


@pytest.mark.parametrize("length", [40, 64, 100])
def test_dynamic_logits(tmp_path: Path, length: int) -> None:
    """Equal to transformers when its sequence has the length the model is loaded for."""
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    hf = tiny_model("llama", rope_parameters=rope)
    decoder = load(save(hf, tmp_path), max_model_len=length).decoder
    ids = IDS[:length]
    ours = paged_logits(decoder, [ids], 40)[0]
    baseline = transformers_logits(hf, ids)  # it grows its base by the way, rounded to fp32
    rotary = hf.model.rotary_emb
    rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](hf.config, CPU, seq_len=length)
    reference = transformers_float64_logits(hf, ids)
    assert_accurate(ours, reference, baseline, multiple=3.0)


def test_dynamic_within_the_original_context(tmp_path: Path) -> None:
    """Then it is the unscaled model, in transformers too."""
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    hf = tiny_model("llama", rope_parameters=rope)
    decoder = load(save(hf, tmp_path), max_model_len=64).decoder
    prompt = IDS[:30]
    assert paged_greedy(decoder, [prompt], 32, chunk=20) == [transformers_greedy(hf, prompt, 32)]


def test_how_long_a_context_may_be(tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 3.0}
    folder = save(tiny_model("llama", rope_parameters=dynamic), tmp_path / "dynamic")
    assert load(folder).max_model_len == 64
    assert load(folder, max_model_len=192).max_model_len == 192
    with pytest.raises(ValueError, match=r"max_model_len must be in 1..192"):
        load(folder, max_model_len=193)
    folder = save(scaled("llama", "yarn", max_position_embeddings=48), tmp_path / "yarn")
    assert load(folder, load_format="dummy", max_model_len=128).max_model_len == 128
    with pytest.raises(ValueError, match=r"max_model_len must be in 1..128"):
        load(folder, max_model_len=129)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_spellings(name: str) -> None:
    """`rope_parameters` of transformers 5, `rope_scaling` with "rope_type", and with "type"."""
    base = {"model_type": "llama", **TINY}
    new = {**base, "rope_parameters": {**SCALINGS[name], "rope_theta": 5e5}}
    old = {**base, "rope_theta": 5e5, "rope_scaling": SCALINGS[name]}
    options = {k: v for k, v in SCALINGS[name].items() if k != "rope_type"}
    oldest = {**old, "rope_scaling": {**options, "type": SCALINGS[name]["rope_type"]}}
    config = ModelConfig.from_hf(new)
    assert config.rope_theta == 5e5
    assert (config.rope_scaling is None) == (name == "default")
    assert ModelConfig.from_hf(old) == config
    assert ModelConfig.from_hf(oldest) == config


def test_the_original_context_may_stand_outside() -> None:
    options = {k: v for k, v in SCALINGS["llama3"].items() if not k.startswith("original")}
    fields = {"model_type": "llama", **TINY, "rope_scaling": options}
    context = {"original_max_position_embeddings": 32}
    assert ModelConfig.from_hf({**fields, **context}) == ModelConfig.from_hf(
        {**fields, "rope_scaling": SCALINGS["llama3"]}
    )
    scaling = ModelConfig.from_hf(fields).rope_scaling
    assert scaling is not None and scaling.original_context == 64  # the context itself


LLAMA3 = SCALINGS["llama3"]


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, r"'longrope' is not supported; .*'yarn'"),
        ({"type": "su", "factor": 2.0}, "rope scaling 'su' is not supported"),
        ({"type": "factors", "factor": 2.0}, "rope scaling 'factors' is not supported"),
        ({"type": ["yarn"], "factor": 2.0}, r"rope scaling \['yarn'\] is not supported"),
        ({"rope_type": "default", "mrope_section": [8, 4, 4]}, "mrope_section"),
        ({"type": "linear"}, "the key 'factor' is missing"),
        ({"type": "linear", "factor": "2"}, "factor must be a number, got '2'"),
        ({"type": "linear", "factor": 0.5}, "factor >= 1 expected, got 0.5"),
        ({"type": "linear", "factor": float("nan")}, "factor > 0 expected, got nan"),
        ({"type": "dynamic", "factor": -2.0}, "factor > 0 expected, got -2.0"),
        ({**LLAMA3, "low_freq_factor": None}, "the key 'low_freq_factor' is missing"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor < high_freq_factor expected"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_context > 0 expected"),
        ({"type": "yarn", **YARN, "beta_slow": 9.0}, "beta_slow < beta_fast expected"),
        ({"type": "yarn", **YARN, "attention_factor": 0}, "attention_factor > 0 expected"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type are not supported"),
    ],
)
def test_refused(rope: dict[str, Any], message: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf({"model_type": "llama", **TINY, key: rope})


def test_dynamic_needs_more_than_one_pair() -> None:
    rope = {"type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="at least 4 rotary features expected, got 2"):
        ModelConfig.from_hf({"model_type": "llama", **TINY, "head_dim": 2, "rope_scaling": rope})
