"""merge_attention_states against the reference."""

import math

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    STRIDED,
    assert_accurate,
    assert_bit_equal,
    dtype_name,
    far_apart,
    guarded,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def states(
    backend: Backend, dtype: torch.dtype, parts: int, tokens: int, heads: int, dim: int
) -> tuple[Tensor, Tensor]:
    outs = torch.randn(parts, tokens, heads, dim, device=backend.device).to(dtype)
    return outs, torch.randn(parts, heads, tokens, device=backend.device) * 4


def check(
    actual: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor, sinks: Tensor | None = None
) -> None:
    out, lse = reference.merge_attention_states(outs, lses, sinks=sinks)
    plain, _ = reference.merge_attention_states(outs, lses, sinks=sinks, dtype=outs.dtype)
    _, plain_lse = reference.merge_attention_states(outs, lses, sinks=sinks, dtype=torch.float32)
    assert actual[0].dtype == outs.dtype and actual[1].dtype == torch.float32
    assert_accurate(actual[0], out, plain, what="out")
    assert_accurate(actual[1], lse, plain_lse, what="lse")


@by_dtype
@pytest.mark.parametrize("parts", [1, 2, 3, 16, 65])
@pytest.mark.parametrize("dim", [1, 7, 64, 72, 256, 512])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_and_sizes(
    backend: Backend, dtype: torch.dtype, parts: int, dim: int, with_sinks: bool
) -> None:
    outs, lses = states(backend, dtype, parts, 5, 3, dim)
    sinks = torch.randn(3, device=backend.device) * 3 if with_sinks else None
    check(backend.ops.merge_attention_states(outs, lses, sinks=sinks), outs, lses, sinks)


@by_dtype
def test_dense_states(backend: Backend, dtype: torch.dtype) -> None:
    outs = torch.randn(3, 2, 5, 4, 24, device=backend.device).to(dtype)
    lses = torch.randn(3, 2, 4, 5, device=backend.device)
    sinks = torch.randn(4, device=backend.device)
    out, lse = backend.ops.merge_attention_states(outs, lses, sinks=sinks)
    assert out.shape == (2, 5, 4, 24) and lse.shape == (2, 4, 5)
    check((out, lse), outs, lses, sinks)


@by_dtype
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_all_parts_empty(
    backend: Backend, dtype: torch.dtype, parts: int, with_sinks: bool
) -> None:
    """R03: (0, -inf) whatever the parts' outputs hold, with a sink as well."""
    outs, lses = states(backend, dtype, parts, 4, 2, 40)
    outs.fill_(math.nan)
    lses.fill_(-math.inf)
    sinks = torch.zeros(2, device=backend.device) if with_sinks else None
    out, lse = backend.ops.merge_attention_states(outs, lses, sinks=sinks)
    assert (out == 0).all() and (lse == -math.inf).all()


@by_dtype
@pytest.mark.parametrize("empty", [[0], [1], [0, 2], [1, 2]])
def test_one_part_remains_unchanged_beside_empty_ones(
    backend: Backend, dtype: torch.dtype, empty: list[int]
) -> None:
    """R03."""
    outs, lses = states(backend, dtype, 3, 6, 2, 40)
    outs[empty], lses[empty] = math.nan, -math.inf
    out, lse = backend.ops.merge_attention_states(outs, lses)
    kept = [part for part in range(3) if part not in empty]
    if len(kept) == 1:
        assert_bit_equal(out, outs[kept[0]], "out")
        assert_bit_equal(lse, lses[kept[0]], "lse")
    check((out, lse), outs[kept], lses[kept])


def test_empty_rows_differ_by_head_and_token(backend: Backend) -> None:
    outs, lses = states(backend, torch.float32, 4, 33, 5, 24)
    lses.masked_fill_(torch.rand(lses.shape, device=lses.device) < 0.6, -math.inf)
    lses[:, 2, 7] = -math.inf
    outs.masked_fill_((lses == -math.inf).transpose(1, 2).unsqueeze(-1), math.nan)
    check(backend.ops.merge_attention_states(outs, lses), outs, lses)


def test_far_apart_and_huge_lses(backend: Backend) -> None:
    outs, lses = states(backend, torch.float32, 3, 4, 2, 24)
    lses[0], lses[1], lses[2] = 500.0, 88.0, -2000.0
    check(backend.ops.merge_attention_states(outs, lses), outs, lses)


def test_sinks_enter_once_and_not_into_the_lse(backend: Backend) -> None:
    outs, lses = states(backend, torch.float32, 3, 4, 2, 24)
    sinks = torch.tensor([1.0, 1e4], device=backend.device)
    result = backend.ops.merge_attention_states(outs, lses, sinks=sinks)
    check(result, outs, lses, sinks)
    assert_bit_equal(result[1], backend.ops.merge_attention_states(outs, lses)[1], "lse")


