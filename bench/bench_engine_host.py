"""The engine's own time for a decode step: scheduling, packing, sampling parameters, what is done
with the tokens. The model and the sampling op are stand-ins that cost next to nothing, so this is
what a device would wait for, but for the launches.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from bench.harness import Suite
from fastinfer import LLM, SamplingParams, ops
from fastinfer.models import ModelConfig
from fastinfer.models.source import EMBEDDED

VOCAB, STEPS, PROMPT_TOKENS = 2048, 150, 128
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, ignore_eos=True, max_tokens=512)
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=512)
KINDS = {
    "greedy": (GREEDY, None),
    "sampled": (SAMPLED, None),
    "sampled+text": (SAMPLED, EMBEDDED),
    "sampled+stream": (SAMPLED, EMBEDDED),
}


class NoModel:
    """Hidden states and logits that are there already."""

    def __init__(self, decoder, rows: int, tokens: int) -> None:
        self.config, self.embed_tokens = decoder.config, decoder.embed_tokens
        self._hidden = torch.zeros(tokens, 1)
        self._logits = torch.randn(rows, VOCAB)

    def __call__(self, batch, kv_caches):
        return self._hidden[: len(batch.input_ids)]

    def compute_logits(self, hidden):
        return self._logits[: len(hidden)]


def no_sample(logits, *, token_ids, valid, **options):
    token_ids.fill_(777)
    valid.fill_(True)
    return token_ids, valid


def engine(sequences: int, tokenizer: str | None) -> LLM:
    config = ModelConfig(
        architecture="llama",
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=2048,
        norm_eps=1e-5,
    )
    llm = LLM(
        config,
        load_format="dummy",
        device="cpu",
        tokenizer=tokenizer,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT_TOKENS,
    )
    runner = llm._core._runner
    runner._decoder = NoModel(runner._decoder, sequences, sequences * PROMPT_TOKENS)
    return llm


@pytest.mark.parametrize("sequences", [64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_decode_step(suite: Suite, monkeypatch, sequences, kind):
    params, tokenizer = KINDS[kind]
    llm = engine(sequences, tokenizer)
    monkeypatch.setattr(ops, "sample", no_sample)
    prompts = torch.randint(0, VOCAB, (sequences, PROMPT_TOKENS)).tolist()
    samples = []

    def timed_step() -> None:
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e6)

    if kind.endswith("stream"):
        step = llm.step
        for prompt in prompts:
            llm.add_request(prompt, params)
        for _ in range(STEPS):
            timed_step()
    else:
        step = llm._core.step
        monkeypatch.setattr(llm._core, "step", timed_step)
        llm.generate(prompts, SamplingParams(**{**vars(params), "max_tokens": STEPS}))
    samples = samples[1:-1]  # without the prefill, and the step in which all of them end
    quartiles = statistics.quantiles(samples, n=4)
    suite.record["results"].append(
        {
            "name": f"decode_step_host/{kind}/{sequences}",
            "backend": suite.device.type,
            "us": round(quartiles[1], 1),
            "us_iqr": round(quartiles[2] - quartiles[0], 1),
            "tflops": None,
            "tbps": None,
            "ceiling_share": None,
            "peers": {},
        }
    )
    suite.write()
    print(f"\n{kind}, {sequences}: {quartiles[1]:.0f} us of host time, at most {max(samples):.0f}")
