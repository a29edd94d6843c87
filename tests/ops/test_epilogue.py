"""What follows a matrix product: activations, gating, residuals and results in 8 bits."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.ops import quantize_fp8, quantize_int8
from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    assert_accurate,
    assert_bit_equal,
    bits,
    column_slice,
    dtype_name,
    guarded,
)

FP8, INT8 = torch.float8_e4m3fn, torch.int8
QUANTIZE = {FP8: quantize_fp8, INT8: quantize_int8}
LOW_BIT = ["int2_gemm", "int3_gemm", "int4_gemm", "int8_gemm"]
SCALED = ["fp8_scaled_mm", "int8_scaled_mm"]
ACTIVATIONS = ["none", "silu", "gelu", "gelu_tanh"]

by_op = pytest.mark.parametrize("op", ["int4_gemm", *SCALED])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@dataclass(frozen=True)
class Product:
    """A product whose elements have a standard deviation of about 2."""

    op: str
    dtype: torch.dtype  # of the result, unless it is quantized
    arguments: dict[str, Any] = field(repr=False)

    @property
    def m(self) -> int:
        return self.arguments["x" if self.op in LOW_BIT else "a"].shape[0]

    @property
    def n(self) -> int:
        if self.op in LOW_BIT:
            return self.arguments["scales"].shape[1]
        return self.arguments["b"].shape[0]

    def __call__(self, backend: Backend, **options: Any) -> Tensor:
        if self.op in SCALED and "out" not in options:
            options = {"out_dtype": self.dtype, **options}
        return getattr(backend.ops, self.op)(**self.arguments, **options)

    def reference(self, dtype: torch.dtype = torch.float64, **options: Any) -> Tensor:
        if self.op in SCALED:
            return getattr(reference, self.op)(**self.arguments, dtype=dtype, **options)
        number = int(self.op[3])
        return reference.low_bit_gemm(number, **self.arguments, dtype=dtype, **options)

    def check(self, backend: Backend, **options: Any) -> None:
        """Against float64, and the same in the result's dtype."""
        out = self(backend, **options)
        assert out.dtype == self.dtype and out.is_contiguous()
        cores = self.op == "fp8_scaled_mm" and out.is_cuda and out.dtype == torch.float32
        baseline = self.reference(torch.float16 if cores else self.dtype, **options)
        assert_accurate(out, self.reference(**options), baseline, what=str(options.keys()))

    def residual(self, gated: bool = False) -> Tensor:
        """Like the result, in a wider and poisoned matrix."""
        columns = self.n // 2 if gated else self.n
        device = self.arguments["bias"].device
        return column_slice(torch.randn(self.m, columns, device=device).to(self.dtype))

    def rows(self, index: slice) -> "Product":
        """The product of some rows."""
        names = ["x"] if self.op in LOW_BIT else ["a", "a_scale"]
        some = {name: self.arguments[name][index] for name in names}
        return replace(self, arguments=self.arguments | some)