def test_nan_in_a_part_that_counts_is_seen(backend: Backend) -> None:
    outs, lses = states(backend, torch.float32, 2, 3, 2, 8)
    outs[0, 1, 0, 3] = math.nan
    out, _ = backend.ops.merge_attention_states(outs, lses)
    assert out.isnan().nonzero().tolist() == [[1, 0, 3]]


@by_dtype
def test_merged_splits_equal_the_whole(backend: Backend, dtype: torch.dtype) -> None:
    """Attention over three ranges of keys, merged, is attention over all of them."""
    q = torch.randn(1, 5, 4, 40, device=backend.device).to(dtype)
    k, v = (torch.randn(1, 90, 2, 40, device=backend.device).to(dtype) for _ in range(2))
    sinks = torch.randn(4, device=backend.device)
    parts = [
        backend.ops.flash_attention(q, k[:, a:b], v[:, a:b])
        for a, b in ((0, 1), (1, 1), (1, 50), (50, 90))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    merged = backend.ops.merge_attention_states(outs, lses, sinks=sinks)
    whole = reference.flash_attention(q, k, v, sinks=sinks)
    plain = reference.flash_attention(q, k, v, sinks=sinks, dtype=dtype)
    assert_accurate(merged[0], whole[0], plain[0], what="out")
    plain_lse = reference.flash_attention(q, k, v, dtype=torch.float32)[1]
    assert_accurate(merged[1], whole[1], plain_lse, what="lse")


@by_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs_equal_contiguous(backend: Backend, dtype: torch.dtype, layout: str) -> None:
    outs, lses = states(backend, dtype, 3, 5, 4, 40)
    expected = backend.ops.merge_attention_states(outs, lses)
    ours = backend.ops.merge_attention_states(STRIDED[layout](outs), STRIDED[layout](lses))
    assert_bit_equal(ours[0], expected[0])
    assert_bit_equal(ours[1], expected[1])


@by_dtype
def test_outputs_are_filled_and_nothing_else_is(backend: Backend, dtype: torch.dtype) -> None:
    outs, lses = states(backend, dtype, 3, 5, 4, 41)
    out = guarded((5, 4, 41), dtype, backend.device)
    lse = guarded((4, 5), torch.float32, backend.device)
    backend.ops.merge_attention_states(outs, lses, out=out.view, lse=lse.view)
    expected = backend.ops.merge_attention_states(outs, lses)
    for part, wanted in zip((out, lse), expected, strict=True):
        assert_bit_equal(part.view, wanted)
        part.assert_untouched_around()


def test_overloads_are_equal(backend: Backend) -> None:
    outs, lses = states(backend, torch.float32, 3, 5, 4, 40)
    packet = backend.library.merge_attention_states
    out, lse = torch.full_like(outs[0], math.nan), torch.full_like(lses[0], math.nan)
    assert packet.out(outs, lses, out=out, lse=lse) is None
    for result in (
        packet.default(outs, lses), backend.ops.merge_attention_states(outs, lses)
    ):  # fmt: skip
        assert_bit_equal(result[0], out)
        assert_bit_equal(result[1], lse)


def test_zero_tokens(backend: Backend) -> None:
    """R24."""
    outs, lses = states(backend, torch.float32, 3, 0, 4, 40)
    out, lse = backend.ops.merge_attention_states(outs, lses)
    assert out.shape == (0, 4, 40) and lse.shape == (4, 0)


@by_dtype
def test_rows_do_not_see_each_other(backend: Backend, dtype: torch.dtype) -> None:
    """R31."""
    outs, lses = states(backend, dtype, 3, 256, 2, 24)
    whole = backend.ops.merge_attention_states(outs, lses)
    for begin, end in ((0, 1), (255, 256), (0, 2), (3, 20), (0, 64)):
        part = backend.ops.merge_attention_states(outs[:, begin:end], lses[:, :, begin:end])
        assert_bit_equal(part[0], whole[0][begin:end])
        assert_bit_equal(part[1], whole[1][:, begin:end].contiguous())


def test_offsets_beyond_32_bits(backend: Backend) -> None:
    """R06."""
    outs, lses = states(backend, torch.bfloat16, 3, 2, 2, 24)
    expected = backend.ops.merge_attention_states(outs, lses)
    far = far_apart(outs, 2**30 + 8), far_apart(lses, 2**30 + 8)
    for ours, near in zip(backend.ops.merge_attention_states(*far), expected, strict=True):
        assert_bit_equal(ours, near)
