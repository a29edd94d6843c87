"""rms_norm, layer_norm and their fused additions against the reference."""

from typing import Any

import pytest
import torch
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

NORMS = ["rms_norm", "layer_norm"]
HIDDEN_SIZES = [1, 2, 7, 8, 31, 64, 129, 1000, 3584, 16384, 28672]

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_norm = pytest.mark.parametrize("norm", NORMS)


def parameters(norm: str, hidden: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """weight, and a bias for layer_norm."""
    weight = torch.randn(hidden).to(dtype).to(device)
    if norm == "rms_norm":
        return [weight]
    return [weight, torch.randn(hidden).to(dtype).to(device)]


def check(norm: str, actual: Tensor, x: Tensor, *args: Any, **options: Any) -> None:
    """`actual` against the reference and the eager composition in x's dtype."""
    function = getattr(reference, norm)
    expected = function(x, *args, **options)
    assert_accurate(actual, expected, function(x, *args, **options, dtype=x.dtype), what=norm)


@by_norm
@by_dtype
@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
def test_hidden_sizes(backend: Backend, norm: str, dtype: torch.dtype, hidden: int) -> None:
    x = torch.randn(5, hidden, device=backend.device).to(dtype) * 3 + 0.5
    args = parameters(norm, hidden, dtype, backend.device)
    out = getattr(backend.ops, norm)(x, *args)
    assert out.dtype == dtype and out.is_contiguous()
    check(norm, out, x, *args)


@by_norm
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_result_is_rounded_once(backend: Backend, norm: str, dtype: torch.dtype) -> None:
    x = torch.randn(33, 257, device=backend.device).to(dtype)
    args = parameters(norm, 257, torch.float32, backend.device)
    out = getattr(backend.ops, norm)(x, *args, weight_offset=1.0)
    expected = getattr(reference, norm)(x, *args, weight_offset=1.0)
    # Where terms cancel, the float32 noise is relative to the terms, not to what remains of them.
    large = expected.abs() > 0.1
    assert_rounded_once(out[large], expected[large])


@by_norm
@by_dtype
@pytest.mark.parametrize("weight_dtype", ["same", "float32"])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0, -0.25])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_weight_offset_and_eps(
    backend: Backend,
    norm: str,
    dtype: torch.dtype,
    weight_dtype: str,
    weight_offset: float,
    eps: float,
) -> None:
    x = torch.randn(3, 65, device=backend.device).to(dtype)
    args = parameters(norm, 65, dtype if weight_dtype == "same" else torch.float32, backend.device)
    out = getattr(backend.ops, norm)(x, *args, eps=eps, weight_offset=weight_offset)
    check(norm, out, x, *args, eps=eps, weight_offset=weight_offset)


@by_dtype
def test_layer_norm_without_bias(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 48).to(dtype), torch.randn(48).to(dtype)
    x, weight = x.to(backend.device), weight.to(backend.device)
    check("layer_norm", backend.ops.layer_norm(x, weight), x, weight)
    zeros = torch.zeros_like(weight)
    assert_bit_equal(backend.ops.layer_norm(x, weight), backend.ops.layer_norm(x, weight, zeros))


@by_norm
def test_default_eps_is_the_documented_one(backend: Backend, norm: str) -> None:
    x = torch.randn(2, 9, device=backend.device) * 1e-3
    args = parameters(norm, 9, torch.float32, backend.device)
    eps = 1e-6 if norm == "rms_norm" else 1e-5
    op = getattr(backend.ops, norm)
    assert_bit_equal(op(x, *args), op(x, *args, eps=eps))
    assert not torch.equal(op(x, *args), op(x, *args, eps=2 * eps))


@by_norm
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 3, 6), (2, 3, 2, 6), (2, 1, 3, 2, 2, 6)])
def test_any_rank(backend: Backend, norm: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, device=backend.device)
    args = parameters(norm, 6, torch.float32, backend.device)
    out = getattr(backend.ops, norm)(x, *args)
    assert out.shape == shape
    check(norm, out, x, *args)


@by_norm
@by_dtype
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_input_equals_contiguous(
    backend: Backend, norm: str, dtype: torch.dtype, layout: str
) -> None:
    x = torch.randn(3, 4, 67, device=backend.device).to(dtype)
    args = parameters(norm, 67, dtype, backend.device)
    op = getattr(backend.ops, norm)
    strided = STRIDED[layout](x)
    assert_bit_equal(op(strided, *args), op(x, *args))
    assert torch.equal(strided, x)


