"""The attention family against torch's scaled_dot_product_attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from bench.harness import Case
from fastinfer import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = {"h9-3/d64": (9, 3, 64), "h32-8/d128": (32, 8, 128)}


def sdpa(q, k, v, causal):
    """On [S, H, D] views; torch repeats the KV heads itself."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flash_attention_causal(record, suite, cpu, dtype, heads, length):
    h, hk, d = HEADS[heads]

    def make():
        return tuple(
            torch.randn(1, length, n, d, device=suite.device).to(DTYPES[dtype]) for n in (h, hk, hk)
        )

    record(
        Case(
            name=f"flash_attention/{dtype}/s{length}/causal/{heads}",
            make=make,
            run=lambda q, k, v: ops.flash_attention(q, k, v, causal=True),
            peers={"sdpa": lambda q, k, v: sdpa(q, k, v, True)},
            flops=2 * length * length * h * d,
        )
    )


def with_fp8(q, k, v):
    """The same call in e4m3 with a scale for each head, before the bf16 tensors that peers take."""
    scales = [torch.ones(x.shape[-2], device=x.device) for x in (q, k, v)]
    return *(x.to(torch.float8_e4m3fn) for x in (q, k, v)), *scales, q, k, v


def run_fp8(causal):
    """Ours on what `with_fp8` makes."""

    def run(q, k, v, q_scale, k_scale, v_scale, *_bf16):
        return ops.flash_attention(
            q, k, v, causal=causal, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        )

    return run


@pytest.mark.parametrize("heads", HEADS)
def test_flash_attention_fp8_causal(record, suite, cpu, heads):
    """The peer attends in bf16."""
    h, hk, d = HEADS[heads]
    length = 512

    def make():
        shapes = ((1, length, n, d) for n in (h, hk, hk))
        return with_fp8(*(torch.randn(s, device=suite.device).bfloat16() for s in shapes))

    record(
        Case(
            name=f"flash_attention/fp8/s{length}/causal/{heads}",
            make=make,
            run=run_fp8(True),
            peers={"sdpa": lambda *inputs: sdpa(*inputs[-3:], True)},
            flops=2 * length * length * h * d,
        )
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_flash_attention_varlen(record, suite, cpu, dtype, heads):
    h, hk, d = HEADS[heads]
    lengths = [17, 200, 64, 511]
    cu = (
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(suite.device)
    )
    starts = cu.tolist()

    def make():
        return tuple(
            torch.randn(sum(lengths), n, d, device=suite.device).to(DTYPES[dtype])
            for n in (h, hk, hk)
        )

    def each(q, k, v):
        spans = pairwise(starts)
        return [sdpa(q[a:b], k[a:b], v[a:b], True) for a, b in spans]

    record(
        Case(
            name=f"flash_attention_varlen/{dtype}/4seqs/causal/{heads}",
            make=make,
            run=lambda q, k, v: ops.flash_attention_varlen(
                q, k, v, cu, cu, max_seqlen_q=512, max_seqlen_k=512, causal=True
            ),
            peers={"sdpa": each},
        )
    )


@pytest.mark.parametrize("kv", ["fp32", "bf16", "int8kv", "fp8kv"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1024), (8, 1024), (8, 8192)])
def test_paged_attention_decode(record, suite, cpu, kv, batch, length):
    """One query token a sequence. The peer reads contiguous 16- or 32-bit keys and values: it has
    no pages.
    """
    h, hk, d, block = 32, 8, 128, 16
    storage = {"int8kv": torch.int8, "fp8kv": torch.float8_e4m3fn}.get(kv, DTYPES.get(kv))
    dtype = torch.float32 if kv == "fp32" else torch.bfloat16
    blocks = batch * length // block
    cu = torch.arange(batch + 1, dtype=torch.int32, device=suite.device)
    lens = torch.full((batch,), length, dtype=torch.int32, device=suite.device)

    def make():
        pages = [torch.randn(blocks, hk, block, d, device=suite.device) for _ in range(2)]
        scales = [None, None]
        if kv.endswith("kv"):
            scales = [torch.ones(blocks, hk, block, device=suite.device) for _ in range(2)]
        table = torch.randperm(blocks, device=suite.device).to(torch.int32).view(batch, -1)
        q = torch.randn(batch, h, d, device=suite.device).to(dtype)
        dense = [torch.randn(batch, length, hk, d, device=suite.device).to(dtype) for _ in range(2)]
        return q, *(p.to(storage) for p in pages), table, *scales, *dense

    def run(q, k_cache, v_cache, table, k_scale, v_scale, k, v):
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            table,
            cu,
            lens,
            max_seqlen_q=1,
            max_seqlen_k=length,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def peer(q, k_cache, v_cache, table, k_scale, v_scale, k, v):
        return sdpa(q.unsqueeze(1), k, v, False)

    record(
        Case(
            name=f"paged_attention/{kv}/{batch}x{length}/b{block}/q1",
            make=make,
            run=run,
            peers={"sdpa": peer},
            bytes_moved=2 * batch * length * hk * d * storage.itemsize,
        )
    )


