"""flash_attention and flash_attention_varlen on e4m3 queries, keys and values with scales."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    HALF_DTYPES,
    STRIDED,
    assert_accurate,
    assert_bit_equal,
    cumulative,
    dtype_name,
    far_apart,
    guarded,
    random_tree_masks,
)
from tests.ops.test_attention import OPTIONS, RAGGED, prepared
from tests.reference import fp8
from tests.reference.fp8 import FP8, dequantize

NAN_BYTE = 0x7F
Scales = dict[str, Tensor | None]


@dataclass
class Inputs:
    """q, k and v of a call in e4m3, and their scales by argument name."""

    qkv: list[Tensor]
    scales: Scales

    def dequantized(self, dtype: torch.dtype) -> list[Tensor]:
        """What q, k and v stand for, computed exactly and then rounded to the dtype."""
        pairs = zip(self.qkv, self.scales.values(), strict=True)
        return [dequantize(x, scale).to(dtype) for x, scale in pairs]


def make(
    backend: Backend,
    sq: int,
    sk: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 24,
    value_dim: int | None = None,
) -> Inputs:
    """Random tensors, and ordinary scales that differ from head to head."""
    value_dim = head_dim if value_dim is None else value_dim
    shapes = [
        (batch, sq, heads, head_dim),
        (batch, sk, kv_heads, head_dim),
        (batch, sk, kv_heads, value_dim),
    ]
    qkv = [torch.randn(*shape).to(FP8).to(backend.device) for shape in shapes]
    counts = {"q_scale": heads, "k_scale": kv_heads, "v_scale": kv_heads}
    scales: Scales = {n: (torch.rand(c) + 0.5).to(backend.device) for n, c in counts.items()}
    return Inputs(qkv, scales)


def check(
    backend: Backend, actual: tuple[Tensor, Tensor], inputs: Inputs, options: dict[str, Any]
) -> None:
    """Against float64; at most twice the error of weights rounded to e4m3.

    Backends that do not round weights so are held to what plain PyTorch makes of the dequantized
    tensors in out's dtype.
    """
    options = {name: o for name, o in options.items() if name != "batch_invariant"}
    out, lse = actual
    wanted, wanted_lse = reference.flash_attention(*inputs.dequantized(torch.float64), **options)
    plain = fp8.flash_attention(*inputs.dequantized(torch.float32), **options)
    assert lse.dtype == torch.float32
    assert_accurate(out, wanted, plain.to(out.dtype), what="out, weights in e4m3")
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=1e-3, atol=1e-3, equal_nan=True)
    if backend.name == "cuda":
        return
    plain, _ = reference.flash_attention(*inputs.dequantized(out.dtype), **options, dtype=out.dtype)
    assert_accurate(out, wanted, plain, what="out")
    _, plain_lse = reference.flash_attention(
        *inputs.dequantized(torch.float32), **options, dtype=torch.float32
    )
    assert_accurate(lse, wanted_lse, plain_lse, what="lse")


def run_and_check(backend: Backend, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """One dense call, compared with the reference."""
    result = backend.ops.flash_attention(*inputs.qkv, **inputs.scales, **options)
    assert result[0].dtype == torch.bfloat16
    check(backend, result, inputs, options)
    return result


# -------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize(
    "option", ["plain", "causal", "causal_left", "both", "self", "softcap", "sinks", "all"]
)
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 17), (7, 33), (33, 7), (65, 130)])
def test_options(backend: Backend, option: str, sq: int, sk: int) -> None:
    inputs = make(backend, sq, sk)
    run_and_check(backend, inputs, **prepared(OPTIONS[option], 4, backend.device))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(1, 1), (7, 33), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (64, 192),
     (256, 256), (512, 512)],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(backend: Backend, head_dim: int, value_dim: int, causal: bool) -> None:
    inputs = make(backend, 11, 37, head_dim=head_dim, value_dim=value_dim)
    out, _ = run_and_check(backend, inputs, causal=causal)
    assert out.shape == (2, 11, 4, value_dim)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_head_groups(backend: Backend, heads: int, kv_heads: int, head_dim: int) -> None:
    inputs = make(backend, 19, 40, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    run_and_check(backend, inputs, causal=True)


@pytest.mark.parametrize("sq", [1, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequence(backend: Backend, sq: int, causal: bool) -> None:
    """Keys that may be cut, and merged again."""
    inputs = make(backend, sq, 1100, batch=1, heads=2, kv_heads=1, head_dim=64)
    run_and_check(backend, inputs, causal=causal)


def test_rounded_weights_have_no_bias(backend: Backend) -> None:
    """Twice the error of e4m3 weights would hide results that are all 3 % too large."""
    inputs = make(backend, 150, 600, batch=1, head_dim=64)
    out, _ = run_and_check(backend, inputs)
    wanted, _ = reference.flash_attention(*inputs.dequantized(torch.float64))
    gain = (out.double() * wanted).sum() / wanted.square().sum()
    assert abs(gain - 1) < 3e-3


@pytest.mark.parametrize("out_dtype", HALF_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("sq", [9, 1])
def test_output_dtypes(backend: Backend, out_dtype: torch.dtype, sq: int) -> None:
    """A given out may be either; of splits too. Nothing around it is written."""
    sk = 700 if sq == 1 else 21
    inputs = make(backend, sq, sk, value_dim=17)
    out = guarded((2, sq, 4, 17), out_dtype, backend.device)
    lse = guarded((2, 4, sq), torch.float32, backend.device)
    options = {"causal": True}
    result = backend.ops.flash_attention(
        *inputs.qkv, **inputs.scales, **options, out=out.view, lse=lse.view
    )
    assert [x.data_ptr() for x in result] == [out.view.data_ptr(), lse.view.data_ptr()]
    check(backend, result, inputs, options)
    for part in (out, lse):
        part.assert_untouched_around()


def test_overloads_are_equal(backend: Backend) -> None:
    inputs = make(backend, 5, 9)
    packet = backend.library.flash_attention
    out = torch.full((2, 5, 4, 24), math.nan, dtype=torch.bfloat16, device=backend.device)
    lse = torch.full((2, 4, 5), math.nan, device=backend.device)
    assert packet.out(*inputs.qkv, **inputs.scales, out=out, lse=lse) is None
    for call in (packet.default, backend.ops.flash_attention):
        for ours, wanted in zip(call(*inputs.qkv, **inputs.scales), (out, lse), strict=True):
            assert_bit_equal(ours, wanted)


# Exponents of 10 of q's, k's and v's scales, and the softmax's scale.
MAGNITUDES: dict[str, tuple[int, int, int, float | None]] = {
    "tiny": (-4, -4, -4, None),
    "tiny_and_seen": (-4, -4, -4, 1e8 / 5),
    "large": (3, 3, 3, 1e-6 / 5),
    "opposite": (3, -3, 0, None),
    "zero_scale": (3, 3, 3, 0.0),
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("option", ["causal", "softcap"])
def test_scales_of_all_magnitudes(backend: Backend, magnitude: str, option: str) -> None:
    inputs = make(backend, 9, 40)
    *exponents, scale = MAGNITUDES[magnitude]
    for (name, x), exponent in zip(inputs.scales.items(), exponents, strict=True):
        assert x is not None
        inputs.scales[name] = x * 10.0**exponent
    run_and_check(backend, inputs, scale=scale, **OPTIONS[option])


def test_scales_that_differ_by_decades_from_head_to_head(backend: Backend) -> None:
    """A head that took another's scale would be far off; each head is compared alone."""
    inputs = make(backend, 9, 40, heads=6, kv_heads=3)
    inputs.scales |= {
        "q_scale": torch.tensor([1e-3, 1e-4, 0.7, 2.0, 1e3, 300.0], device=backend.device),
        "k_scale": torch.tensor([1e3, 1.3, 1e-3], device=backend.device),
        "v_scale": torch.tensor([1e-4, 0.9, 1e3], device=backend.device),
    }
    out, lse = backend.ops.flash_attention(*inputs.qkv, **inputs.scales)
    q, k, v = inputs.qkv
    for head in range(6):
        kv = head // 2
        at = {"q_scale": head, "k_scale": kv, "v_scale": kv}
        alone = Inputs(
            [q[:, :, head : head + 1], k[:, :, kv : kv + 1], v[:, :, kv : kv + 1]],
            {name: inputs.scales[name][i : i + 1] for name, i in at.items()},  # type: ignore[index]
        )
        check(backend, (out[:, :, head : head + 1], lse[:, head : head + 1]), alone, {})


