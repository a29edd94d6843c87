"""paged_attention of many query rows over pages of bytes: verified drafts and chunks of prompts.

On Hopper more than 16 rows (tokens times the heads of a group) over int8 or fp8 pages are another
kernel's than fewer rows: units of 32 or 64 rows, keys in tiles of 64, which two groups of
warps take in turn. Here all heads and values are such that it takes them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import Pages, assert_accurate, assert_bit_equal, dtype_name, random_tree_masks
from tests.ops.test_paged_attention import (
    OPTIONS,
    STORAGES,
    assert_same_results,
    check,
    prepared,
    step,
)

HEADS, KV_HEADS = 8, 2  # a group of 4: 8 tokens are 32 rows, 16 tokens 64
TILE = 64  # keys

by_storage = pytest.mark.parametrize("storage", ["int8", "fp8"])
by_tokens = pytest.mark.parametrize("tokens", [8, 16])


def bytes_step(
    backend: Backend, counts: list[int], lengths: list[int], storage: str, **options: Any
) -> tuple[list[Tensor], Pages, dict[str, int]]:
    """`step` with the group of these tests, and with q in bf16 and a head_dim of 128 by default."""
    options = {"dtype": torch.bfloat16, "head_dim": 128, **STORAGES[storage], **options}
    return step(backend, counts, lengths, heads=HEADS, num_kv_heads=KV_HEADS, **options)


def lengths_beside(backend: Backend, tokens: int) -> list[int]:
    """Of sequences that end before, at and after the end of a tile."""
    return [tokens + 1, 65, 90] if backend.interpreted else [tokens + 1, 63, 64, 65, 300, 700]


def write_keys(cache: Tensor, pool: Pages, sequence: int, values: Tensor) -> None:
    """Writes values [length, n] into the first n elements of a sequence's keys, for all heads."""
    block, offset = places(pool, sequence)
    codes = values.to(device=cache.device, dtype=cache.dtype).view(torch.uint8)
    cache.view(torch.uint8)[block, :, offset, : codes.shape[-1]] = codes[:, None]


def write_scales(scale: Tensor | None, pool: Pages, sequence: int, values: Tensor | float) -> None:
    """Writes values [length] as the scales of a sequence's keys, for all heads."""
    assert scale is not None
    block, offset = places(pool, sequence)
    values = torch.as_tensor(values, dtype=torch.float32, device=scale.device)
    scale[block, :, offset] = values.expand(len(block))[:, None]


def places(pool: Pages, sequence: int) -> tuple[Tensor, Tensor]:
    """Block and offset of each key of a sequence."""
    at = torch.arange(int(pool.seq_lens[sequence]), device=pool.block_table.device)
    block_size = pool.k_cache.shape[2]
    return pool.block_table[sequence].long()[at // block_size], at % block_size


# -------------------------------------------------------------------------- against the reference


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(64, 64, torch.bfloat16), (128, 128, torch.bfloat16), (128, 128, torch.float16),
     (192, 128, torch.bfloat16), (256, 256, torch.bfloat16), (80, 80, torch.bfloat16)],
    ids=lambda x: dtype_name(x) if isinstance(x, torch.dtype) else str(x),
)  # fmt: skip
@by_storage
@by_tokens
@pytest.mark.parametrize("beside", ["nothing", "wide", "nothing_invariant"])
def test_head_sizes(
    backend: Backend,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    storage: str,
    tokens: int,
    beside: str,
) -> None:
    """Beside a wide sequence, and with batch_invariant, other units are made of narrow ones.

    A plan changes nothing.
    """
    batch_invariant = beside == "nothing_invariant"
    lengths = lengths_beside(backend, tokens)
    counts = [tokens] * len(lengths)
    if beside == "wide":
        counts, lengths = [*counts, 70, 1], [*lengths, 100 if backend.interpreted else 330, 40]
    args, pool, maxima = bytes_step(
        backend, counts, lengths, storage, head_dim=head_dim, value_dim=value_dim, dtype=dtype
    )
    options = {**maxima, **pool.scales, "batch_invariant": batch_invariant}
    out, lse = backend.ops.paged_attention(*args, **options)
    check((out, lse), args, options)
    plan = backend.ops.plan_attention(
        *args[4:], total_q=sum(counts), num_heads=HEADS, num_kv_heads=KV_HEADS, **maxima,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    assert_same_results(backend.ops.paged_attention(*args, **options, plan=plan), (out, lse))


@by_storage
@by_tokens
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "option",
    ["default", "not_causal", "negative_scale", "left", "both", "far_left", "softcap", "sinks",
     "all"],
)  # fmt: skip
def test_masks_and_options(
    backend: Backend, storage: str, tokens: int, tree: bool, option: str
) -> None:
    lengths = [*lengths_beside(backend, tokens), 3, 0]  # and with fewer keys than tokens
    counts = [tokens] * len(lengths)
    args, pool, maxima = bytes_step(backend, counts, lengths, storage, head_dim=64)
    options = {"window_left": 100} if option == "far_left" else OPTIONS[option]
    options = {**prepared(options, HEADS, backend.device), **maxima, **pool.scales}
    if tree:
        mask = torch.cat([random_tree_masks(count) for count in counts])
        options["tree_mask"] = mask.to(backend.device)
    check(backend.ops.paged_attention(*args, **options), args, options)