# ---- sizes for a GPU


def cudnn(q, k, v, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v, causal)


TOKENS = [(16, 1024), (4, 4096), (1, 16384)]
PREFILL = [
    (*tokens, *heads)
    for heads in [(32, 8, 128), (32, 32, 128), (32, 8, 64), (32, 32, 96), (16, 8, 256)]
    for tokens in TOKENS
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "length", "h", "hk", "d"), PREFILL)
def test_prefill_on_a_gpu(record, gpu, batch, length, h, hk, d, causal):
    def make():
        return tuple(
            torch.randn(batch, length, n, d, device="cuda", dtype=torch.bfloat16)
            for n in (h, hk, hk)
        )

    record(
        Case(
            name=f"flash_attention/bf16/d{d}/{batch}x{length}/{'causal' if causal else 'full'}"
            f"/h{h}-{hk}",
            make=make,
            run=lambda q, k, v: ops.flash_attention(q, k, v, causal=causal),
            peers={"cudnn": lambda q, k, v: cudnn(q, k, v, causal)},
            flops=4 * batch * length * length * h * d // (2 if causal else 1),
        )
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("h", "hk"), [(32, 8), (32, 32)])
@pytest.mark.parametrize(("batch", "length"), [(4, 4096), (1, 16384)])
def test_fp8_prefill_on_a_gpu(record, gpu, batch, length, h, hk, causal):
    """The peer is cuDNN in bf16, on the tensors that ours were rounded from."""
    d = 128

    def make():
        shapes = ((batch, length, n, d) for n in (h, hk, hk))
        return with_fp8(*(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes))

    record(
        Case(
            name=f"flash_attention/fp8/d{d}/{batch}x{length}/{'causal' if causal else 'full'}"
            f"/h{h}-{hk}",
            make=make,
            run=run_fp8(causal),
            peers={"cudnn": lambda *inputs: cudnn(*inputs[-3:], causal)},
            flops=4 * batch * length * length * h * d // (2 if causal else 1),
        )
    )


SKEWED = "1x131072+63x1024"
DECODE = [
    *((kv, load, block, 1) for load in ["64x8192", "16x32768"] for block in [16, 128]
      for kv in ["bf16", "int8kv", "fp8kv"]),
    *(("bf16", load, block, 1)
      for load in ["256x4096", "64x4096", "256x1024", "16x1024", "1x131072", SKEWED]
      for block in [16, 128]),
    *((kv, "16x32768", 16, 8) for kv in ["bf16", "int8kv", "fp8kv"]),
    ("bf16", "64x8192", 16, 16),
    *(("bf16", load, 16, 1) for load in ["random64", "random256"]),
]  # fmt: skip
# Chunks of prompts over what is cached already.
CHUNKS = [
    (kv, load, 16, queries)
    for load, queries in [("1x16384", 2048), ("4x8192", 512)]
    for kv in ["bf16", "int8kv", "fp8kv"]
]
# What it costs that no bit depends on the rest of a batch.
INVARIANT = [
    (kv, load, 16, 1)
    for kv in ["bf16", "int8kv"]
    for load in ["64x8192", "16x32768", "1x131072", "random64"]
]


