"""append_paged_kv_cache_ against an indexed assignment, eager and compiled; qk_norm_rope_append_
against the ops that it fuses, one after the other. Beside both, on a GPU, a plain copy that moves
as many bytes: at these sizes it does not reach the bandwidth of a large one either.
"""

from __future__ import annotations

import pytest
import torch

from bench.bench_norm import peers
from bench.harness import Case
from fastinfer import ops

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8kv": torch.int8,
    "fp8kv": torch.float8_e4m3fn,
}
HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
TOKENS = {"cpu": [1, 64, 2048], "cuda": [1, 64, 8192]}


def copied(bytes_moved, device):
    """What `plain_copy` takes, to be added to a case's inputs."""
    if device.type == "cpu":
        return ()
    return tuple(torch.zeros(bytes_moved // 2, dtype=torch.uint8, device=device) for _ in range(2))


def plain_copy(*inputs):
    inputs[-1].copy_(inputs[-2])


def with_copy(candidates, device):
    """The peers of a case, and on a GPU the copy."""
    return candidates if device.type == "cpu" else {**candidates, "plain copy": plain_copy}


def pytest_generate_tests(metafunc):
    metafunc.parametrize("tokens", TOKENS[metafunc.config.getoption("--bench-device")])


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_paged_kv_cache_(record, suite, dtype, tokens):
    storage = DTYPES[dtype]
    quantized = dtype.endswith("kv")
    # What a model on the device computes in.
    computed = torch.float32 if suite.device.type == "cpu" else torch.bfloat16
    source = computed if quantized else storage
    num_blocks = 2 * max(1, tokens // BLOCK_SIZE) + 1
    bytes_moved = 2 * tokens * HEADS * HEAD_DIM * (source.itemsize + storage.itemsize)

    def make():
        k, v = (
            torch.randn(tokens, HEADS, HEAD_DIM, device=suite.device).to(source) for _ in range(2)
        )
        shape = (num_blocks, HEADS, BLOCK_SIZE, HEAD_DIM)
        caches = [torch.zeros(shape, device=suite.device).to(storage) for _ in range(2)]
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=suite.device)[:tokens]
        scales = (
            [torch.ones(shape[:3], device=suite.device) for _ in range(2)]
            if quantized
            else [None, None]
        )
        return k, v, *caches, slots, *scales, *copied(bytes_moved, suite.device)

    def run(k, v, k_cache, v_cache, slots, k_scale, v_scale, *_copied):
        ops.append_paged_kv_cache_(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)

    def eager(k, v, k_cache, v_cache, slots, k_scale, v_scale, *_copied):
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            if scale is not None:
                largest = 127.0 if cache.dtype == torch.int8 else 448.0
                new = (x.float().abs().amax(-1) / largest).clamp(min=1e-12)
                scale[block, :, offset] = new
                x = x.float() / new.unsqueeze(-1)
                x = (x.round() if cache.dtype == torch.int8 else x).to(cache.dtype)
            if cache.dtype == torch.float8_e4m3fn:
                cache.view(torch.int8)[block, :, offset] = x.view(torch.int8)
            else:
                cache[block, :, offset] = x

    record(
        Case(
            name=f"append_paged_kv_cache_/{dtype}/{tokens}x{HEADS}x{HEAD_DIM}/b{BLOCK_SIZE}",
            make=make,
            run=run,
            peers=with_copy(peers(eager, suite.device), suite.device),
            bytes_moved=bytes_moved,
        )
    )


QUERY_HEADS, POSITIONS = 32, 4096


@pytest.mark.parametrize("norm", [False, True], ids=["rope", "norm_rope"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_append_(record, suite, dtype, norm, tokens):
    storage = DTYPES[dtype]
    quantized = dtype.endswith("kv")
    computed = torch.float32 if suite.device.type == "cpu" else torch.bfloat16
    source = computed if quantized else storage
    num_blocks = 2 * max(1, tokens // BLOCK_SIZE) + 1
    sizes = (QUERY_HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEADS * HEAD_DIM)
    inv_freq = 1.0 / 1e4 ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
    cos_sin = ops.rotary_cos_sin(inv_freq, POSITIONS).to(suite.device)
    weight = torch.ones(HEAD_DIM, device=suite.device, dtype=source) if norm else None
    kv = 2 * HEADS * HEAD_DIM
    bytes_moved = tokens * (
        2 * sizes[0] * source.itemsize + kv * (source.itemsize + storage.itemsize)
    )

    def make():
        qkv = torch.randn(tokens, sum(sizes), device=suite.device).to(source)
        q = torch.empty(tokens, QUERY_HEADS, HEAD_DIM, device=suite.device, dtype=source)
        shape = (num_blocks, HEADS, BLOCK_SIZE, HEAD_DIM)
        caches = [torch.zeros(shape, device=suite.device).to(storage) for _ in range(2)]
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=suite.device)[:tokens]
        positions = torch.randint(POSITIONS, (tokens,), device=suite.device)
        scales = [
            torch.ones(shape[:3], device=suite.device) if quantized else None for _ in range(2)
        ]
        return (
            qkv, q, *caches, slots, positions, *scales, *copied(bytes_moved, suite.device)
        )  # fmt: skip

    def run(qkv, q, k_cache, v_cache, slots, positions, k_scale, v_scale, *_copied):
        ops.qk_norm_rope_append_(
            qkv, q, k_cache, v_cache, slots, positions=positions, cos_sin=cos_sin,
            q_weight=weight, k_weight=weight, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def separate(qkv, q, k_cache, v_cache, slots, positions, k_scale, v_scale, *_copied):
        q, k, v = (x.unflatten(1, (-1, HEAD_DIM)) for x in qkv.split(sizes, dim=1))
        if weight is not None:
            ops.rms_norm(q, weight, out=q)
            ops.rms_norm(k, weight, out=k)
        ops.rotary_embedding_(q, k, positions, cos_sin)
        ops.append_paged_kv_cache_(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)

    record(
        Case(
            name=f"qk_norm_rope_append_/{dtype}{'-norm' if norm else ''}"
            f"/{tokens}x{QUERY_HEADS}-{HEADS}x{HEAD_DIM}/b{BLOCK_SIZE}",
            make=make,
            run=run,
            peers=with_copy({"separate ops": separate}, suite.device),
            bytes_moved=bytes_moved,
        )
    )
