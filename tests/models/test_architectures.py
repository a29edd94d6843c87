"""Every family of the decoder against transformers: logits by the error ratio, greedy tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.models import Batch, Decoder, ModelConfig, load
from fastinfer.models.architectures import ARCHITECTURES
from fastinfer.models.linear import _can_pack
from tests.helpers import assert_accurate
from tests.models.tools import (
    float64_logits,
    paged_greedy,
    paged_logits,
    save,
    tiny_model,
    transformers_float64_logits,
    transformers_greedy,
    transformers_logits,
)

# Prompts are longer than the windows; head_dim is not hidden_size / heads unless said otherwise.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_gelu": ("llama", {"hidden_act": "gelu"}),
    "llama_gelu_tanh": ("llama", {"hidden_act": "gelu_new", "tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mistral_window_2": ("mistral", {"sliding_window": 2, "num_key_value_heads": 6}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"rope_theta": 1e6}),
    "qwen3_window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {}),
    "phi3_window": ("phi3", {"sliding_window": 11, "num_key_value_heads": None}),
    "phi3_partial": (
        "phi3",
        {"hidden_size": 96, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3_untied": (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
            },
        },
    ),
    "gemma3_all_sliding": ("gemma3_text", {"layer_types": ["sliding_attention"] * 4}),
    "gpt2": ("gpt2", {}),
    "gpt2_untied": (
        "gpt2",
        {"n_inner": None, "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "gpt2_erf": ("gpt2", {"activation_function": "gelu"}),
}
PROMPTS = [[1, *range(3, 50)], [5], [90, 3, 3, 17, 41, 2, 8, 96, 0], list(range(60, 77))]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers' model, ours, loaded from what it saved)."""
    kind, changes = MODELS[request.param]
    hf = tiny_model(kind, **changes)
    folder = tmp_path_factory.mktemp(request.param)
    return hf, load(save(hf, folder), dtype=torch.float32).decoder


