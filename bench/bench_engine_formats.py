"""The engine with weights of each format: output tokens a second beside bf16's, at several batches.

On a GPU a model of Llama-3-8B's shape with random weights; a format is loaded once and takes all
batches. (On the CPU a tiny model and short texts, to show that it works; that is not recorded.)
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest
import torch

from bench.bench_engine import TINY, model_config, record, run, started
from bench.harness import Suite
from fastinfer import LLM
from fastinfer.models import ModelConfig

FORMATS = ("bf16", "int4", "int3", "int8", "fp8", "int8_w8a8")  # bf16, the peer of all, first


@dataclass(frozen=True)
class Setting:
    """The model, the batches and the tokens of each request."""

    name: str
    config: ModelConfig
    batches: tuple[int, ...]
    prompt: int
    output: int
    rounds: int


def setting_for(device: torch.device) -> Setting:
    if device.type == "cpu":
        return Setting("tiny", model_config("llama", *TINY), (1, 4), 8, 8, 1)
    config = model_config("llama", 128256, 4096, 14336, 32, 32, 8, 128, 8192)
    return Setting("llama3-8b", config, (1, 16, 128), 128, 128, 3)


@pytest.fixture(scope="module")
def bf16_seconds() -> dict[int, float]:
    """Of each batch, filled by the first format."""
    return {}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(suite: Suite, bf16_seconds: dict[int, float], name: str):
    setting = setting_for(suite.device)
    llm = started(
        suite,
        setting,
        dtype="bfloat16",
        quantization=None if name == "bf16" else name,
        max_model_len=setting.prompt + setting.output,
        max_num_seqs=max(setting.batches),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    weights = weight_bytes(llm)
    for batch in setting.batches:
        lengths = [(setting.prompt, setting.output)] * batch
        run(llm, lengths, seed=1)  # records the graphs of the steps that come up
        loads = [run(llm, lengths, seed=2 + i) for i in range(setting.rounds)]
        seconds = sorted(load.seconds for load in loads)
        median = statistics.median(seconds)
        tokens = batch * setting.output
        decode = [step[1] for load in loads for step in load.steps if step[0] == batch]
        peers = {}
        if name == "bf16":
            bf16_seconds[batch] = median
        elif batch in bf16_seconds:
            peers["bf16"] = bf16_seconds[batch] / tokens
        rate = tokens / median
        shape = f"{batch}x{setting.prompt}+{setting.output}"
        record(
            suite,
            f"generate/{setting.name}/{name}/{shape}",
            median / tokens,
            peers,
            us_iqr=round((seconds[-1] - seconds[0]) / tokens * 1e6, 2),
            output_tokens_per_s=round(rate, 1),
            decode_step_us=round(statistics.median(decode) * 1e6, 1),
            weights_gb=round(weights / 1e9, 3),
        )
        print(f"\n{name}, batch {batch}: {rate:.0f} tokens/s, {weights / 1e9:.2f} GB of weights")


def weight_bytes(llm: LLM) -> int:
    """What weights take, the embedding and the output projection among them."""
    decoder = llm._core._runner._decoder
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
