"""The engine as a whole.

On the CPU against transformers' generate: the real SmolLM2, fp32, greedy, batch 1 and batch 8, one
process, runs interleaved. On a GPU under load, with a model of Qwen3-8B's shape and random weights:
continuous against static batching, and the workloads that other engines were recorded on. (The
loads run on the CPU too, with a tiny model and short texts, to show that they work; that is not
recorded.)
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import Suite
from fastinfer import LLM, SamplingParams
from fastinfer.models import ModelConfig
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
def test_generate(suite: Suite, request, batch):
    if suite.device.type != "cpu":
        pytest.skip("compared with transformers on the CPU only")
    engine, peer = request.getfixturevalue("engine"), request.getfixturevalue("peer")
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


RECORDED = json.loads((Path(__file__).parent / "recorded" / "engines-h200.json").read_text())

Lengths = list[tuple[int, int]]  # prompt and output tokens of each request


def uniform(count: int, prompts: tuple[int, int], outputs: tuple[int, int]) -> Lengths:
    draw = random.Random(0)
    return [(draw.randint(*prompts), draw.randint(*outputs)) for _ in range(count)]


@dataclass(frozen=True)
class Setting:
    """The model and the loads for a kind of device."""

    name: str
    config: ModelConfig
    max_model_len: int
    max_num_batched_tokens: int
    workloads: dict[str, Lengths]
    batching: Lengths
    """Continuous against static batching, in the KV memory of `slots` sequences."""
    slots: int
    slot_tokens: int


def settings(device: torch.device) -> Setting:
    if device.type == "cpu":
        return Setting(
            "tiny",
            model_config("qwen3", *TINY),
            256,
            64,
            {"1x8/16": [(8, 16)], "8x32/16": [(32, 16)] * 8, "prefill4x64/1": [(64, 1)] * 4},
            uniform(24, (4, 64), (2, 32)),
            slots=4,
            slot_tokens=128,
        )
    return Setting(
        "qwen3-8b",
        model_config("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960),
        5120,
        8192,
        {
            "1x128/256": [(128, 256)],
            "16x512/256": [(512, 256)] * 16,
            "64x512/256": [(512, 256)] * 64,
            "256x512/256": [(512, 256)] * 256,
            "mixed256": uniform(256, (32, 1024), (16, 512)),
            "prefill16x4096/1": [(4096, 1)] * 16,
        },
        uniform(256, (32, 1024), (16, 512)),
        slots=32,
        slot_tokens=2048,
    )


TINY = (1000, 64, 128, 2, 4, 2, 16, 1024)  # sizes, in the order of model_config
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"norm_eps": 1e-6, "rope_theta": 1e6, "qk_norm": True},
    "llama": {"norm_eps": 1e-5, "rope_theta": 5e5},
}


def model_config(
    family: str, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, context
) -> ModelConfig:
    """A model in bf16 of these sizes."""
    return ModelConfig(
        architecture=family,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        dtype=torch.bfloat16,
        **FAMILIES[family],
    )


def started(suite: Suite, setting: Setting, **options: Any) -> LLM:
    """A new engine; what nobody uses any more of the memory of the last one is given back first."""
    gc.collect()
    if suite.device.type == "cuda":
        torch.cuda.empty_cache()
    return LLM(setting.config, load_format="dummy", device=str(suite.device), **options)


@dataclass
class Load:
    """What came of a workload."""

    seconds: float
    latencies: list[float]
    """Of each request, from the start of all."""
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)
    """Of each step: tokens sampled, seconds in all, of the host alone, of the device."""


def run(llm: LLM, lengths: Lengths, seed: int) -> Load:
    """All requests at once, first come, first served, greedy; the prompts are random tokens."""
    draw = random.Random(seed)
    vocab = llm.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(prompt)] for prompt, _ in lengths]
    params = [
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=output) for _, output in lengths
    ]
    core, ends, steps = llm._core, [], []
    real_step, real_forget = core.step, core._forget

    def step() -> None:
        before = core.stats
        real_step()
        after = core.stats
        steps.append(
            (
                after.tokens - before.tokens,
                after.step_seconds - before.step_seconds,
                after.host_seconds - before.host_seconds,
                after.device_seconds - before.device_seconds,
            )
        )

    def forget(completion: Any) -> None:
        real_forget(completion)
        ends.append(time.perf_counter())

    core.step, core._forget = step, forget  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    finally:
        del core.step, core._forget
    assert [len(o.token_ids) for o in outputs] == [output for _, output in lengths]
    return Load(seconds, sorted(end - start for end in ends), steps)


def record(suite: Suite, name: str, seconds: float, peers: dict[str, float], **more: Any) -> None:
    """A row whose ``us`` are those of ``seconds``, beside the peers' seconds for the same."""
    if suite.device.type == "cpu":
        return
    suite.record["results"].append(
        {
            "name": name,
            "backend": suite.device.type,
            "us": round(seconds * 1e6, 2),
            "us_iqr": 0.0,
            "tflops": None,
            "tbps": None,
            "ceiling_share": None,
            "peers": {
                peer: {"us": round(value * 1e6, 2), "ratio": round(value / seconds, 3)}
                for peer, value in peers.items()
            },
            **more,
        }
    )
    suite.write()


