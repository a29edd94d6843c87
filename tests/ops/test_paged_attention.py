"""paged_attention against the reference; plans are in test_plan_attention.py, refusals in
test_paged_attention_refused.py.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    Pages,
    assert_accurate,
    assert_bit_equal,
    assert_lse_of_large_scores,
    bits,
    column_slice,
    cumulative,
    dtype_name,
    far_pool,
    guarded,
    make_pages,
    misaligned,
    random_tree_masks,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

INT8, FP8 = torch.int8, torch.float8_e4m3fn
STORAGES: dict[str, dict[str, Any]] = {
    "float": {},
    "int8": {"k_storage": INT8, "v_storage": INT8},
    "fp8": {"k_storage": FP8, "v_storage": FP8},
    "int8_static": {"k_storage": INT8, "v_storage": INT8, "static_scale": True},
    "fp8_static": {"k_storage": FP8, "v_storage": FP8, "static_scale": True},
    "k_int8_v_fp8": {"k_storage": INT8, "v_storage": FP8},
    "k_int8_v_float": {"k_storage": INT8},
    "k_float_v_fp8": {"v_storage": FP8, "static_scale": True},
}
by_storage = pytest.mark.parametrize("storage", STORAGES)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "not_causal": {"causal": False},
    "scale": {"scale": 0.37},
    "negative_scale": {"scale": -0.37},
    "no_scale": {"scale": 0.0},
    "left": {"window_left": 3},
    "both": {"causal": False, "window_left": 4, "window_right": 1},
    "self": {"window_left": 0},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {
        "window_left": 9, "softcap": 3.0, "sinks": True, "scale": 0.2, "batch_invariant": True
    },
}  # fmt: skip

# (query counts, lengths): decode, prefill, chunked prefill, verification, mixtures, empties.
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "decode": ([1, 1, 1, 1], [32, 64, 96, 48]),
    "decode_odd": ([1, 1, 1], [1, 17, 130]),
    "prefill": ([33, 5], [33, 5]),
    "chunk": ([7, 16], [40, 16]),
    "mixed": ([1, 20, 4, 1], [50, 20, 31, 2]),
    "empties": ([0, 3, 1, 0], [5, 0, 9, 0]),
    "more_queries_than_keys": ([9, 4], [3, 4]),
}


def step(
    backend: Backend,
    counts: list[int],
    lengths: list[int],
    dtype: torch.dtype,
    *,
    heads: int = 4,
    **pages: Any,
) -> tuple[list[Tensor], Pages, dict[str, int]]:
    """(positional arguments, pages, declared maxima) of one ragged step."""
    pool = make_pages(lengths, dtype=dtype, device=backend.device, **{"head_dim": 24, **pages})
    q = torch.randn(sum(counts), heads, pool.k_cache.shape[-1], device=backend.device).to(dtype)
    args = [
        q, pool.k_cache, pool.v_cache, pool.block_table, cumulative(counts, backend.device),
        pool.seq_lens,
    ]  # fmt: skip
    maxima = {"max_seqlen_q": max([*counts, 0]), "max_seqlen_k": max([*lengths, 0])}
    return args, pool, maxima


def prepared(options: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    """Options with the sinks drawn."""
    if options.get("sinks") is not True:
        return dict(options)
    return {**options, "sinks": torch.randn(heads, device=device) * 2}


def check(
    actual: tuple[Tensor, Tensor],
    args: list[Tensor],
    options: dict[str, Any],
    *,
    large_scores: bool = False,
) -> None:
    """out against eager in q's dtype over dequantized pages; lse against eager in float32."""
    dropped = ("batch_invariant", "max_seqlen_q", "max_seqlen_k", "plan")
    options = {name: value for name, value in options.items() if name not in dropped}
    dtype = args[0].dtype
    out, lse = reference.paged_attention(*args, **options)
    plain, _ = reference.paged_attention(*args, **options, dtype=dtype)
    _, plain_lse = reference.paged_attention(*args, **options, dtype=torch.float32)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_accurate(actual[0], out, plain, what="out")
    if large_scores:
        assert_lse_of_large_scores(actual[1], lse)
    else:
        assert_accurate(actual[1], lse, plain_lse, what="lse")


