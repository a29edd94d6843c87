"""Matrix products where GPUs have kernels of their own: rows of x from few to many, on both sides
of where those kernels take over, with edges in every dimension.
"""

from dataclasses import replace

import pytest
import torch

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    HALF_DTYPES,
    Guarded,
    assert_accurate,
    assert_bit_equal,
    dtype_name,
    guarded,
)
from tests.ops.test_epilogue import LOW_BIT, Product, make
from tests.ops.test_low_bit_gemm import WHOLE, ZEROS, Weight, make_weight
from tests.ops.test_scaled_mm import kinds_of, make_call

ON_CPU = (17, 40, 130)
ROWS = (17, 31, 33, 64, 65, 128, 130, 257, 300, 700)
by_bits = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def rows_of(backend: Backend) -> tuple[int, ...]:
    return ON_CPU if backend.device == "cpu" else ROWS


def check(backend: Backend, weight: Weight, m: int, dtype: torch.dtype, what: str) -> None:
    x = torch.randn(m, weight.k, device=backend.device).to(dtype)
    weight.check(weight(backend, x), x, f"{what}, {m} rows")


@by_bits
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_rows(backend: Backend, bits: int, dtype: torch.dtype) -> None:
    """R10: both sides of every threshold."""
    for group_size in (64, 128):
        for m in rows_of(backend):
            weight = make_weight(
                bits, 200, 320, group_size=group_size, zeros="symmetric", dtype=dtype,
                device=backend.device,
            )  # fmt: skip
            check(backend, weight, m, dtype, f"groups of {group_size}")


@by_bits
@pytest.mark.parametrize("zeros", ZEROS)
def test_groups_and_zeros(backend: Backend, bits: int, zeros: str) -> None:
    for group_size in (64, 128, 192, 256, WHOLE):
        for m in (20, 65, 300) if backend.device != "cpu" else (20,):
            weight = make_weight(
                bits, 72, 576, group_size=group_size, zeros=zeros, dtype=torch.float16,
                bias=True, device=backend.device,
            )  # fmt: skip
            check(backend, weight, m, torch.bfloat16, f"groups of {group_size}")


@pytest.mark.parametrize("n", [1, 8, 40, 64, 65, 129, 257, 513])
def test_features(backend: Backend, n: int) -> None:
    """Scales whose rows lie at any address, and results that fill no vector."""
    for dtype in DTYPES:
        weight = make_weight(4, n, 256, dtype=dtype, bias=True, device=backend.device)
        for m in (33, 300) if backend.device != "cpu" else (33,):
            check(backend, weight, m, torch.bfloat16, f"scales in {dtype}")


@pytest.mark.parametrize("k", [8, 64, 72, 136, 192, 2880])
def test_inputs(backend: Backend, k: int) -> None:
    for bits in (3, 4):
        for m in (33, 130, 300) if backend.device != "cpu" else (33,):
            weight = make_weight(bits, 136, k, group_size=128, device=backend.device)
            x = torch.randn(m, k, device=backend.device).to(torch.float16)
            weight.check(weight(backend, x), x, f"{bits} bits, {m} rows")


@pytest.mark.parametrize("m", [20, 64, 300])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=dtype_name)
def test_scales_may_be_far_apart(backend: Backend, dtype: torch.dtype, m: int) -> None:
    """Groups whose scales are 0, negative, or nothing beside others, in any order."""
    weight = make_weight(4, 72, 1024, zeros="integer", device=backend.device)
    scales = weight.scales
    orders = torch.tensor([0.0, 1e-30, 1.0, 1e-12, 0.0, -1.0, 1e-38, 0.5])
    for feature in range(72):
        scales[:, feature] *= orders[torch.randperm(8)].to(scales.device)
    scales[:, 5] = 0.0
    scales[:, 6] = 1e-32
    weight = replace(weight, scales=scales)
    x = torch.randn(m, 1024, device=backend.device).to(dtype)
    weight.check(weight(backend, x), x)