def percentile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


@pytest.fixture(scope="module")
def setting(suite: Suite) -> Setting:
    return settings(suite.device)


def test_workloads(suite: Suite, setting: Setting):
    """Recorded peers are shown where the GPU is the one that they were recorded on."""
    comparable = suite.record.get("gpu") == RECORDED["gpu"]
    start = time.perf_counter()
    llm = started(
        suite,
        setting,
        max_model_len=setting.max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=setting.max_num_batched_tokens,
    )
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    startup = time.perf_counter() - start
    peers = RECORDED["startup_seconds"] if comparable else {}
    record(suite, f"startup/{setting.name}", startup, peers, peers_recorded=comparable)
    print(f"\nstart-up to the first token: {startup:.1f} s, recorded: {peers}")
    for name, lengths in setting.workloads.items():
        run(llm, lengths, seed=1)  # records the graphs of the steps that come up
        load = run(llm, lengths, seed=2)
        report(suite, f"{name}/{setting.name}", name, lengths, load, comparable)


def report(
    suite: Suite, row: str, name: str, lengths: Lengths, load: Load, comparable: bool
) -> None:
    outputs, total = sum(o for _, o in lengths), sum(p + o for p, o in lengths)
    tokens = total if name.startswith("prefill") else outputs
    recorded = RECORDED["seconds"].get(name, {}) if comparable else {}
    busy = sum(step[3] for step in load.steps) / load.seconds
    decode = [step for step in load.steps if step[0] == len(lengths)]
    more: dict[str, Any] = {
        "elapsed_s": round(load.seconds, 4),
        "output_tokens_per_s": round(outputs / load.seconds, 1),
        "total_tokens_per_s": round(total / load.seconds, 1),
        "device_busy_share": round(busy, 4),
        "peers_recorded": comparable,
    }
    if len(decode) > 2:
        more["decode_step_host_us"] = round(statistics.median(s[2] for s in decode) * 1e6, 1)
        more["decode_step_us"] = round(statistics.median(s[1] for s in decode) * 1e6, 1)
        more["decode_busy_share"] = round(sum(s[3] for s in decode) / sum(s[1] for s in decode), 4)
    peers = {peer: seconds / tokens for peer, seconds in recorded.items()}
    record(suite, row, load.seconds / tokens, peers, **more)
    rates = {peer: round(1 / seconds) for peer, seconds in peers.items()}
    print(f"\n{row}: {tokens / load.seconds:.0f} tokens/s, recorded: {rates}\n  {more}")


def test_continuous_against_static(suite: Suite, setting: Setting):
    """Equal KV memory, all requests at t = 0, first come, first served."""
    lengths, slots = setting.batching, setting.slots
    config = setting.config
    bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    bytes_per_token *= 4 if suite.device.type == "cpu" else 2
    options = {
        "max_model_len": setting.slot_tokens,
        "max_num_seqs": 256,
        "kv_cache_memory_bytes": slots * setting.slot_tokens * bytes_per_token,
    }
    loads = {}
    for batching in ("continuous", "static"):
        llm = started(suite, setting, batching=batching, **options)
        run(llm, lengths, seed=1)  # records the graphs of the steps that come up
        loads[batching] = run(llm, lengths, seed=2)
        del llm
    ours, static = loads["continuous"], loads["static"]
    outputs = sum(o for _, o in lengths)
    peak = slots * setting.slot_tokens / statistics.mean(p + o for p, o in lengths)
    bounds = bound(lengths, slots, peak)
    for name, mine, theirs in (
        ("seconds_per_token", ours.seconds / outputs, static.seconds / outputs),
        ("latency_p50", percentile(ours.latencies, 0.5), percentile(static.latencies, 0.5)),
        ("latency_p99", percentile(ours.latencies, 0.99), percentile(static.latencies, 0.99)),
    ):
        more = {"bounds": bounds} if name == "seconds_per_token" else {}
        record(suite, f"continuous/{name}/{setting.name}", mine, {"static": theirs}, **more)
        print(f"\n{name}: continuous {mine:.6f} s, static {theirs:.6f} s, x{theirs / mine:.2f}")
    print(f"tokens/s: {outputs / ours.seconds:.0f} and {outputs / static.seconds:.0f}; {bounds}")


def bound(lengths: Lengths, slots: int, fit: float) -> dict[str, float]:
    """What the lengths alone allow continuous batching to gain, were every step as long as another.

    decode_steps_equal_slots: static batches take the sum of their longest outputs; with the same
    number of slots, never empty, all outputs take their sum over the slots.
    decode_steps_equal_memory: the same with as many sequences as fit into the memory, on average,
    when each takes what it needs at its end.
    prompt_tokens: padded over real ones.
    """
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    static_steps = sum(max(o for _, o in batch) for batch in batches)
    padded = sum(len(batch) * max(p for p, _ in batch) for batch in batches)
    outputs = sum(o for _, o in lengths)
    return {
        "decode_steps_equal_slots": round(static_steps / (outputs / slots), 3),
        "decode_steps_equal_memory": round(static_steps / (outputs / min(fit, len(lengths))), 3),
        "prompt_tokens": round(padded / sum(p for p, _ in lengths), 3),
    }
