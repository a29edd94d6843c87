"""flash_attention (dense) and flash_attention_varlen (ragged) against the reference."""

import math
from typing import Any

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
    assert_same_nonfinite,
    cumulative,
    dtype_name,
    far_apart,
    guarded,
    random_tree_masks,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.37},
    "left": {"window_left": 3},
    "right": {"window_right": 2},
    "both": {"window_left": 4, "window_right": 1},
    "self": {"window_left": 0, "window_right": 0},
    "causal_left": {"causal": True, "window_left": 5},
    "causal_wins": {"causal": True, "window_right": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {
        "causal": True, "window_left": 9, "softcap": 3.0, "sinks": True, "scale": 0.2,
        "batch_invariant": True,
    },
}  # fmt: skip
SIZES = [(1, 1), (1, 17), (5, 5), (7, 33), (33, 7), (3, 130), (65, 65)]
HEAD_DIMS = [(1, 1), (7, 33), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128),
             (192, 128), (64, 192), (256, 256), (512, 512)]  # fmt: skip


def qkv(
    dtype: torch.dtype,
    sq: int,
    sk: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 24,
    value_dim: int | None = None,
    device: str = "cpu",
) -> list[Tensor]:
    """Dense random q, k, v."""
    value_dim = head_dim if value_dim is None else value_dim
    shapes = [
        (batch, sq, heads, head_dim),
        (batch, sk, kv_heads, head_dim),
        (batch, sk, kv_heads, value_dim),
    ]
    return [torch.randn(*shape, device=device).to(dtype) for shape in shapes]


