"""quantize_fp8, quantize_int8 and quantize_int8_asymmetric: bit for bit the reference's."""

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
    assert_bit_equal,
    column_slice,
    dtype_name,
    far_apart,
    guarded,
    misaligned,
)
from tests.ops.test_kv_cache import HARD_SCALES, UNUSUAL_SCALES

SYMMETRIC = ["quantize_fp8", "quantize_int8"]
ASYMMETRIC = "quantize_int8_asymmetric"
OPS = [*SYMMETRIC, ASYMMETRIC]
LIMITS = {"quantize_fp8": 448.0, "quantize_int8": 127.0}
STORED = {"quantize_fp8": torch.float8_e4m3fn, "quantize_int8": torch.int8, ASYMMETRIC: torch.int8}
BLOCKS = {
    "token": (1, -1),
    "tensor": (-1, -1),
    "1x128": (1, 128),
    "128x128": (128, 128),
    "column": (-1, 1),
    "3x5": (3, 5),
}
WIDTHS = [1, 17, 100, 128, 130, 2880, 8193]
# More than a program holds: the largest magnitudes are found by a launch of their own.
LARGE = {"token": (2, 33000), "tensor": (37, 1300), "3x5": (3, 5), "column": (40000, 3)}

by_op = pytest.mark.parametrize("op", SYMMETRIC)
by_any_op = pytest.mark.parametrize("op", OPS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_block = pytest.mark.parametrize("block", BLOCKS)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different magnitudes."""
    scale = torch.exp2(torch.randint(-8, 8, (*shape[:-1], 1)).float())
    return (torch.randn(*shape) * scale).to(dtype)


def call(backend: Backend, op: str, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return getattr(backend.ops, op)(x, **options)


def check(backend: Backend, op: str, x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Ours equals the reference, of an x and of scales on the CPU; returned is ours, there."""
    expected = getattr(reference, op)(x, **options)
    moved = {n: v.to(backend.device) if isinstance(v, Tensor) else v for n, v in options.items()}
    ours = [result.cpu() for result in call(backend, op, x.to(backend.device), **moved)]
    names = ("out", "scale", "zero_point")
    for name, got, wanted in zip(names, ours, expected, strict=False):
        assert_bit_equal(got, wanted, name)
    assert ours[0].dtype == STORED[op]
    return tuple(ours)


# ------------------------------------------------------------------------------- shapes and types


@pytest.mark.parametrize("width", WIDTHS)
@by_block
@by_dtype
@by_op
def test_widths(backend: Backend, op: str, dtype: torch.dtype, block: str, width: int) -> None:
    check(backend, op, random(3, width, dtype=dtype), block=BLOCKS[block])


@pytest.mark.parametrize("rows", [0, 1, 3, 129])
@by_block
@by_op
def test_row_counts(backend: Backend, op: str, block: str, rows: int) -> None:
    check(backend, op, random(rows, 130), block=BLOCKS[block])


@pytest.mark.parametrize("width", WIDTHS)
@by_dtype
def test_widths_asymmetric(backend: Backend, dtype: torch.dtype, width: int) -> None:
    check(backend, ASYMMETRIC, random(3, width, dtype=dtype) + 1)


@pytest.mark.parametrize("shape", [(33, 1100), (129, 129)])
@pytest.mark.parametrize("block", [(32, 1024), (64, -1), (-1, 100), (1, 1), (200, 200)])
@by_op
def test_any_block(
    backend: Backend, op: str, block: tuple[int, int], shape: tuple[int, int]
) -> None:
    if shape[0] * shape[1] > 2**14 and block == (1, 1):
        shape = (shape[0], 40)
    check(backend, op, random(*shape), block=block)


@pytest.mark.parametrize("block", LARGE)
@by_dtype
@by_any_op
def test_blocks_beyond_a_program(backend: Backend, op: str, dtype: torch.dtype, block: str) -> None:
    x = random(*LARGE[block], dtype=dtype)
    check(backend, op, x, **({} if op == ASYMMETRIC else {"block": BLOCKS[block]}))


@pytest.mark.parametrize(
    ("shape", "rows"), [((20,), 1), ((3, 20), 3), ((2, 3, 20), 6), ((2, 1, 3, 2, 20), 12)]
)
@by_any_op
def test_any_rank(backend: Backend, op: str, shape: tuple[int, ...], rows: int) -> None:
    out, *per_token = check(backend, op, random(*shape))
    assert out.shape == shape and all(value.shape == (rows, 1) for value in per_token)


def test_scales_are_per_token_unless_asked(backend: Backend) -> None:
    x = random(3, 20).to(backend.device)
    for op in SYMMETRIC:
        for ours, wanted in zip(
            call(backend, op, x), call(backend, op, x, block=(1, -1)), strict=True
        ):
            assert_bit_equal(ours, wanted)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0), (0, 0)])
