"""silu_and_mul and gelu_and_mul against the reference."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    STRIDED,
    assert_accurate,
    assert_bit_equal,
    assert_rounded_once,
    assert_same_nonfinite,
    dtype_name,
    far_apart,
    guarded,
)

CASES = [("silu_and_mul", {}), ("gelu_and_mul", {}), ("gelu_and_mul", {"tanh_approx": True})]
by_op = pytest.mark.parametrize(("op", "options"), CASES, ids=["silu", "gelu_erf", "gelu_tanh"])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def eager(op: str, options: dict[str, bool], x: Tensor) -> Tensor:
    """The same-dtype PyTorch composition."""
    a, b = x.chunk(2, -1)
    if op == "silu_and_mul":
        return F.silu(a) * b
    return F.gelu(a, approximate="tanh" if options else "none") * b


def check(op: str, options: dict[str, bool], actual: Tensor, x: Tensor) -> None:
    expected = getattr(reference, op)(x, **options)
    assert_accurate(actual, expected, eager(op, options, x), what=op)


@by_op
@by_dtype
@pytest.mark.parametrize("width", [1, 2, 7, 8, 33, 1000, 3584, 28672])
def test_widths(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype, width: int
) -> None:
    x = (torch.randn(3, 2 * width, device=backend.device) * 3).to(dtype)
    out = getattr(backend.ops, op)(x, **options)
    assert out.shape == (3, width) and out.dtype == dtype
    check(op, options, out, x)


@by_op
@by_dtype
def test_every_range_of_the_gate(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    """From where the gate is 0 to where it is 1, row by row, so that small values count too."""
    gate = torch.linspace(-20, 20, 4001, device=backend.device)
    x = torch.stack([gate, torch.ones_like(gate)], -1).to(dtype)
    out = getattr(backend.ops, op)(x, **options)
    for begin, end in ((-20, -8), (-8, -4), (-4, -1), (-1, 0), (0, 1), (1, 4), (4, 20)):
        rows = (gate >= begin) & (gate <= end)
        check(op, options, out[rows], x[rows])


@by_op
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_result_is_rounded_once(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    x = torch.randn(16, 502, device=backend.device).to(dtype)
    assert_rounded_once(
        getattr(backend.ops, op)(x, **options), getattr(reference, op)(x, **options)
    )


@by_op
def test_large_gates_saturate_without_nan(
    backend: Backend, op: str, options: dict[str, bool]
) -> None:
    gate = torch.tensor([-3e38, -1e20, -1000.0, -100.0, 100.0, 1000.0, 1e20], device=backend.device)
    x = torch.stack([gate, torch.ones_like(gate)], -1)
    out = getattr(backend.ops, op)(x, **options).flatten()
    expected = torch.where(gate < 0, 0.0, gate)
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-36), out


@by_op
def test_nan_and_infinity(backend: Backend, op: str, options: dict[str, bool]) -> None:
    x = torch.tensor(
        [[math.nan, 1.0], [1.0, math.nan], [math.inf, 1.0], [math.inf, -1.0], [1.0, -math.inf]],
        device=backend.device,
    )
    out = getattr(backend.ops, op)(x, **options)
    assert_same_nonfinite(out, eager(op, options, x))


@by_op
@by_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_input_equals_contiguous(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype, layout: str
) -> None:
    x = torch.randn(3, 4, 66, device=backend.device).to(dtype)
    call = getattr(backend.ops, op)
    assert_bit_equal(call(STRIDED[layout](x), **options), call(x, **options))


@by_op
@by_dtype
def test_column_slice_of_a_fused_projection(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    """R08."""
    fused = torch.randn(5, 100, device=backend.device).to(dtype)
    call = getattr(backend.ops, op)
    for begin in (0, 1, 33):
        part = fused[:, begin : begin + 62]
        assert_bit_equal(call(part, **options), call(part.contiguous(), **options))


@by_op
@pytest.mark.parametrize("shape", [(10,), (3, 10), (2, 3, 10), (2, 1, 3, 2, 10)])
def test_any_rank(
    backend: Backend, op: str, options: dict[str, bool], shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape, device=backend.device)
    check(op, options, getattr(backend.ops, op)(x, **options), x)


@by_op
@by_dtype
def test_out_is_filled_and_nothing_else_is(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    x = torch.randn(4, 3, 74, device=backend.device).to(dtype)
    out = guarded((4, 3, 37), dtype, backend.device)
    getattr(backend.ops, op)(x, **options, out=out.view)
    assert_bit_equal(out.view, getattr(backend.ops, op)(x, **options))
    out.assert_untouched_around()


@by_op
def test_overloads_are_equal(backend: Backend, op: str, options: dict[str, bool]) -> None:
    x = torch.randn(4, 74, device=backend.device)
    packet = getattr(backend.library, op)
    out = torch.full((4, 37), torch.nan, device=backend.device)
    assert packet.out(x, **options, out=out) is None
    assert_bit_equal(packet.default(x, **options), out)
    assert_bit_equal(getattr(backend.ops, op)(x, **options), out)


def test_gelu_is_by_erf_unless_asked(backend: Backend) -> None:
    x = torch.randn(3, 20, device=backend.device)
    assert_bit_equal(backend.ops.gelu_and_mul(x), backend.ops.gelu_and_mul(x, tanh_approx=False))
    assert not torch.equal(
        backend.ops.gelu_and_mul(x), backend.ops.gelu_and_mul(x, tanh_approx=True)
    )


@by_op
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_zero_rows(
    backend: Backend, op: str, options: dict[str, bool], shape: tuple[int, ...]
) -> None:
    """R24."""
    x = torch.empty(*shape, device=backend.device)
    assert getattr(backend.ops, op)(x, **options).shape == (*shape[:-1], 4)


@by_op
@by_dtype
def test_rows_do_not_see_each_other(
    backend: Backend, op: str, options: dict[str, bool], dtype: torch.dtype
) -> None:
    """R31."""
    x = torch.randn(256, 94, device=backend.device).to(dtype)
    call = getattr(backend.ops, op)
    whole = call(x, **options)
    for row in (0, 1, 100, 255):
        assert_bit_equal(call(x[row], **options), whole[row])
    for batch in (2, 3, 17, 64):
        assert_bit_equal(call(x[:batch], **options), whole[:batch])


@by_op
def test_row_offset_beyond_32_bits(backend: Backend, op: str, options: dict[str, bool]) -> None:
    """R06."""
    near = torch.randn(3, 64, device=backend.device).to(torch.bfloat16)
    call = getattr(backend.ops, op)
    out = far_apart(torch.zeros(3, 32, dtype=torch.bfloat16, device=backend.device), 2**30 + 8)
    call(far_apart(near, 2**30 + 8), **options, out=out)
    assert_bit_equal(out.clone(), call(near, **options))
