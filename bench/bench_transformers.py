"""transformers' Llama with fastinfer's parts in it, one after the other: decode steps and a prompt.

On a GPU a model of Llama-3-8B's shape with random weights in bf16. `plain` is the model as
transformers makes it, with its default attention; each further row has one more part of ours.
(On the CPU a tiny model, to show that it works; that is not recorded.)
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fastinfer
from bench.bench_engine import record
from bench.harness import Suite

transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Setting:
    """The model's sizes, and the tokens that are timed."""

    name: str
    sizes: dict[str, int]
    batches: tuple[int, ...]
    context: int
    output: int
    prompt: int
    rounds: int


@dataclass(frozen=True)
class Variant:
    """What the model has of ours: the options of `optimize` (None: nothing), and graphs."""

    name: str
    parts: dict[str, Any] | None
    graph: bool = False


VARIANTS = (
    Variant("plain", None),
    Variant("attention", {"norms": False, "mlps": False}),
    Variant("attention+fused", {}),
    Variant("attention+fused+graph", {}, graph=True),
    Variant("attention+fused+int4", {"quantization": "int4"}),
    Variant("attention+fused+int4+graph", {"quantization": "int4"}, graph=True),
)


def setting_for(device: torch.device) -> Setting:
    if device.type == "cpu":
        sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return Setting("tiny", sizes, (1, 2), 8, 4, 16, 1)
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    return Setting("llama3-8b", sizes, (1, 16), 128, 48, 4096, 3)


@pytest.fixture(scope="module")
def setting(suite: Suite) -> Setting:
    return setting_for(suite.device)


@pytest.fixture(scope="module")
def model(suite: Suite, setting: Setting) -> Any:
    config = transformers.LlamaConfig(**setting.sizes, max_position_embeddings=8192)
    dtype = torch.float32 if suite.device.type == "cpu" else torch.bfloat16
    with suite.device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def plain_seconds() -> dict[str, float]:
    """Of each row of the plain model, which comes first."""
    return {}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_transformers(
    suite: Suite,
    setting: Setting,
    model: Any,
    plain_seconds: dict[str, float],
    variant: Variant,
) -> None:
    if variant.graph and suite.device.type == "cpu":
        pytest.skip("graphs need a GPU")
    if variant.parts is not None:
        fastinfer.optimize(model, **variant.parts)
    try:
        for name, seconds in measured(suite.device, setting, model, variant).items():
            plain = plain_seconds.setdefault(name, seconds)
            peers = {} if variant.parts is None else {"transformers": plain}
            record(suite, f"{setting.name}/{name}/{variant.name}", seconds, peers)
            print(f"\n{variant.name}, {name}: {seconds * 1e3:.3f} ms, {plain / seconds:.2f}x")
    finally:
        if variant.parts is not None:
            fastinfer.restore(model)


def measured(
    device: torch.device, setting: Setting, model: Any, variant: Variant
) -> dict[str, float]:
    """Seconds of a decode step for each batch and, where graphs play no part, of a prompt."""
    options = {"do_sample": False, "disable_compile": True}
    if variant.graph:
        options["cache_implementation"] = "static"
    seconds = {}
    for batch in setting.batches:
        ids = torch.randint(3, setting.sizes["vocab_size"], (batch, setting.context), device=device)

        def generate(count: int, ids: torch.Tensor = ids) -> None:
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
                **options,
            )

        with fastinfer.graph(model) if variant.graph else contextlib.nullcontext():
            whole = timed(device, setting.rounds, lambda: generate(setting.output))
            first = timed(device, setting.rounds, lambda: generate(1))
        name = f"decode/{batch}x{setting.context}+{setting.output}"
        seconds[name] = (whole - first) / (setting.output - 1)
    if not variant.graph:
        ids = torch.randint(3, setting.sizes["vocab_size"], (1, setting.prompt), device=device)
        with torch.no_grad():
            seconds[f"prefill/1x{setting.prompt}"] = timed(
                device, setting.rounds + 2, lambda: model(ids, use_cache=True, logits_to_keep=1)
            )
    return seconds


def timed(device: torch.device, rounds: int, run: Callable[[], Any]) -> float:
    """The median of some rounds, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
