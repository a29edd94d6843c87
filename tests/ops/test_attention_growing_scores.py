"""Scores that grow in the order in which a kernel meets the keys, from the first or from the last.

A kernel may keep sums relative to a score that is not the highest. Far above it probabilities
overflow, in fp16 sooner than in bf16, and whole tiles of rows are computed once more: with the same
accuracy, and without a change of the rows beside.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    HALF_DTYPES,
    assert_accurate,
    assert_bit_equal,
    assert_lse_of_large_scores,
    dtype_name,
)
from tests.ops.test_attention import qkv

by_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)


def raise_scores(q: Tensor, k: Tensor, keys: slice, by: float | Tensor) -> None:
    """Adds `by` to the scores, after scaling, that all queries have with these keys; in place."""
    head_dim = q.shape[-1]
    direction = torch.nn.functional.normalize(torch.randn(head_dim, device=q.device), dim=0)
    along = (q.float() @ direction)[..., None]
    q += ((head_dim**0.5 - along) * direction).to(q.dtype)
    k -= ((k.float() @ direction)[..., None] * direction).to(k.dtype)
    k[:, keys] += (by * direction).to(k.dtype)


def check(actual: tuple[Tensor, Tensor], inputs: list[Tensor], *, causal: bool = False) -> None:
    wanted, wanted_lse = reference.flash_attention(*inputs, causal=causal)
    plain, _ = reference.flash_attention(*inputs, causal=causal, dtype=inputs[0].dtype)
    assert_accurate(actual[0], wanted, plain)
    assert_lse_of_large_scores(actual[1], wanted_lse)


def sizes(backend: Backend) -> tuple[int, int]:
    """Queries and keys: several blocks of keys on a GPU."""
    return (5, 90) if backend.interpreted else (70, 400)


@by_dtype
@pytest.mark.parametrize("by", [6.0, 15.0, 60.0, 100.0, 1000.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [slice(0, 3), slice(-3, None)], ids=["first", "last"])
def test_a_few_keys_that_take_the_weight(
    backend: Backend, dtype: torch.dtype, by: float, head_dim: int, causal: bool, keys: slice
) -> None:
    q, k, v = qkv(dtype, *sizes(backend), head_dim=head_dim, device=backend.device)
    raise_scores(q, k, keys, by)
    ours = backend.ops.flash_attention(q, k, v, causal=causal)
    check(ours, [q, k, v], causal=causal)


@by_dtype
@pytest.mark.parametrize("ends", [(40.0, 0.0), (400.0, 0.0), (0.0, 40.0), (0.0, 400.0)])
def test_scores_that_grow_steadily(
    backend: Backend, dtype: torch.dtype, ends: tuple[float, float]
) -> None:
    sq, sk = sizes(backend)
    q, k, v = qkv(dtype, sq, sk, head_dim=128, device=backend.device)
    growing = torch.linspace(*ends, sk, device=backend.device)[:, None, None]
    raise_scores(q, k, slice(None), growing)
    check(backend.ops.flash_attention(q, k, v), [q, k, v])


@by_dtype
@pytest.mark.parametrize("storage", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("ends", [(20.0, 0.0), (200.0, 0.0), (0.0, 20.0), (0.0, 200.0)])
@pytest.mark.parametrize("queries", [1, 9])
def test_scores_that_grow_steadily_in_pages(
    backend: Backend,
    dtype: torch.dtype,
    storage: torch.dtype | None,
    ends: tuple[float, float],
    queries: int,
) -> None:
    sk, block_size, device = 70 if backend.interpreted else 1500, 16, backend.device
    q, k, v = qkv(dtype, queries, sk, batch=1, head_dim=128, device=device)
    raise_scores(q, k, slice(None), torch.linspace(*ends, sk, device=device)[:, None, None])
    shape = (-(-sk // block_size), k.shape[2], block_size, k.shape[3])
    caches = [torch.zeros(shape, dtype=storage or dtype, device=device) for _ in range(2)]
    scales = {}
    if storage is not None:
        scales = {n: torch.ones(shape[:3], device=device) for n in ("k_scale", "v_scale")}
    slots = torch.arange(sk, device=device)
    backend.ops.append_paged_kv_cache_(k[0], v[0], *caches, slots, **scales)
    args = [
        q[0], *caches, torch.arange(shape[0], dtype=torch.int32, device=device)[None],
        *(torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, queries], [sk])),
    ]  # fmt: skip
    out, lse = backend.ops.paged_attention(*args, **scales, max_seqlen_q=queries, max_seqlen_k=sk)
    wanted, wanted_lse = reference.paged_attention(*args, **scales)
    plain, _ = reference.paged_attention(*args, **scales, dtype=dtype)
    assert_accurate(out, wanted, plain)
    assert_lse_of_large_scores(lse, wanted_lse)


@pytest.mark.parametrize("by", [0.0, 60.0])
def test_values_near_the_largest_number(backend: Backend, by: float) -> None:
    """A weighted mean of them is a number, though a sum before it is divided may be none."""
    q, k, v = qkv(torch.bfloat16, *sizes(backend), head_dim=64, device=backend.device)
    raise_scores(q, k, slice(0, 3), by)
    v *= 2.0**118
    out, lse = backend.ops.flash_attention(q, k, v)
    check((out * 2.0**-118, lse), [q, k, v * 2.0**-118])


@pytest.mark.parametrize("magnitude", [11008.0, 20096.0, 30080.0])
@pytest.mark.parametrize("at", [0, 200, 399])
def test_enormous_scores(backend: Backend, magnitude: float, at: int) -> None:
    """The exponent of the highest score is 0, however large the score."""
    backend.skip_if_enormous_scores_are_wrong()
    sq, sk = sizes(backend)
    at = min(at, sk - 1)
    q, k, v = qkv(torch.bfloat16, sq, sk, head_dim=128, device=backend.device)
    q[:, 3:7], k[:, at] = magnitude, magnitude
    out, lse = backend.ops.flash_attention(q, k, v)
    wanted, wanted_lse = reference.flash_attention(q, k, v)
    plain, _ = reference.flash_attention(q, k, v, dtype=torch.bfloat16)
    assert_accurate(out, wanted, plain)
    # The other rows' scores of that key are differences of numbers as large.
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-2)


@by_dtype
def test_long_keys(backend: Backend, dtype: torch.dtype) -> None:
    """Blocks of keys are larger over many."""
    sk = 150 if backend.interpreted else 2500
    q, k, v = qkv(dtype, 5, sk, heads=8, head_dim=128, device=backend.device)
    q = q.repeat(1, 1 if backend.interpreted else 40, 1, 1).contiguous()
    raise_scores(q, k, slice(0, 2), 30.0)
    check(backend.ops.flash_attention(q, k, v), [q, k, v])


@by_dtype
@pytest.mark.parametrize("what", ["sink", "nan_query", "nan_value"])
def test_rows_beside_keep_their_bits(backend: Backend, dtype: torch.dtype, what: str) -> None:
    """Some rows overflow, or are NaN; the others have the bits that they have without those.

    Where a hidden value is NaN, or in Triton's kernel, they may be computed in another order.
    """
    sq, sk = sizes(backend)
    q, k, v = qkv(dtype, sq, sk, batch=1, head_dim=64, device=backend.device)
    raise_scores(q, k, slice(0, 0), 0.0)
    spoiled = slice(2, 4)
    first = sk - sq + spoiled.start  # the last key that the first spoiled query sees
    clean = backend.ops.flash_attention(q, k, v, causal=True)
    if what == "sink":
        q[:, spoiled] *= -1000.0  # only the spoiled rows' scores become large
    elif what == "nan_query":
        q[:, spoiled] = math.nan
    else:
        v[:, first] = math.nan
        spoiled = slice(spoiled.start, None)
    out, lse = backend.ops.flash_attention(q, k, v, causal=True)
    if what != "sink":
        assert out[:, spoiled].isnan().all()
    kept = [row for row in range(sq) if row not in range(sq)[spoiled]]
    pairs = (out[:, kept], clean[0][:, kept]), (lse[:, :, kept], clean[1][:, :, kept])
    for actual, wanted in pairs:
        if what == "nan_value" or backend.name == "triton":
            torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=5e-3)
        else:
            assert_bit_equal(actual, wanted)