def make(
    op: str,
    m: int,
    n: int,
    k: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    blocks: bool = False,
    device: str = "cpu",
) -> Product:
    # Odd ones, and on a GPU those that its hand-written kernels take.
    k = k or (100 if device == "cpu" else 128)
    group_size = 32 if device == "cpu" else 128
    spread = 2.0 / k**0.5
    if op in LOW_BIT:
        number = int(op[3])
        largest = 2**number
        scales = torch.rand(-(-k // group_size), n) * 2 * spread * 3.5 / largest
        made = {
            "x": torch.randn(m, k).to(dtype),
            "qweight": reference.pack_codes(torch.randint(0, largest, (n, k)), number),
            "scales": scales,
            "zeros": torch.rand_like(scales) + (largest - 1) / 2,
        }
    else:
        codes = FP8 if op == "fp8_scaled_mm" else INT8
        of_a = (m, -(-k // 128)) if blocks else (m, 1)
        of_b = (-(-n // 128), -(-k // 128)) if blocks else (n, 1)
        made = {
            "a": (torch.randn(m, k) * 40).to(codes),
            "b": (torch.randn(n, k) * 40).to(codes),
            "a_scale": (torch.rand(of_a) + 0.5) / 40,
            "b_scale": (torch.rand(of_b) + 0.5) / 40 * spread,
        }
    made["bias"] = torch.randn(n)
    arguments: dict[str, Any] = {name: tensor.to(device) for name, tensor in made.items()}
    return Product(op, dtype, arguments | ({"group_size": group_size} if op in LOW_BIT else {}))


@by_op
@by_dtype
@pytest.mark.parametrize("gated", [False, True])
def test_activations_and_residuals(
    backend: Backend, op: str, dtype: torch.dtype, gated: bool
) -> None:
    product = make(op, 5, 130, dtype=dtype, device=backend.device)
    for activation in ACTIVATIONS:
        product.check(backend, activation=activation, gated=gated)
        residual = product.residual(gated)
        product.check(backend, activation=activation, gated=gated, residual=residual)


@pytest.mark.parametrize("op", LOW_BIT + SCALED)
@pytest.mark.parametrize("half", [1, 40, 64, 65, 96, 192])
def test_gates_of_any_number(backend: Backend, op: str, half: int) -> None:
    """Whether or not they fill a kernel's tiles, and wherever what they multiply begins."""
    for m in (1, 17, 33):
        product = make(op, m, 2 * half, dtype=torch.bfloat16, device=backend.device)
        residual = product.residual(gated=True)
        product.check(backend, activation="silu", gated=True, residual=residual)


@pytest.mark.parametrize("half", [64, 100, 128, 200])
def test_gates_under_scales_of_blocks(backend: Backend, half: int) -> None:
    """What gates multiply may begin within a block of features."""
    product = make("fp8_scaled_mm", 3, 2 * half, 304, blocks=True, device=backend.device)
    product.check(backend, activation="silu", gated=True)


@by_op
def test_many_rows(backend: Backend, op: str) -> None:
    product = make(op, 300, 260, dtype=torch.float16, device=backend.device)
    product.check(backend, activation="gelu", residual=product.residual())
    product.check(backend, activation="gelu_tanh", gated=True, residual=product.residual(True))


@by_op
def test_zero_rows(backend: Backend, op: str) -> None:
    product = make(op, 0, 70, device=backend.device)
    one = torch.ones(1, 1, device=backend.device)
    assert product(backend, activation="silu", gated=True).shape == (0, 35)
    out = product(backend, out_dtype=INT8, out_scale=one, residual=product.residual())
    assert out.shape == (0, 70) and out.dtype == INT8


@by_op
@pytest.mark.parametrize("residual_dtype", DTYPES, ids=dtype_name)
def test_residual_of_another_dtype(backend: Backend, op: str, residual_dtype: torch.dtype) -> None:
    """Any in scaled products; the low-bit ones have but one float dtype."""
    product = make(op, 3, 70, dtype=torch.bfloat16, device=backend.device)
    residual = product.residual().to(residual_dtype)
    if op in LOW_BIT and residual_dtype != torch.bfloat16:
        with pytest.raises(ValueError, match=f"{op}: residual: expected dtype bfloat16, got"):
            product(backend, residual=residual)
    else:
        product.check(backend, residual=residual)


# ----------------------------------------------------------------------------- results in 8 bits


def assert_same_codes(backend: Backend, actual: Tensor, expected: Tensor) -> None:
    """Bit for bit; on a GPU another compilation may round a sum otherwise, to the next code."""
    if backend.device == "cpu":
        assert_bit_equal(actual, expected)
        return
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    apart = (bits(actual).int() - bits(expected).int()).abs()
    assert apart.max() <= 1 and (apart != 0).float().mean() < 0.01


@by_op
@pytest.mark.parametrize("stored", [FP8, INT8], ids=dtype_name)
@pytest.mark.parametrize("gated", [False, True])
def test_codes_are_those_of_the_float_result(
    backend: Backend, op: str, stored: torch.dtype, gated: bool
) -> None:
    """As `quantize_fp8` and `quantize_int8` make them, saturated where the scale is small."""
    for n in (70, 128):
        product = make(op, 5, n, device=backend.device)
        for options in ({}, {"activation": "silu", "residual": product.residual(gated)}):
            options = {"gated": gated, **options}
            full = product(backend, **options)
            for scale in (0.003, 0.05):
                given = torch.full((1, 1), scale, device=backend.device)
                out = product(backend, **options, out_dtype=stored, out_scale=given)
                expected, _ = QUANTIZE[stored](full, scale=given, block=(-1, -1))
                assert_same_codes(backend, out, expected)


@by_op
@pytest.mark.parametrize("stored", [FP8, INT8], ids=dtype_name)
def test_codes_of_half_precision(backend: Backend, op: str, stored: torch.dtype) -> None:
    """Rounded once: nothing passes through the dtype of x."""
    product = make(op, 9, 130, dtype=torch.float16, device=backend.device)
    scale = torch.full((1, 1), 0.05, device=backend.device)
    residual = product.residual()
    out = product(backend, activation="gelu", residual=residual, out_dtype=stored, out_scale=scale)
    exact = product.reference(activation="gelu", residual=residual)
    expected, _ = getattr(reference, QUANTIZE[stored].__name__)(
        exact.float(), scale=scale, block=(-1, -1)
    )
    apart = (bits(out).int() - bits(expected).int()).abs()
    # Tensor cores that multiply fp8 keep fewer digits of a sum than fp32.
    cores = op == "fp8_scaled_mm" and backend.device != "cpu"
    assert apart.max() <= 1 and (apart != 0).float().mean() < (0.05 if cores else 0.002)


@by_op
def test_nan_of_the_residual_stays_in_its_row(backend: Backend, op: str) -> None:
    """It has a code in fp8, and 0 in int8."""
    product = make(op, 4, 140, device=backend.device)
    one = torch.ones(1, 1, device=backend.device)
    for gated in (False, True):
        residual = product.residual(gated)
        quantized = {
            stored: {"gated": gated, "out_dtype": stored, "out_scale": one}
            for stored in (FP8, INT8)
        }
        before = {s: product(backend, residual=residual, **o) for s, o in quantized.items()}
        full = product(backend, residual=residual, gated=gated)
        residual[2] = torch.nan
        out = product(backend, residual=residual, gated=gated)
        assert out[2].isnan().all()
        others = [0, 1, 3]
        assert_bit_equal(out[others], full[others])
        for stored, options in quantized.items():
            codes = product(backend, residual=residual, **options)
            assert_bit_equal(bits(codes)[others], bits(before[stored])[others])
            assert (codes[2].view(torch.uint8) == (0x7F if stored == FP8 else 0)).all()


# ------------------------------------------------------------------------------ what is written


@by_op
@by_dtype
def test_out_is_filled_and_nothing_else_is(backend: Backend, op: str, dtype: torch.dtype) -> None:
    one = torch.ones(1, 1, device=backend.device)
    for n, gated in ((70, False), (140, True), (128, True)):
        product = make(op, 5, n, dtype=dtype, device=backend.device)
        columns = n // 2 if gated else n
        for stored in (dtype, INT8):
            options: dict[str, Any] = {"activation": "silu", "gated": gated}
            options |= {"out_scale": one} if stored == INT8 else {}
            out = guarded((5, columns), stored, backend.device)
            returned = product(backend, **options, out=out.view)
            assert returned.data_ptr() == out.view.data_ptr()
            assert_bit_equal(out.view, product(backend, **options, out_dtype=stored))
            out.assert_untouched_around()


@by_op
@by_dtype
def test_out_may_be_the_residual(backend: Backend, op: str, dtype: torch.dtype) -> None:
    for n, gated in ((70, False), (140, True), (128, True)):
        product = make(op, 40, n, dtype=dtype, device=backend.device)
        options: dict[str, Any] = {"activation": "gelu", "gated": gated}
        for residual in (product.residual(gated), product.residual(gated).clone()):
            expected = product(backend, **options, residual=residual)
            assert product(backend, **options, residual=residual, out=residual) is residual
            assert_bit_equal(residual.clone(), expected)


@by_op
def test_out_over_its_scale_or_itself(backend: Backend, op: str) -> None:
    product = make(op, 5, 64, device=backend.device)
    raw = torch.ones(5, 64, device=backend.device)
    codes = raw.view(INT8)[:, :64]
    with pytest.raises(ValueError, match=f"{op}: out: expected no memory shared with out_scale"):
        product(backend, out_scale=raw[2:3, 5:6], out=codes)
    with pytest.raises(ValueError, match=f"{op}: out: expected rows at least 64 elements apart"):
        product(backend, out=torch.as_strided(raw, (5, 64), (1, 1)))


@by_op
def test_out_over_a_part_of_the_residual(backend: Backend, op: str) -> None:
    product = make(op, 5, 70, dtype=torch.bfloat16, device=backend.device)
    buffer = torch.zeros(8, 160, dtype=torch.bfloat16, device=backend.device)
    flat = torch.zeros(600, dtype=torch.bfloat16, device=backend.device)
    pairs = {
        "rows": (buffer[:5, :70], buffer[1:6, :70]),
        "columns": (buffer[:5, :70], buffer[:5, 69:139]),
        "columns before": (buffer[:5, 69:139], buffer[:5, :70]),
        "columns of other rows": (buffer[2:7, 69:139], buffer[:5, :70]),
        "dense": (flat[:350].view(5, 70), flat[200:550].view(5, 70)),
        "a row for all": (buffer[:5, :70], buffer[3:4, :70].expand(5, 70)),
        "every other row": (buffer[:5, :70], torch.as_strided(buffer, (5, 70), (80, 1), 80)),
    }
    for out, residual in pairs.values():
        with pytest.raises(ValueError, match=rf"{op}: out: .*overlapping"):
            product(backend, residual=residual, out=out)
    if op in SCALED:  # the same memory as another dtype
        with pytest.raises(ValueError, match=rf"{op}: out: .*overlapping"):
            product(backend, residual=buffer[:5, :70].view(torch.float16), out=buffer[:5, :70])
    beside = product(backend, residual=buffer[:5, 70:140], out=buffer[:5, :70])
    apart = torch.zeros(5, 70, dtype=torch.bfloat16, device=backend.device)
    assert_bit_equal(beside.clone(), product(backend, residual=apart))


@by_op
def test_overloads_are_equal(backend: Backend, op: str) -> None:
    packet = getattr(backend.library, op)
    product = make(op, 5, 128, dtype=torch.float16, device=backend.device)
    options: dict[str, Any] = {
        "activation": "silu", "gated": True, "residual": product.residual(True),
        "out_dtype": FP8, "out_scale": torch.full((1, 1), 0.1, device=backend.device),
    }  # fmt: skip
    out = torch.zeros(5, 64, device=backend.device).to(FP8)
    assert packet.out(**product.arguments, **options, out=out) is None
    assert_bit_equal(packet.default(**product.arguments, **options), out)
    assert_bit_equal(product(backend, **options), out)


@by_op
def test_rows_do_not_see_each_other(backend: Backend, op: str) -> None:
    rows = 300 if backend.name == "cpu" else 16
    product = make(op, rows, 140, device=backend.device)
    for gated in (False, True):
        residual = product.residual(gated)
        options: dict[str, Any] = {"activation": "gelu", "gated": gated}
        whole = product(backend, **options, residual=residual)
        for some in (slice(1), slice(6, 7), slice(rows - 1, rows), slice(3), slice(257)):
            part = product.rows(some)(backend, **options, residual=residual[some])
            assert_bit_equal(part, whole[some])


@pytest.mark.parametrize("op", ["int4_gemm", "fp8_scaled_mm"])
def test_compiled_with_out_that_is_the_residual(backend: Backend, op: str) -> None:
    product = make(op, 5, 70, dtype=torch.bfloat16, device=backend.device)
    stream = product.residual().clone()
    expected = product(backend, residual=stream)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(stream: Tensor) -> None:
        product(backend, residual=stream, out=stream)

    step(stream)
    assert_bit_equal(stream, expected)


# --------------------------------------------------------------------------------------- refused

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "another activation": (
        "activation: expected none, silu, gelu or gelu_tanh, got relu", {"activation": "relu"},
    ),
    "gates of an odd number": (
        "gated: expected an even number of .* got 71", {"gated": True, "n": 71},
    ),
    "residual as wide as the product of gates": (
        r"residual: expected shape \[5, 35\], got \[5, 70\]",
        {"gated": True, "residual": torch.zeros(5, 70)},
    ),
    "residual of integers": (
        "residual: expected dtype .*, got int8", {"residual": torch.zeros(5, 70, dtype=INT8)},
    ),
    "residual with columns apart": (
        "residual: expected stride 1", {"residual": torch.zeros(5, 140)[:, ::2]},
    ),
    "out as wide as the product of gates": (
        r"out: expected shape \[5, 35\], got \[5, 70\]",
        {"gated": True, "out": torch.zeros(5, 70)},
    ),
    "codes without a scale": (
        r"out_scale: expected float32 \[1, 1\] since the result is int8, got none",
        {"out_dtype": INT8},
    ),
    "codes into out without a scale": (
        "out_scale: .*since the result is float8_e4m3fn", {"out": torch.zeros(5, 70).to(FP8)},
    ),
    "scale of floats": (
        "out_scale: expected none since the result is float32, got a tensor",
        {"out_scale": torch.ones(1, 1), "out_dtype": torch.float32},
    ),
    "scale of one dimension": (
        r"out_scale: expected shape \[1, 1\], got \[1\]",
        {"out_scale": torch.ones(1), "out_dtype": INT8},
    ),
    "scale of each row": (
        r"out_scale: expected shape \[1, 1\]", {"out_scale": torch.ones(5, 1), "out_dtype": INT8},
    ),
    "scale of bf16": (
        "out_scale: expected dtype float32, got bfloat16",
        {"out_scale": torch.ones(1, 1).bfloat16(), "out_dtype": INT8},
    ),
    "result of integers": (
        "out_dtype: expected dtype float32 .*float8_e4m3fn or int8, got int32",
        {"out_dtype": torch.int32},
    ),
    "out that is not of out_dtype": (
        "out: expected dtype int8 as out_dtype, got float32",
        {"out": torch.zeros(5, 70), "out_dtype": INT8, "out_scale": torch.ones(1, 1)},
    ),
}  # fmt: skip


@by_op
@pytest.mark.parametrize("case", REFUSED)
def test_refused(backend: Backend, op: str, case: str) -> None:
    message, options = REFUSED[case]
    product = make(op, 5, options.get("n", 70), device=backend.device)

    def there(x: Any) -> Any:
        # A view with gaps becomes dense on its way.
        if isinstance(x, Tensor) and backend.device != "cpu" and not x.is_contiguous():
            return torch.zeros(5, 140, device=backend.device)[:, ::2]
        return x.to(backend.device) if isinstance(x, Tensor) else x

    given = {name: there(x) for name, x in options.items() if name != "n"}
    with pytest.raises(ValueError, match=f"{op}: {message}"):
        product(backend, **given)


def test_low_bit_products_have_one_float_dtype(backend: Backend) -> None:
    product = make("int4_gemm", 5, 70, device=backend.device)
    with pytest.raises(ValueError, match=r"out_dtype: expected dtype float32 or .* got bfloat16"):
        product(backend, out_dtype=torch.bfloat16)
