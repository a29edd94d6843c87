"""fp8_scaled_mm and int8_scaled_mm against a float64 product."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.ops import quantize_fp8, quantize_int8, quantize_int8_asymmetric
from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    assert_accurate,
    assert_bit_equal,
    assert_rounded_once,
    assert_same_nonfinite,
    column_slice,
    dtype_name,
    far_apart,
    guarded,
    misaligned,
    poison,
)

FP8 = torch.float8_e4m3fn
OPS = ["fp8_scaled_mm", "int8_scaled_mm"]
BLOCK = 128

by_op = pytest.mark.parametrize("op", OPS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@dataclass(frozen=True)
class Call:
    """Arguments of a product."""

    op: str
    a: Tensor
    b: Tensor
    a_scale: Tensor
    b_scale: Tensor
    a_zero: Tensor | None = None
    bias: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        names = ["a", "b", "a_scale", "b_scale", "bias"]
        names += ["a_zero"] if self.op == "int8_scaled_mm" else []
        return {name: getattr(self, name) for name in names}

    def __call__(self, backend: Backend, dtype: torch.dtype | None = None, **out: Tensor) -> Tensor:
        """The op's result."""
        return getattr(backend.ops, self.op)(**self.arguments, out_dtype=dtype, **out)

    def reference(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return getattr(reference, self.op)(**self.arguments, dtype=dtype)

    def check(self, actual: Tensor, what: str = "out") -> None:
        """`actual` against float64, and a product in its own dtype.

        Tensor cores that multiply fp8 keep no more digits of a sum than fp16 operands have.
        """
        cores = self.op == "fp8_scaled_mm" and actual.is_cuda and actual.dtype == torch.float32
        baseline = self.reference(torch.float16 if cores else actual.dtype)
        assert_accurate(actual, self.reference(), baseline, what=what)

    def rows(self, index: Any) -> "Call":
        """The call on some rows of a."""
        per_row = {"a": self.a[index]}
        for name in ("a_scale", "a_zero"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape[0] == self.a.shape[0]:
                per_row[name] = tensor[index]
        return replace(self, **per_row)


def make_codes(op: str, rows: int, k: int) -> Tensor:
    if op == "int8_scaled_mm":
        return torch.randint(-128, 128, (rows, k), dtype=torch.int8)
    return (torch.randn(rows, k) * 60).clamp(-448, 448).to(FP8)


def make_scale(kind: str, rows: int, k: int, block_rows: int) -> Tensor:
    """Scales of `kind`: "tensor", "row" or "block"."""
    shape = {
        "tensor": (1, 1),
        "row": (rows, 1),
        "block": (-(-rows // block_rows), -(-k // BLOCK)),
    }[kind]
    return (torch.rand(shape) + 0.5) / 64


def make_call(
    op: str,
    m: int,
    n: int,
    k: int,
    *,
    a_kind: str = "row",
    b_kind: str = "row",
    zero: bool = False,
    bias: bool = False,
    device: str = "cpu",
) -> Call:
    made = {
        "a": make_codes(op, m, k),
        "b": make_codes(op, n, k),
        "a_scale": make_scale(a_kind, m, k, 1),
        "b_scale": make_scale(b_kind, n, k, BLOCK),
    }
    if zero:
        made["a_zero"] = torch.randint(-128, 128, (m, 1), dtype=torch.int32)
    if bias:
        made["bias"] = torch.randn(n)
    return Call(op, **{name: tensor.to(device) for name, tensor in made.items()})


def kinds_of(op: str) -> list[tuple[str, str]]:
    kinds = ["tensor", "row"] + ["block"] * (op == "fp8_scaled_mm")
    return [(a, b) for a in kinds for b in kinds]


@by_op
@by_dtype
def test_kinds_of_scales(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """Each with each; the last blocks are partial."""
    for a_kind, b_kind in kinds_of(op):
        for n in (100, 130):
            call = make_call(
                op, 3, n, 300, a_kind=a_kind, b_kind=b_kind, bias=True, device=backend.device
            )
            out = call(backend, dtype)
            assert out.shape == (3, n) and out.is_contiguous() and out.dtype == dtype
            call.check(out, f"{a_kind}, {b_kind}")


@by_op
@by_dtype
@pytest.mark.parametrize("k", [1, 17, 100, 127, 128, 129, 130, 2880])
def test_inputs(backend: Backend, op: str, k: int, dtype: torch.dtype) -> None:
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[-1]):
        call = make_call(op, 3, 20, k, a_kind=a_kind, b_kind=b_kind, device=backend.device)
        call.check(call(backend, dtype), f"{a_kind}, {b_kind}")


@by_op
@by_dtype
@pytest.mark.parametrize("n", [1, 40, 128, 130, 1000])
def test_features(backend: Backend, op: str, n: int, dtype: torch.dtype) -> None:
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[-1]):
        call = make_call(
            op, 9, n, 150, a_kind=a_kind, b_kind=b_kind, bias=True, device=backend.device
        )
        call.check(call(backend, dtype), f"{a_kind}, {b_kind}")


@by_op
@by_dtype
@pytest.mark.parametrize("m", [1, 17, 300, 33, 129])
def test_rows(backend: Backend, op: str, m: int, dtype: torch.dtype) -> None:
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[-1]):
        call = make_call(op, m, 70, 140, a_kind=a_kind, b_kind=b_kind, device=backend.device)
        call.check(call(backend, dtype), f"{a_kind}, {b_kind}")


@by_op
def test_zero_rows(backend: Backend, op: str) -> None:
    for a_kind, b_kind in kinds_of(op):
        call = make_call(op, 0, 70, 200, a_kind=a_kind, b_kind=b_kind, device=backend.device)
        assert call(backend).shape == (0, 70)


@by_op
def test_dtype_of_the_result(backend: Backend, op: str) -> None:
    """bf16, or what is asked for, or `out`'s; all are one fp32 result, rounded."""
    call = make_call(op, 3, 40, 200, bias=True, device=backend.device)
    full = call(backend, torch.float32)
    assert call(backend).dtype == torch.bfloat16
    for dtype in DTYPES:
        assert_bit_equal(call(backend, dtype), full.to(dtype))
        out = torch.full((3, 40), torch.nan, dtype=dtype, device=backend.device)
        assert_bit_equal(call(backend, out=out), full.to(dtype))
        assert_bit_equal(call(backend, dtype, out=out), full.to(dtype))


# -------------------------------------------------------------------------------------- int8


def scaled_once(call: Call, dtype: torch.dtype) -> Tensor:
    """The exact sums, rounded to fp32, times a's scale, times b's; then rounded."""
    return call.reference(torch.float32).to(dtype)


@by_dtype
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("k", [1, 17, 128, 130, 2880])
def test_int8_sums_are_exact(backend: Backend, k: int, zero: bool, dtype: torch.dtype) -> None:
    for a_kind, b_kind in kinds_of("int8_scaled_mm"):
        call = make_call(
            "int8_scaled_mm", 5, 70, k, a_kind=a_kind, b_kind=b_kind, zero=zero,
            device=backend.device,
        )  # fmt: skip
        assert_bit_equal(call(backend, dtype), scaled_once(call, dtype), f"{a_kind}, {b_kind}")


@pytest.mark.parametrize("zero", [None, -128, 127, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("k", [2**16 + 3, 2**17 - 1, 2**17, 2**17 + 130])
def test_int8_sums_do_not_overflow(backend: Backend, k: int, zero: int | None) -> None:
    """The largest sums there are, on both sides of where they exceed 32 bits."""
    device = backend.device
    a = torch.full((2, k), -128, dtype=torch.int8, device=device)
    a[1] = 127
    b = torch.full((3, k), -128, dtype=torch.int8, device=device)
    b[1] = 127
    zeros = None if zero is None else torch.full((2, 1), zero, dtype=torch.int32, device=device)
    one = torch.ones(1, 1, device=device)
    call = Call("int8_scaled_mm", a, b, one, one, zeros)
    assert_bit_equal(call(backend, torch.float32), scaled_once(call, torch.float32))


@pytest.mark.parametrize("m", [1, 40])
def test_asymmetric_activations(backend: Backend, m: int) -> None:
    """What quantize_int8_asymmetric makes, and none of the zero point's sum is lost."""
    x = (torch.randn(m, 500) + 3.0).to(backend.device)
    weight = torch.randn(70, 500).to(backend.device)
    a, a_scale, a_zero = quantize_int8_asymmetric(x)
    b, b_scale = quantize_int8(weight)
    call = Call("int8_scaled_mm", a, b, a_scale, b_scale, a_zero)
    out = call(backend, torch.float32)
    assert_bit_equal(out, scaled_once(call, torch.float32))
    exact = x.double() @ weight.double().T
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), 0) > 0.999


# --------------------------------------------------------------------------------------- fp8


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_fp8_result_is_rounded_once(backend: Backend, dtype: torch.dtype) -> None:
    if backend.device != "cpu":
        pytest.skip("tensor cores that multiply fp8 keep fewer digits than fp32")
    for a_kind, b_kind in kinds_of("fp8_scaled_mm"):
        call = make_call(
            "fp8_scaled_mm", 9, 70, 384, a_kind=a_kind, b_kind=b_kind, device=backend.device
        )
        out, expected = call(backend, dtype), call.reference()
        # Where terms cancel, the float32 noise is relative to the terms, not to what remains.
        large = expected.abs() > 0.3 * expected.abs().max()
        assert_rounded_once(out[large], expected[large])


def test_fp8_every_code(backend: Backend) -> None:
    """A product with one is the code's own value: exact, subnormals and NaN included."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).view(256, 1).to(backend.device)
    one = torch.ones(1, 1, device=backend.device)
    wide = torch.zeros(256, 130, device=backend.device).to(FP8)
    wide[:, 129:] = codes
    unit = torch.zeros(1, 130, device=backend.device)
    unit[0, 129] = 1.0
    for a, b in ((wide, unit.to(FP8)), (unit.to(FP8), wide)):
        out = Call("fp8_scaled_mm", a, b, one, one)(backend, torch.float32).flatten()
        expected = codes.flatten().float()
        assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))


def test_fp8_blocks_are_scaled_apart(backend: Backend) -> None:
    """A block of huge scale and one of tiny scale: neither is lost in the other's rounding."""
    a = torch.ones(2, 256, device=backend.device).to(FP8)
    b = torch.ones(130, 256, device=backend.device).to(FP8)
    a_scale = torch.tensor([[2.0**60, 2.0**-60], [2.0**-60, 2.0**60]], device=backend.device)
    b_scale = torch.tensor([[2.0**-60, 2.0**60], [2.0**60, 2.0**-60]], device=backend.device)
    out = Call("fp8_scaled_mm", a, b, a_scale, b_scale)(backend, torch.float32)
    expected = torch.full((2, 130), 256.0)
    expected[1, :128] = expected[0, 128:] = 2.0**127
    assert_bit_equal(out.cpu(), expected)


@pytest.mark.parametrize("kind", ["token", "block"])
def test_fp8_of_quantized_operands(backend: Backend, kind: str) -> None:
    """What quantize_fp8 makes, with scales along M as well."""
    x = torch.randn(9, 300).to(backend.device)
    weight = torch.randn(200, 300).to(backend.device)
    blocks = {"token": ((1, -1), (1, -1)), "block": ((1, BLOCK), (BLOCK, BLOCK))}[kind]
    a, a_scale = quantize_fp8(x, block=blocks[0])
    b, b_scale = quantize_fp8(weight, block=blocks[1])
    call = Call("fp8_scaled_mm", a, b, a_scale, b_scale)
    out = call(backend, torch.float32)
    call.check(out)
    along_m = replace(call, a_scale=a_scale.T.contiguous().T)
    assert_bit_equal(along_m(backend, torch.float32), out)
    exact = x.double() @ weight.double().T
    assert torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), 0) > 0.998


