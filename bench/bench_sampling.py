"""sample against argmax and the usual composition (sort, filter, multinomial), eager and
compiled.
"""

from __future__ import annotations

import torch

from bench.bench_norm import peers
from bench.harness import Case
from fastinfer import ops


def eager_sample(logits, temperature, top_k, top_p):
    x = logits.float() / temperature.unsqueeze(1)
    values, order = x.sort(dim=-1, descending=True)
    rank = torch.arange(x.shape[1], device=x.device)
    if top_k is not None:
        values = values.masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    probabilities = values.softmax(-1)
    drop = probabilities.cumsum(-1) - probabilities >= top_p.unsqueeze(1)
    probabilities = probabilities.masked_fill(drop, 0.0)
    return order.gather(1, torch.multinomial(probabilities, 1)).squeeze(1)


SHAPES = {
    "cpu": [(rows, vocab) for vocab in (49152, 151936) for rows in (1, 8, 64)],
    "cuda": [(1, 151936), (64, 151936), (256, 128256)],
}
VARIANTS = {
    "cpu": ["greedy", "temperature", "top_k-top_p"],
    "cuda": ["greedy", "temperature", "top_k-top_p", "top_p"],
}


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    metafunc.parametrize("variant", VARIANTS[device])
    metafunc.parametrize("shape", SHAPES[device], ids=lambda s: f"{s[0]}x{s[1]}")


def test_sample(record, suite, variant, shape):
    device = suite.device
    rows, vocab = shape

    def per_row(value, dtype=torch.float32):
        return torch.full((rows,), value, dtype=dtype, device=device)

    temperature, seeds = per_row(0.8), torch.arange(rows, device=device)
    positions = torch.arange(rows, device=device)
    top_k = per_row(50, torch.int32) if variant == "top_k-top_p" else None
    top_p = per_row(0.9) if variant in ("top_k-top_p", "top_p") else None

    def run(logits):
        if variant == "greedy":
            return ops.sample(logits)
        return ops.sample(
            logits, temperature, top_k=top_k, top_p=top_p, seeds=seeds, positions=positions
        )

    def eager(logits):
        if variant == "greedy":
            return logits.argmax(-1)
        if variant == "temperature":
            return torch.multinomial((logits / temperature.unsqueeze(1)).softmax(-1), 1)
        return eager_sample(logits, temperature, top_k, top_p)  # a top_k of None keeps all

    record(
        Case(
            name=f"sample/{variant}/{rows}x{vocab}",
            make=lambda: (torch.randn(rows, vocab, device=device) * 3,),
            run=run,
            peers=peers(eager, device),
            bytes_moved=rows * vocab * 4,
        )
    )