def assert_same_results(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_bit_equal(actual[0], expected[0], "out")
    assert_bit_equal(actual[1], expected[1], "lse")


# -------------------------------------------------------------------------- against the reference


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("steps", STEPS)
def test_options(backend: Backend, dtype: torch.dtype, option: str, steps: str) -> None:
    args, _, maxima = step(backend, *STEPS[steps], dtype)
    options = {**prepared(OPTIONS[option], 4, backend.device), **maxima}
    check(backend.ops.paged_attention(*args, **options), args, options)


@by_dtype
@by_storage
@pytest.mark.parametrize("steps", ["decode", "mixed", "empties"])
def test_storage_formats(backend: Backend, dtype: torch.dtype, storage: str, steps: str) -> None:
    args, pool, maxima = step(backend, *STEPS[steps], dtype, **STORAGES[storage])
    for options in ({}, {"window_left": 6, "softcap": 4.0}):
        options = {**options, **maxima, **pool.scales}
        check(backend.ops.paged_attention(*args, **options), args, options)


@by_dtype
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(1, 1), (7, 33), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128),
     (64, 192), (256, 256), (512, 512)],
)  # fmt: skip
@pytest.mark.parametrize("storage", ["float", "int8", "fp8"])
def test_head_sizes(
    backend: Backend, dtype: torch.dtype, head_dim: int, value_dim: int, storage: str
) -> None:
    args, pool, maxima = step(
        backend, [1, 6], [40, 21], dtype, head_dim=head_dim, value_dim=value_dim,
        **STORAGES[storage],
    )  # fmt: skip
    options = {**maxima, **pool.scales}
    out, lse = backend.ops.paged_attention(*args, **options)
    assert out.shape == (7, 4, value_dim) and lse.shape == (4, 7)
    check((out, lse), args, options)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("storage", ["float", "int8", "fp8", "int8_static"])
@pytest.mark.parametrize("option", OPTIONS)
def test_long_chunks_beside_decoding_sequences(
    backend: Backend, dtype: torch.dtype, storage: str, option: str
) -> None:
    counts, lengths = [1, 150, 0, 40, 3, 9], [400, 700, 5, 40, 90, 333]
    if backend.interpreted:
        counts, lengths = [1, 40, 3], [90, 70, 20]
    args, pool, maxima = step(
        backend, counts, lengths, dtype, heads=8, head_dim=64, **STORAGES[storage]
    )
    options = {**prepared(OPTIONS[option], 8, backend.device), **maxima, **pool.scales}
    out, lse = backend.ops.paged_attention(*args, **options)
    check((out, lse), args, options)
    planned = {
        name: value
        for name, value in options.items()
        if name in ("causal", "window_left", "window_right", "batch_invariant", *maxima)
    }
    plan = backend.ops.plan_attention(
        *args[4:], total_q=sum(counts), num_heads=8, num_kv_heads=2, **planned
    )
    assert_same_results(backend.ops.paged_attention(*args, **options, plan=plan), (out, lse))


@pytest.mark.parametrize("magnitude", [11008.0, 20096.0, 30080.0])
@pytest.mark.parametrize("storage", ["float", "int8", "fp8"])
def test_enormous_scores(backend: Backend, magnitude: float, storage: str) -> None:
    """The exponent of the highest score is 0, however large the score."""
    backend.skip_if_enormous_scores_are_wrong()
    args, pool, maxima = step(backend, [1], [3], torch.bfloat16, head_dim=128, **STORAGES[storage])
    args[0].fill_(magnitude)
    used = args[3][0, 0]
    if storage == "float":
        pool.k_cache[used, :, :3] = magnitude
        pool.k_cache[used, :, 1] /= 2
    else:
        pool.k_cache[used, :, :3] = torch.tensor(100.0).to(pool.k_cache.dtype)
        pool.scales["k_scale"][used, :, :3] = magnitude / 100.0
        pool.scales["k_scale"][used, :, 1] /= 2
    options = {**maxima, **pool.scales}
    check(backend.ops.paged_attention(*args, **options), args, options)


