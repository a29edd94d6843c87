"""The low-bit products of an x that is normalised on its way."""

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    assert_accurate,
    assert_bit_equal,
    column_slice,
    dtype_name,
    guarded,
)

BITS = [2, 3, 4, 8]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def make(
    bits: int, m: int, n: int, k: int, dtype: torch.dtype, device: str, *, perm: bool = False
) -> dict[str, Tensor]:
    """Arguments with columns of x of very different size, which a norm after `perm` would mix."""
    x = torch.randn(m, k) * torch.logspace(-1, 1, k)
    scales = (torch.rand(-(-k // 128), n) + 0.5) / (2**bits * k**0.5)
    made = {
        "x": x.to(dtype),
        "qweight": reference.pack_codes(torch.randint(0, 2**bits, (n, k)), bits),
        "scales": scales,
        "bias": torch.randn(n),
        "norm_weight": (torch.rand(k) + 0.5).to(dtype),
    }
    if perm:
        made["perm"] = torch.randperm(k, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in made.items()}


@by_dtype
@pytest.mark.parametrize("m", [1, 5, 33])
def test_product_of_a_normalised_x(backend: Backend, m: int, dtype: torch.dtype) -> None:
    for bits in BITS:
        for k, perm in ((1, False), (100, True), (300, False)):
            arguments = make(bits, m, 70, k, dtype, backend.device, perm=perm)
            for options in ({}, {"norm_eps": 0.5, "norm_weight_offset": 1.0}):
                out = getattr(backend.ops, f"int{bits}_gemm")(**arguments, **options)
                exact, rounded = (
                    reference.low_bit_gemm(bits, **arguments, **options, dtype=d)
                    for d in (torch.float64, dtype)
                )
                assert_accurate(out, exact, rounded, what=f"{bits} bits, {k}, {options}")


@by_dtype
def test_weight_in_fp32(backend: Backend, dtype: torch.dtype) -> None:
    arguments = make(4, 5, 70, 100, dtype, backend.device)
    arguments["norm_weight"] = arguments["norm_weight"].float()
    plain = arguments | {"norm_weight": arguments["norm_weight"].to(dtype)}
    assert_bit_equal(backend.ops.int4_gemm(**arguments), backend.ops.int4_gemm(**plain))


@by_dtype
def test_with_all_that_follows(backend: Backend, dtype: torch.dtype) -> None:
    """A feed-forward layer's first half."""
    arguments = make(4, 5, 256, 192, dtype, backend.device)
    residual = torch.randn(5, 128, device=backend.device).to(dtype)
    options = {"activation": "silu", "gated": True, "residual": residual}
    out = backend.ops.int4_gemm(**arguments, **options)
    exact, rounded = (
        reference.low_bit_gemm(4, **arguments, **options, dtype=d) for d in (torch.float64, dtype)
    )
    assert_accurate(out, exact, rounded)


def test_zero_rows(backend: Backend) -> None:
    arguments = make(4, 0, 70, 100, torch.float32, backend.device)
    assert backend.ops.int4_gemm(**arguments).shape == (0, 70)


@by_dtype
def test_rows_of_any_stride_that_do_not_see_each_other(
    backend: Backend, dtype: torch.dtype
) -> None:
    """x in a poisoned matrix; a row of NaN, which stays there; x is not changed."""
    arguments = make(4, 9, 70, 200, dtype, backend.device)
    expected = backend.ops.int4_gemm(**arguments)
    x = column_slice(arguments["x"])
    x[3] = torch.nan
    before = x.clone()
    out = guarded((9, 70), dtype, backend.device)
    backend.ops.int4_gemm(**arguments | {"x": x}, out=out.view)
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    assert_bit_equal(out.view[others], expected[others])
    assert out.view[3].isnan().all()
    out.assert_untouched_around()
    assert_bit_equal(x.clone(), before)
    alone = backend.ops.int4_gemm(**arguments | {"x": arguments["x"][7:8]})
    if backend.device == "cpu":
        assert_bit_equal(alone, expected[7:8])
    else:  # where few rows have a kernel of their own
        exact, rounded = (
            reference.low_bit_gemm(4, **arguments, dtype=d)[7:8] for d in (torch.float64, dtype)
        )
        assert_accurate(alone, exact, rounded)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm_weight", torch.ones(99), r"norm_weight: expected shape \[100\], got \[99\]"),
        ("norm_weight", torch.ones(100).half(), "norm_weight: expected dtype float32 as x"),
        ("norm_weight", torch.ones(1, 100), "norm_weight: expected shape"),
        ("norm_eps", -1.0, "norm_eps: expected a number >= 0, got -1"),
    ],
)
def test_refused(backend: Backend, name: str, value: Tensor | float, message: str) -> None:
    arguments = make(4, 5, 70, 100, torch.float32, backend.device)
    value = value.to(backend.device) if isinstance(value, Tensor) else value
    with pytest.raises(ValueError, match=f"int4_gemm: {message}"):
        backend.ops.int4_gemm(**arguments | {name: value})


def test_out_over_the_weight(backend: Backend) -> None:
    arguments = make(4, 1, 100, 100, torch.float32, backend.device)
    with pytest.raises(ValueError, match="int4_gemm: out: expected no memory shared with norm_w"):
        backend.ops.int4_gemm(**arguments, out=arguments["norm_weight"].view(1, 100))
