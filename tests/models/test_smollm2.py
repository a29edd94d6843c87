"""The embedded default model, against transformers' own load of the same file."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fastinfer.models import Decoder, load_tokenizer
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.linear import _can_pack
from fastinfer.models.loader import fill
from fastinfer.models.source import resolve
from tests.helpers import assert_accurate
from tests.models.tools import float64_logits, paged_logits


@pytest.fixture(scope="module")
def theirs() -> Any:
    # What from_pretrained(gguf_file=...) does, without parsing the vocabulary three times over.
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    path = str(resolve("smollm2"))
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    model = transformers.LlamaForCausalLM(config).eval()
    result = model.load_state_dict(tensors, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys  # it is tied
    return model


@pytest.fixture(scope="module")
def ours() -> Decoder:
    """Filled, not packed."""
    checkpoint = GGUFCheckpoint(resolve("smollm2"))
    decoder = Decoder(
        checkpoint.config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=256
    )
    fill(decoder, checkpoint)
    return decoder


def test_weights_are_bit_equal(theirs: Any, ours: Decoder) -> None:
    slots = ours.weight_slots()
    weights = dict(theirs.named_parameters())
    assert len(slots) == 272
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, weights[name]), name


def test_logits(theirs: Any, ours: Decoder) -> None:
    prompts = [
        "The capital of France is",
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
        "In 1969, 3 astronauts travelled 384,400 km to the Moon. The first to step onto it was",
    ]
    tokenizer = load_tokenizer("smollm2")
    ids = [tokenizer.encode(p) for p in prompts]
    ours.pack_weights()
    whole = paged_logits(ours, ids, 64)
    for tokens, logits in zip(ids, whole, strict=True):
        with torch.no_grad():
            baseline = theirs(torch.tensor([tokens])).logits[0]
        reference = float64_logits(theirs.state_dict(), ours.config, tokens)
        assert torch.equal(logits.argmax(-1), reference.argmax(-1))
        assert torch.equal(baseline.argmax(-1), reference.argmax(-1))
        # One running sum per output makes up to 4 times the rounding error of several.
        assert_accurate(logits, reference, baseline, multiple=4.0)
    if _can_pack(ours.embed_tokens):
        for a, b in zip(whole, paged_logits(ours, ids, 5), strict=True):
            assert torch.equal(a, b)