@by_dtype
def test_nan_stays_in_its_row(backend: Backend, dtype: torch.dtype) -> None:
    nan = torch.tensor(torch.nan).to(FP8)
    for a_kind, b_kind in kinds_of("fp8_scaled_mm"):
        call = make_call(
            "fp8_scaled_mm", 6, 70, 200, a_kind=a_kind, b_kind=b_kind, device=backend.device
        )
        expected = call(backend, dtype)
        call.a[1, 3], call.a[4, 199] = nan, nan
        call.b[69, 199] = nan
        out = call(backend, dtype)
        others = [0, 2, 3, 5]
        assert_bit_equal(out[others, :69], expected[others, :69])
        assert out[[1, 4]].isnan().all() and out[:, 69].isnan().all()
        assert_same_nonfinite(out, call.reference().to(dtype))


# -------------------------------------------------------------------------------------- both


def strided_scale(scale: Tensor) -> Tensor:
    """Equal to a scale, stored with other strides in either dimension."""
    wide = torch.full((scale.shape[1] * 3, scale.shape[0] * 2), torch.nan, device=scale.device)
    return wide.to(scale.dtype).T[::2, ::3].copy_(scale)


@by_op
@by_dtype
def test_strided_inputs_equal_contiguous_ones(
    backend: Backend, op: str, dtype: torch.dtype
) -> None:
    """Column slices of wider, poisoned matrices, odd addresses, and scales of any strides."""
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[-1]):
        call = make_call(
            op, 5, 130, 136, a_kind=a_kind, b_kind=b_kind, zero=op == OPS[1], bias=True,
            device=backend.device,
        )  # fmt: skip
        expected = call(backend, dtype)
        for make in (column_slice, misaligned):
            for changed in ({"a": make(call.a)}, {"b": make(call.b)}):
                out = replace(call, **changed)(backend, dtype)
                assert_bit_equal(out, expected, f"{make.__name__} {list(changed)}")
        scales = ["a_scale", "b_scale"] + ["a_zero"] * (op == OPS[1])
        strided = {name: strided_scale(getattr(call, name)) for name in scales}
        assert_bit_equal(replace(call, **strided)(backend, dtype), expected, "scales")
        one = replace(call, a=call.a[:1].expand(5, 136))
        whole = replace(one, a=one.a.contiguous())
        assert_bit_equal(one(backend, dtype), whole(backend, dtype), "expanded")


