"""Offsets past 2^31 elements: pages at the end of a large pool, far rows (R04, R05, R06)."""

from __future__ import annotations

import pytest
import torch

import fastinfer.ops as ops
from tests.helpers import assert_bit_equal

BF16 = torch.bfloat16
HEADS, BLOCK, DIM = 8, 16, 128
BLOCKS = 2**31 // (HEADS * BLOCK * DIM) + 64  # the last 64 lie past 2^31 elements


def pool(dtype: torch.dtype) -> torch.Tensor:
    raw = torch.empty(BLOCKS, HEADS, BLOCK, DIM, device="cuda", dtype=torch.int8
                      if dtype != BF16 else BF16)  # fmt: skip
    return raw.view(dtype)


@pytest.mark.parametrize("stored", [BF16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_the_last_pages_equal_the_first(stored: torch.dtype, tokens: int) -> None:
    """The same request in block 0 .. and in the last blocks: append, then attend."""
    length = 300
    k, v = (torch.randn(length, HEADS, DIM, device="cuda", dtype=BF16) for _ in range(2))
    q = torch.randn(tokens, 32, DIM, device="cuda", dtype=BF16)
    caches = pool(stored), pool(stored)
    scales = {}
    if stored != BF16:
        for name in ("k_scale", "v_scale"):
            scales[name] = torch.empty(BLOCKS, HEADS, BLOCK, device="cuda")
    results = []
    count = -(-length // BLOCK)
    for first in (0, BLOCKS - count):
        blocks = torch.arange(first, first + count, device="cuda", dtype=torch.int32)
        slots = first * BLOCK + torch.arange(length, device="cuda")
        ops.append_paged_kv_cache_(k, v, *caches, slots, **scales)
        results.append(
            ops.paged_attention(
                q,
                *caches,
                blocks[None],
                torch.tensor([0, tokens], device="cuda", dtype=torch.int32),
                torch.tensor([length], device="cuda", dtype=torch.int32),
                max_seqlen_q=tokens,
                max_seqlen_k=length,
                **scales,
            )
        )
    assert_bit_equal(results[1][0], results[0][0])
    assert_bit_equal(results[1][1], results[0][1])
    assert results[0][0].isfinite().all()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul"])
def test_rows_past_2_31_elements(op: str) -> None:
    rows, hidden = 2**23 + 16, 256
    x = torch.zeros(rows, hidden, device="cuda", dtype=BF16)
    x[-2:] = torch.randn(2, hidden, device="cuda", dtype=BF16)
    more = [torch.randn(hidden, device="cuda", dtype=BF16)] if "norm" in op else []
    out = getattr(ops, op)(x, *more)
    assert_bit_equal(out[-2:], getattr(ops, op)(x[-2:].clone(), *more))
    assert not out[:-2].any()


@pytest.mark.parametrize("block", [(1, -1), (-1, -1), (1, 128), (128, 128)])
@pytest.mark.parametrize("excess", [-65536, 0, 65536])
@pytest.mark.parametrize("op", ["quantize_fp8", "quantize_int8"])
def test_quantize_around_2_31_elements(op: str, excess: int, block: tuple[int, int]) -> None:
    """R07."""
    x = torch.zeros((2**31 + excess) // 4096, 4096, device="cuda", dtype=BF16)
    x[-16:] = torch.randn(16, 4096, device="cuda", dtype=BF16)
    out, scale = getattr(ops, op)(x, block=block)
    # From a row on where a block begins: the last ones alone are the same blocks.
    begin = max(0, (x.shape[0] - 16) // max(1, block[0]) * max(1, block[0]))
    wanted, own = getattr(ops, op)(x[begin:].clone(), block=block)
    assert_bit_equal(out[begin:], wanted)
    assert_bit_equal(scale[-own.shape[0] :], own)
    assert not out[:-16].view(torch.int8).any()


def test_asymmetric_past_2_31_elements() -> None:
    x = torch.zeros(2**19 + 16, 4096, device="cuda", dtype=BF16)
    x[-16:] = torch.randn(16, 4096, device="cuda", dtype=BF16)
    ours = ops.quantize_int8_asymmetric(x)
    for got, wanted in zip(ours, ops.quantize_int8_asymmetric(x[-16:].clone()), strict=True):
        assert_bit_equal(got[-16:], wanted)


def test_rotary_past_2_31_elements() -> None:
    tokens, heads, dim = 2**20 + 8, 16, 128
    table = ops.rotary_cos_sin(1.0 / 10000 ** (torch.arange(0, dim, 2) / dim), 64).cuda()
    q = torch.zeros(tokens, heads, dim, device="cuda", dtype=BF16)
    q[-4:] = torch.randn(4, heads, dim, device="cuda", dtype=BF16)
    positions = torch.arange(tokens, device="cuda") % 64
    small = q[-4:].clone()
    ops.rotary_embedding_(q, None, positions, table)
    ops.rotary_embedding_(small, None, positions[-4:].clone(), table)
    assert_bit_equal(q[-4:], small)
    assert not q[:-4].any()


def test_logits_past_2_31_elements() -> None:
    rows, vocab = 17_000, 128_256
    logits = torch.zeros(rows, vocab, device="cuda", dtype=BF16)
    logits[-1, 777] = 3.0
    logits[0, 5] = 1.0
    token_ids, valid = ops.sample(logits)
    assert valid.all()
    assert token_ids[-1] == 777 and token_ids[0] == 5 and not token_ids[1:-1].any()


@pytest.mark.parametrize("rows", [1, 100])
def test_weights_past_2_31_bytes(rows: int) -> None:
    """The last features of a weight of 2 GB, for few rows and for many."""
    k, tiles = 8192, 2**31 // (8192 * 64 // 2) + 1  # 64 features of 4 bits a tile
    last = torch.randint(-(2**31), 2**31, (1, k // 64, 512), device="cuda", dtype=torch.int32)
    qweight = torch.empty(tiles, k // 64, 512, device="cuda", dtype=torch.int32)
    qweight[-1:] = last
    scales = torch.rand(k // 128, tiles * 64, device="cuda", dtype=BF16)
    x = torch.randn(rows, k, device="cuda", dtype=BF16)
    whole = ops.int4_gemm(x, qweight, scales)
    alone = ops.int4_gemm(x, last, scales[:, -64:].contiguous())
    torch.testing.assert_close(whole[:, -64:], alone, rtol=2**-7, atol=1e-2)