@by_storage
@pytest.mark.parametrize("option", ["default", "left", "all"])
def test_wide_trees(backend: Backend, storage: str, option: str) -> None:
    counts, lengths = [64, 8, 0, 37, 1], [200, 70, 5, 37, 90]
    if backend.interpreted:
        counts, lengths = [37, 8], [70, 37]
    args, pool, maxima = bytes_step(backend, counts, lengths, storage)
    options = {**prepared(OPTIONS[option], HEADS, backend.device), **maxima, **pool.scales}
    mask = torch.cat([random_tree_masks(count) for count in counts])
    options["tree_mask"] = mask.to(backend.device)
    check(backend.ops.paged_attention(*args, **options), args, options)


@by_storage
@by_tokens
@pytest.mark.parametrize("block_size", [8, 24, 128])
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
def test_block_sizes(
    backend: Backend, storage: str, tokens: int, block_size: int, wide: bool
) -> None:
    lengths = [block_size - 1, block_size, block_size + 1, 3, 75]
    if not backend.interpreted:
        lengths += [5 * block_size + 7, 700]
    counts = [tokens] * len(lengths)
    if wide:
        counts[-1] = 70
    args, pool, maxima = bytes_step(
        backend, counts, lengths, storage, head_dim=64, block_size=block_size
    )
    options = {**maxima, **pool.scales}
    check(backend.ops.paged_attention(*args, **options), args, options)


# ------------------------------------------------------------------------------------- hidden NaN


@pytest.mark.parametrize(
    ("storage", "what"),
    [("fp8", "value"), ("fp8", "v_scale"), ("fp8", "k_scale"), ("int8", "v_scale"),
     ("int8", "k_scale")],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [8, 16, 70])
