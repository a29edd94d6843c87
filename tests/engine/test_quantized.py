"""The engine with quantized weights: a token does not depend on what shares a step with it."""

from __future__ import annotations

import copy

import pytest

from fastinfer import LLM, SamplingParams
from fastinfer.models.linear import QUANTIZATIONS
from tests.engine.test_llm import PROMPTS, greedy
from tests.models.quantized_tools import awq, quantized, save_quantized


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_batching_does_not_change_tokens(tiny_folder, llm, quantization):
    engine = LLM(tiny_folder, quantization=quantization, kv_cache_memory_bytes=1 << 22)
    params = [greedy(8, ignore_eos=True) for _ in PROMPTS]
    params += [SamplingParams(seed=i, max_tokens=8, ignore_eos=True) for i in range(len(PROMPTS))]
    together = [o.token_ids for o in engine.generate(PROMPTS * 2, params)]
    alone = [engine.generate(p, s)[0].token_ids for p, s in zip(PROMPTS * 2, params, strict=True)]
    assert together == alone
    chunked = LLM(tiny_folder, quantization=quantization, max_num_batched_tokens=3)
    assert [o.token_ids for o in chunked.generate(PROMPTS * 2, params)] == together
    # It is another model than the plain one.
    plain = [o.token_ids for o in llm.generate(PROMPTS, params[: len(PROMPTS)])]
    assert "8" in quantization or plain != together[: len(PROMPTS)]


def test_a_folder_that_is_quantized(tmp_path, tiny_reference, tiny_tokenizer):
    """It says what the model of its dequantized weights says, under any batching."""
    hf = copy.deepcopy(tiny_reference)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    folder = save_quantized(
        hf,
        tmp_path / "awq",
        config,
        lambda name, weight: quantized(weight, 4, 32, symmetric=False),
        awq,
    )
    hf.save_pretrained(tmp_path / "plain")
    for path in (folder, tmp_path / "plain"):
        tiny_tokenizer.save_pretrained(path)
    params = greedy(12, ignore_eos=True)
    engine, plain = (
        LLM(path, kv_cache_memory_bytes=1 << 22) for path in (folder, tmp_path / "plain")
    )
    tokens = [output.token_ids for output in engine.generate(PROMPTS, params)]
    assert tokens == [output.token_ids for output in plain.generate(PROMPTS, params)]
    assert tokens == [engine.generate(prompt, params)[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("quantization", ["int4", "fp8", "int8_w8a8"])
def test_dummy_weights(llm, quantization):
    engine, again = (
        LLM(
            llm.config,
            load_format="dummy",
            quantization=quantization,
            kv_cache_memory_bytes=1 << 22,
        )
        for _ in range(2)
    )
    prompt, params = [[5, 6, 7]], greedy(8, ignore_eos=True)
    tokens = engine.generate(prompt, params)[0].token_ids
    assert len(tokens) == 8 and again.generate(prompt, params)[0].token_ids == tokens


def test_unknown_quantization(tiny_folder):
    with pytest.raises(ValueError, match=r"quantization must be None or one of 'int2'.*got 'fp5'"):
        LLM(tiny_folder, quantization="fp5")
