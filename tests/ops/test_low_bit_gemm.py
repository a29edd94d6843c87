"""int2_gemm, int3_gemm, int4_gemm and int8_gemm against a float64 product."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    assert_accurate,
    assert_bit_equal,
    assert_rounded_once,
    assert_same_but_for_rounding,
    assert_same_nonfinite,
    column_slice,
    dtype_name,
    far_apart,
    guarded,
    misaligned,
    poison,
)

BITS = [2, 3, 4, 8]
ZEROS = ["symmetric", "integer", "float"]
WHOLE = 1 << 40  # a group as long as any x

by_bits = pytest.mark.parametrize("bits", BITS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@dataclass(frozen=True)
class Weight:
    """A quantized weight [N, K]."""

    bits: int
    k: int
    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int = 128
    perm: Tensor | None = None
    bias: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "perm": self.perm, "bias": self.bias}

    def __call__(self, backend: Backend, x: Tensor, **out: Tensor) -> Tensor:
        """The op's result."""
        op = getattr(backend.ops, f"int{self.bits}_gemm")
        return op(x, self.qweight, self.scales, self.zeros, **self.options, **out)

    def reference(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        return reference.low_bit_gemm(
            self.bits, x, self.qweight, self.scales, self.zeros, **self.options, dtype=dtype
        )

    def check(self, actual: Tensor, x: Tensor, what: str = "out") -> None:
        """`actual` against float64, and a product with the weight rounded to x's dtype."""
        assert actual.dtype == x.dtype
        assert_accurate(actual, self.reference(x), self.reference(x, x.dtype), what=what)


def make_weight(
    bits: int,
    n: int,
    k: int,
    *,
    group_size: int = 128,
    zeros: str = "float",
    dtype: torch.dtype = torch.float32,
    perm: bool = False,
    bias: bool = False,
    device: str = "cpu",
) -> Weight:
    """Random codes; scales and zeros of `dtype` in the range that real ones have."""
    groups = -(-k // group_size)
    scales = ((torch.rand(groups, n) + 0.5) / 2**bits).to(dtype)
    made = {
        "symmetric": None,
        "integer": torch.randint(0, 2**bits, (groups, n)).to(dtype),
        "float": (torch.rand(groups, n) * 2**bits).to(dtype),
    }[zeros]
    return Weight(
        bits,
        k,
        reference.pack_codes(torch.randint(0, 2**bits, (n, k)), bits).to(device),
        scales.to(device),
        None if made is None else made.to(device),
        group_size,
        torch.randperm(k, dtype=torch.int32, device=device) if perm else None,
        torch.randn(n, device=device) if bias else None,
    )


@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 128, 192, WHOLE])
@by_dtype
def test_bits_groups_and_zeros(backend: Backend, dtype: torch.dtype, group_size: int) -> None:
    x = torch.randn(3, 200, device=backend.device).to(dtype)
    for bits in BITS:
        for zeros in ZEROS:
            weight = make_weight(
                bits, 72, 200, group_size=group_size, zeros=zeros, dtype=dtype,
                device=backend.device,
            )  # fmt: skip
            out = weight(backend, x)
            assert out.shape == (3, 72) and out.is_contiguous()
            weight.check(out, x, f"int{bits}_gemm, {zeros} zeros")


@by_bits
@pytest.mark.parametrize("k", [2880, 7392, 10944])
def test_last_group_is_partial(backend: Backend, bits: int, k: int) -> None:
    """R09: sizes of real layers that neither 64 nor the group divides."""
    weight = make_weight(bits, 10, k, group_size=256, bias=True, device=backend.device)
    x = torch.randn(2, k, device=backend.device).to(torch.bfloat16)
    weight.check(weight(backend, x), x)


@by_dtype
@by_bits
@pytest.mark.parametrize("k", [1, 2, 15, 17, 63, 65, 130])
def test_inputs(backend: Backend, bits: int, dtype: torch.dtype, k: int) -> None:
    weight = make_weight(bits, 20, k, group_size=32, device=backend.device)
    x = torch.randn(3, k, device=backend.device).to(dtype)
    weight.check(weight(backend, x), x)


@by_dtype
@pytest.mark.parametrize("n", [1, 40, 100, 1000])
def test_features(backend: Backend, n: int, dtype: torch.dtype) -> None:
    for bits in BITS:
        weight = make_weight(bits, n, 96, group_size=64, bias=True, device=backend.device)
        x = torch.randn(16, 96, device=backend.device).to(dtype)
        weight.check(weight(backend, x), x)