def test_every_family_is_here() -> None:
    assert {kind for kind, _ in MODELS.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_reference_is_float64(kind: str) -> None:
    """The float64 run of transformers' own code equals the formulas."""
    hf = tiny_model(kind)
    config = ModelConfig.from_hf(hf.config.to_dict())
    expected = float64_logits(hf.state_dict(), config, PROMPTS[0])
    actual = transformers_float64_logits(hf, PROMPTS[0])
    assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()


def test_logits(pair: Any) -> None:
    hf, decoder = pair
    ours = paged_logits(decoder, PROMPTS, 7)
    for ids, logits in zip(PROMPTS, ours, strict=True):
        reference = transformers_float64_logits(hf, ids)
        assert_accurate(logits, reference, transformers_logits(hf, ids), multiple=3.0)


def test_greedy_tokens(pair: Any) -> None:
    hf, decoder = pair
    prompts = [PROMPTS[2], PROMPTS[0][:29]]
    expected = [transformers_greedy(hf, p, 32) for p in prompts]
    assert all(len(tokens) == 32 for tokens in expected)
    assert paged_greedy(decoder, prompts, 32, chunk=10) == expected


def test_logits_do_not_depend_on_batch_or_chunks(pair: Any) -> None:
    _, decoder = pair
    if not _can_pack(decoder.embed_tokens):
        pytest.skip("bit-equal rows are promised for fp32 on x86")
    together = paged_logits(decoder, PROMPTS, 64)
    for chunk in (1, 7):
        for a, b in zip(together, paged_logits(decoder, PROMPTS, chunk), strict=True):
            assert torch.equal(a, b)
    for ids, expected in zip(PROMPTS, together, strict=True):
        assert torch.equal(paged_logits(decoder, [ids], 64, block_size=16)[0], expected)


@pytest.mark.parametrize("window", [1, 46, 47])
def test_windows_at_the_edge(tmp_path: Path, window: int) -> None:
    """The token alone; all of the prompt but one token; all of it."""
    hf = tiny_model("mistral", sliding_window=window)
    decoder = load(save(hf, tmp_path)).decoder
    reference = transformers_float64_logits(hf, PROMPTS[0])
    baseline = transformers_logits(hf, PROMPTS[0])
    assert_accurate(paged_logits(decoder, PROMPTS[:1], 7)[0], reference, baseline, multiple=3.0)


@pytest.mark.parametrize("kind", ["mistral", "qwen3", "phi3", "gemma3_text", "gpt2"])
def test_half_precision(tmp_path: Path, kind: str) -> None:
    """The embedding scale and the norms are rounded as transformers rounds them."""
    hf = tiny_model(kind).bfloat16()
    decoder = load(save(hf, tmp_path), dtype="bfloat16").decoder
    reference = transformers_float64_logits(hf, PROMPTS[0])
    baseline = transformers_logits(hf, PROMPTS[0])
    assert_accurate(paged_logits(decoder, PROMPTS[:1], 7)[0], reference, baseline, multiple=2.0)


@pytest.mark.parametrize("name", MODELS)
def test_slots_are_the_parameters(name: str) -> None:
    """Names and shapes of the slots are transformers' own, and they cover all there is to fill."""
    kind, changes = MODELS[name]
    hf = tiny_model(kind, **changes)
    config = ModelConfig.from_hf(hf.config.to_dict())
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    slots = decoder.weight_slots()
    expected = {n: tuple(p.shape) for n, p in hf.named_parameters()}
    assert {n: tuple(s.shape) for n, s in slots.items()} == expected
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)
    for slot in slots.values():
        slot.fill_(1.0)
    assert all(p.isfinite().all() for p in decoder.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_dummy_weights(tmp_path: Path, name: str) -> None:
    """From config.json alone, and from a `ModelConfig`."""
    kind, changes = MODELS[name]
    tiny_model(kind, **changes).config.save_pretrained(tmp_path)
    first = load(tmp_path, load_format="dummy")
    again = load(first.config, load_format="dummy")
    a, b = (paged_logits(m.decoder, PROMPTS[2:3], 64)[0] for m in (first, again))
    assert a.isfinite().all() and a.std() > 0
    assert torch.equal(a, b)


def test_a_published_config() -> None:
    """Qwen3-8B's, in the old spelling: all its weights have their place."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "model_type": "qwen3",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert config == ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        dtype=torch.bfloat16,
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )
    meta = torch.device("meta")
    decoder = Decoder(config, dtype=torch.bfloat16, device=meta, max_model_len=64)
    assert sum(p.numel() for p in decoder.parameters()) == 8_190_735_360


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_no_data_on_the_host(name: str) -> None:
    """So that it can be captured on a GPU: on the meta device there is nothing but shapes."""
    kind, changes = MODELS[name]
    config = ModelConfig.from_hf(tiny_model(kind, **changes).config.to_dict())
    meta = torch.device("meta")
    decoder = Decoder(config, dtype=torch.bfloat16, device=meta, max_model_len=64)
    shape = (9, config.num_kv_heads, 16, config.head_dim)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=meta)
    longs = torch.empty(5, dtype=torch.int64, device=meta)
    ints = torch.empty(4, dtype=torch.int32, device=meta)
    batch = Batch(
        input_ids=longs,
        positions=longs,
        slot_mapping=longs,
        block_table=ints[:3, None],
        cu_seqlens_q=ints,
        seq_lens=ints[:3],
        logits_indices=longs,
        max_seqlen_q=3,
        max_seqlen_k=64,
    )
    with torch.inference_mode():
        hidden = decoder(batch, [(cache, cache)] * config.num_layers)
        logits = decoder.compute_logits(hidden[batch.logits_indices])
    assert logits.shape == (5, 97) and logits.device == meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_scale_is_rounded(dtype: torch.dtype) -> None:
    hf = tiny_model("gemma3_text").to(dtype)
    config = ModelConfig.from_hf(hf.config.to_dict())
    decoder = Decoder(config, dtype=dtype, device=torch.device("cpu"), max_model_len=8)
    assert decoder._embedding_scale == hf.model.embed_tokens.embed_scale.item()


def test_gpt2_without_prefix_and_with_its_masks(tmp_path: Path) -> None:
    """As the first GPT-2 checkpoints are: saved from the model without a head."""
    from safetensors.torch import load_file, save_file

    hf = tiny_model("gpt2")
    file = save(hf, tmp_path) / "model.safetensors"
    expected = paged_logits(load(tmp_path).decoder, PROMPTS, 64)
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(file).items()}
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, file)
    for a, b in zip(expected, paged_logits(load(tmp_path).decoder, PROMPTS, 64), strict=True):
        assert torch.equal(a, b)
    save_file({**tensors, "transformer.wte.weight": tensors["wte.weight"].clone()}, file)
    with pytest.raises(ValueError, match=r"wte.weight: the checkpoint holds this weight twice"):
        load(tmp_path)
    tensors["h.0.attn.c_attn.weight"] = tensors["h.0.attn.c_attn.weight"].t().contiguous()
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"c_attn.weight: shape \(48, 144\) expected"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, {-1}), (7, {6}), (8, {-1}), (100, {-1}), (1, {0})]
)
def test_one_plan_per_window(window: int | None, expected: set[int]) -> None:
    """A window that no sequence outgrows is none."""
    config = ModelConfig.from_hf(tiny_model("mistral", sliding_window=window).config.to_dict())
    cpu = torch.device("cpu")
    decoder = Decoder(config, dtype=torch.float32, device=cpu, max_model_len=8)
    assert {kind.window_left for kind in decoder._kinds} == expected


def test_plans_are_shared_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastinfer import ops

    decoder = load(
        ModelConfig.from_hf(tiny_model("gemma3_text").config.to_dict()), load_format="dummy"
    ).decoder
    windows = []
    plan = ops.plan_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        windows.append(kwargs["window_left"])
        return plan(*args, **kwargs)

    monkeypatch.setattr(ops, "plan_attention", counted)
    paged_logits(decoder, PROMPTS, 64)
    assert windows == [5, -1]
