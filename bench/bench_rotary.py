"""rotary_embedding_ against the usual composition (rotate_half), eager and compiled."""

from __future__ import annotations

import pytest
import torch

from bench.bench_norm import peers
from bench.harness import Case
from fastinfer import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIM, POSITIONS = 128, 4096
TOKENS = {"cpu": [1, 64, 1024], "cuda": [1, 64, 8192]}


def pytest_generate_tests(metafunc):
    metafunc.parametrize("tokens", TOKENS[metafunc.config.getoption("--bench-device")])


def eager(q, k, positions, cos_sin):
    cos, sin = cos_sin[positions].to(q.dtype).chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((sin, sin), -1).unsqueeze(1)
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        x.copy_(x * cos + torch.cat((-second, first), -1) * sin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_(record, suite, dtype, tokens):
    heads, kv_heads = 32, 8
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    cos_sin = ops.rotary_cos_sin(inv_freq, POSITIONS).to(suite.device)

    def make():
        qkv = torch.randn(tokens, heads + 2 * kv_heads, HEAD_DIM, device=suite.device).to(
            DTYPES[dtype]
        )
        positions = torch.randint(POSITIONS, (tokens,), device=suite.device)
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], positions, cos_sin

    record(
        Case(
            name=f"rotary_embedding_/{dtype}/{tokens}x{heads}-{kv_heads}x{HEAD_DIM}",
            make=make,
            run=ops.rotary_embedding_,
            peers=peers(eager, suite.device),
            bytes_moved=2 * tokens * (heads + kv_heads) * HEAD_DIM * DTYPES[dtype].itemsize,
        )
    )