@by_dtype
@pytest.mark.parametrize("m", [1, 17, 300, 33])
def test_rows(backend: Backend, m: int, dtype: torch.dtype) -> None:
    """R10."""
    for bits in BITS:
        weight = make_weight(bits, 70, 80, group_size=32, device=backend.device)
        x = torch.randn(m, 80, device=backend.device).to(dtype)
        weight.check(weight(backend, x), x)


@by_bits
def test_zero_rows(backend: Backend, bits: int) -> None:
    """R24."""
    weight = make_weight(bits, 70, 80, device=backend.device)
    assert weight(backend, torch.empty(0, 80, device=backend.device)).shape == (0, 70)


@by_dtype
@by_bits
def test_strided_input_equals_contiguous(backend: Backend, bits: int, dtype: torch.dtype) -> None:
    """R08: column slices of a wider, poisoned matrix, and rows at odd addresses."""
    weight = make_weight(bits, 66, 136, group_size=64, device=backend.device)
    x = torch.randn(5, 136, device=backend.device).to(dtype)
    expected = weight(backend, x)
    for make in (column_slice, misaligned):
        assert_bit_equal(weight(backend, make(x)), expected, make.__name__)
    one = x[:1].expand(5, 136)
    assert_bit_equal(weight(backend, one), weight(backend, one.contiguous()), "expanded")


