"""The engine against transformers' generate: the real SmolLM2, fp32, greedy, batch 1 and batch 8,
one process, runs interleaved.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from bench.harness import Suite
from fastinfer import LLM, SamplingParams
from fastinfer.models.source import EMBEDDED, resolve

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 64, 3


@pytest.fixture(scope="module")
def engine():
    return LLM(
        EMBEDDED,
        dtype="float32",
        device="cpu",
        enable_prefix_caching=False,
        max_model_len=1024,
    )


@pytest.fixture(scope="module")
def peer():
    from transformers import AutoModelForCausalLM

    path = resolve(EMBEDDED)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("batch", [1, 8])
def test_generate(suite: Suite, engine, peer, batch):
    ids = torch.randint(100, 40000, (batch, PROMPT_TOKENS))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def ours():
        results = engine.generate(ids.tolist(), params)
        assert all(len(r.token_ids) == NEW_TOKENS for r in results)

    def transformers():
        with torch.inference_mode():
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        assert out.shape[1] == PROMPT_TOKENS + NEW_TOKENS

    runs = {"fastinfer": ours, "transformers": transformers}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):  # the first round warms up
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - start) / (batch * NEW_TOKENS) * 1e6)
    us = {name: statistics.median(values[1:]) for name, values in samples.items()}
    spread = max(samples["fastinfer"][1:]) - min(samples["fastinfer"][1:])
    suite.record["results"].append(
        {
            "name": f"generate/smollm2/fp32/{batch}x{PROMPT_TOKENS}+{NEW_TOKENS}",
            "backend": suite.device.type,
            "us": round(us["fastinfer"], 1),
            "us_iqr": round(spread, 1),
            "tflops": None,
            "tbps": None,
            "ceiling_share": None,
            "peers": {
                "transformers": {
                    "us": round(us["transformers"], 1),
                    "ratio": round(us["transformers"] / us["fastinfer"], 3),
                }
            },
        }
    )
    suite.write()
    rates = ", ".join(f"{name} {1e6 / value:.1f} tokens/s" for name, value in us.items())
    print(f"\nbatch {batch}: {rates}")
