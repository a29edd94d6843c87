"""Options at the end of their range, and bits that must not depend on what lies beside a row."""

from __future__ import annotations

import math

import pytest
import torch

from tests.conftest import Backend
from tests.helpers import assert_bit_equal, cumulative, make_pages
from tests.ops.test_attention import by_dtype, qkv, ragged


@pytest.mark.parametrize("options", [{"window_left": 2**63 - 1}, {"window_right": 2**63 - 1}])
def test_the_largest_window_is_no_window(backend: Backend, options: dict[str, int]) -> None:
    q = torch.randn(1, 3, 2, 8, device=backend.device)
    expected = backend.ops.flash_attention(q, q, q)
    for actual, wanted in zip(
        backend.ops.flash_attention(q, q, q, **options), expected, strict=True
    ):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("options", [{"scale": 1e300}, {"softcap": 1e300}, {"softcap": 1e-50}])
def test_numbers_that_float32_cannot_hold(backend: Backend, options: dict[str, float]) -> None:
    q = torch.randn(1, 3, 2, 8, device=backend.device)
    with pytest.raises(ValueError, match=rf"flash_attention: {next(iter(options))}: .*float32"):
        backend.ops.flash_attention(q, q, q, **options)


@pytest.mark.parametrize("sizes", [(513, 8), (8, 513), (0, 8), (8, 0)])
def test_head_sizes_outside_1_to_512_are_refused(backend: Backend, sizes: tuple[int, int]) -> None:
    inputs = qkv(torch.float32, 3, 5, head_dim=sizes[0], value_dim=sizes[1], device=backend.device)
    with pytest.raises(ValueError, match="flash_attention"):
        backend.ops.flash_attention(*inputs)


def test_tree_of_65_tokens_is_refused(backend: Backend) -> None:
    inputs = qkv(torch.float32, 65, 70, device=backend.device)
    mask = torch.ones(2, 65, dtype=torch.int64, device=backend.device)
    with pytest.raises(ValueError, match=r"flash_attention.*tree_mask"):
        backend.ops.flash_attention(*inputs, tree_mask=mask)


# Sequences long enough for the kernels of long queries, ends in the midst of a block of keys.
COUNTS, LENGTHS = [70, 300, 33], [250, 300, 101]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_bits_do_not_depend_on_what_a_page_holds_beyond_its_sequence(
    backend: Backend, head_dim: int
) -> None:
    results = []
    for fill in (math.nan, 0.0):
        torch.manual_seed(3)
        pool = make_pages(
            LENGTHS, dtype=torch.bfloat16, device=backend.device, fill=fill, head_dim=head_dim,
            value_dim=min(head_dim, 128) if head_dim == 192 else head_dim,
        )  # fmt: skip
        q = torch.randn(sum(COUNTS), 8, head_dim).to(backend.device, torch.bfloat16)
        results.append(
            backend.ops.paged_attention(
                q, pool.k_cache, pool.v_cache, pool.block_table,
                cumulative(COUNTS, backend.device), pool.seq_lens,
                max_seqlen_q=max(COUNTS), max_seqlen_k=max(LENGTHS),
            )
        )  # fmt: skip
    assert_bit_equal(results[0][0], results[1][0], "out")
    assert_bit_equal(results[0][1], results[1][1], "lse")


@pytest.mark.parametrize("causal", [True, False])
def test_bits_do_not_depend_on_the_keys_of_the_next_sequence(
    backend: Backend, causal: bool
) -> None:
    q = torch.randn(sum(COUNTS), 8, 64).to(backend.device, torch.bfloat16)
    k, v = torch.randn(2, sum(LENGTHS), 2, 64).to(backend.device, torch.bfloat16)
    cu_q, cu_k = cumulative(COUNTS, backend.device), cumulative(LENGTHS, backend.device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return backend.ops.flash_attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=max(COUNTS), max_seqlen_k=max(LENGTHS), causal=causal
        )

    clean = run()
    k[LENGTHS[0] : sum(LENGTHS[:2])], v[LENGTHS[0] : sum(LENGTHS[:2])] = math.nan, math.nan
    out, lse = run()
    assert out[COUNTS[0] : sum(COUNTS[:2])].isnan().all()
    for rows in (slice(0, COUNTS[0]), slice(sum(COUNTS[:2]), None)):
        assert_bit_equal(out[rows].clone(), clean[0][rows].clone(), "out")
        assert_bit_equal(lse[:, rows].clone(), clean[1][:, rows].clone(), "lse")


@by_dtype
def test_few_keys_beside_many(backend: Backend, dtype: torch.dtype) -> None:
    """R31: how many keys a kernel takes at once may not depend on the longest sequence."""
    counts, lengths = ([3, 2], [40, 90]) if backend.interpreted else ([70, 30], [1000, 3000])
    args, maxima = ragged(dtype, counts, lengths, backend.device, heads=2, kv_heads=1, head_dim=128)
    options = {"causal": True, "batch_invariant": True}
    whole = backend.ops.flash_attention_varlen(*args, **maxima, **options)
    alone = (args[0][: counts[0]], *(x[: lengths[0]] for x in args[1:3]))
    part = backend.ops.flash_attention_varlen(
        *alone, *(cumulative([n], backend.device) for n in (counts[0], lengths[0])),
        max_seqlen_q=counts[0], max_seqlen_k=lengths[0], **options,
    )  # fmt: skip
    assert_bit_equal(part[0], whole[0][: counts[0]], "out")
    assert_bit_equal(part[1], whole[1][:, : counts[0]].contiguous(), "lse")


@by_dtype
def test_a_short_sequence_beside_a_long_one(backend: Backend, dtype: torch.dtype) -> None:
    """R31: two queries are a small tile, alone and beside a sequence that takes large ones."""
    args, maxima = ragged(dtype, [33, 2], [33, 70], backend.device)
    options = {"causal": True, "batch_invariant": True}
    whole = backend.ops.flash_attention_varlen(*args, **maxima, **options)
    part = backend.ops.flash_attention_varlen(
        *(x[33:] for x in args[:3]), *(cumulative([n], backend.device) for n in (2, 70)),
        max_seqlen_q=2, max_seqlen_k=70, **options,
    )  # fmt: skip
    assert_bit_equal(part[0], whole[0][33:], "out")
    assert_bit_equal(part[1], whole[1][:, 33:].contiguous(), "lse")