def prepared(options: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    """Options with the sinks drawn."""
    if options.get("sinks") is not True:
        return dict(options)
    return {**options, "sinks": torch.randn(heads, device=device) * 2}


def check(
    function: str,
    actual: tuple[Tensor, Tensor],
    inputs: list[Tensor],
    options: dict[str, Any],
) -> None:
    """out against eager in its own dtype; lse, which is float32, against eager in float32."""
    options = {
        k: o
        for k, o in options.items()
        if k not in ("batch_invariant", "max_seqlen_q", "max_seqlen_k")
    }
    op = getattr(reference, function)
    dtype = inputs[0].dtype
    out, lse = op(*inputs, **options)
    plain, _ = op(*inputs, **options, dtype=dtype)
    _, plain_lse = op(*inputs, **options, dtype=torch.float32)
    assert actual[0].dtype == dtype and actual[1].dtype == torch.float32
    assert_accurate(actual[0], out, plain, what="out")
    assert_accurate(actual[1], lse, plain_lse, what="lse")


def ragged(
    dtype: torch.dtype,
    counts_q: list[int],
    counts_k: list[int],
    device: str,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 24,
    value_dim: int | None = None,
) -> tuple[list[Tensor], dict[str, int]]:
    """(q, k, v, cu_seqlens_q, cu_seqlens_k) and the declared maxima."""
    q, k, v = (
        x[0]
        for x in qkv(
            dtype, sum(counts_q), sum(counts_k), batch=1, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, value_dim=value_dim, device=device,
        )
    )  # fmt: skip
    maxima = {"max_seqlen_q": max([*counts_q, 0]), "max_seqlen_k": max([*counts_k, 0])}
    return [q, k, v, cumulative(counts_q, device), cumulative(counts_k, device)], maxima


# -------------------------------------------------------------------------------------- dense


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_dense_options(backend: Backend, dtype: torch.dtype, option: str, sq: int, sk: int) -> None:
    inputs = qkv(dtype, sq, sk, device=backend.device)
    options = prepared(OPTIONS[option], 4, backend.device)
    check("flash_attention", backend.ops.flash_attention(*inputs, **options), inputs, options)


@by_dtype
@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_dense_head_sizes(
    backend: Backend, dtype: torch.dtype, head_dim: int, value_dim: int, causal: bool
) -> None:
    inputs = qkv(dtype, 11, 37, head_dim=head_dim, value_dim=value_dim, device=backend.device)
    out, lse = backend.ops.flash_attention(*inputs, causal=causal)
    assert out.shape == (2, 11, 4, value_dim) and lse.shape == (2, 4, 11)
    check("flash_attention", (out, lse), inputs, {"causal": causal})


@by_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (14, 2), (33, 11)])
def test_dense_head_groups(backend: Backend, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    inputs = qkv(dtype, 6, 19, heads=heads, kv_heads=kv_heads, device=backend.device)
    check(
        "flash_attention",
        backend.ops.flash_attention(*inputs, causal=True),
        inputs,
        {"causal": True},
    )


@by_dtype
@pytest.mark.parametrize("sq", [1, 300])
def test_dense_long_sequence(backend: Backend, dtype: torch.dtype, sq: int) -> None:
    inputs = qkv(dtype, sq, 1500, batch=1, heads=2, kv_heads=1, head_dim=64, device=backend.device)
    options = {"causal": True}
    check("flash_attention", backend.ops.flash_attention(*inputs, **options), inputs, options)


@by_dtype
@pytest.mark.parametrize("magnitude", [30.0, 1e-4])
def test_dense_large_and_small_scores(
    backend: Backend, dtype: torch.dtype, magnitude: float
) -> None:
    """Scores in the thousands neither overflow nor give NaN.

    Then few weights are not 0 or 1, and one rounding decides the error: the yardstick is the less
    exact of the two plain ways, scaling the scores and scaling the queries.
    """
    q, k, v = qkv(dtype, 9, 70, device=backend.device)
    q, k = q * magnitude, k * magnitude
    expected = reference.flash_attention(q, k, v)
    ours = backend.ops.flash_attention(q, k, v)
    scaled_q = (q * 24**-0.5).to(dtype)
    for i, (name, plain_dtype) in enumerate((("out", dtype), ("lse", torch.float32))):
        plain = [
            reference.flash_attention(q, k, v, dtype=plain_dtype)[i],
            reference.flash_attention(scaled_q, k, v, scale=1.0, dtype=plain_dtype)[i],
        ]
        worst = max(plain, key=lambda x: (x.double() - expected[i]).square().sum().item())
        assert_accurate(ours[i], expected[i], worst, what=name)


def test_default_scale_is_of_the_key_size(backend: Backend) -> None:
    inputs = qkv(torch.float32, 3, 5, head_dim=25, value_dim=9, device=backend.device)
    ours = backend.ops.flash_attention(*inputs)
    for a, b in zip(ours, backend.ops.flash_attention(*inputs, scale=0.2), strict=True):
        torch.testing.assert_close(a, b)


@by_dtype
@pytest.mark.parametrize(("sq", "sk"), [(5, 0), (5, 2), (40, 33)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_more_queries_than_keys_give_empty_rows(
    backend: Backend, dtype: torch.dtype, sq: int, sk: int, with_sinks: bool
) -> None:
    """R02: rows that see nothing are 0 with lse -inf, with a sink as well."""
    inputs = qkv(dtype, sq, sk, device=backend.device)
    options = prepared({"causal": True, "sinks": with_sinks or None}, 4, backend.device)
    out, lse = backend.ops.flash_attention(*inputs, **options)
    assert (out[:, : sq - sk] == 0).all()
    assert (lse[:, :, : sq - sk] == -math.inf).all()
    assert not lse[:, :, sq - sk :].isinf().any()
    check("flash_attention", (out, lse), inputs, options)


@by_dtype
def test_nan_is_seen_only_where_it_is_visible(backend: Backend, dtype: torch.dtype) -> None:
    for which in (1, 2):
        inputs = qkv(dtype, 8, 20, device=backend.device)
        inputs[which][0, 15] = math.nan  # queries 3.. of batch 0 see key 15
        inputs[which][0, 19, 0] = math.inf
        for options in ({"causal": True}, {"causal": True, "window_left": 2}):
            out, lse = backend.ops.flash_attention(*inputs, **options)
            assert out[1].isfinite().all() and out[0, :3].isfinite().all()
            assert lse[1].isfinite().all() and lse[0, :, :3].isfinite().all()
            assert out[0, 3].isnan().all()
            if which == 1:
                assert lse[0, :, 3].isnan().all()
            clean = [x.clone() for x in inputs]
            clean[which][0, 15:] = 0
            if backend.name == "cpu":
                expected, _ = backend.ops.flash_attention(*clean, **options)
                assert_bit_equal(out[0, :3].clone(), expected[0, :3].clone())
            else:  # which computes such a tile again, in smaller steps
                wanted, _ = reference.flash_attention(*clean, **options)
                plain, _ = reference.flash_attention(*clean, **options, dtype=dtype)
                assert_accurate(out[0, :3], wanted[0, :3], plain[0, :3])


def test_nan_query_spoils_only_its_row(backend: Backend) -> None:
    inputs = qkv(torch.float32, 4, 9, device=backend.device)
    inputs[0][1, 2, 3] = math.nan
    out, lse = backend.ops.flash_attention(*inputs)
    expected = [x.float() for x in reference.flash_attention(*inputs)]
    assert_same_nonfinite(out, expected[0])
    assert_same_nonfinite(lse, expected[1])


@by_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_dense_strided_inputs_equal_contiguous(
    backend: Backend, dtype: torch.dtype, layout: str
) -> None:
    inputs = qkv(dtype, 9, 21, head_dim=40, device=backend.device)
    strided = [STRIDED[layout](x) for x in inputs]
    if layout == "swapped":  # BHSD storage, the usual one
        strided = [STRIDED[layout](x, 1, 2) for x in inputs]
    expected = backend.ops.flash_attention(*inputs, causal=True)
    result = backend.ops.flash_attention(*strided, causal=True)
    if backend.name == "cuda":  # what is not aligned goes to another kernel
        check("flash_attention", result, inputs, {"causal": True})
        return
    for ours, contiguous in zip(result, expected, strict=True):
        assert_bit_equal(ours, contiguous)


@by_dtype
def test_slices_of_a_fused_projection(backend: Backend, dtype: torch.dtype) -> None:
    """R08: q, k and v are column slices of one tensor."""
    fused = torch.randn(2, 7, (4 + 2 + 2) * 40, device=backend.device).to(dtype)
    parts = fused.view(2, 7, 8, 40).split([4, 2, 2], 2)
    expected = backend.ops.flash_attention(*(x.contiguous() for x in parts))
    for ours, contiguous in zip(backend.ops.flash_attention(*parts), expected, strict=True):
        assert_bit_equal(ours, contiguous)


def test_keys_shared_by_the_batch_through_stride_zero(backend: Backend) -> None:
    q, k, v = qkv(torch.float32, 3, 12, device=backend.device)
    k, v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    check("flash_attention", backend.ops.flash_attention(q, k, v), [q, k, v], {})


def test_dense_offsets_beyond_32_bits(backend: Backend) -> None:
    """R06: batch index times stride passes 2^31 elements, in every input and in out."""
    inputs = qkv(torch.bfloat16, 2, 5, batch=3, device=backend.device)
    far = [far_apart(x, 2**30 + 16) for x in inputs]
    out = far_apart(torch.zeros_like(inputs[0]), 2**30 + 16)
    lse = torch.empty(3, 4, 2, device=backend.device)
    backend.ops.flash_attention(*far, out=out, lse=lse)
    expected = backend.ops.flash_attention(*inputs)
    assert_bit_equal(out.clone(), expected[0])
    assert_bit_equal(lse, expected[1])


@by_dtype
def test_dense_outputs_are_filled_and_nothing_else_is(backend: Backend, dtype: torch.dtype) -> None:
    inputs = qkv(dtype, 5, 9, value_dim=17, device=backend.device)
    out = guarded((2, 5, 4, 17), dtype, backend.device)
    lse = guarded((2, 4, 5), torch.float32, backend.device)
    returned = backend.ops.flash_attention(*inputs, causal=True, out=out.view, lse=lse.view)
    expected = backend.ops.flash_attention(*inputs, causal=True)
    for part, wanted, back in zip((out, lse), expected, returned, strict=True):
        assert_bit_equal(part.view, wanted)
        assert back.data_ptr() == part.view.data_ptr()
        part.assert_untouched_around()


def test_dense_overloads_are_equal(backend: Backend) -> None:
    inputs = qkv(torch.float32, 5, 9, device=backend.device)
    options = prepared({"sinks": True, "softcap": 3.0, "window_left": 4}, 4, backend.device)
    packet = backend.library.flash_attention
    out, lse = torch.full((2, 5, 4, 24), math.nan), torch.full((2, 4, 5), math.nan)
    out, lse = out.to(backend.device), lse.to(backend.device)
    assert packet.out(*inputs, **options, out=out, lse=lse) is None
    for result in (
        packet.default(*inputs, **options), backend.ops.flash_attention(*inputs, **options)
    ):  # fmt: skip
        assert_bit_equal(result[0], out)
        assert_bit_equal(result[1], lse)


@pytest.mark.parametrize(
    ("batch", "sq", "sk"), [(0, 3, 5), (2, 0, 5), (2, 0, 0), (0, 0, 0), (2, 3, 0)]
)
def test_dense_of_nothing(backend: Backend, batch: int, sq: int, sk: int) -> None:
    """R24, R02."""
    inputs = qkv(torch.float32, sq, sk, batch=batch, device=backend.device)
    out, lse = backend.ops.flash_attention(*inputs)
    assert out.shape == (batch, sq, 4, 24) and lse.shape == (batch, 4, sq)
    assert (out == 0).all() and (lse == -math.inf).all()


@by_dtype
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (6, 6), (8, 40), (64, 64), (64, 100), (10, 7)])
@pytest.mark.parametrize("option", ["plain", "causal", "left", "both", "self", "sinks"])
def test_dense_tree_mask(
    backend: Backend, dtype: torch.dtype, sq: int, sk: int, option: str
) -> None:
    """The causal flag means nothing beside a tree mask; windows go by tree depth."""
    inputs = qkv(dtype, sq, sk, device=backend.device)
    mask = torch.stack([random_tree_masks(sq) for _ in range(2)]).to(backend.device)
    options = prepared(OPTIONS[option], 4, backend.device)
    result = backend.ops.flash_attention(*inputs, **options, tree_mask=mask)
    check("flash_attention", result, inputs, {**options, "tree_mask": mask})


def test_tree_mask_of_a_chain_is_causal(backend: Backend) -> None:
    inputs = qkv(torch.float32, 64, 80, device=backend.device)
    chain = torch.tensor([-1 if i == 63 else (1 << (i + 1)) - 1 for i in range(64)])
    mask = chain.expand(2, 64).contiguous().to(backend.device)
    result = backend.ops.flash_attention(*inputs, tree_mask=mask, window_left=20)
    check("flash_attention", result, inputs, {"causal": True, "window_left": 20})


def test_tree_mask_bits_past_the_last_query_are_ignored(backend: Backend) -> None:
    inputs = qkv(torch.float32, 5, 9, device=backend.device)
    mask = torch.stack([random_tree_masks(5) for _ in range(2)]).to(backend.device)
    expected = backend.ops.flash_attention(*inputs, tree_mask=mask)
    high = mask | (-1 << 5)
    for ours, wanted in zip(
        backend.ops.flash_attention(*inputs, tree_mask=high), expected, strict=True
    ):
        assert_bit_equal(ours, wanted)


def test_invisible_siblings_may_be_nan(backend: Backend) -> None:
    q, k, v = qkv(torch.float32, 4, 10, device=backend.device)
    # Token 3 descends from 2; 1 is a sibling that it does not see.
    mask = torch.tensor([0b0001, 0b0011, 0b0101, 0b1101]).expand(2, 4).contiguous()
    k[:, 7], v[:, 7] = math.nan, math.nan
    out, lse = backend.ops.flash_attention(q, k, v, tree_mask=mask.to(backend.device))
    assert out[:, [0, 2, 3]].isfinite().all() and lse[:, :, [0, 2, 3]].isfinite().all()
    assert out[:, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_dense_rows_do_not_depend_on_the_batch(backend: Backend, dtype: torch.dtype) -> None:
    """R31: one sequence alone, and in a batch of 2..64, bit for bit."""
    inputs = qkv(dtype, 2, 300, batch=64, heads=2, kv_heads=1, device=backend.device)
    options = {"causal": True, "batch_invariant": True}
    whole = backend.ops.flash_attention(*inputs, **options)
    for begin, end in ((0, 1), (63, 64), (5, 7), (0, 33)):
        part = backend.ops.flash_attention(*(x[begin:end] for x in inputs), **options)
        assert_bit_equal(part[0], whole[0][begin:end])
        assert_bit_equal(part[1], whole[1][begin:end])


def test_sinks_of_minus_infinity_do_nothing(backend: Backend) -> None:
    inputs = qkv(torch.float32, 3, 7, device=backend.device)
    sinks = torch.full((4,), -math.inf, device=backend.device)
    expected = backend.ops.flash_attention(*inputs)
    for ours, wanted in zip(
        backend.ops.flash_attention(*inputs, sinks=sinks), expected, strict=True
    ):
        torch.testing.assert_close(ours, wanted)


def test_a_large_sink_takes_the_weight_but_not_the_lse(backend: Backend) -> None:
    inputs = qkv(torch.float32, 3, 7, device=backend.device)
    sinks = torch.tensor([0.0, 50.0, 200.0, 1e4], device=backend.device)
    result = backend.ops.flash_attention(*inputs, sinks=sinks)
    check("flash_attention", result, inputs, {"sinks": sinks})
    assert_bit_equal(result[1], backend.ops.flash_attention(*inputs)[1], "lse")
    assert (result[0][:, :, 3] == 0).all()


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2), (2, 4)])
def test_heads_that_do_not_divide_are_refused(backend: Backend, heads: int, kv_heads: int) -> None:
    """R26."""
    inputs = qkv(torch.float32, 3, 5, heads=heads, kv_heads=kv_heads, device=backend.device)
    with pytest.raises(ValueError, match=rf"flash_attention.*{heads}"):
        backend.ops.flash_attention(*inputs)
    args, maxima = ragged(torch.float32, [3], [5], backend.device, heads=heads, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=rf"flash_attention_varlen.*{heads}"):
        backend.ops.flash_attention_varlen(*args, **maxima)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window_left": -2}, "window_left"),
        ({"window_right": -5}, "window_right"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
    ],
)
def test_senseless_options_are_refused(
    backend: Backend, options: dict[str, Any], name: str
) -> None:
    inputs = qkv(torch.float32, 3, 5, device=backend.device)
    with pytest.raises(ValueError, match=rf"flash_attention.*{name}"):
        backend.ops.flash_attention(*inputs, **options)