@by_any_op
def test_nothing_to_quantize(backend: Backend, op: str, shape: tuple[int, ...]) -> None:
    """R24: a tensor, and a token, has its scale even then."""
    out, scale, *_ = check(backend, op, torch.empty(shape))
    assert out.shape == shape and scale.shape == (math.prod(shape[:-1]), 1)
    assert (scale == 1.0).all()
    if op in SYMMETRIC:
        _, scale = check(backend, op, torch.empty(shape), block=(-1, -1))
        assert scale.tolist() == [[1.0]]
        given = torch.tensor([[3.0]])
        _, scale = check(backend, op, torch.empty(shape), block=(-1, -1), scale=given)
        assert scale.tolist() == [[3.0]]


@pytest.mark.parametrize("block", [(1, -1), (1, 16), (-1, -1)])
@by_op
def test_codes_stand_for_x(backend: Backend, op: str, block: tuple[int, int]) -> None:
    """Within half a step of int8, and within half a step of e4m3's 4 bits, or of its smallest."""
    x = torch.randn(16, 64)
    out, scale = (r.cpu() for r in call(backend, op, x.to(backend.device), block=block))
    scale = scale.double().repeat_interleave(64 // scale.shape[1], 1)
    error = (out.double() * scale - x.double()).abs()
    step = scale
    if op == "quantize_fp8":
        step = torch.maximum(x.double().abs() * 2.0**-3, scale * 2.0**-9)
    assert (error <= 0.501 * step).all()


# ------------------------------------------------------------------------------------ given scales


@by_block
@by_dtype
@by_op
def test_given_scales(backend: Backend, op: str, dtype: torch.dtype, block: str) -> None:
    """Of which some are too small: what is beyond the limit saturates."""
    x = random(7, 260, dtype=dtype)
    _, own = getattr(reference, op)(x, block=BLOCKS[block])
    given = own * (torch.rand_like(own) + 0.3)
    given[0, 0] = own[0, 0] * 0.5
    out, scale = check(backend, op, x, block=BLOCKS[block], scale=given)
    assert_bit_equal(scale, given)
    assert out.float().abs().max() == LIMITS[op]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@by_op
def test_given_scale_of_a_single_block(backend: Backend, op: str, shape: tuple[int, ...]) -> None:
    _, scale = check(backend, op, random(3, 5000), block=(-1, -1), scale=torch.full(shape, 0.01))
    assert scale.shape == (1, 1)


@by_op
def test_given_scales_through_any_strides(backend: Backend, op: str) -> None:
    x = random(6, 260).to(backend.device)
    scale = torch.rand(3, 6, device=backend.device).t()
    spread = torch.rand(6, 6, device=backend.device)[:, ::2].copy_(scale)
    expected = call(backend, op, x, block=(1, 128), scale=scale.contiguous())
    for given in (scale, spread):
        ours = call(backend, op, x, block=(1, 128), scale=given)
        for got, wanted in zip(ours, expected, strict=True):
            assert_bit_equal(got, wanted)
    one = torch.full((1, 1), 0.1, device=backend.device)
    grouped = call(backend, op, x, block=(1, 128), scale=one.expand(6, 3))
    assert_bit_equal(grouped[0], call(backend, op, x, block=(-1, -1), scale=one)[0])


@pytest.mark.parametrize("kind", ["common", "wide", "last_mantissas", "unusual"])
@by_op
def test_quotients_are_rounded_like_ieee_division(backend: Backend, op: str, kind: str) -> None:
    """Elements within 4 ulp of what lies between two codes."""
    scale = {
        "common": torch.cat([torch.tensor(HARD_SCALES), torch.rand(12) * 0.02 + 0.01]),
        "wide": torch.exp2(torch.rand(16) * 240 - 120),
        "last_mantissas": (torch.randint(0x7FFF00, 0x800000, (16,)) | 0x3C000000)
        .int()
        .view(torch.float32),
        "unusual": torch.tensor(UNUSUAL_SCALES),
    }[kind]
    if op == "quantize_int8":
        middles = torch.arange(-128, 128) + 0.5
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (codes[1:] + codes[:-1]) / 2
    exact = (scale.double()[:, None] * middles.double()).float()
    near = exact.view(torch.int32)[:, :, None] + torch.arange(-4, 5)
    x = near.int().view(torch.float32).flatten(1)
    x = torch.where(x.isfinite(), x, 1.0)
    check(backend, op, torch.cat([x, -x], 1), scale=scale[:, None])


# -------------------------------------------------------------------------------- awkward values


@by_op
@by_dtype
def test_awkward_values(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """R34: rows of zeros, 449, 480, 1e30, denormals; under their own scales and under 1."""
    tiny = torch.finfo(dtype).smallest_normal
    rows = [
        [0.0, -0.0, 0.0, 0.0],
        [449.0, -449.0, 448.0, 1.0],
        [480.0, 464.0, -480.0, 0.1],
        [1e30, -1e30, 1e-30, 1.0],
        [tiny / 2, -tiny / 4, tiny, 0.0],
        [1e-45, 3e-45, -1e-44, 0.0],
        [torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0, 0.0],
    ]
    if dtype == torch.float16:
        del rows[3]
    x = torch.tensor(rows, dtype=torch.float64).to(dtype)
    out, scale = check(backend, op, x)
    assert scale.isfinite().all() and scale[0] == 1.0
    assert out[0].float().tolist() == [0.0, 0.0, 0.0, 0.0]
    out, _ = check(backend, op, x, scale=torch.tensor([[1.0]]).expand(len(rows), 1))
    assert out[1, :2].float().tolist() == [LIMITS[op], -LIMITS[op]]
    assert out[-1, :2].float().tolist() == [LIMITS[op], -LIMITS[op]]
    check(backend, op, x, block=(-1, -1))
    check(backend, op, x, block=(2, 3))


def test_zeros_keep_their_sign_in_fp8(backend: Backend) -> None:
    x = torch.tensor([[0.0, -0.0, 3.0, -1e-9], [0.0, -0.0, 0.0, 0.0]])
    out, _ = check(backend, "quantize_fp8", x)
    assert out.view(torch.uint8)[:, :2].tolist() == [[0, 0x80], [0, 0x80]]
    assert out.view(torch.uint8)[0, 3] == 0x80


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@by_dtype
@by_any_op
def test_nan_and_infinity_stay_visible(
    backend: Backend, op: str, dtype: torch.dtype, bad: float
) -> None:
    """No element of the token stands for a finite number; other tokens are as they would be."""
    x = random(4, 100, dtype=dtype)
    clean = x.clone()
    x[1, 7] = bad
    x[2, 99] = torch.copysign(torch.tensor(bad), torch.tensor(-1.0)).to(dtype)
    ours, wanted = check(backend, op, x), check(backend, op, clean)
    for got, expected in zip(ours, wanted, strict=True):
        assert_bit_equal(got[0], expected[0])
        assert_bit_equal(got[3], expected[3])
    out, scale, *zero_point = (r.float() for r in ours)
    value = (out - zero_point[0] if zero_point else out) * scale
    assert not value[1:3].isfinite().any()
    if op == "quantize_fp8" and math.isnan(bad):
        assert (ours[0][1:3].view(torch.uint8) == 0x7F).all()
    if op == "quantize_int8":
        assert not ours[0][1:3].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block", ["tensor", "token"])
@by_any_op
def test_nan_in_a_block_beyond_a_program(backend: Backend, op: str, block: str, bad: float) -> None:
    """It is found by a launch before, wherever it is."""
    x = random(*LARGE[block])
    x[1, -1] = bad
    _, scale, *_ = check(backend, op, x, **({} if op == ASYMMETRIC else {"block": BLOCKS[block]}))
    assert not scale[min(1, len(scale) - 1)].isfinite()


@by_op
def test_nan_under_a_given_scale(backend: Backend, op: str) -> None:
    """It is one code among others: NaN in fp8, 0 in int8."""
    x = torch.tensor([[1.0, math.nan, -math.nan, math.inf, -math.inf, -2.0]])
    out, _ = check(backend, op, x, scale=torch.tensor(1.0))
    limit = LIMITS[op]
    expected = torch.tensor([[1.0, math.nan, math.nan, limit, -limit, -2.0]])
    if op == "quantize_int8":
        expected = expected.nan_to_num(nan=0.0)
    assert torch.equal(out.float().nan_to_num(nan=999.0), expected.nan_to_num(nan=999.0))


def test_zero_is_exact_in_asymmetric_codes(backend: Backend) -> None:
    x = random(64, 100) + torch.randn(64, 1).bfloat16() * 10
    x[:, 3], x[:, 4] = 0.0, -0.0
    out, _, zero_point = check(backend, ASYMMETRIC, x)
    assert torch.equal(out[:, 3:5].int(), zero_point.expand(-1, 2))


def test_ranges_of_asymmetric_codes(backend: Backend) -> None:
    """Rows of one sign, constant ones, of zeros, and one whose range is beyond float32."""
    x = torch.stack(
        [
            torch.rand(50) + 1,
            -torch.rand(50) - 1,
            torch.full((50,), 5.0),
            torch.full((50,), -5.0),
            torch.zeros(50),
            torch.linspace(-1, 1, 50) * 3.4e38,
            torch.linspace(-1e-44, 2e-44, 50),
        ]
    )
    out, scale, zero_point = check(backend, ASYMMETRIC, x)
    assert zero_point.flatten()[:5].tolist() == [-128, 127, -128, 127, -128]
    assert scale.isfinite().all() and scale[4] == 1.0
    value = (out.double() - zero_point) * scale.double()
    assert ((value - x.double()).abs() <= 0.51 * scale.double()).all()


# ---------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("layout", STRIDED)
@by_dtype
@by_any_op
def test_strided_input_equals_contiguous(
    backend: Backend, op: str, dtype: torch.dtype, layout: str
) -> None:
    x = random(3, 4, 66, dtype=dtype).to(backend.device)
    blocks = [{}] if op == ASYMMETRIC else [{"block": b} for b in ((1, -1), (5, 16), (-1, -1))]
    for options in blocks:
        ours = call(backend, op, STRIDED[layout](x), **options)
        for got, wanted in zip(ours, call(backend, op, x, **options), strict=True):
            assert_bit_equal(got, wanted)


@by_any_op
def test_dimensions_that_do_not_merge(backend: Backend, op: str) -> None:
    """Rows are numbered in the order of the dimensions, whatever the strides."""
    x = random(2, 3, 2, 5, 24).to(backend.device)
    permuted = x.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    blocks = [{}] if op == ASYMMETRIC else [{"block": b} for b in ((1, 8), (7, 16), (-1, -1))]
    for options in blocks:
        out = torch.empty(5, 2, 3, 2, 24, dtype=STORED[op], device=backend.device)
        ours = call(backend, op, permuted, **options, out=out.permute(1, 2, 3, 0, 4))
        for got, wanted in zip(ours, call(backend, op, x, **options), strict=True):
            assert_bit_equal(got.contiguous(), wanted)


@pytest.mark.parametrize("begin", [0, 1, 33, 64])
@by_dtype
@by_any_op
def test_column_slice_of_a_fused_projection(
    backend: Backend, op: str, dtype: torch.dtype, begin: int
) -> None:
    """R08."""
    part = random(5, 300, dtype=dtype).to(backend.device)[:, begin : begin + 128]
    ours = call(backend, op, part)
    for got, wanted in zip(ours, call(backend, op, part.contiguous()), strict=True):
        assert_bit_equal(got, wanted)


@by_block
@by_op
def test_out_is_filled_and_nothing_else_is(backend: Backend, op: str, block: str) -> None:
    x = column_slice(misaligned(random(5, 261))).to(backend.device)
    expected = call(backend, op, x, block=BLOCKS[block])
    out, scale = (guarded(tuple(r.shape), r.dtype, backend.device) for r in expected)
    call(backend, op, x, block=BLOCKS[block], out=out.view, out_scale=scale.view)
    for receiver, wanted in zip((out, scale), expected, strict=True):
        assert_bit_equal(receiver.view, wanted)
        receiver.assert_untouched_around()


@pytest.mark.parametrize("width", [74, 33000])
def test_out_is_filled_and_nothing_else_is_asymmetric(backend: Backend, width: int) -> None:
    x = random(2, 3, width).to(backend.device)
    expected = call(backend, ASYMMETRIC, x)
    receivers = [guarded(tuple(r.shape), r.dtype, backend.device) for r in expected]
    names = ("out", "out_scale", "out_zero_point")
    call(backend, ASYMMETRIC, x, **dict(zip(names, (r.view for r in receivers), strict=True)))
    for receiver, wanted in zip(receivers, expected, strict=True):
        assert_bit_equal(receiver.view, wanted)
        receiver.assert_untouched_around()


@by_op
def test_scales_received_where_they_were_given(backend: Backend, op: str) -> None:
    x = random(5, 40).to(backend.device)
    scale = torch.rand(5, 1, device=backend.device)
    expected = call(backend, op, x, scale=scale.clone())
    for got, wanted in zip(
        call(backend, op, x, scale=scale, out_scale=scale), expected, strict=True
    ):
        assert_bit_equal(got, wanted)
    buffer = torch.ones(6, 1, device=backend.device)
    with pytest.raises(ValueError, match=rf"{op}: out_scale: .*overlapping"):
        call(backend, op, x, scale=buffer[:5], out_scale=buffer[1:])


@by_op
def test_scales_along_m_as_deepgemm_reads_them(backend: Backend, op: str) -> None:
    """Scales of (1, 128) in a transposed view, of rows padded to a multiple of 4."""
    x = random(7, 300).to(backend.device)
    padded = torch.full((3, 8), 99.0, device=backend.device)
    out, scale = call(backend, op, x, block=(1, 128), out_scale=padded.t()[:7])
    expected = call(backend, op, x, block=(1, 128))
    assert scale.stride() == (1, 8)
    assert_bit_equal(out, expected[0])
    assert_bit_equal(padded[:, :7].t().contiguous(), expected[1])
    assert (padded[:, 7] == 99.0).all()


@by_any_op
def test_overloads_are_equal(backend: Backend, op: str) -> None:
    x = random(4, 74).to(backend.device)
    packet = getattr(backend.library, op)
    expected = packet.default(x)
    for got, wanted in zip(call(backend, op, x), expected, strict=True):
        assert_bit_equal(got, wanted)
    names = ("out", "out_scale", "out_zero_point")
    receivers = [torch.empty_like(result) for result in expected]
    assert packet.out(x, **dict(zip(names, receivers, strict=False))) is None
    for got, wanted in zip(receivers, expected, strict=True):
        assert_bit_equal(got, wanted)


@by_any_op
@by_dtype
def test_rows_do_not_see_each_other(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """R31."""
    x = random(256, 94, dtype=dtype).to(backend.device)
    whole = call(backend, op, x)
    for begin, end in ((0, 1), (100, 101), (255, 256), (0, 2), (0, 17), (3, 67)):
        for got, wanted in zip(call(backend, op, x[begin:end]), whole, strict=True):
            assert_bit_equal(got, wanted[begin:end])


# ------------------------------------------------------------------------------------------ sizes


@by_any_op
def test_row_offset_beyond_32_bits(backend: Backend, op: str) -> None:
    """R06."""
    near = random(3, 64).to(backend.device)
    expected = call(backend, op, near)
    out = far_apart(torch.zeros_like(expected[0]), 2**30 + 8)
    ours = call(backend, op, far_apart(near, 2**30 + 8), out=out)
    for got, wanted in zip(ours, expected, strict=True):
        assert_bit_equal(got.clone(), wanted)


@pytest.mark.parametrize("block", [(1, -1), (-1, -1)])
def test_more_than_2_31_elements(backend: Backend, block: tuple[int, int]) -> None:
    """R07; x is one row in memory, and tests/gpu has the same on the device with all of it."""
    if backend.interpreted:
        pytest.skip("too many elements for Triton's interpreter")
    row = torch.randn(65536, device=backend.device).bfloat16()
    out, scale = call(backend, "quantize_int8", row.expand(2**15 + 1, 65536), block=block)
    wanted, own = call(backend, "quantize_int8", row)
    assert (scale == own).all()
    for i in (0, 2**15 - 1, 2**15):
        assert_bit_equal(out[i], wanted)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("block", [(0, -1), (1, 0), (-2, 128), (1, -128), (1,), (1, 2, 3), ()])
@by_op
def test_bad_block(backend: Backend, op: str, block: tuple[int, ...]) -> None:
    x = torch.zeros(3, 8, device=backend.device)
    for function in (getattr(backend.ops, op), getattr(backend.library, op).default):
        with pytest.raises(ValueError, match=rf"{op}: block: expected .*rows, columns.*got"):
            function(x, block=block)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1), (2, 3), (1, 1)])
@by_op
def test_given_scales_of_another_shape(backend: Backend, op: str, shape: tuple[int, ...]) -> None:
    x, scale = torch.zeros(3, 8, device=backend.device), torch.ones(shape, device=backend.device)
    with pytest.raises(ValueError, match=rf"{op}: scale: expected .*3, 2\], got"):
        call(backend, op, x, block=(1, 4), scale=scale)


@by_any_op
def test_codes_over_their_own_input(backend: Backend, op: str) -> None:
    x = torch.ones(4, 8, device=backend.device)
    with pytest.raises(ValueError, match=rf"{op}: out: .*overlapping"):
        call(backend, op, x, out=x.view(STORED[op])[:, :8])
    assert (x == 1).all()