@pytest.mark.parametrize("m", [20, 300])
def test_what_is_not_finite_stays_in_its_row_and_feature(backend: Backend, m: int) -> None:
    weight = make_weight(4, 72, 512, zeros="integer", device=backend.device)
    x = torch.randn(m, 512, device=backend.device).to(torch.bfloat16)
    clean = weight(backend, x)
    weight.scales[1, 7] = float("nan")
    x[3, 200] = float("nan")
    out = weight(backend, x)
    assert out[3].isnan().all() and out[:, 7].isnan().all()
    rows = [i for i in range(m) if i != 3]
    features = [i for i in range(72) if i != 7]
    assert_bit_equal(out[rows][:, features], clean[rows][:, features])


def outputs(m: int, n: int, dtype: torch.dtype, device: str) -> list[Guarded]:
    """At an odd address, and where rows may be written in vectors."""
    storage = torch.full((m + 2, n + 16 + -n % 8), -77.0, dtype=dtype, device=device)
    view = storage[1:-1, 8 : 8 + n]
    view.fill_(torch.nan)
    return [guarded((m, n), dtype, device), Guarded(view, storage, storage.clone())]


@pytest.mark.parametrize("m", [20, 64, 130, 300])
def test_only_the_result_is_written(backend: Backend, m: int) -> None:
    for n in (72, 77):
        weight = make_weight(4, n, 256, device=backend.device)
        x = torch.randn(m, 256, device=backend.device).to(torch.bfloat16)
        for out in outputs(m, n, torch.bfloat16, backend.device):
            weight(backend, x, out=out.view)
            out.assert_untouched_around()
            weight.check(out.view, x)