# -------------------------------------------------------------------------------------- ragged

RAGGED = [
    ([5], [5]), ([1, 1, 1], [7, 1, 40]), ([3, 0, 9, 1], [8, 4, 3, 65]), ([0, 6, 0], [0, 0, 2]),
    ([33, 2], [33, 70]),
]  # fmt: skip


@by_dtype
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("counts_q", "counts_k"), RAGGED)
def test_ragged_options(
    backend: Backend, dtype: torch.dtype, option: str, counts_q: list[int], counts_k: list[int]
) -> None:
    args, maxima = ragged(dtype, counts_q, counts_k, backend.device)
    options = {**prepared(OPTIONS[option], 4, backend.device), **maxima}
    result = backend.ops.flash_attention_varlen(*args, **options)
    check("flash_attention_varlen", result, args, options)


@by_dtype
@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_ragged_head_sizes(
    backend: Backend, dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    args, maxima = ragged(
        dtype, [4, 9], [11, 20], backend.device, head_dim=head_dim, value_dim=value_dim
    )
    result = backend.ops.flash_attention_varlen(*args, **maxima, causal=True)
    assert result[0].shape == (13, 4, value_dim) and result[1].shape == (4, 13)
    check("flash_attention_varlen", result, args, {"causal": True})


@by_dtype
@pytest.mark.parametrize("option", ["plain", "both", "sinks"])
def test_ragged_tree_mask(backend: Backend, dtype: torch.dtype, option: str) -> None:
    counts = [5, 0, 64, 1, 8]
    args, maxima = ragged(dtype, counts, [9, 3, 64, 1, 5], backend.device)
    mask = torch.cat([random_tree_masks(count) for count in counts]).to(backend.device)
    options = {**prepared(OPTIONS[option], 4, backend.device), "tree_mask": mask}
    result = backend.ops.flash_attention_varlen(*args, **maxima, **options)
    check("flash_attention_varlen", result, args, options)


@by_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_ragged_strided_inputs_equal_contiguous(
    backend: Backend, dtype: torch.dtype, layout: str
) -> None:
    args, maxima = ragged(dtype, [4, 9], [11, 20], backend.device, head_dim=40)
    strided = [*(STRIDED[layout](x) for x in args[:3]), *args[3:]]
    expected = backend.ops.flash_attention_varlen(*args, **maxima)
    ours = backend.ops.flash_attention_varlen(*strided, **maxima)
    if backend.name == "cuda":
        check("flash_attention_varlen", ours, args, {})
        return
    assert_bit_equal(ours[0], expected[0])
    assert_bit_equal(ours[1], expected[1])


@by_dtype
def test_ragged_outputs_are_filled_and_nothing_else_is(
    backend: Backend, dtype: torch.dtype
) -> None:
    args, maxima = ragged(dtype, [4, 0, 9], [11, 2, 5], backend.device, value_dim=17)
    out = guarded((13, 4, 17), dtype, backend.device)
    lse = guarded((4, 13), torch.float32, backend.device)
    options = {**maxima, "causal": True}
    backend.ops.flash_attention_varlen(*args, **options, out=out.view, lse=lse.view)
    expected = backend.ops.flash_attention_varlen(*args, **options)
    for part, wanted in zip((out, lse), expected, strict=True):
        assert_bit_equal(part.view, wanted)
        part.assert_untouched_around()


def test_ragged_overloads_are_equal(backend: Backend) -> None:
    args, maxima = ragged(torch.float32, [4, 9], [11, 20], backend.device)
    packet = backend.library.flash_attention_varlen
    out = torch.full((13, 4, 24), math.nan, device=backend.device)
    lse = torch.full((4, 13), math.nan, device=backend.device)
    assert packet.out(*args, **maxima, out=out, lse=lse) is None
    for result in (
        packet.default(*args, **maxima), backend.ops.flash_attention_varlen(*args, **maxima)
    ):  # fmt: skip
        assert_bit_equal(result[0], out)
        assert_bit_equal(result[1], lse)


@pytest.mark.parametrize(
    ("counts_q", "counts_k"), [([], []), ([0], [0]), ([0, 0], [3, 4]), ([2, 1], [0, 0])]
)
def test_ragged_of_nothing(backend: Backend, counts_q: list[int], counts_k: list[int]) -> None:
    """R24, R02: no sequences, no queries, no keys."""
    args, maxima = ragged(torch.float32, counts_q, counts_k, backend.device)
    out, lse = backend.ops.flash_attention_varlen(*args, **maxima)
    assert out.shape == (sum(counts_q), 4, 24) and lse.shape == (4, sum(counts_q))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_ragged_maxima_may_be_larger_than_the_lengths(backend: Backend) -> None:
    args, maxima = ragged(torch.float32, [4, 9], [11, 20], backend.device)
    expected = backend.ops.flash_attention_varlen(*args, **maxima, batch_invariant=True)
    ours = backend.ops.flash_attention_varlen(
        *args, max_seqlen_q=1000, max_seqlen_k=10**6, batch_invariant=True
    )
    assert_bit_equal(ours[0], expected[0])
    assert_bit_equal(ours[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_ragged_rows_do_not_depend_on_the_batch(backend: Backend, dtype: torch.dtype) -> None:
    """R31: each sequence alone, and in batches with longer and shorter ones, bit for bit."""
    counts_q = [1, 5, 3, 1] * 8
    counts_k = [300, 17, 650, 3] * 8
    args, maxima = ragged(dtype, counts_q, counts_k, backend.device, heads=2, kv_heads=1)
    q, k, v, cu_q, cu_k = args
    options = {"causal": True, "batch_invariant": True}
    whole = backend.ops.flash_attention_varlen(*args, **maxima, **options)
    for first, count in ((0, 1), (1, 1), (2, 1), (31, 1), (4, 2), (3, 17)):
        bounds_q, bounds_k = cu_q[first : first + count + 1], cu_k[first : first + count + 1]
        rows, keys = slice(*bounds_q[[0, -1]].tolist()), slice(*bounds_k[[0, -1]].tolist())
        part = backend.ops.flash_attention_varlen(
            q[rows], k[keys], v[keys], bounds_q - bounds_q[0], bounds_k - bounds_k[0],
            max_seqlen_q=max(counts_q[first : first + count]),
            max_seqlen_k=max(counts_k[first : first + count]), **options,
        )  # fmt: skip
        assert_bit_equal(part[0], whole[0][rows], "out")
        assert_bit_equal(part[1], whole[1][:, rows].contiguous(), "lse")


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "name"),
    [
        ([0, 4, 3, 13], [0, 5, 9, 20], "cu_seqlens_q"),
        ([0, 4, 9, 13], [0, 15, 9, 20], "cu_seqlens_k"),
        ([1, 4, 9, 13], [0, 5, 9, 20], "cu_seqlens_q"),
        ([-3, 4, 9, 13], [0, 5, 9, 20], "cu_seqlens_q"),
        ([0, 4, 9, 14], [0, 5, 9, 20], "cu_seqlens_q"),
        ([0, 4, 9, 12], [0, 5, 9, 20], "cu_seqlens_q"),
        ([0, 4, 9, 13], [0, 5, 9, 19], "cu_seqlens_k"),
        ([0, 4, 9, 13], [0, 5, 9, 2**31 - 1], "cu_seqlens_k"),
        ([0, 4, 9, 13], [0, 5, 20], "cu_seqlens_k"),
    ],
)
def test_senseless_cu_seqlens_are_refused(
    backend: Backend, cu_q: list[int], cu_k: list[int], name: str
) -> None:
    if not backend.reads_contents:
        pytest.skip("lengths are read on the device, unchecked")
    args, _ = ragged(torch.float32, [13], [20], "cpu")
    args[3:] = [torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    with pytest.raises(ValueError, match=rf"flash_attention_varlen.*{name}"):
        backend.ops.flash_attention_varlen(*args, max_seqlen_q=20, max_seqlen_k=20)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_lengths_above_the_declared_maximum_are_refused(backend: Backend, name: str) -> None:
    if not backend.reads_contents:
        pytest.skip("lengths are read on the device, unchecked")
    args, maxima = ragged(torch.float32, [4, 9], [11, 20], "cpu")
    for wrong in (maxima[name] - 1, -1):
        with pytest.raises(ValueError, match=rf"flash_attention_varlen.*{name}"):
            backend.ops.flash_attention_varlen(*args, **{**maxima, name: wrong})