def lengths_of(load: str) -> list[int]:
    """`2x100+3x50`, or `random64`: so many lengths from 200 to 9000."""
    if load.startswith("random"):
        generator = torch.Generator().manual_seed(0)
        return torch.randint(200, 9001, (int(load[6:]),), generator=generator).tolist()
    parts = (part.split("x") for part in load.split("+"))
    return [int(length) for count, length in parts for _ in range(int(count))]


@pytest.mark.parametrize(
    ("kv", "load", "block", "queries", "invariant"),
    [(*case, False) for case in DECODE + CHUNKS] + [(*case, True) for case in INVARIANT],
)
def test_decode_on_a_gpu(record, gpu, kv, load, block, queries, invariant):
    """With the plan made before, as for all layers of a step."""
    h, hk, d = 32, 8, 128
    storage = {"int8kv": torch.int8, "fp8kv": torch.float8_e4m3fn}.get(kv, torch.bfloat16)
    lengths = lengths_of(load)
    batch, longest = len(lengths), max(lengths)
    chunk = (kv, load, block, queries) in CHUNKS or None
    element_bytes = d * storage.itemsize + 4 * kv.endswith("kv")
    counts = [-(-length // block) for length in lengths]
    blocks = sum(counts)
    cu = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan = ops.plan_attention(
        cu,
        lens,
        total_q=batch * queries,
        num_heads=h,
        num_kv_heads=hk,
        max_seqlen_q=queries,
        max_seqlen_k=longest,
        batch_invariant=invariant,
    )

    def make():
        shape = (blocks, hk, block, d)
        pages = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        scales = [None, None]
        if kv.endswith("kv"):
            scales = [torch.ones(shape[:3], device="cuda") for _ in range(2)]
        ids = torch.randperm(blocks, device="cuda").to(torch.int32)
        table = torch.nn.utils.rnn.pad_sequence(ids.split(counts), batch_first=True)
        q = torch.randn(batch * queries, h, d, device="cuda", dtype=torch.bfloat16)
        return q, *(p.to(storage) for p in pages), table, *scales

    def run(q, k_cache, v_cache, table, k_scale, v_scale):
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            table,
            cu,
            lens,
            max_seqlen_q=queries,
            max_seqlen_k=longest,
            k_scale=k_scale,
            v_scale=v_scale,
            plan=plan,
            batch_invariant=invariant,
        )

    record(
        Case(
            name=f"paged_attention/{kv}/{load}/b{block}/q{queries}{'/invariant' * invariant}",
            make=make,
            run=run,
            bytes_moved=None if chunk else 2 * sum(lengths) * hk * element_bytes,
            flops=chunk and sum(4 * queries * (n - queries // 2) * h * d for n in lengths),
        )
    )


# ---- both


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_attention_states(record, suite, dtype):
    states, tokens, heads, dim = 2, 8192 if suite.device.type == "cuda" else 512, 32, 128

    def make():
        outs = torch.randn(states, tokens, heads, dim, device=suite.device).to(DTYPES[dtype])
        return outs, torch.randn(states, heads, tokens, device=suite.device)

    def eager(outs, lses):
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - total).transpose(1, 2).unsqueeze(-1)
        return (outs * weights).sum(0).to(outs.dtype), total

    record(
        Case(
            name=f"merge_attention_states/{dtype}/{states}x{tokens}x{heads}x{dim}",
            make=make,
            run=ops.merge_attention_states,
            peers={"eager": eager},
            bytes_moved=(states + 1) * tokens * heads * dim * DTYPES[dtype].itemsize,
        )
    )


def test_plan_attention(record, suite):
    batch = 64
    cu = torch.arange(batch + 1, dtype=torch.int32, device=suite.device)

    def run(lens):
        return ops.plan_attention(
            cu, lens, total_q=batch, num_heads=32, num_kv_heads=8, max_seqlen_q=1, max_seqlen_k=8192
        )

    record(
        Case(
            name=f"plan_attention/{batch}seqs",
            make=lambda: (torch.randint(1, 8193, (batch,), device=suite.device).int(),),
            run=run,
        )
    )