@pytest.mark.parametrize("given", [(), ("q_scale",), ("k_scale",), ("v_scale",)])
def test_scales_that_are_not_given_are_1(backend: Backend, given: tuple[str, ...]) -> None:
    inputs = make(backend, 9, 40)
    inputs.scales = {name: x if name in given else None for name, x in inputs.scales.items()}
    run_and_check(backend, inputs, causal=True)


def test_negative_scales(backend: Backend) -> None:
    """The largest score is the one after scaling."""
    inputs = make(backend, 9, 40)
    inputs.scales["q_scale"] = torch.tensor([30.0, -30.0, 1.0, -1.0], device=backend.device)
    inputs.scales["v_scale"] = torch.tensor([-1.0, 2.0], device=backend.device)
    run_and_check(backend, inputs, causal=True)


@pytest.mark.parametrize(("sq", "sk"), [(5, 0), (5, 2), (40, 33), (1, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_rows(backend: Backend, sq: int, sk: int, with_sinks: bool) -> None:
    """Rows that see nothing are 0 with lse -inf, whatever the scales hold."""
    inputs = make(backend, sq, sk)
    options = prepared({"causal": True, "sinks": with_sinks or None}, 4, backend.device)
    out, lse = run_and_check(backend, inputs, **options)
    assert (out[:, : sq - sk] == 0).all() and (lse[:, :, : sq - sk] == -math.inf).all()
    for scale in inputs.scales.values():
        assert scale is not None
        scale.fill_(math.nan)
    out, lse = backend.ops.flash_attention(*inputs.qkv, **inputs.scales, **options)
    assert (out[:, : sq - sk] == 0).all() and (lse[:, :, : sq - sk] == -math.inf).all()
    assert out[:, sq - sk :].isnan().all()


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_nan_scale_spoils_only_its_heads(backend: Backend, name: str) -> None:
    inputs = make(backend, 9, 40)
    scale = inputs.scales[name]
    assert scale is not None
    scale[1] = math.nan
    out, lse = backend.ops.flash_attention(*inputs.qkv, **inputs.scales, causal=True)
    spoiled = [1] if name == "q_scale" else [2, 3]
    clean = [head for head in range(4) if head not in spoiled]
    assert out[:, :, spoiled].isnan().all() and out[:, :, clean].isfinite().all()
    assert lse[:, spoiled].isnan().all() == (name != "v_scale")
    assert lse[:, clean].isfinite().all()


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("head_dim", [24, 128])
def test_nan_is_seen_only_where_it_is_visible(backend: Backend, which: int, head_dim: int) -> None:
    inputs = make(backend, 8, 20, head_dim=head_dim)
    inputs.qkv[which].view(torch.uint8)[0, 15:] = NAN_BYTE  # queries 3.. of batch 0 see key 15
    for options in ({"causal": True}, {"causal": True, "window_left": 2}):
        out, lse = run_and_check(backend, inputs, **options)
        assert out[1].isfinite().all() and out[0, :3].isfinite().all()
        assert lse[1].isfinite().all() and lse[0, :, :3].isfinite().all()
        assert out[0, 3:].isnan().all()


def test_nan_outside_what_is_used_is_not_read(backend: Backend) -> None:
    """Keys before the window and values of rows that nobody sees."""
    inputs = make(backend, 4, 40)
    for x in inputs.qkv[1:]:
        x.view(torch.uint8)[:, :30] = NAN_BYTE
    out, lse = run_and_check(backend, inputs, causal=True, window_left=6)
    assert out.isfinite().all() and lse.isfinite().all()


def test_nan_query_spoils_only_its_row(backend: Backend) -> None:
    inputs = make(backend, 4, 9)
    inputs.qkv[0].view(torch.uint8)[1, 2, :, 3] = NAN_BYTE
    out, lse = backend.ops.flash_attention(*inputs.qkv, **inputs.scales)
    assert out[1, 2].isnan().all() and lse[1, :, 2].isnan().all()
    assert out[0].isfinite().all() and out[1, [0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_strided_inputs(backend: Backend, layout: str, head_dim: int) -> None:
    inputs = make(backend, 9, 21, head_dim=head_dim)
    dimensions = (1, 2) if layout == "swapped" else ()  # BHSD storage, the usual one
    strided = [STRIDED[layout](x, *dimensions) for x in inputs.qkv]
    result = backend.ops.flash_attention(*strided, **inputs.scales, causal=True)
    if backend.name == "cuda":  # what is not aligned goes to another kernel
        check(backend, result, inputs, {"causal": True})
        return
    expected = backend.ops.flash_attention(*inputs.qkv, **inputs.scales, causal=True)
    for ours, contiguous in zip(result, expected, strict=True):
        assert_bit_equal(ours, contiguous)


def test_keys_shared_by_the_batch_through_stride_zero(backend: Backend) -> None:
    inputs = make(backend, 3, 12)
    inputs.qkv[1:] = [x[:1].expand(2, -1, -1, -1) for x in inputs.qkv[1:]]
    run_and_check(backend, inputs)


def test_offsets_beyond_32_bits(backend: Backend) -> None:
    inputs = make(backend, 2, 5, batch=2)
    far = [far_apart(x, 2**31 + 16) for x in inputs.qkv]
    result = backend.ops.flash_attention(*far, **inputs.scales)
    check(backend, result, inputs, {})


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (8, 40), (64, 100), (10, 7)])
@pytest.mark.parametrize("option", ["plain", "both", "sinks"])
def test_tree_mask(backend: Backend, sq: int, sk: int, option: str) -> None:
    inputs = make(backend, sq, sk)
    mask = torch.stack([random_tree_masks(sq) for _ in range(2)]).to(backend.device)
    options = prepared(OPTIONS[option], 4, backend.device)
    run_and_check(backend, inputs, **options, tree_mask=mask)


def test_rows_do_not_depend_on_the_batch(backend: Backend) -> None:
    """One sequence alone, and in larger batches, bit for bit."""
    inputs = make(backend, 2, 600, batch=6, heads=2, kv_heads=1)
    options = {"causal": True, "batch_invariant": True}
    whole = run_and_check(backend, inputs, **options)
    for begin, end in ((0, 1), (5, 6), (2, 4)):
        part = backend.ops.flash_attention(
            *(x[begin:end] for x in inputs.qkv), **inputs.scales, **options
        )
        assert_bit_equal(part[0], whole[0][begin:end])
        assert_bit_equal(part[1], whole[1][begin:end])


@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_of_nothing(backend: Backend, batch: int, sq: int, sk: int) -> None:
    inputs = make(backend, sq, sk, batch=batch)
    out, lse = backend.ops.flash_attention(*inputs.qkv, **inputs.scales)
    assert out.shape == (batch, sq, 4, 24) and out.dtype == torch.bfloat16
    assert (out == 0).all() and (lse == -math.inf).all()


# -------------------------------------------------------------------------------------- ragged


@pytest.mark.parametrize("option", ["plain", "causal", "both", "sinks", "all"])
@pytest.mark.parametrize(("counts_q", "counts_k"), RAGGED)
def test_ragged_equals_dense(
    backend: Backend, option: str, counts_q: list[int], counts_k: list[int]
) -> None:
    """Each sequence is as accurate as a dense call on it, and has the bits it has alone."""
    inputs = make(backend, sum(counts_q), sum(counts_k), batch=1)
    options = {**prepared(OPTIONS[option], 4, backend.device), "batch_invariant": True}

    def run(q: Tensor, k: Tensor, v: Tensor, cq: list[int], ck: list[int]) -> tuple[Tensor, Tensor]:
        return backend.ops.flash_attention_varlen(
            q, k, v, cumulative(cq, backend.device), cumulative(ck, backend.device),
            max_seqlen_q=max(cq), max_seqlen_k=max(ck), **inputs.scales, **options,
        )  # fmt: skip

    q, k, v = (x[0] for x in inputs.qkv)
    out, lse = run(q, k, v, counts_q, counts_k)
    assert out.dtype == torch.bfloat16
    parts = zip(q.split(counts_q), k.split(counts_k), v.split(counts_k), strict=True)
    rows = zip(out.split(counts_q), lse.split(counts_q, 1), strict=True)
    for qkv, (out_rows, lse_rows) in zip(parts, rows, strict=True):
        if qkv[0].shape[0] == 0:
            continue
        alone = Inputs([x.unsqueeze(0) for x in qkv], inputs.scales)
        check(backend, (out_rows.unsqueeze(0), lse_rows.unsqueeze(0)), alone, options)
        if backend.name == "cpu":  # one kernel for both ops
            dense = backend.ops.flash_attention(*alone.qkv, **inputs.scales, **options)
            assert_bit_equal(out_rows, dense[0][0])
            assert_bit_equal(lse_rows.contiguous(), dense[1][0])
        # Copies, since a kernel for addresses of another alignment may differ in a last bit.
        copies = [x.clone() for x in qkv]
        bits = run(*copies, [qkv[0].shape[0]], [qkv[1].shape[0]])
        assert_bit_equal(out_rows, bits[0])
        assert_bit_equal(lse_rows.contiguous(), bits[1])


@pytest.mark.parametrize("out_dtype", HALF_DTYPES, ids=dtype_name)
def test_ragged_outputs_and_trees(backend: Backend, out_dtype: torch.dtype) -> None:
    counts = [5, 0, 64, 1, 8]
    inputs = make(backend, sum(counts), sum(counts), batch=1, head_dim=64)
    cu = cumulative(counts, backend.device)
    mask = torch.cat([random_tree_masks(count) for count in counts]).to(backend.device)
    out = guarded((sum(counts), 4, 64), out_dtype, backend.device)
    lse = guarded((4, sum(counts)), torch.float32, backend.device)
    backend.ops.flash_attention_varlen(
        *(x[0] for x in inputs.qkv), cu, cu, max_seqlen_q=64, max_seqlen_k=64, tree_mask=mask,
        **inputs.scales, out=out.view, lse=lse.view,
    )  # fmt: skip
    for part in (out, lse):
        part.assert_untouched_around()
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        if begin == end:
            continue
        alone = Inputs([x[:, begin:end] for x in inputs.qkv], inputs.scales)
        result = (out.view[None, begin:end], lse.view[None, :, begin:end])
        check(backend, result, alone, {"tree_mask": mask[None, begin:end]})
