"""The proof on the real SmolLM2 in fp32: its greedy tokens are those of transformers, always.

16 varied prompts of 1 to about 600 tokens, 128 tokens each. What the engine does with its time
(batches, chunks, prefix hits, preemption) must not change one token, greedy or sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fastinfer import LLM, SamplingParams
from fastinfer.engine import llm as llm_module
from fastinfer.engine.outputs import RequestOutput
from fastinfer.models import load, load_tokenizer
from fastinfer.models.source import resolve

TOKENS = 128
SAMPLED_TOKENS = 48

WINDS = ["north", "north-east", "east", "south", "south-west", "west"]
SKIES = ["calm", "rain", "fog", "a storm", "snow"]
LOG = "".join(
    f"Day {day}. Wind from the {WINDS[day * 5 % 6]}, {day * 7 % 23} ships, {SKIES[day * 3 % 5]}. "
    f"The lamp of the lighthouse burned for {day * 11 % 13 + 1} hours.\n"
    for day in range(1, 21)
)

PROMPTS = [
    "The",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number.'''\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "3.14159265358979323846264338327950288419716939937510",
    "| city | country | population |\n|---|---|---|\n| Paris | France | 2148000 |\n",
    "La révolution française a commencé en",
    "Die Straßenbahn fährt über die Brücke, während",
    "Москва — столица России, и",
    "人工智能是计算机科学的一个分支，",
    "🙂🙃 The emoji above mean: \u200dñ ü ß ∑ √ ≈",
    'SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name;\n-- {"a": [1, 2, 3]}\n',
    [{"role": "user", "content": "What is the capital of Australia, and why is it not Sydney?"}],
    [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is photosynthesis?"},
        {"role": "assistant", "content": "It is how plants make sugar from light."},
        {"role": "user", "content": "Which gas do they take in for that?"},
    ],
    f"The keeper's log.\n{LOG}On the last day, he wrote:",
    "Q: If a train travels 60 miles in 1.5 hours, what is its average speed?\nA: Let us think.",
]


def greedy(count: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def sampled(i: int, count: int = SAMPLED_TOKENS) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.95, seed=1000 + i, max_tokens=count, ignore_eos=True
    )


def run(llm: LLM, prompts: list[int], counts: tuple[int, int]) -> dict[str, list[int]]:
    """Tokens of the prompts with these indices, each once greedy and once sampled, in one batch."""
    requests = [(f"greedy {i}", PROMPTS[i], greedy(counts[0])) for i in prompts]
    requests += [(f"sampled {i}", PROMPTS[i], sampled(i, counts[1])) for i in prompts]
    outputs = llm.generate([r[1] for r in requests], [r[2] for r in requests])
    llm.blocks.check_integrity()
    assert llm.blocks.num_used == 0
    return {r[0]: o.token_ids for r, o in zip(requests, outputs, strict=True)}


@dataclass
class Baseline:
    """All prompts in one batch: greedy results, and greedy and sampled tokens by name."""

    outputs: list[RequestOutput]
    tokens: dict[str, list[int]]

    def of(self, prompts: list[int], counts: tuple[int, int]) -> dict[str, list[int]]:
        """What `run` must return for the same arguments."""
        result = {f"greedy {i}": self.tokens[f"greedy {i}"][: counts[0]] for i in prompts}
        return result | {f"sampled {i}": self.tokens[f"sampled {i}"][: counts[1]] for i in prompts}


ALL = list(range(len(PROMPTS)))


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., LLM]]:
    """Makes engines that share one copy of the weights, which takes seconds to load."""
    loaded = load("smollm2")
    tokenizer = load_tokenizer("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "load", lambda *args, **options: loaded)
        yield lambda **options: LLM("smollm2", tokenizer=tokenizer, **options)


@pytest.fixture(scope="module")
def engine(make_engine) -> LLM:
    return make_engine(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def baseline(engine) -> Baseline:
    requests = [greedy() for _ in ALL] + [sampled(i) for i in ALL]
    outputs = engine.generate(PROMPTS * 2, requests)
    names = [f"greedy {i}" for i in ALL] + [f"sampled {i}" for i in ALL]
    tokens = {name: o.token_ids for name, o in zip(names, outputs, strict=True)}
    assert all(len(ids) in (TOKENS, SAMPLED_TOKENS) for ids in tokens.values())
    return Baseline(outputs[: len(ALL)], tokens)


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    """SmolLM2 as transformers reads it from the same file (but for the vocabulary)."""
    path = str(resolve("smollm2"))
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False)
    assert result.missing_keys == ["lm_head.weight"] and not result.unexpected_keys  # it is tied
    return model


def test_the_prompts_are_varied(baseline):
    lengths = [len(o.prompt_token_ids) for o in baseline.outputs]
    assert len(PROMPTS) == 16 and min(lengths) == 1 and 550 < max(lengths) < 700
    assert len({o.text for o in baseline.outputs}) == 16
    tokens = baseline.tokens
    assert all(tokens[f"sampled {i}"] != tokens[f"greedy {i}"][:SAMPLED_TOKENS] for i in ALL)


@pytest.mark.parametrize("i", ALL)
def test_greedy_tokens_are_the_argmax_of_transformers(baseline, reference, i):
    # Prompt and our tokens in one pass: by induction, each is what their own loop would choose.
    output = baseline.outputs[i]
    start = len(output.prompt_token_ids) - 1
    with torch.inference_mode():
        ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
        logits = reference(ids, logits_to_keep=TOKENS).logits[0]
    assert len(ids[0]) - start == TOKENS
    best = logits.topk(2, dim=-1)
    assert output.token_ids == best.indices[:, 0].tolist()
    # No token was a tie that rounding could have decided otherwise on another machine.
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > 1e-3


@pytest.mark.parametrize("i", [6, 12])
def test_greedy_tokens_are_those_that_transformers_generates(baseline, reference, i):
    output = baseline.outputs[i]
    ids = torch.tensor([output.prompt_token_ids])
    with torch.inference_mode():
        generated = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    assert output.token_ids == generated[0, len(output.prompt_token_ids) :].tolist()


@pytest.mark.parametrize("i", ALL)
def test_alone(engine, baseline, i):
    # One token a step is slow: the full length for the first prompt only.
    counts = (TOKENS, SAMPLED_TOKENS) if i == 0 else (24, 12)
    for params, name in ((greedy(counts[0]), "greedy"), (sampled(i, counts[1]), "sampled")):
        output = engine.generate(PROMPTS[i], params)[0]
        assert output.token_ids == baseline.tokens[f"{name} {i}"][: params.max_tokens]


def test_in_other_batches(engine, baseline):
    # In reverse, so that other prompts share each step; and three only.
    assert run(engine, ALL[::-1], (48, 24)) == baseline.of(ALL, (48, 24))
    assert run(engine, [3, 9, 14], (24, 24)) == baseline.of([3, 9, 14], (24, 24))


@pytest.mark.parametrize(
    ("budget", "prompts", "counts"),
    [
        # One token a step, whoever's it is: two prompts, of 1 and 22 tokens, must do.
        (1, [0, 8], (16, 16)),
        (7, [0, 2, 7, 9, 12, 14], (32, 16)),
        (64, ALL, (64, 32)),
    ],
)
def test_in_chunks(make_engine, baseline, budget, prompts, counts):
    llm = make_engine(max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert run(llm, prompts, counts) == baseline.of(prompts, counts)


def test_with_a_prefix_hit(make_engine, baseline):
    llm, counts = make_engine(), (32, 32)
    assert run(llm, ALL, counts) == baseline.of(ALL, counts)
    hits = spy_on_prefix_hits(llm)
    assert run(llm, ALL, counts) == baseline.of(ALL, counts)
    # Every prompt of more than a block hit, and the long one almost whole.
    lengths = [len(o.prompt_token_ids) for o in baseline.outputs]
    assert len([h for h in hits if h > 0]) == 2 * len([n for n in lengths if n > 16])
    assert max(hits) >= max(lengths) - 16


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_through_preemption(make_engine, baseline, prefix_caching):
    # 48 blocks of 16 tokens, of which the long prompt and its output need 42 alone.
    prompts, counts = [0, 2, 5, 8, 9, 12, 13, 14], (64, 32)
    memory = 48 * (30 * 3 * 64 * 2 * 4 * 16)
    llm = make_engine(kv_cache_memory_bytes=memory, enable_prefix_caching=prefix_caching)
    assert llm.blocks.num_blocks == 48
    preempted = spy_on_preemption(llm)
    assert run(llm, prompts, counts) == baseline.of(prompts, counts)
    assert len(preempted) >= 4, "the pool was meant to be too small"


def spy_on_prefix_hits(llm: LLM) -> list[int]:
    """Fills up with the cached tokens of each request that a step admits."""
    hits: list[int] = []
    scheduler = llm._core._scheduler
    admit = scheduler._admit

    def spy(request):
        admitted = admit(request)
        if admitted:
            hits.append(request.num_cached_tokens)
        return admitted

    scheduler._admit = spy
    return hits


def spy_on_preemption(llm: LLM) -> list[int]:
    """Fills up with the ids of preempted requests."""
    preempted: list[int] = []
    scheduler = llm._core._scheduler
    preempt = scheduler._preempt_youngest

    def spy():
        request = preempt()
        preempted.append(request.request_id)
        return request

    scheduler._preempt_youngest = spy
    return preempted