@pytest.mark.parametrize("op", ["fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_scaled_rows(backend: Backend, op: str, dtype: torch.dtype) -> None:
    for a_kind, b_kind in (kinds_of(op)[0], kinds_of(op)[1], kinds_of(op)[-1]):
        for m in (1, 16, *rows_of(backend)):
            call = make_call(
                op, m, 200, 400, a_kind=a_kind, b_kind=b_kind, bias=True, device=backend.device
            )
            call.check(call(backend, dtype), f"{a_kind}, {b_kind}, {m} rows")


@pytest.mark.parametrize("op", ["fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize("k", [128, 400])
def test_every_pair_of_scales(backend: Backend, op: str, k: int) -> None:
    """Blocks beside scales of rows and features, and blocks as long as K."""
    for a_kind, b_kind in kinds_of(op):
        for m in (9, 40, 300) if backend.device != "cpu" else (9,):
            call = make_call(op, m, 200, k, a_kind=a_kind, b_kind=b_kind, device=backend.device)
            call.check(call(backend, torch.bfloat16), f"{a_kind}, {b_kind}, {m} rows")


@pytest.mark.parametrize("op", ["fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (40, 128), (193, 144), (385, 2880), (77, 1168)])
def test_scaled_edges(backend: Backend, op: str, n: int, k: int) -> None:
    for a_kind, b_kind in (kinds_of(op)[1], kinds_of(op)[-1]):
        for m in (9, 64, 130, 300) if backend.device != "cpu" else (9,):
            call = make_call(op, m, n, k, a_kind=a_kind, b_kind=b_kind, device=backend.device)
            call.check(call(backend, torch.bfloat16), f"{a_kind}, {b_kind}, {m} rows")


@pytest.mark.parametrize("m", [9, 130, 300])
def test_only_the_scaled_result_is_written(backend: Backend, m: int) -> None:
    for n in (72, 77):
        for dtype in (torch.bfloat16, torch.float32):
            call = make_call("fp8_scaled_mm", m, n, 256, device=backend.device)
            for out in outputs(m, n, dtype, backend.device):
                call(backend, out=out.view)
                out.assert_untouched_around()
                call.check(out.view)


def with_groups_of_128(product: Product) -> Product:
    """Whose kernels on a GPU are others than those of smaller groups."""
    if product.op not in LOW_BIT:
        return product
    arguments = dict(product.arguments)
    k = arguments["x"].shape[1]
    for name in ("scales", "zeros"):
        arguments[name] = arguments[name][: -(-k // 128)].contiguous()
    return replace(product, arguments=arguments | {"group_size": 128})


def with_rounded_scales(product: Product) -> Product:
    """With the scales of low-bit weights in bf16."""
    if product.op not in LOW_BIT:
        return product
    scales = product.arguments["scales"].bfloat16().float()
    return replace(product, arguments=product.arguments | {"scales": scales})


@pytest.mark.parametrize("op", ["int4_gemm", "int2_gemm", "fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize("n", [128, 192, 256, 384])
def test_what_follows_the_product(backend: Backend, op: str, n: int) -> None:
    for m in (9, 20, 64, 130, 300) if backend.device != "cpu" else (9,):
        made = make(op, m, n, 256, dtype=torch.bfloat16, device=backend.device)
        product = with_groups_of_128(made)
        product.check(backend, activation="gelu")
        product.check(backend, residual=product.residual())
        product.check(backend, activation="silu", gated=True)
        residual = product.residual(gated=True)
        product.check(backend, activation="gelu_tanh", gated=True, residual=residual)
        out = residual.clone()
        product(backend, activation="silu", gated=True, residual=out, out=out)
        assert_bit_equal(out, product(backend, activation="silu", gated=True, residual=residual))


@pytest.mark.parametrize("op", ["int4_gemm", "fp8_scaled_mm", "int8_scaled_mm"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=dtype_name)
def test_codes_that_follow_the_product(backend: Backend, op: str, stored: torch.dtype) -> None:
    """Within a step of a code of what the float result would give. Kernels may round scales and
    then weights to x's type, and so err as those do before the codes are made.
    """
    scale = torch.full((1, 1), 0.03, device=backend.device)
    for m in (9, 64, 300) if backend.device != "cpu" else (9,):
        for gated in (False, True):
            made = make(op, m, 256, 256, dtype=torch.bfloat16, device=backend.device)
            product = with_groups_of_128(made)
            options = {"activation": "silu", "gated": gated}
            codes = product(backend, **options, out_dtype=stored, out_scale=scale).float()
            exact = product.reference(**options) / scale
            if op == "int8_scaled_mm":  # whose sums are exact
                rounded = product.reference(torch.float32, **options) / scale
            else:
                rounded = (
                    with_rounded_scales(product).reference(factors=torch.bfloat16, **options)
                    / scale
                )
            limit = 127.0 if stored == torch.int8 else 448.0
            exact, rounded = exact.clamp(-limit, limit), rounded.clamp(-limit, limit)
            step = torch.full_like(exact, 0.5) if stored == torch.int8 else exact.abs() / 16
            error, noise = (codes - exact).abs(), (rounded - exact).abs()
            most = 3 * noise.amax(1, keepdim=True) + 1e-5 * exact.abs()
            assert (error <= step + 2.0**-10 + most).all()
            # Roundings are spread evenly over a step.
            rms, rms_step, rms_noise = (x.square().mean().sqrt() for x in (error, step, noise))
            assert rms <= rms_step / 3**0.5 + 2 * rms_noise + 2.0**-10


@pytest.mark.parametrize("m", [1, 5, 8, 9, 40])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_before_the_product(backend: Backend, m: int, offset: float) -> None:
    for bits in (2, 4):
        weight = make_weight(bits, 200, 1088, dtype=torch.bfloat16, device=backend.device)
        x = (torch.randn(m, 1088, device=backend.device) * 30 + 3).to(torch.bfloat16)
        norm = torch.randn(1088, device=backend.device).to(torch.bfloat16)
        op = getattr(backend.ops, f"int{bits}_gemm")
        out = op(
            x, weight.qweight, weight.scales, weight.zeros, norm_weight=norm, norm_eps=1e-5,
            norm_weight_offset=offset,
        )  # fmt: skip
        normalised = reference.rms_norm(x, norm, 1e-5, weight_offset=offset)
        baseline = weight.reference(normalised.to(torch.bfloat16), torch.bfloat16)
        assert_accurate(out, weight.reference(normalised), baseline, what=f"{bits} bits")