@pytest.mark.parametrize("window_left", [-1, 40])
def test_rows_that_do_not_see_a_nan_keep_their_bits(
    backend: Backend, storage: str, what: str, tokens: int, window_left: int
) -> None:
    """In one KV head, in either half of a tile, the first of a group of warps or a later one."""
    lengths = [84, 116] if backend.interpreted else [84, 116, 276, 308]
    counts = [tokens] * len(lengths)
    args, pool, maxima = bytes_step(backend, counts, lengths, storage, head_dim=64)
    options = {**maxima, **pool.scales, "window_left": window_left}
    # The last four tokens see it, or with a window all but them (and those before the key).
    keys = [length - (4 if window_left < 0 else window_left + 5) for length in lengths]
    assert {key % TILE // 32 for key in keys} == {0, 1}
    seeing = torch.cat([
        reference.visible_keys(tokens, length, causal=True, window_left=window_left)[:, key]
        for length, key in zip(lengths, keys, strict=True)
    ])  # fmt: skip
    results = []
    for nan in (False, True):
        for b, key in enumerate(keys):
            block, offset = (int(place[key]) for place in places(pool, b))
            if what == "value":
                pool.v_cache.view(torch.uint8)[block, 1, offset, 37] = 0x7F if nan else 0
            else:
                pool.scales[what][block, 1, offset] = math.nan if nan else float(what == "k_scale")
        results.append(backend.ops.paged_attention(*args, **options))
    (clean, clean_lse), (out, lse) = results
    assert clean.isfinite().all()
    spoiled = torch.zeros(out.shape[:2], dtype=torch.bool, device=backend.device)
    spoiled[:, HEADS // KV_HEADS :] = seeing[:, None].to(backend.device)
    assert spoiled.any() and not spoiled[:, -1].all()
    column = slice(37, 38) if what == "value" else slice(None)
    assert out[spoiled][:, column].isnan().all()
    if what == "k_scale":
        assert lse[spoiled.T].isnan().all()
    else:  # which has nothing to do with values
        torch.testing.assert_close(lse[spoiled.T], clean_lse[spoiled.T])
    pairs = (out[~spoiled], clean[~spoiled]), (lse[~spoiled.T], clean_lse[~spoiled.T])
    for actual, wanted in pairs:
        if backend.name == "triton":  # which computes such a tile again, in smaller steps
            torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=5e-3)
        else:
            assert_bit_equal(actual, wanted)


# ---------------------------------------------------------------------- scales and scores that grow


@by_storage
@by_tokens
@pytest.mark.parametrize(
    ("scales", "rise"),
    [
        (scales, rise)
        for scales in ("growing", "shrinking", "alternating")
        for rise in (0.5, 2.0, 5.9, -2.0, -5.9)
        if (scales, rise) != ("shrinking", 5.9)
    ],
)
def test_scales_of_values_that_grow(
    backend: Backend, storage: str, tokens: int, scales: str, rise: float
) -> None:
    """By a factor of 16 every 64 keys, while scores rise or fall by `rise` in base 2.

    Sums are kept in units of the largest scale so far, and relative to a score that may be passed
    by 6. Values of far smaller scales lose digits in such units, so the weight may not outrun the
    scales while these shrink.
    """
    lengths = [130, 140] if backend.interpreted else [700, 690]
    args, pool, maxima = bytes_step(backend, [tokens] * 2, lengths, storage)
    steps = -(-lengths[0] // TILE)
    q = args[0]
    q *= 0.02
    q[..., :steps] = abs(rise)
    for b, length in enumerate(lengths):
        at = torch.arange(length) // TILE
        # How many of the first elements are 1: as many times `rise` is added to the score.
        height = at if rise > 0 else steps - 1 - at
        write_keys(pool.k_cache, pool, b, (torch.arange(steps) < height[:, None]) * 64.0)
        write_scales(pool.k_scale, pool, b, 1 / 64)
        exponent = 4.0 * (at - steps // 2) * (-1 if scales == "shrinking" else 1)
        values = torch.exp2(exponent) * (torch.rand(length) + 0.5) / 100
        if scales == "alternating":
            values[1::2] *= -1
        write_scales(pool.v_scale, pool, b, values)
    options = {**maxima, **pool.scales, "scale": math.log(2)}
    check(backend.ops.paged_attention(*args, **options), args, options, large_scores=True)


# --------------------------------------------------------------------------------- enormous scores


@by_storage
@pytest.mark.parametrize("tokens", [8, 16, 70])
@pytest.mark.parametrize("magnitude", [2.0**15, 30080.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equal_keys_of_enormous_scores(
    backend: Backend, storage: str, tokens: int, magnitude: float, head_dim: int
) -> None:
    """Scores of 10^8 and of -10^8, for all keys the same: the result is the mean of the values.

    Products are sums of few bits, exact in any order: rounded, equal keys may differ by 8 and more.
    And there is one piece of keys only: a piece is weighed by its lse, which lacks as much.
    """
    backend.skip_if_enormous_scores_are_wrong()
    lengths = [75, 90] if backend.interpreted else [75, 193, 256]
    args, pool, maxima = bytes_step(
        backend, [tokens] * len(lengths), lengths, storage, head_dim=head_dim
    )
    key = torch.randint(1, 9, (head_dim,)) * 8.0 * torch.randn(head_dim).sign()
    signs = torch.tensor([1.0, -1.0, 0.25, -0.5]).repeat(HEADS // 4)[:, None]
    args[0].copy_(magnitude * signs * key.sign())
    score = float(magnitude * key.abs().sum()) / head_dim**0.5
    for b, length in enumerate(lengths):
        write_keys(pool.k_cache, pool, b, key.expand(length, head_dim))
        write_scales(pool.k_scale, pool, b, 2.0 ** round(math.log2(1e8 / score)))
    options = {**maxima, **pool.scales}
    out, lse = backend.ops.paged_attention(*args, **options)
    check((out, lse), args, options)
    assert 0.7e8 < lse.abs().max() < 1.5e8


@by_storage
@pytest.mark.parametrize("tokens", [8, 16, 70])
@pytest.mark.parametrize("base", [2.0**23 + 1, 2.0**26, 2.0**26 + 16, 2.0**27 - 8])
@pytest.mark.parametrize("above", [8.0, 16.0])
def test_a_score_above_an_enormous_base(
    backend: Backend, storage: str, tokens: int, base: float, above: float
) -> None:
    """In base 2, and exactly: 2^8 times a value's scale must not overflow unseen.

    First all values are alike, so that the result is known whatever becomes of the weights.
    """
    backend.skip_if_enormous_scores_are_wrong()
    lengths = [150] if backend.interpreted else [256, 450]
    args, pool, maxima = bytes_step(backend, [tokens] * len(lengths), lengths, storage)
    q = args[0]
    q.zero_()
    q[..., 0] = torch.tensor([1.0, -1.0, 0.5, 0.0]).repeat(HEADS // 4).to(q)
    random_values = pool.v_cache.view(torch.uint8).clone()
    for b, length in enumerate(lengths):
        scores = torch.full((length,), -1.0)
        scores[: 2 * TILE] = base
        scores[2 * TILE + 9 if backend.interpreted else 200] = base + above
        assert scores.max() == base + above, "the numbers are not those of fp32"
        write_keys(pool.k_cache, pool, b, torch.eye(1, 128).expand(length, 128))
        write_keys(pool.v_cache, pool, b, torch.ones(length, 128))
        write_scales(pool.k_scale, pool, b, scores)
        write_scales(pool.v_scale, pool, b, 1.99)
    options = {**maxima, **pool.scales, "scale": math.log(2)}
    out, _ = backend.ops.paged_attention(*args, **options)
    torch.testing.assert_close(out, torch.full_like(out, 1.99), rtol=1e-2, atol=0.0)

    pool.v_cache.view(torch.uint8).copy_(random_values)
    out, lse = backend.ops.paged_attention(*args, **options)
    check((out, lse), args, options)
    if backend.name == "cuda":  # which takes scores in base 2, where these are exact
        wanted, _ = reference.paged_attention(*args, **pool.scales, scale=math.log(2))
        assert_accurate(out, wanted, wanted.to(out.dtype))


# -------------------------------------------------------------------------- batch independence


@by_storage
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_do_not_depend_on_the_batch(backend: Backend, storage: str, head_dim: int) -> None:
    """R31: drafts of 8 tokens alone, among others, and beside a chunk, bit for bit."""
    counts, lengths = [8, 8, 1, 8, 70, 16, 8], [700, 65, 300, 9, 333, 64, 1100]
    if backend.interpreted:
        counts, lengths = [8, 1, 40], [70, 20, 50]
    args, pool, maxima = bytes_step(backend, counts, lengths, storage, head_dim=head_dim)
    q, k_cache, v_cache, table, cu_q, seq_lens = args
    options = {**pool.scales, "batch_invariant": True}
    whole = backend.ops.paged_attention(*args, **maxima, **options)
    for first in range(len(counts)):
        for end in range(first + 1, len(counts) + 1):
            if first % 3 != 0 and end - first > 1:
                continue
            bounds = cu_q[first : end + 1]
            rows = slice(int(bounds[0]), int(bounds[-1]))
            part = backend.ops.paged_attention(
                q[rows], k_cache, v_cache, table[first:end], bounds - bounds[0],
                seq_lens[first:end].contiguous(), max_seqlen_q=max(counts[first:end]),
                max_seqlen_k=max(lengths[first:end]), **options,
            )  # fmt: skip
            assert_bit_equal(part[0], whole[0][rows], "out")
            assert_bit_equal(part[1], whole[1][:, rows].contiguous(), "lse")