@by_norm
def test_expanded_input(backend: Backend, norm: str) -> None:
    x = torch.randn(1, 3, 1, 16, device=backend.device).expand(2, 3, 4, 16)
    args = parameters(norm, 16, torch.float32, backend.device)
    op = getattr(backend.ops, norm)
    assert_bit_equal(op(x, *args), op(x.contiguous(), *args))


@by_norm
@by_dtype
def test_column_slice_of_a_fused_projection(
    backend: Backend, norm: str, dtype: torch.dtype
) -> None:
    """R08: x = qkv[..., :d] with stride(0) > d is taken as it is."""
    qkv = torch.randn(7, 3 * 64, device=backend.device).to(dtype)
    args = parameters(norm, 64, dtype, backend.device)
    op = getattr(backend.ops, norm)
    for begin in (0, 64, 65, 127):
        x = qkv[..., begin : begin + 64]
        assert_bit_equal(op(x, *args), op(x.contiguous(), *args))


@by_norm
@by_dtype
@pytest.mark.parametrize("hidden", [3584, 16384, 28672])
def test_large_hidden_at_an_odd_address(
    backend: Backend, norm: str, dtype: torch.dtype, hidden: int
) -> None:
    """R25: hidden sizes past 48 KB, at a base pointer one element past an aligned one."""
    x = STRIDED["misaligned"](torch.randn(3, hidden, device=backend.device).to(dtype))
    args = [STRIDED["misaligned"](a) for a in parameters(norm, hidden, dtype, backend.device)]
    out = STRIDED["misaligned"](torch.full_like(x, torch.nan))
    getattr(backend.ops, norm)(x, *args, out=out)
    check(norm, out, x, *args)


@by_norm
@by_dtype
def test_out_is_filled_and_nothing_else_is(backend: Backend, norm: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 37, device=backend.device).to(dtype)
    args = parameters(norm, 37, dtype, backend.device)
    out = guarded((4, 3, 37), dtype, backend.device)
    returned = getattr(backend.ops, norm)(x, *args, out=out.view)
    assert returned.data_ptr() == out.view.data_ptr()
    assert_bit_equal(out.view, getattr(backend.ops, norm)(x, *args))
    out.assert_untouched_around()


@by_norm
def test_overloads_are_equal(backend: Backend, norm: str) -> None:
    x = torch.randn(4, 37, device=backend.device)
    args = parameters(norm, 37, torch.float32, backend.device)
    packet = getattr(backend.library, norm)
    out = torch.full_like(x, torch.nan)
    assert packet.out(x, *args, weight_offset=0.5, out=out) is None
    assert_bit_equal(packet.default(x, *args, weight_offset=0.5), out)
    assert_bit_equal(getattr(backend.ops, norm)(x, *args, weight_offset=0.5), out)


@by_norm
def test_out_may_be_the_input(backend: Backend, norm: str) -> None:
    x = torch.randn(4, 37, device=backend.device)
    args = parameters(norm, 37, torch.float32, backend.device)
    expected = getattr(backend.ops, norm)(x, *args)
    getattr(backend.ops, norm)(x, *args, out=x)
    assert_bit_equal(x, expected)


@by_norm
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (0, 0, 16)])
def test_zero_rows(backend: Backend, norm: str, shape: tuple[int, ...]) -> None:
    """R24."""
    args = parameters(norm, 16, torch.float32, backend.device)
    x = torch.empty(*shape, device=backend.device)
    assert getattr(backend.ops, norm)(x, *args).shape == shape
    residual = torch.empty(*shape, device=backend.device)
    getattr(backend.ops, f"fused_add_{norm}_")(x, residual, *args)


@by_norm
@by_dtype
@pytest.mark.parametrize("hidden", [1, 7, 256, 3584])
@pytest.mark.parametrize("layout", ["contiguous", "column_slice", "misaligned", "swapped"])
def test_fused_add_is_bit_equal_to_the_two_steps(
    backend: Backend, norm: str, dtype: torch.dtype, hidden: int, layout: str
) -> None:
    make = STRIDED.get(layout, Tensor.clone)
    x, residual = (
        make(torch.randn(3, 2, hidden, device=backend.device).to(dtype)) for _ in range(2)
    )
    args = parameters(norm, hidden, dtype, backend.device)
    total = residual + x
    expected = getattr(backend.ops, norm)(total, *args, weight_offset=0.5)
    true_out, true_residual = getattr(reference, f"fused_add_{norm}_")(
        x, residual, *args, weight_offset=0.5
    )
    getattr(backend.ops, f"fused_add_{norm}_")(x, residual, *args, weight_offset=0.5)
    assert_bit_equal(residual, total, "residual")
    assert_bit_equal(residual, true_residual, "residual")
    assert_bit_equal(x, expected, "x")
    baseline = getattr(reference, norm)(total, *args, weight_offset=0.5, dtype=dtype)
    assert_accurate(x, true_out, baseline, what="x")


