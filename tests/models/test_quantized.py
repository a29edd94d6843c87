"""Quantized decoders: they compute what the same model with rounded weights, or with layers that
quantize their inputs too, computes.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastinfer.models import Decoder, load, load_tokenizer
from fastinfer.models.layer import DecoderLayer
from fastinfer.models.linear import QUANTIZATIONS, Linear
from fastinfer.nn import FP8Linear, Int8W8A8Linear, LowBitLinear, QuantizedLinear, W8A8Linear
from fastinfer.ops import quantize_fp8, quantize_weight
from tests.helpers import assert_accurate, assert_bit_equal
from tests.models.test_decoder import PROMPTS
from tests.models.tools import (
    paged_greedy,
    paged_logits,
    save,
    tiny_model,
    transformers_float64_logits,
    transformers_greedy,
    transformers_logits,
)

BITS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8}
W8A8: dict[str, type[W8A8Linear]] = {"fp8": FP8Linear, "int8_w8a8": Int8W8A8Linear}

# Inputs of 192 and 300 features: several groups, the last one partial.
SIZES = {"hidden_size": 192, "intermediate_size": 300, "num_hidden_layers": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "phi3": SIZES,  # checkpoints hold merged projections
    "gpt2": {"n_embd": 192, "n_inner": 300, "n_layer": 2},  # transposed ones, with biases
}


def is_quantized(name: str, weight: Tensor) -> bool:
    return weight.dim() == 2 and (".layers." in name or ".h." in name)


@torch.no_grad()
def rounded(hf: Any, bits: int, dtype: torch.dtype = torch.float32) -> Any:
    """The model in fp32, its layers' matrices as they are after quantization from `dtype`."""
    result = copy.deepcopy(hf).to(dtype).float()
    for name, weight in result.named_parameters():
        if is_quantized(name, weight):
            matrix = weight.t() if hf.config.model_type == "gpt2" else weight
            matrix.copy_(quantize_weight(matrix.to(dtype), bits, 128).dequantize())
    return result