@by_dtype
@pytest.mark.parametrize("block_size", [8, 16, 24, 40, 128, 256, 512])
@pytest.mark.parametrize("storage", ["float", "int8"])
def test_block_sizes(backend: Backend, dtype: torch.dtype, block_size: int, storage: str) -> None:
    lengths = [block_size - 1, block_size, block_size + 1, 3, 75]
    args, pool, maxima = step(
        backend, [1, 2, 3, 3, 4], lengths, dtype, block_size=block_size, **STORAGES[storage]
    )
    options = {**maxima, **pool.scales}
    check(backend.ops.paged_attention(*args, **options), args, options)


@by_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (14, 2), (33, 11)])
def test_head_groups(backend: Backend, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    args, _, maxima = step(backend, *STEPS["mixed"], dtype, heads=heads, num_kv_heads=kv_heads)
    check(backend.ops.paged_attention(*args, **maxima), args, maxima)


@by_dtype
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("storage", ["float", "int8"])
def test_long_sequences_are_split_and_merged(
    backend: Backend, dtype: torch.dtype, batch_invariant: bool, storage: str
) -> None:
    args, pool, maxima = step(
        backend, [1, 3, 1], [3000, 1025, 5], dtype, heads=2, num_kv_heads=1, head_dim=64,
        **STORAGES[storage],
    )  # fmt: skip
    for window_left in (-1, 700):
        options = {
            **maxima, **pool.scales, "batch_invariant": batch_invariant,
            "window_left": window_left,
        }  # fmt: skip
        check(backend.ops.paged_attention(*args, **options), args, options)


@by_dtype
@pytest.mark.parametrize("option", ["default", "left", "both", "sinks"])
@pytest.mark.parametrize("storage", ["float", "int8"])
def test_tree_mask(backend: Backend, dtype: torch.dtype, option: str, storage: str) -> None:
    counts = [5, 0, 64, 1, 8]
    args, pool, maxima = step(backend, counts, [9, 3, 90, 1, 5], dtype, **STORAGES[storage])
    mask = torch.cat([random_tree_masks(count) for count in counts]).to(backend.device)
    options = {
        **prepared(OPTIONS[option], 4, backend.device), **maxima, **pool.scales, "tree_mask": mask
    }  # fmt: skip
    check(backend.ops.paged_attention(*args, **options), args, options)


def test_pages_equal_the_ragged_op_over_the_same_tokens(backend: Backend) -> None:
    lengths = [32, 7, 0, 50]
    args, pool, maxima = step(backend, [1, 7, 0, 3], lengths, torch.float32)
    read = [
        torch.cat([
            reference.read_pages(cache, None, pool.block_table[b], length, torch.float32)
            for b, length in enumerate(lengths)
        ])
        for cache in (pool.k_cache, pool.v_cache)
    ]  # fmt: skip
    ragged = [args[0], *read, args[4], cumulative(lengths, backend.device)]
    expected = backend.ops.flash_attention_varlen(*ragged, **maxima, causal=True)
    for ours, wanted in zip(backend.ops.paged_attention(*args, **maxima), expected, strict=True):
        torch.testing.assert_close(ours, wanted)


# -------------------------------------------------------------------------------------- poison


@by_dtype
@by_storage
@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize("steps", ["decode", "mixed", "empties"])
def test_unused_slots_and_table_entries_do_not_matter(
    backend: Backend, dtype: torch.dtype, storage: str, fill: float, steps: str
) -> None:
    """R01: NaN or Inf beyond each length, in pages and scales; absurd ids in unused entries."""
    results = []
    for value in (fill, 0.0):
        torch.manual_seed(3)
        args, pool, maxima = step(backend, *STEPS[steps], dtype, fill=value, **STORAGES[storage])
        before = bits(args[1].view(torch.uint8)).clone()
        results.append(backend.ops.paged_attention(*args, **maxima, **pool.scales))
        assert torch.equal(bits(args[1].view(torch.uint8)), before), "the cache was written"
    assert results[0][0].isfinite().all()
    assert_same_results(results[0], results[1])


@pytest.mark.parametrize("storage", ["float", "int8", "fp8"])
@pytest.mark.parametrize("options", [{}, {"window_left": 2}], ids=["causal", "window"])
def test_nan_in_invisible_slots_of_used_pages(
    backend: Backend, storage: str, options: dict[str, Any]
) -> None:
    """NaN in a token that a query may not see (the future, or left of its window) stays out."""
    args, pool, maxima = step(backend, [4], [20], torch.float32, **STORAGES[storage])
    options = {**options, **maxima, **pool.scales}
    clean = backend.ops.paged_attention(*args, **options)
    kept = {name: value for name, value in options.items() if name not in maxima}
    wanted, _ = reference.paged_attention(*args, causal=True, **kept)
    plain, _ = reference.paged_attention(*args, causal=True, **kept, dtype=torch.float32)
    block, offset = pool.block_table[0, 1].long(), 19 % 16
    if storage == "float":
        args[1][block, :, offset], args[2][block, :, offset] = math.nan, math.nan
    else:
        assert pool.k_scale is not None and pool.v_scale is not None
        pool.k_scale[block, :, offset], pool.v_scale[block, :, offset] = math.nan, math.nan
    out, lse = backend.ops.paged_attention(*args, **options)
    if backend.name == "cpu":
        assert_bit_equal(out[:3].clone(), clean[0][:3].clone())
        assert_bit_equal(lse[:, :3].clone(), clean[1][:, :3].clone())
    else:  # which computes such a tile again, in smaller steps
        assert_accurate(out[:3], wanted[:3], plain[:3])
    assert out[3].isnan().all() and lse[:, 3].isnan().all()
    if "window_left" in options:
        args, pool, maxima = step(backend, [1], [20], torch.float32, **STORAGES[storage])
        options = {"window_left": 2, **maxima, **pool.scales}
        clean = backend.ops.paged_attention(*args, **options)
        block = pool.block_table[0, 0].long()
        if storage == "float":
            args[1][block], args[2][block] = math.nan, math.nan
        else:
            assert pool.k_scale is not None and pool.v_scale is not None
            pool.k_scale[block], pool.v_scale[block] = math.nan, math.nan
        assert_same_results(backend.ops.paged_attention(*args, **options), clean)


@by_storage
def test_block_order_does_not_matter(backend: Backend, storage: str) -> None:
    args, pool, maxima = step(backend, *STEPS["mixed"], torch.float32, **STORAGES[storage])
    expected = backend.ops.paged_attention(*args, **maxima, **pool.scales)
    order = torch.randperm(pool.k_cache.shape[0], device=pool.k_cache.device)
    place = torch.argsort(order).to(torch.int32)
    shuffled = [args[0], *(_reorder(cache, order) for cache in args[1:3]), *args[3:]]
    table = pool.block_table.clone()
    for b, length in enumerate(pool.seq_lens.tolist()):
        used = -(-length // 16)
        table[b, :used] = place[table[b, :used].long()]
    shuffled[3] = table
    scales = {
        name: scale[order].contiguous() if scale.dim() == 3 else scale
        for name, scale in pool.scales.items()
    }
    assert_same_results(backend.ops.paged_attention(*shuffled, **maxima, **scales), expected)


def _reorder(cache: Tensor, order: Tensor) -> Tensor:
    return cache.view(torch.uint8)[order].contiguous().view(cache.dtype)


@by_dtype
@by_storage
def test_a_sequence_may_share_blocks_with_another(
    backend: Backend, dtype: torch.dtype, storage: str
) -> None:
    """A prefix cache gives two sequences the same pages."""
    args, pool, maxima = step(backend, [1, 1], [40, 33], dtype, **STORAGES[storage])
    pool.block_table[1, :2] = pool.block_table[0, :2]
    options = {**maxima, **pool.scales}
    check(backend.ops.paged_attention(*args, **options), args, options)


# ------------------------------------------------------------------------------ strides, outputs


@by_dtype
@by_storage
def test_nhd_pages_are_a_transposed_view(
    backend: Backend, dtype: torch.dtype, storage: str
) -> None:
    args, pool, maxima = step(backend, *STEPS["mixed"], dtype, layout="NHD", **STORAGES[storage])
    assert not args[1].is_contiguous()
    dense = [args[0], args[1].contiguous(), args[2].contiguous(), *args[3:]]
    options = {**maxima, **pool.scales}
    assert_same_results(
        backend.ops.paged_attention(*args, **options),
        backend.ops.paged_attention(*dense, **options),
    )


@by_dtype
def test_strided_inputs_equal_contiguous(backend: Backend, dtype: torch.dtype) -> None:
    """R08: q from a fused projection, K and V as halves of one pool, a table wider than used."""
    args, pool, maxima = step(backend, *STEPS["mixed"], dtype, head_dim=40)
    expected = backend.ops.paged_attention(*args, **maxima)
    pair = torch.stack([args[1], args[2]], 1)  # [num_blocks, 2, Hk, block_size, D]
    table = column_slice(args[3])
    strided = [
        [column_slice(args[0]), pair[:, 0], pair[:, 1], table, *args[4:]],
        [misaligned(args[0]), pair[:, 0], pair[:, 1], table, *args[4:]],
        [args[0], misaligned(args[1]), column_slice(args[2]), *args[3:]],
    ]
    for inputs in strided:
        ours = backend.ops.paged_attention(*inputs, **maxima)
        if backend.name == "cuda":  # what is not aligned goes to another kernel
            check(ours, args, maxima)
        else:
            assert_same_results(ours, expected)
    assert pool.block_table is args[3]


@by_dtype
def test_strided_scales_equal_contiguous(backend: Backend, dtype: torch.dtype) -> None:
    args, pool, maxima = step(backend, *STEPS["mixed"], dtype, **STORAGES["int8"])
    assert pool.k_scale is not None and pool.v_scale is not None
    expected = backend.ops.paged_attention(*args, **maxima, **pool.scales)
    strided = {
        "k_scale": column_slice(pool.k_scale),
        "v_scale": pool.v_scale.transpose(0, 1).contiguous().transpose(0, 1),
    }
    assert_same_results(backend.ops.paged_attention(*args, **maxima, **strided), expected)


@by_dtype
def test_outputs_are_filled_and_nothing_else_is(backend: Backend, dtype: torch.dtype) -> None:
    args, _, maxima = step(backend, *STEPS["empties"], dtype, value_dim=17)
    out = guarded((4, 4, 17), dtype, backend.device)
    lse = guarded((4, 4), torch.float32, backend.device)
    backend.ops.paged_attention(*args, **maxima, out=out.view, lse=lse.view)
    assert_same_results((out.view, lse.view), backend.ops.paged_attention(*args, **maxima))
    out.assert_untouched_around()
    lse.assert_untouched_around()


def test_overloads_are_equal(backend: Backend) -> None:
    args, pool, maxima = step(backend, *STEPS["mixed"], torch.float32, **STORAGES["int8"])
    options = {**maxima, **pool.scales, "softcap": 5.0}
    packet = backend.library.paged_attention
    out = torch.full((26, 4, 24), math.nan, device=backend.device)
    lse = torch.full((4, 26), math.nan, device=backend.device)
    assert packet.out(*args, **options, out=out, lse=lse) is None
    assert_same_results(packet.default(*args, **options), (out, lse))
    assert_same_results(backend.ops.paged_attention(*args, **options), (out, lse))


@pytest.mark.parametrize(("counts", "lengths"), [([], []), ([0, 0], [4, 0]), ([2], [0])])
def test_nothing(backend: Backend, counts: list[int], lengths: list[int]) -> None:
    """R24, R02: no sequences, no queries, no keys."""
    args, _, maxima = step(backend, counts, lengths, torch.float32)
    out, lse = backend.ops.paged_attention(*args, **maxima)
    assert out.shape == (sum(counts), 4, 24) and lse.shape == (4, sum(counts))
    assert (out == 0).all() and (lse == -math.inf).all()


# ---------------------------------------------------------------------------------- large pools


def far(pages: Tensor, first: int, stride: int) -> Tensor:
    """The same pages as blocks `first`.. of a pool with this stride(0), all else untouched."""
    pool = far_pool((first + pages.shape[0], *pages.shape[1:]), stride, pages.dtype, pages.device)
    source, target = pages, pool[first:]
    if pages.dtype == FP8:
        source, target = pages.view(torch.uint8), target.view(torch.uint8)
    target.copy_(source)
    return pool


@pytest.mark.parametrize("storage", ["float", "int8", "fp8"])
@pytest.mark.parametrize("stride", [1_039_680, 2**20 + 8, 2**28])
@pytest.mark.parametrize("steps", ["decode", "mixed"])
def test_last_pages_of_a_large_pool(
    backend: Backend, storage: str, stride: int, steps: str
) -> None:
    """R04, R05: decode, verification and scale loads past 2^31 elements equal those at page 0."""
    args, pool, maxima = step(backend, *STEPS[steps], torch.bfloat16, fill=0.0, **STORAGES[storage])
    expected = backend.ops.paged_attention(*args, **maxima, **pool.scales)
    first = 2**31 // stride + 1
    table = pool.block_table.clone()
    for b, length in enumerate(pool.seq_lens.tolist()):
        table[b, : -(-length // 16)] += first
    scales = {name: far(scale, first, 2**31 // first + 1) for name, scale in pool.scales.items()}
    moved = [args[0], *(far(cache, first, stride) for cache in args[1:3]), table, *args[4:]]
    assert_same_results(backend.ops.paged_attention(*moved, **maxima, **scales), expected)


# -------------------------------------------------------------------------- batch independence


@pytest.mark.parametrize("storage", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_rows_do_not_depend_on_the_batch(
    backend: Backend, dtype: torch.dtype, storage: str
) -> None:
    """R31: each sequence alone, and among others in batches of 2..256, bit for bit."""
    others, longest = (5, 700) if backend.interpreted else (63, 2100)
    counts = [1, 1, 4, 1] * (1 + others)
    lengths = [longest, 3, 600, 40] + [30, 7, 16, 1] * others
    args, pool, maxima = step(
        backend, counts, lengths, dtype, heads=2, num_kv_heads=1, head_dim=16, **STORAGES[storage]
    )
    q, k_cache, v_cache, table, cu_q, seq_lens = args
    options = {**pool.scales, "batch_invariant": True}
    whole = backend.ops.paged_attention(*args, **maxima, **options)
    for first, count in (
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (len(counts) - 1, 1),
        (0, 2),
        (1, 3),
        (2, 17),
        (0, min(64, len(counts))),
    ):
        bounds = cu_q[first : first + count + 1]
        rows = slice(int(bounds[0]), int(bounds[-1]))
        part = backend.ops.paged_attention(
            q[rows], k_cache, v_cache, table[first : first + count], bounds - bounds[0],
            seq_lens[first : first + count].contiguous(),
            max_seqlen_q=max(counts[first : first + count]),
            max_seqlen_k=max(lengths[first : first + count]), **options,
        )  # fmt: skip
        assert_bit_equal(part[0], whole[0][rows], "out")
        assert_bit_equal(part[1], whole[1][:, rows].contiguous(), "lse")


@pytest.mark.parametrize("storage", ["float", "int8"])
def test_a_decoding_sequence_beside_a_long_chunk(backend: Backend, storage: str) -> None:
    """R31: a chunk of many tokens may be another kernel's; the one token is not."""
    counts, lengths = [1, 100], [300, 120]
    args, pool, maxima = step(backend, counts, lengths, torch.bfloat16, **STORAGES[storage])
    q, k_cache, v_cache, table, cu_q, seq_lens = args
    options = {**pool.scales, "batch_invariant": True}
    whole = backend.ops.paged_attention(*args, **maxima, **options)
    part = backend.ops.paged_attention(
        q[:1], k_cache, v_cache, table[:1], cu_q[:2], seq_lens[:1].contiguous(),
        max_seqlen_q=1, max_seqlen_k=300, **options,
    )  # fmt: skip
    assert_bit_equal(part[0], whole[0][:1], "out")
    assert_bit_equal(part[1], whole[1][:, :1].contiguous(), "lse")


def test_result_does_not_depend_on_the_number_of_threads(backend: Backend) -> None:
    """R31: batch_invariant=True fixes the splits, whatever runs them."""
    args, _, maxima = step(backend, [1, 2], [2500, 900], torch.float32, heads=2, num_kv_heads=1)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(backend.ops.paged_attention(*args, **maxima, batch_invariant=True))
    finally:
        torch.set_num_threads(threads)
    assert_same_results(results[1], results[0])
    assert_same_results(results[2], results[0])