@by_dtype
@by_bits
def test_out_is_filled_and_nothing_else_is(backend: Backend, bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(bits, 70, 72, group_size=32, device=backend.device)
    x = torch.randn(5, 72, device=backend.device).to(dtype)
    out = guarded((5, 70), dtype, backend.device)
    returned = weight(backend, x, out=out.view)
    assert returned.data_ptr() == out.view.data_ptr()
    assert_bit_equal(out.view, weight(backend, x))
    out.assert_untouched_around()


def test_overloads_are_equal(backend: Backend) -> None:
    for bits in BITS:
        weight = make_weight(bits, 70, 72, perm=True, bias=True, device=backend.device)
        x = torch.randn(5, 72, device=backend.device)
        packet = getattr(backend.library, f"int{bits}_gemm")
        out = torch.full((5, 70), torch.nan, device=backend.device)
        arguments = (x, weight.qweight, weight.scales, weight.zeros)
        assert packet.out(*arguments, **weight.options, out=out) is None
        assert_bit_equal(packet.default(*arguments, **weight.options), out)
        assert_bit_equal(weight(backend, x), out)


@by_dtype
@by_bits
def test_act_order(backend: Backend, bits: int, dtype: torch.dtype) -> None:
    """R13: columns sorted by group; column k of the weight multiplies x[:, perm[k]]."""
    weight = make_weight(bits, 40, 150, group_size=32, perm=True, device=backend.device)
    assert weight.perm is not None
    x = torch.randn(3, 150, device=backend.device).to(dtype)
    out = weight(backend, x)
    weight.check(out, x)
    plain = replace(weight, perm=None)
    assert_bit_equal(plain(backend, x[:, weight.perm.long()]), out)


@by_dtype
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=dtype_name)
def test_scales_may_have_another_dtype(
    backend: Backend, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    for bits in BITS:
        weight = make_weight(bits, 40, 96, group_size=32, dtype=scale_dtype, device=backend.device)
        x = torch.randn(3, 96, device=backend.device).to(dtype)
        weight.check(weight(backend, x), x)


@by_bits
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_bias(backend: Backend, bits: int, dtype: torch.dtype, bias_dtype: str) -> None:
    plain = make_weight(bits, 70, 64, device=backend.device)
    bias = torch.randn(70, device=backend.device).to(
        dtype if bias_dtype == "same" else torch.float32
    )
    weight = replace(plain, bias=bias)
    x = torch.randn(3, 64, device=backend.device).to(dtype)
    weight.check(weight(backend, x), x)


@by_bits
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_result_is_rounded_once(
    backend: Backend, bits: int, zeros: str, dtype: torch.dtype
) -> None:
    """R15: weights keep their digits, so bf16 is as good as its rounding."""
    weight = make_weight(bits, 70, 256, zeros=zeros, dtype=dtype, device=backend.device)
    x = torch.randn(9, 256, device=backend.device).to(dtype)
    out, expected = weight(backend, x), weight.reference(x)
    # Where terms cancel, the float32 noise is relative to the terms, not to what remains of them.
    large = expected.abs() > 0.3 * expected.abs().max()
    assert_rounded_once(out[large], expected[large])
    similarity = torch.nn.functional.cosine_similarity(
        out.double().flatten(), expected.flatten(), 0
    )
    assert similarity > (0.999995 if dtype == torch.bfloat16 else 0.9999999)


@by_bits
@pytest.mark.parametrize("m", [1, 16, 17, 64])
def test_large_values_in_half_do_not_overflow(backend: Backend, m: int, bits: int) -> None:
    """R16: 6e4 times codes over 27648 inputs; infinite only where the true result is."""
    made = make_weight(bits, 4, 27648, zeros="symmetric", device=backend.device)
    scales = made.scales * 1e-4
    scales[:, -1] = 1e3
    weight = replace(made, scales=scales)
    x = (torch.rand(m, 27648, device=backend.device) * 2 - 1).mul(6e4).half()
    out, expected = weight(backend, x), weight.reference(x)
    assert_same_nonfinite(out, expected.half())
    assert out[:, -1].isinf().any() and out[:, :-1].isfinite().all()
    assert_accurate(out, expected, expected.half())
    if m > 1:  # the same within rounding on both sides of any threshold of the number of rows
        assert_same_but_for_rounding(out[:1, :-1], weight(backend, x[:1])[:, :-1])


@by_dtype
@by_bits
def test_rows_do_not_see_each_other(backend: Backend, bits: int, dtype: torch.dtype) -> None:
    """R31: one row alone, and as row i of a batch of 2..300, bit for bit where sums are ordered
    alike for every number of rows.
    """
    weight = make_weight(bits, 70, 200, group_size=48, bias=True, device=backend.device)
    rows = 300 if backend.name == "cpu" else 16
    x = torch.randn(rows, 200, device=backend.device).to(dtype)
    whole = weight(backend, x)
    for row in (0, 1, 6, len(x) - 1):
        assert_bit_equal(weight(backend, x[row : row + 1])[0], whole[row])
    for batch in (2, 3, 7, 13, 257):
        assert_bit_equal(weight(backend, x[:batch]), whole[:batch])


@by_bits
def test_threads_do_not_change_the_result(backend: Backend, bits: int) -> None:
    weight = make_weight(bits, 300, 256, device=backend.device)
    x = torch.randn(5, 256, device=backend.device)
    expected, threads = weight(backend, x), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_bit_equal(weight(backend, x), expected)
    finally:
        torch.set_num_threads(threads)


@by_dtype
@by_bits
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_row(
    backend: Backend, bits: int, dtype: torch.dtype, value: float
) -> None:
    for zeros in ZEROS:
        weight = make_weight(bits, 70, 80, zeros=zeros, group_size=32, device=backend.device)
        x = torch.randn(6, 80, device=backend.device).to(dtype)
        expected = weight(backend, x)
        x[1, 3], x[4, 79] = value, -value
        out = weight(backend, x)
        others = [0, 2, 3, 5]
        assert_bit_equal(out[others], expected[others], zeros)
        assert not out[[1, 4]].isfinite().any()
        # On a GPU a zero may enter apart from the codes, and infinities of two signs make NaN.
        if zeros == "symmetric" or backend.name == "cpu":
            assert_same_nonfinite(out, weight.reference(x).to(dtype), zeros)


@by_dtype
@by_bits
def test_nothing_outside_the_arguments_is_read(
    backend: Backend, bits: int, dtype: torch.dtype
) -> None:
    """Scales, zeros, bias, perm and x end before N, K and the groups' sizes are full: what stands
    behind them in memory is poisoned.
    """
    weight = make_weight(bits, 70, 72, group_size=64, perm=True, bias=True, device=backend.device)
    x = torch.randn(5, 72, device=backend.device).to(dtype)
    expected = weight(backend, x)

    def poisoned(t: Tensor) -> Tensor:
        around = torch.full((t.numel() + 512,), poison(t.dtype), dtype=t.dtype, device=t.device)
        return around[256 : 256 + t.numel()].view(t.shape).copy_(t)

    assert weight.zeros is not None and weight.perm is not None and weight.bias is not None
    hostile = replace(
        weight, scales=poisoned(weight.scales), zeros=poisoned(weight.zeros),
        perm=poisoned(weight.perm), bias=poisoned(weight.bias),
    )  # fmt: skip
    assert_bit_equal(hostile(backend, poisoned(x)), expected)
    inputs = [hostile.qweight, hostile.scales, hostile.zeros, hostile.perm, hostile.bias]
    before = [t.clone() for t in inputs if t is not None]
    hostile(backend, x)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True) if a is not None)