@by_norm
def test_fused_add_writes_only_its_views(backend: Backend, norm: str) -> None:
    x, residual = (guarded((5, 33), torch.float32, backend.device) for _ in range(2))
    for part in (x, residual):
        part.view.copy_(torch.randn(5, 33))
    args = parameters(norm, 33, torch.float32, backend.device)
    getattr(backend.ops, f"fused_add_{norm}_")(x.view, residual.view, *args)
    x.assert_untouched_around()
    residual.assert_untouched_around()


@by_norm
@by_dtype
def test_rows_do_not_see_each_other(backend: Backend, norm: str, dtype: torch.dtype) -> None:
    """R31: one row alone, and as row i of a batch of 2..256, bit for bit."""
    x = torch.randn(256, 203, device=backend.device).to(dtype)
    args = parameters(norm, 203, dtype, backend.device)
    op = getattr(backend.ops, norm)
    whole = op(x, *args)
    for row in (0, 1, 100, 255):
        assert_bit_equal(op(x[row], *args), whole[row])
    for batch in (2, 3, 17, 64):
        assert_bit_equal(op(x[:batch], *args), whole[:batch])


@by_norm
def test_nan_and_infinity_stay_in_their_row(backend: Backend, norm: str) -> None:
    x = torch.randn(5, 40, device=backend.device)
    x[1, 3], x[3, 39] = torch.nan, torch.inf
    args = parameters(norm, 40, torch.float32, backend.device)
    out = getattr(backend.ops, norm)(x, *args)
    assert_same_nonfinite(out, getattr(reference, norm)(x, *args).float())
    assert out[[0, 2, 4]].isfinite().all()


@by_norm
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_squares_do_not_overflow_half(backend: Backend, norm: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 512, device=backend.device) * 2e4).clamp(-6e4, 6e4).to(dtype)
    args = parameters(norm, 512, dtype, backend.device)
    out = getattr(backend.ops, norm)(x, *args)
    expected = getattr(reference, norm)(x, *args)
    assert_accurate(out, expected, expected.to(dtype))


def test_layer_norm_of_a_large_mean(backend: Backend) -> None:
    """E[x^2] - E[x]^2 in float32 would lose the variance: 1 beside a mean of 1000."""
    x = torch.randn(4, 512, device=backend.device) + 1000
    weight = torch.ones(512, device=backend.device)
    check("layer_norm", backend.ops.layer_norm(x, weight), x, weight)


def test_layer_norm_of_a_row_that_begins_far_from_its_mean(backend: Backend) -> None:
    """A mean guessed from the first elements is no help there, and must do no harm."""
    x = torch.randn(4, 8192, device=backend.device)
    x[1, :4] += 1e4
    x[3, :8] -= 1e3
    weight = torch.ones(8192, device=backend.device)
    check("layer_norm", backend.ops.layer_norm(x, weight), x, weight)


@by_norm
def test_constant_and_zero_rows(backend: Backend, norm: str) -> None:
    x = torch.zeros(2, 64, device=backend.device)
    x[1] = 3.0
    args = parameters(norm, 64, torch.float32, backend.device)
    check(norm, getattr(backend.ops, norm)(x, *args), x, *args)


@by_norm
@pytest.mark.parametrize("stride", [2**31 - 1, 2**31 + 24])
def test_row_offset_beyond_32_bits(backend: Backend, norm: str, stride: int) -> None:
    """R06: row index times stride passes 2^31 elements; only a few rows have memory behind them."""
    near = torch.randn(3, 256, device=backend.device).to(torch.bfloat16)
    args = parameters(norm, 256, torch.bfloat16, backend.device)
    op = getattr(backend.ops, norm)
    expected = op(near, *args)
    x = far_apart(near, stride // 2)
    assert_bit_equal(op(x, *args), expected)
    out = far_apart(torch.full_like(near, torch.nan), stride // 2)
    op(x, *args, out=out)
    assert_bit_equal(out.clone(), expected)
    residual = far_apart(torch.zeros_like(near), stride // 2)
    getattr(backend.ops, f"fused_add_{norm}_")(x, residual, *args)
    assert_bit_equal(x.clone(), expected)