@by_op
def test_expanded_scales(backend: Backend, op: str) -> None:
    """Scales that are expanded are the kind of scales that their shape says."""
    call = make_call(op, 5, 130, 300, a_kind="tensor", b_kind="tensor", device=backend.device)
    shapes = [((5, 1), (130, 1))] + [((5, 3), (2, 3))] * (op == OPS[0])
    expected = call(backend, torch.float32)
    for a_shape, b_shape in shapes:
        scales = {"a_scale": call.a_scale.expand(a_shape), "b_scale": call.b_scale.expand(b_shape)}
        assert_bit_equal(replace(call, **scales)(backend, torch.float32), expected)


@by_op
@by_dtype
def test_out_is_filled_and_nothing_else_is(backend: Backend, op: str, dtype: torch.dtype) -> None:
    call = make_call(op, 5, 70, 72, bias=True, zero=op == OPS[1], device=backend.device)
    out = guarded((5, 70), dtype, backend.device)
    returned = call(backend, out=out.view)
    assert returned.data_ptr() == out.view.data_ptr()
    assert_bit_equal(out.view, call(backend, dtype))
    out.assert_untouched_around()


@by_op
def test_overloads_are_equal(backend: Backend, op: str) -> None:
    call = make_call(op, 5, 70, 72, bias=True, zero=op == OPS[1], device=backend.device)
    packet = getattr(backend.library, op)
    for dtype in (None, torch.float32):
        out = torch.full((5, 70), torch.nan, dtype=dtype or torch.bfloat16, device=backend.device)
        assert packet.out(**call.arguments, out_dtype=dtype, out=out) is None
        assert_bit_equal(packet.default(**call.arguments, out_dtype=dtype), out)
        assert_bit_equal(call(backend, dtype), out)