@by_bits
@pytest.mark.parametrize("stride", [2**31 - 1, 2**31 + 24])
def test_row_offset_beyond_32_bits(backend: Backend, bits: int, stride: int) -> None:
    """R06: row index times stride passes 2^31 elements; only a few rows have memory behind them."""
    near = torch.randn(3, 64, device=backend.device).to(torch.bfloat16)
    weight = make_weight(bits, 64, 64, device=backend.device)
    expected = weight(backend, near)
    x = far_apart(near, stride // 2)
    out = far_apart(torch.full_like(near, torch.nan), stride // 2)
    weight(backend, x, out=out)
    assert_bit_equal(out.clone(), expected)


@by_bits
@pytest.mark.parametrize("rows", [3, 40])
def test_qweight_at_any_address(backend: Backend, bits: int, rows: int) -> None:
    """Such as a checkpoint's file gives it; not in the order of sums of another kernel."""
    weight = make_weight(bits, 70, 128, group_size=64, device=backend.device)
    x = torch.randn(rows, 128, device=backend.device).half()
    expected = weight(backend, x)
    flat = torch.empty(weight.qweight.numel() + 1, dtype=torch.int32, device=backend.device)
    moved = flat[1:].view(weight.qweight.shape).copy_(weight.qweight)
    weight = replace(weight, qweight=moved)
    assert_same_but_for_rounding(weight(backend, x), expected)


REFUSED: dict[str, tuple[str, Any]] = {
    "x of integers": ("x", lambda a: a["x"].int()),
    "x of one dimension": ("x", lambda a: a["x"][0]),
    "x of three dimensions": ("x", lambda a: a["x"][None]),
    "x without columns": ("x", lambda a: a["x"][:, :0]),
    "x with columns apart": ("x", lambda a: torch.cat([a["x"]] * 2, 1)[:, ::2]),
    "group of 0": ("group_size", lambda a: 0),
    "negative group": ("group_size", lambda a: -16),
    "group that is no multiple of 16": ("group_size", lambda a: 24),
    "group that makes other groups": ("scales", lambda a: {"group_size": 32}),
    "qweight of other bits": ("qweight", lambda a: a["qweight"].repeat(1, 1, 2)),
    "qweight of bytes": ("qweight", lambda a: a["qweight"].view(torch.uint8)),
    "scales without columns": ("scales", lambda a: a["scales"][:, :0]),
    "scales transposed": ("scales", lambda a: a["scales"].T.contiguous().T),
    "scales of integers": ("scales", lambda a: a["scales"].int()),
    "zeros of another dtype": ("zeros", lambda a: a["scales"].bfloat16()),
    "zeros of integers": ("zeros", lambda a: a["scales"].int()),
    "zeros of fewer groups": ("zeros", lambda a: a["scales"][1:].contiguous()),
    "perm of 64 bits": ("perm", lambda a: torch.arange(96)),
    "perm that is short": ("perm", lambda a: torch.arange(95, dtype=torch.int32)),
    "bias of another dtype": ("bias", lambda a: torch.zeros(70, dtype=torch.float16)),
    "bias that is long": ("bias", lambda a: torch.zeros(71)),
    "out over x": ("out", lambda a: a["x"][:, :70]),
    "out over scales": ("out", lambda a: a["scales"].view(-1)[:350].view(5, 70)),
    "out over qweight": (
        "out",
        lambda a: a["qweight"].view(torch.float32).view(-1)[:350].view(5, 70),
    ),
    "out over bias": (
        "out",
        lambda a: (lambda o: {"out": o, "bias": o[0]})(torch.zeros(5, 70).to(a["x"].device)),
    ),
    "out of another dtype": ("out", lambda a: torch.zeros(5, 70, dtype=torch.float16)),
    "out of another shape": ("out", lambda a: torch.zeros(5, 71)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(backend: Backend, case: str) -> None:
    name, make = REFUSED[case]
    for bits in BITS:
        weight = make_weight(bits, 70, 96, group_size=16, zeros="symmetric", device=backend.device)
        arguments: dict[str, Any] = {
            "x": torch.randn(5, 96, device=backend.device), "qweight": weight.qweight,
            "scales": weight.scales, "group_size": 16,
        }  # fmt: skip
        # Made there: on its way to a device a view becomes a tensor of its own.
        changed = make(arguments)
        if isinstance(changed, Tensor):
            changed = changed.to(backend.device)
        arguments |= changed if isinstance(changed, dict) else {name: changed}
        with pytest.raises(ValueError, match=rf"int{bits}_gemm: {name}"):
            getattr(backend.ops, f"int{bits}_gemm")(**arguments)


@pytest.mark.parametrize("entry", [-1, 96, 2**31 - 1, -(2**31)])
def test_perm_outside_of_x(backend: Backend, entry: int) -> None:
    """Refused where contents are read; elsewhere NaN, and nothing outside x is read."""
    weight = make_weight(4, 70, 96, perm=True, device=backend.device)
    assert weight.perm is not None
    weight.perm[50] = entry
    x = torch.randn(3, 96, device=backend.device)
    if backend.reads_contents:
        with pytest.raises(ValueError, match=rf"int4_gemm: perm: .*got {entry} at index 50"):
            weight(backend, x)
    else:
        assert weight(backend, x).isnan().all()
