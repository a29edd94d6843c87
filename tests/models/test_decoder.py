"""The decoder: its logits against float64 and transformers, through paged KV in any chunking."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.models import Batch, Decoder, load
from fastinfer.models.linear import _can_pack
from tests.helpers import assert_accurate
from tests.models.tools import float64_logits, paged_logits, save, tiny_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_mha": ("llama", {"num_key_value_heads": None}),
    "llama_plain_head_dim": ("llama", {"head_dim": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
}
PROMPTS = [[1, *range(3, 50)], [5], [90, 3, 3, 17, 41, 2, 8, 96, 0], list(range(60, 77))]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers' model, ours, loaded from what it saved)."""
    kind, changes = MODELS[request.param]
    hf = tiny_model(kind, **changes)
    folder = tmp_path_factory.mktemp(request.param)
    return hf, load(save(hf, folder), dtype=torch.float32).decoder


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits(pair: Any, chunk: int) -> None:
    hf, decoder = pair
    ours = paged_logits(decoder, PROMPTS, chunk)
    for ids, logits in zip(PROMPTS, ours, strict=True):
        with torch.no_grad():
            baseline = hf(torch.tensor([ids])).logits[0]
        reference = float64_logits(hf.state_dict(), decoder.config, ids)
        # Two implementations of one model differ by rounding; were one wrong, by the size of the
        # logits. This guards the reference, not us.
        assert (baseline - reference).abs().max() < 2**-12 * reference.abs().max()
        assert_accurate(logits, reference, baseline, multiple=3.0)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    hf = tiny_model("llama")
    decoder = load(save(hf, tmp_path), dtype=dtype).decoder
    ids = PROMPTS[0]
    with torch.no_grad():
        baseline = hf.to(dtype)(torch.tensor([ids])).logits[0]
    reference = float64_logits(hf.state_dict(), decoder.config, ids)
    assert_accurate(paged_logits(decoder, [ids], 7)[0], reference, baseline, multiple=2.0)


def test_a_step_without_tokens(tmp_path: Path) -> None:
    decoder = load(save(tiny_model("llama"), tmp_path)).decoder
    empty, ints = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    batch = Batch(empty, empty, empty, ints[:0, None], ints, ints[:0], empty, 0, 0)
    hidden = decoder(batch, [])
    assert hidden.shape == (0, decoder.config.hidden_size)
    assert decoder.compute_logits(hidden).shape == (0, decoder.config.vocab_size)


def test_the_weights_need_no_gradient_and_are_set_once(tmp_path: Path) -> None:
    decoder = load(save(tiny_model("qwen2"), tmp_path)).decoder
    assert not any(p.requires_grad for p in decoder.parameters())
    if _can_pack(decoder.embed_tokens):
        with pytest.raises(RuntimeError, match=r"packed"):
            decoder.weight_slots()


def test_slots_cover_every_parameter(tmp_path: Path) -> None:
    hf = tiny_model("llama", attention_bias=True, mlp_bias=True)
    config = load(save(hf, tmp_path)).config
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    slots = decoder.weight_slots()
    assert {n: tuple(s.shape) for n, s in slots.items()} == {
        n: tuple(p.shape) for n, p in hf.named_parameters()
    }
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)
    for slot in slots.values():
        slot.fill_(1.0)
    assert all(p.isfinite().all() for p in decoder.parameters())