@torch.no_grad()
def replaced(hf: Any, layer: type[W8A8Linear]) -> Any:
    """The model with each of its layers' linear ones, not merged, as a module of `fastinfer.nn`."""
    result = copy.deepcopy(hf)
    for parent in list(result.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(getattr(child, "weight", None), Tensor) or child.weight.dim() != 2:
                continue
            linear = child
            if hf.config.model_type == "gpt2":
                linear = nn.Linear(*child.weight.shape)
                linear.weight = nn.Parameter(child.weight.t())
                linear.bias = getattr(child, "bias", None)
            if name != "lm_head" and not isinstance(child, nn.Embedding):
                setattr(parent, name, layer.from_linear(linear))
    return result.requires_grad_(False)


def quantized_layers(decoder: Decoder) -> list[QuantizedLinear]:
    return [m for m in decoder.modules() if isinstance(m, QuantizedLinear)]


def test_every_quantization_is_tested() -> None:
    assert {*BITS, *W8A8} == {*QUANTIZATIONS}


@pytest.mark.parametrize("quantization", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens(tmp_path: Path, kind: str, quantization: str) -> None:
    hf = tiny_model(kind, **KINDS[kind])
    decoder = load(save(hf, tmp_path), quantization=quantization).decoder
    assert [type(layer) for layer in quantized_layers(decoder)] == [LowBitLinear] * 4 * 2
    hf = rounded(hf, BITS[quantization])

    prompts = PROMPTS[1:]
    for ids, logits in zip(prompts, paged_logits(decoder, prompts, 7), strict=True):
        reference = transformers_float64_logits(hf, ids)
        assert_accurate(logits, reference, transformers_logits(hf, ids), multiple=4.0)

    tokens = paged_greedy(decoder, prompts, 12, 7)
    for ids, got in zip(prompts, tokens, strict=True):
        assert got == transformers_greedy(hf, ids, 12)
        best = transformers_logits(hf, ids + got)[len(ids) - 1 :].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3, "rounding could decide this"

    plain = load(save(hf, tmp_path / "rounded")).decoder
    assert paged_greedy(plain, prompts, 12, 7) == tokens


@pytest.mark.parametrize("quantization", W8A8)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_activations(tmp_path: Path, kind: str, quantization: str) -> None:
    """As layers of `fastinfer.nn` in transformers' model. Where sums in another order move an input
    to the next code, a token's logits change by a small part of what quantization costs.
    """
    hf = tiny_model(kind, **KINDS[kind])
    decoder = load(save(hf, tmp_path), quantization=quantization).decoder
    assert [type(layer) for layer in quantized_layers(decoder)] == [W8A8[quantization]] * 4 * 2
    theirs = replaced(hf, W8A8[quantization])
    logits = torch.cat(paged_logits(decoder, PROMPTS, 7))
    expected, plain = (
        torch.cat([transformers_logits(model, ids) for ids in PROMPTS]) for model in (theirs, hf)
    )
    costs = (expected - plain).norm(dim=1)
    assert 0.01 * plain.norm() < costs.norm() < 0.5 * plain.norm()
    differences = (logits - expected).norm(dim=1) / costs
    assert differences.median() < 1e-4 and differences.max() < 0.3


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_logits_do_not_depend_on_batch_or_chunks(tmp_path: Path, quantization: str) -> None:
    decoder = load(save(tiny_model("llama", **SIZES), tmp_path), quantization=quantization).decoder
    layers = quantized_layers(decoder)
    x = torch.randn(70, 192)
    together = layers[0](x)
    assert_bit_equal(torch.cat([layers[0](row[None]) for row in x]), together)
    whole = paged_logits(decoder, PROMPTS, 64)
    if not torch.equal(decoder.lm_head(x), torch.cat([decoder.lm_head(row[None]) for row in x])):
        pytest.skip("the output projection has bit-equal rows on x86 only")
    for chunk in (1, 7):
        for a, b in zip(whole, paged_logits(decoder, PROMPTS, chunk), strict=True):
            assert_bit_equal(b, a)
    for ids, expected in zip(PROMPTS, whole, strict=True):
        assert_bit_equal(paged_logits(decoder, [ids], 64, block_size=16)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """R15: no worse than a model of that dtype whose weights are the rounded ones."""
    hf = tiny_model("llama", **SIZES)
    decoder = load(save(hf, tmp_path), dtype=dtype, quantization="int4").decoder
    assert {layer.get_buffer("scales").dtype for layer in quantized_layers(decoder)} == {dtype}
    hf = rounded(hf, 4, dtype)
    reference = transformers_float64_logits(hf, PROMPTS[0])
    baseline = transformers_logits(hf.to(dtype), PROMPTS[0])
    assert_accurate(paged_logits(decoder, PROMPTS[:1], 7)[0], reference, baseline, multiple=2.0)


@pytest.mark.parametrize("quantization", W8A8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_activations(
    tmp_path: Path, dtype: torch.dtype, quantization: str
) -> None:
    """Near the fp32 model of that kind: 16 bits between the layers cost less than 8 inside them."""
    hf = tiny_model("llama", **SIZES)
    folder = save(hf, tmp_path)
    logits, wide, plain = (
        paged_logits(load(folder, **options).decoder, PROMPTS[:1], 7)[0].float()
        for options in (
            {"dtype": dtype, "quantization": quantization},
            {"quantization": quantization},
            {},
        )
    )
    assert (logits - wide).norm() < (wide - plain).norm()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_dummy_weights_are_the_plain_ones_rounded(tmp_path: Path, kind: str) -> None:
    config = load(save(tiny_model(kind, **KINDS[kind]), tmp_path)).config
    options: Any = {"load_format": "dummy", "dtype": torch.bfloat16}
    plain = load(config, **options).decoder
    decoder, fp8 = (load(config, quantization=name, **options).decoder for name in ("int3", "fp8"))
    assert torch.equal(decoder.embed_tokens, plain.embed_tokens)
    for i in range(config.num_layers):
        for name in ("qkv", "attention_out", "up", "down"):
            weight = plain.layer(i).get_submodule(name).weight
            assert isinstance(weight, Tensor)
            packed = decoder.layer(i).get_submodule(name + "._packed").get_buffer("qweight")
            assert_bit_equal(packed, quantize_weight(weight.data, 3, 128).qweight)
            codes = fp8.layer(i).get_submodule(name + "._packed").get_buffer("weight")
            assert_bit_equal(codes, quantize_fp8(weight.data)[0])


@pytest.mark.parametrize("shard_size", [None, "100KB"])
def test_one_layer_at_a_time_has_plain_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str | None
) -> None:
    """Where layer 10 comes before layer 2, too. A layer that is spread over two files waits for
    the second one: at most those at both ends of a file, beside the one being read.
    """
    filling: set[nn.Module] = set()
    most = []
    allocate, pack = Linear.allocate, DecoderLayer.pack

    def spy_on_allocate(linear: Linear) -> None:
        filling.add(linear)
        allocate(linear)
        most.append(len(filling))

    def spy_on_pack(layer: DecoderLayer) -> None:
        pack(layer)
        filling.difference_update(layer.children())
        assert not [p for p in layer.parameters() if p.dim() == 2]

    monkeypatch.setattr(Linear, "allocate", spy_on_allocate)
    monkeypatch.setattr(DecoderLayer, "pack", spy_on_pack)
    options = {} if shard_size is None else {"max_shard_size": shard_size}
    folder = save(tiny_model("llama", num_hidden_layers=12), tmp_path, **options)
    assert (shard_size is None) == (folder / "model.safetensors").exists()
    decoder = load(folder, quantization="int8").decoder
    assert not filling and most and max(most) <= 4 * (1 if shard_size is None else 3)
    assert not any(b.is_meta for b in (*decoder.buffers(), *decoder.parameters()))


@pytest.mark.parametrize("quantization", ["int4", *W8A8])
def test_a_weight_that_cannot_be_quantized_is_named(tmp_path: Path, quantization: str) -> None:
    hf = tiny_model("llama")
    hf.model.layers[1].mlp.down_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layer 1: .*weight: expected finite values, got nan"):
        load(save(hf, tmp_path), quantization=quantization)


def test_the_weights_are_set_once(tmp_path: Path) -> None:
    decoder = load(save(tiny_model("llama"), tmp_path), quantization="int4").decoder
    with pytest.raises(RuntimeError, match=r"packed"):
        decoder.weight_slots()
    decoder.pack_weights()  # once more changes nothing


@pytest.mark.parametrize("quantization", ["int5", "INT4", "", 4, True, ["int4"]])
def test_unknown_quantizations(quantization: Any) -> None:
    accepted = "None or one of 'int2', 'int3', 'int4', 'int8', 'fp8', 'int8_w8a8'"
    with pytest.raises(ValueError, match=rf"quantization must be {accepted}, got"):
        load("smollm2", quantization=quantization)


@pytest.fixture(scope="module")
def said() -> tuple[list[list[int]], list[list[int]], Tensor]:
    """What SmolLM2 goes on with: prompts, its tokens, and the logits of all of them."""
    texts = ["The capital of France is", "def fibonacci(n):\n    if n < 2:\n        return n\n"]
    tokenizer = load_tokenizer("smollm2")
    prompts = [tokenizer.encode(text) for text in texts]
    plain = load("smollm2").decoder
    tokens = paged_greedy(plain, prompts, 12, 64)
    whole = [prompt + more for prompt, more in zip(prompts, tokens, strict=True)]
    return prompts, tokens, torch.cat(paged_logits(plain, whole, 64))


def test_smollm2_in_8_bits_says_the_same(said: Any) -> None:
    """That many bits change logits by some hundredths of what they vary by, which decides nothing
    here. (Fewer, rounded to nearest, do change what a model of this size says.)
    """
    prompts, expected, plain_logits = said
    decoder = load("smollm2", quantization="int8").decoder
    assert paged_greedy(decoder, prompts, 12, 64) == expected
    whole = [prompt + more for prompt, more in zip(prompts, expected, strict=True)]
    logits = torch.cat(paged_logits(decoder, whole, 64))
    deviation = plain_logits - plain_logits.mean(-1, keepdim=True)
    assert (logits - plain_logits).norm() < 0.15 * deviation.norm()
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3  # rounding could decide no token


@pytest.mark.parametrize("quantization", W8A8)
def test_smollm2_with_8_bit_activations(said: Any, quantization: str) -> None:
    """Inputs with a scale for each token cost more, a quarter of what logits vary by, but of the
    most likely tokens only a few. (4 bits of the weights change 1.1 times what logits vary by.)
    """
    prompts, tokens, plain_logits = said
    decoder = load("smollm2", quantization=quantization).decoder
    whole = [prompt + more for prompt, more in zip(prompts, tokens, strict=True)]
    logits = torch.cat(paged_logits(decoder, whole, 64))
    deviation = plain_logits - plain_logits.mean(-1, keepdim=True)
    assert (logits - plain_logits).norm() < 0.5 * deviation.norm()
    assert (logits.argmax(-1) == plain_logits.argmax(-1)).float().mean() > 0.75