@by_op
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@by_dtype
def test_bias(backend: Backend, op: str, dtype: torch.dtype, bias_dtype: str) -> None:
    call = make_call(op, 3, 70, 64, device=backend.device)
    bias = torch.randn(70, device=backend.device) * 10
    call = replace(call, bias=bias.to(dtype) if bias_dtype == "same" else bias)
    call.check(call(backend, dtype))


@by_op
@by_dtype
def test_rows_do_not_see_each_other(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """One row alone, and as row i of a batch of 2..300, bit for bit where sums are ordered alike
    for every number of rows.
    """
    a_kind, b_kind = kinds_of(op)[-1]
    rows = 300 if backend.name == "cpu" else 16
    call = make_call(
        op, rows, 70, 200, a_kind=a_kind, b_kind=b_kind, bias=True, zero=op == OPS[1],
        device=backend.device,
    )  # fmt: skip
    whole = call(backend, dtype)
    for row in (0, 1, 6, rows - 1):
        assert_bit_equal(call.rows(slice(row, row + 1))(backend, dtype)[0], whole[row])
    for batch in (2, 3, 7, 13, 257):
        assert_bit_equal(call.rows(slice(batch))(backend, dtype), whole[:batch])


@by_op
def test_threads_do_not_change_the_result(backend: Backend, op: str) -> None:
    call = make_call(op, 5, 300, 256, bias=True, device=backend.device)
    expected, threads = call(backend, torch.float32), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_bit_equal(call(backend, torch.float32), expected)
    finally:
        torch.set_num_threads(threads)


@by_op
def test_nothing_outside_the_arguments_is_read(backend: Backend, op: str) -> None:
    """Whatever ends before a tile is full has poison behind it in memory."""
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[-1]):
        call = make_call(
            op, 5, 70, 200, a_kind=a_kind, b_kind=b_kind, bias=True, zero=op == OPS[1],
            device=backend.device,
        )  # fmt: skip
        expected = call(backend, torch.float32)

        def poisoned(t: Tensor) -> Tensor:
            around = torch.full((t.numel() + 1024,), poison(t.dtype), device=t.device)
            return around.to(t.dtype)[512 : 512 + t.numel()].view(t.shape).copy_(t)

        given = {name: x for name, x in call.arguments.items() if x is not None}
        hostile = replace(call, **{name: poisoned(x) for name, x in given.items()})
        assert_bit_equal(hostile(backend, torch.float32), expected)
        for name, x in given.items():
            assert_bit_equal(getattr(hostile, name), x, name)


