"""The engine with quantized weights: a token does not depend on what shares a step with it."""

from __future__ import annotations

import pytest

from fastinfer import LLM, SamplingParams
from fastinfer.models.linear import QUANTIZATIONS
from tests.engine.test_llm import PROMPTS, greedy


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
