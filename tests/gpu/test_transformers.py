"""transformers models on a GPU: fastinfer's attention and modules, and decode steps as graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fastinfer
from tests.helpers import assert_accurate
from tests.integrations.tools import float64_logits, generated, left_padding, logits, token_ids
from tests.models.tools import tiny_model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"]


def both(family: str) -> tuple[Any, Any]:
    """An optimised model and the untouched one."""
    plain = tiny_model(family).cuda()
    model = copy.deepcopy(plain)
    fastinfer.optimize(model)
    return model, plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(family: str, dtype: torch.dtype) -> None:
    model, plain = (m.to(dtype) for m in both(family))
    ids = token_ids().cuda()
    mask = left_padding(ids)
    expected = float64_logits(plain, ids, attention_mask=mask)
    before = logits(plain, ids, attention_mask=mask)
    rows = mask.bool()
    got = logits(model, ids, attention_mask=mask)
    assert_accurate(got[rows], expected[rows], before[rows], what="logits")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(family: str, cache: str | None) -> None:
    model, plain = both(family)
    ids = token_ids().cuda()
    mask = left_padding(ids)
    options = {"cache_implementation": cache, "disable_compile": True}
    expected = generated(plain, ids, mask, **options)
    assert torch.equal(generated(model, ids, mask, **options), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gpt2"])
@pytest.mark.parametrize("optimized", [False, True])
def test_graphs_generate_the_same(family: str, optimized: bool) -> None:
    model = both(family)[0 if optimized else 1]
    ids = token_ids().cuda()
    mask = left_padding(ids)
    options = {"cache_implementation": "static", "max_new_tokens": 12}
    expected = generated(model, ids, mask, disable_compile=True, **options)
    with fastinfer.graph(model) as graphs:
        assert torch.equal(generated(model, ids, mask, **options), expected)
        assert torch.equal(generated(model, ids, mask, **options), expected)
        assert graphs.num_graphs == 2  # each call of generate makes a cache
    assert torch.equal(generated(model, ids, mask, disable_compile=True, **options), expected)


def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, plain = both("llama")
    model, plain = model.to("cuda:1"), plain.to("cuda:1")
    ids = token_ids().to("cuda:1")
    assert_accurate(logits(model, ids), float64_logits(plain, ids), logits(plain, ids))
    fastinfer.restore(model)
    assert {p.device.index for p in model.parameters()} == {1}