@by_op
@pytest.mark.parametrize("stride", [2**31 - 1, 2**31 + 24])
def test_row_offset_beyond_32_bits(backend: Backend, op: str, stride: int) -> None:
    """Row index times stride passes 2^31 elements; only a few rows have memory behind them."""
    call = make_call(op, 3, 3, 64, device=backend.device)
    expected = call(backend)
    far = replace(call, a=far_apart(call.a, stride // 2), b=far_apart(call.b, stride // 2))
    out = far_apart(torch.full_like(expected, torch.nan), stride // 2)
    far(backend, out=out)
    assert_bit_equal(out.clone(), expected)


REFUSED: dict[str, tuple[str, Any]] = {
    "a of floats": ("a", lambda a: a["a"].float()),
    "a of bytes": ("a", lambda a: a["a"].view(torch.uint8)),
    "a of one dimension": ("a", lambda a: a["a"][0]),
    "a of three dimensions": ("a", lambda a: a["a"][None]),
    "a without columns": ("a", lambda a: a["a"][:, :0]),
    "a with columns apart": ("a", lambda a: torch.cat([a["a"]] * 2, 1)[:, ::2]),
    "b of the other format": ("b", lambda a: a["b"].view(torch.uint8)),
    "b transposed": ("b", lambda a: a["b"].T.contiguous().T),
    "b of other inputs": ("b", lambda a: a["b"][:, 1:]),
    "b without rows": ("b", lambda a: a["b"][:0]),
    "a_scale of two numbers": ("a_scale", lambda a: torch.ones(2, 1)),
    "a_scale of one dimension": ("a_scale", lambda a: torch.ones(5)),
    "a_scale of more blocks": ("a_scale", lambda a: torch.ones(5, 3)),
    "a_scale of bf16": ("a_scale", lambda a: a["a_scale"].bfloat16()),
    "b_scale across": ("b_scale", lambda a: torch.ones(1, 130)),
    "b_scale of more blocks": ("b_scale", lambda a: torch.ones(3, 2)),
    "b_scale of a scalar": ("b_scale", lambda a: torch.ones(())),
    "bias of another dtype": ("bias", lambda a: torch.zeros(130, dtype=torch.float16)),
    "bias that is long": ("bias", lambda a: torch.zeros(131)),
    "bias with gaps": ("bias", lambda a: torch.zeros(260, device=a["a"].device)[::2]),
    "out of another shape": ("out", lambda a: torch.zeros(5, 131)),
    "out of integers": ("out", lambda a: torch.zeros(5, 130, dtype=torch.int32)),
    "out over a_scale": ("out", lambda a: a["a_scale"].expand(5, 130)),
    "out_dtype of integers": ("out_dtype", lambda a: torch.int32),
    "out_dtype of float64": ("out_dtype", lambda a: torch.float64),
    "out_dtype that is not out's": (
        "out",
        lambda a: {"out": torch.zeros(5, 130), "out_dtype": torch.bfloat16},
    ),
}


@by_op
@pytest.mark.parametrize("case", REFUSED)
def test_refused(backend: Backend, op: str, case: str) -> None:
    name, make = REFUSED[case]
    arguments = make_call(op, 5, 130, 200, device=backend.device).arguments
    # Made there: on its way to a device a view becomes a tensor of its own.
    changed = make(arguments)
    if isinstance(changed, Tensor):
        changed = changed.to(backend.device)
    arguments |= changed if isinstance(changed, dict) else {name: changed}
    with pytest.raises(ValueError, match=rf"{op}: {name}\b"):
        getattr(backend.ops, op)(**arguments)


def test_int8_has_no_blocks(backend: Backend) -> None:
    call = make_call("int8_scaled_mm", 5, 130, 200, device=backend.device)
    for name, shape in (("a_scale", (5, 2)), ("b_scale", (2, 2))):
        blocks = replace(call, **{name: torch.ones(shape, device=backend.device)})
        with pytest.raises(ValueError, match=rf"int8_scaled_mm: {name}: expected shape"):
            blocks(backend)
    zero = replace(call, a_zero=torch.zeros(1, 1, dtype=torch.int32, device=backend.device))
    with pytest.raises(ValueError, match=r"int8_scaled_mm: a_zero: expected shape \[5, 1\]"):
        zero(backend)
