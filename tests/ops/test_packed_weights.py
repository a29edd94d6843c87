"""Packed weights: the layout element by element, round trips, quantization, refusals."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.ops import packed_weights
from fastinfer.ops.packed_weights import (
    PackedWeight,
    pack_codes,
    packed_shape,
    quantize_weight,
    row_blocks,
    unpack_codes,
)
from tests.helpers import assert_bit_equal, column_slice, dtype_name

BITS = [2, 3, 4, 8]
SIZES = [(n, k) for n in (1, 40, 64, 100) for k in (16, 100, 128, 2880)]
SCALE_DTYPES = [torch.float16, torch.bfloat16, torch.float32]

by_bits = pytest.mark.parametrize("bits", BITS)
by_size = pytest.mark.parametrize(("n", "k"), SIZES)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


def random_codes(n: int, k: int, bits: int, device: str = "cpu") -> Tensor:
    return torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=device)


def random_weight(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    device: str = "cpu",
    *,
    zeros: bool = True,
    perm: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedWeight, Tensor]:
    """A weight, and its codes in packed order."""
    codes = random_codes(n, k, bits, device)
    groups = -(-k // group_size)
    scales = torch.rand(groups, n, device=device).to(dtype)
    zero = torch.randint(0, 2**bits, (groups, n), device=device).to(dtype) if zeros else None
    order = torch.randperm(k).to(device, torch.int32) if perm else None
    packed = pack_codes(codes, bits)
    return PackedWeight(packed, scales, zero, order, bits, group_size, (n, k)), codes


# ------------------------------------------------------------------------------------- the layout


def fields_of_lanes() -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """row16, step, r, h, lane, and the n and k inside the tile that they stand for."""
    for row16 in range(4):
        for step in range(4):
            for r in range(4):
                for h in range(2):
                    for lane in range(32):
                        n = 16 * row16 + 8 * (r % 2) + lane // 4
                        k = 16 * step + 8 * (r // 2) + 2 * (lane % 4) + h
                        yield row16, step, r, h, lane, n, k


def code_in(words: list[int], bits: int, row16: int, step: int, r: int, h: int, lane: int) -> int:
    """One code of a tile, from the table of the layout."""

    def field(word: int, first: int, width: int) -> int:
        load, part = divmod(word, 4)
        value = words[32 * 4 * load + 4 * lane + part] & 0xFFFFFFFF
        return (value >> first) & (2**width - 1)

    if bits == 4:
        return field(4 * row16 + step, 4 * r + 16 * h, 4)
    if bits == 8:
        return field(2 * (4 * row16 + step) + r // 2, 8 * (r % 2) + 16 * h, 8)
    if bits == 2:
        return field(2 * row16 + step // 2, 2 * (r + 4 * (step % 2)) + 16 * h, 2)
    if step < 3:
        return field(3 * row16 + step, 3 * r + 16 * h, 3)
    if r < 3:
        return field(3 * row16 + r, 12 + 16 * h, 3)
    return sum(field(3 * row16 + b, 15 + 16 * h, 1) << b for b in range(3))


@by_bits
@pytest.mark.parametrize(("n", "k"), [(1, 16), (40, 100), (64, 128), (100, 130), (3, 300)])
def test_every_code_stands_in_its_place(device: str, bits: int, n: int, k: int) -> None:
    codes = random_codes(n, k, bits, device)
    qweight = pack_codes(codes, bits)
    assert qweight.shape == (-(-n // 64), -(-k // 64), bits * 128) == packed_shape(n, k, bits)
    assert qweight.dtype == torch.int32 and qweight.is_contiguous()
    expected = codes.tolist()
    for tile_n, row in enumerate(qweight.tolist()):
        for tile_k, words in enumerate(row):
            for *place, in_n, in_k in fields_of_lanes():
                at_n, at_k = 64 * tile_n + in_n, 64 * tile_k + in_k
                inside = at_n < n and at_k < k
                wanted = expected[at_n][at_k] if inside else 0
                assert code_in(words, bits, *place) == wanted, (at_n, at_k)


@by_bits
@by_size
def test_round_trip(device: str, bits: int, n: int, k: int) -> None:
    codes = random_codes(n, k, bits, device)
    qweight = pack_codes(codes, bits)
    assert_bit_equal(unpack_codes(qweight, bits, n, k), codes)
    whole = unpack_codes(qweight, bits, 64 * qweight.shape[0], 64 * qweight.shape[1])
    assert not whole[n:].any() and not whole[:, k:].any()


@by_bits
def test_any_strides(bits: int) -> None:
    codes = random_codes(70, 90, bits)
    expected = pack_codes(codes, bits)
    assert_bit_equal(pack_codes(codes.t().contiguous().t(), bits), expected)
    assert_bit_equal(pack_codes(column_slice(codes), bits), expected)
    wide = torch.stack([expected, expected], 3)[..., 0]
    assert_bit_equal(unpack_codes(wide, bits, 70, 90), codes)


@by_bits
def test_block_by_block(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done in one block and in several is the same, and memory goes with the block."""
    matrix = torch.randn(200, 100)
    codes = random_codes(200, 100, bits)
    whole = quantize_weight(matrix, bits, 32)
    packed, dequantized = pack_codes(codes, bits), whole.dequantize()
    monkeypatch.setattr(packed_weights, "_BLOCK_ELEMENTS", 64 * 100)
    assert list(row_blocks(200, 100)) == [(0, 64), (64, 128), (128, 192), (192, 200)]
    assert_bit_equal(pack_codes(codes, bits), packed)
    assert_bit_equal(unpack_codes(packed, bits, 200, 100), codes)
    parts = quantize_weight(matrix, bits, 32)
    assert_bit_equal(parts.qweight, whole.qweight)
    assert_bit_equal(parts.scales, whole.scales)
    assert_bit_equal(parts.dequantize(), dequantized)


def test_blocks_stay_small() -> None:
    for n, k in ((152_064, 8192), (8192, 152_064), (1, 5_000_000), (100_000, 1)):
        blocks = list(row_blocks(n, k))
        assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])]
        assert blocks[-1][1] == n
        for first, last in blocks:
            assert first % 64 == 0
            assert (last - first) * k <= 4 * 2**20 or last - first <= 64


# ----------------------------------------------------------------------------------- dequantizing


@by_bits
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("perm", [False, True], ids=["ordered", "perm"])
@pytest.mark.parametrize(("n", "k", "group_size"), [(3, 40, 16), (40, 100, 100), (70, 80, 32)])
def test_dequantize(
    device: str, bits: int, zeros: bool, perm: bool, n: int, k: int, group_size: int
) -> None:
    """R09: with a partial last group, element by element."""
    weight, codes = random_weight(n, k, bits, group_size, device, zeros=zeros, perm=perm)
    actual = weight.dequantize()
    assert actual.dtype == torch.float32
    scales, zero = weight.scales.tolist(), None if weight.zeros is None else weight.zeros.tolist()
    expected = torch.empty(n, k)
    original = torch.empty(n, k, dtype=torch.uint8)
    for at in range(k):
        column = at if weight.perm is None else int(weight.perm[at])
        group = at // group_size
        for row in range(n):
            offset = 2 ** (bits - 1) if zero is None else zero[group][row]
            expected[row, column] = scales[group][row] * (int(codes[row, at]) - offset)
            original[row, column] = codes[row, at]
    assert_bit_equal(actual.cpu(), expected)
    assert_bit_equal(weight.codes().cpu(), original)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("dtype", [*SCALE_DTYPES, torch.float64], ids=dtype_name)
def test_dequantize_rounds_once(scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """R15: bf16 errs by its own rounding of what fp32 gives, and by nothing else."""
    weight, _ = random_weight(20, 50, 8, 16, dtype=scale_dtype)
    exact = weight.dequantize(torch.float64)
    expected = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert_bit_equal(weight.dequantize(dtype), expected)


def test_products_with_permuted_columns() -> None:
    """What `perm` means to a GEMM: packed columns multiply the permuted input."""
    weight, _ = random_weight(10, 64, 4, 16, perm=True)
    assert weight.perm is not None
    plain = PackedWeight(weight.qweight, weight.scales, weight.zeros, None, 4, 16, (10, 64))
    x = torch.randn(5, 64, dtype=torch.float64)
    ordered = x @ weight.dequantize(torch.float64).t()
    permuted = x[:, weight.perm.long()] @ plain.dequantize(torch.float64).t()
    torch.testing.assert_close(ordered, permuted)


def test_to_device(device: str) -> None:
    weight, _ = random_weight(10, 64, 4, 16, perm=True)
    moved = weight.to(device)
    for name in ("qweight", "scales", "zeros", "perm"):
        assert getattr(moved, name).device.type == torch.device(device).type
    assert_bit_equal(moved.dequantize().cpu(), weight.dequantize())
    symmetric, _ = random_weight(10, 64, 4, 16, zeros=False)
    assert symmetric.to(device).zeros is None and symmetric.to(device).perm is None


# ------------------------------------------------------------------------------------ quantization


def is_tie(quotient: float) -> bool:
    return abs(quotient - math.floor(quotient) - 0.5) < 1e-5


@by_bits
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("k", "group_size"), [(40, 16), (100, 100), (48, -1), (70, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_quantize_element_by_element(
    device: str, bits: int, symmetric: bool, k: int, group_size: int, dtype: torch.dtype
) -> None:
    """Where a quotient is next to a tie, its rounding decides: one step either way is right."""
    matrix = (torch.randint(-100, 100, (6, k)) / 64).to(dtype).to(device)
    weight = quantize_weight(matrix, bits, group_size, symmetric=symmetric)
    size = k if group_size == -1 else group_size
    assert weight.group_size == size and weight.shape == (6, k) and weight.perm is None
    assert weight.scales.dtype == dtype and (weight.zeros is None) == symmetric
    codes = unpack_codes(weight.qweight, bits, 6, k).tolist()
    largest = 2**bits - 1
    for n, row in enumerate(matrix.tolist()):
        for begin in range(0, k, size):
            group = row[begin : begin + size]
            low, high = min(*group, 0.0), max(*group, 0.0)
            exact = 2 * max(high, -low) / largest if symmetric else (high - low) / largest
            scale = float(weight.scales[begin // size, n])
            assert abs(scale - exact) <= torch.finfo(dtype).eps * exact
            zero = 2 ** (bits - 1)
            if weight.zeros is not None:
                zero = int(weight.zeros[begin // size, n])
                wanted = min(max(round(-low / scale), 0), largest)
                assert abs(zero - wanted) <= is_tie(low / scale)
            for value, code in zip(group, codes[n][begin : begin + size], strict=True):
                wanted = min(max(round(value / scale) + zero, 0), largest)
                assert abs(code - wanted) <= is_tie(value / scale)


@by_bits
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("k", "group_size"), [(171, 32), (85, 16), (128, 64), (100, 100)])
def test_no_weight_errs_by_more_than_half_a_step(
    bits: int, symmetric: bool, scale_dtype: torch.dtype, k: int, group_size: int
) -> None:
    """Also at both ends; beyond half a step lies only what rounding scale and zero point costs."""
    matrix = torch.randn(50, k) * torch.rand(50, 1).exp()
    weight = quantize_weight(matrix, bits, group_size, symmetric=symmetric, scale_dtype=scale_dtype)
    step = weight.scales.t().double()[:, weight.group_index()]
    error = (weight.dequantize(torch.float64) - matrix.double()).abs()
    lost = 2**bits * torch.finfo(scale_dtype).eps / 2
    # A rounded zero point may shift the range by half a step.
    assert (error <= step * ((0.5 if symmetric else 1.0) + lost) * (1 + 1e-5)).all()


@by_bits
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=dtype_name)
def test_zeros_stay_zeros(bits: int, symmetric: bool, scale_dtype: torch.dtype) -> None:
    matrix = torch.randn(5, 64)
    matrix[1] = 0
    matrix[2, 16:32] = 0
    matrix[3, ::3] = 0
    matrix[4] = 1e-30  # of which fp16 has no scale
    weight = quantize_weight(matrix, bits, 16, symmetric=symmetric, scale_dtype=scale_dtype)
    assert weight.scales.isfinite().all() and (weight.scales > 0).all()
    assert (weight.dequantize()[matrix == 0] == 0).all()
    if scale_dtype == torch.float16:
        assert (weight.dequantize()[4] == 0).all()


@by_bits
@pytest.mark.parametrize("sign", [-1, 1])
def test_weights_of_one_sign(bits: int, sign: int) -> None:
    """0 belongs to the range, so that zero points are codes."""
    matrix = sign * (torch.rand(4, 32) + 3)
    weight = quantize_weight(matrix, bits, 16)
    assert weight.zeros is not None
    assert (weight.zeros == (0 if sign > 0 else 2**bits - 1)).all()
    assert (weight.dequantize() - matrix).abs().max() <= 4 / (2**bits - 1) / 2 * (1 + 1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
def test_enormous_weights(symmetric: bool) -> None:
    matrix = torch.tensor([[3e38, -3e38] * 8])
    weight = quantize_weight(matrix, 8, 16, symmetric=symmetric)
    torch.testing.assert_close(weight.dequantize(), matrix, rtol=0.01, atol=0)
    with pytest.raises(
        ValueError, match=r"scale_dtype: .* weights up to 3e\+38, got torch.float16"
    ):
        quantize_weight(matrix, 8, 16, symmetric=symmetric, scale_dtype=torch.float16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_what_is_not_finite_is_refused(
    value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "_BLOCK_ELEMENTS", 64 * 32)
    matrix = torch.randn(100, 32).to(dtype)
    matrix[70, 5] = value
    with pytest.raises(ValueError, match=rf"weight: expected finite .* got {value} at \[70, 5\]"):
        quantize_weight(matrix, 4, 16)


def test_wider_and_narrower_weights() -> None:
    matrix = torch.randn(10, 32, dtype=torch.float64)
    assert quantize_weight(matrix, 4, 16).scales.dtype == torch.float32
    assert quantize_weight(matrix.half(), 4, 16).scales.dtype == torch.float16
    expected = quantize_weight(matrix, 4, 16, scale_dtype=torch.bfloat16)
    strided = quantize_weight(column_slice(matrix), 4, 16, scale_dtype=torch.bfloat16)
    assert_bit_equal(strided.qweight, expected.qweight)
    by_columns = quantize_weight(matrix.float().t().contiguous().t(), 4, 16)
    assert_bit_equal(by_columns.qweight, quantize_weight(matrix.float(), 4, 16).qweight)
    with pytest.raises(NotImplementedError, match="weight requires grad"):
        quantize_weight(matrix.requires_grad_(), 4, 16)


# ------------------------------------------------------------------------------------- refusals


def test_bad_codes_are_refused() -> None:
    codes = random_codes(10, 32, 4)
    codes[9, 31] = 15
    for args, message in (
        ((codes, 5), r"bits: expected one of \(2, 3, 4, 8\), got 5"),
        ((codes, 3), "codes: expected less than 8, got 15"),
        ((codes.int(), 4), "codes: expected uint8, got torch.int32"),
        ((codes[0], 4), r"codes: expected shape \[N, K\], got \(32,\)"),
        ((codes[:0], 4), "n, k: expected at least 1, got 0 and 32"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_codes(*args)
    qweight = pack_codes(codes, 4)
    with pytest.raises(
        ValueError, match=r"qweight: expected shape \(1, 2, 512\), got \(1, 1, 512\)"
    ):
        unpack_codes(qweight, 4, 10, 65)
    with pytest.raises(ValueError, match=r"qweight: expected torch\.int32, got torch\.int64"):
        unpack_codes(qweight.long(), 4, 10, 32)


def test_bad_weights_are_refused() -> None:
    """R10: when they are made, not when they are first used."""
    good, _ = random_weight(10, 40, 4, 16, perm=True)
    assert good.perm is not None and good.zeros is not None
    repeated = good.perm.clone()
    repeated[0] = repeated[1]
    arguments: dict[str, Any] = {
        name: getattr(good, name)
        for name in ("qweight", "scales", "zeros", "perm", "bits", "group_size", "shape")
    }
    for change, message in (
        ({"bits": 3}, "qweight: expected shape"),
        ({"shape": (10, 90)}, "qweight: expected shape"),
        ({"qweight": good.qweight.float()}, "qweight: expected torch.int32, got torch.float32"),
        ({"qweight": torch.zeros(1, 1, 1024, dtype=torch.int32)[..., ::2]}, "contiguous"),
        ({"group_size": 48}, "group_size: expected one of"),
        ({"group_size": -1}, "group_size: expected 40 for the whole, got -1"),
        ({"scales": good.scales[:2]}, r"scales: expected shape \(3, 10\), got \(2, 10\)"),
        ({"scales": good.scales.double()}, "scales: expected torch.float16 or"),
        ({"zeros": good.zeros.half()}, "zeros: expected torch.float32, got torch.float16"),
        ({"zeros": good.zeros.t()}, "zeros: expected shape"),
        ({"perm": good.perm.long()}, "perm: expected torch.int32, got torch.int64"),
        ({"perm": good.perm[:39]}, "perm: expected shape"),
        ({"perm": repeated}, "perm: expected each of 0 .. 39 once"),
        ({"perm": good.perm.to("meta")}, "perm: expected the same device"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedWeight(**{**arguments, **change})
    for first, last in ((1, 5), (0, 11), (-64, 5), (0, 0)):
        with pytest.raises(ValueError, match="first, last: expected"):
            good.codes(first, last)


def test_bad_quantization_is_refused() -> None:
    matrix = torch.randn(10, 40)
    for args, options, message in (
        ((matrix.int(), 4, 16), {}, "weight: expected a float tensor"),
        ((matrix[0], 4, 16), {}, r"weight: expected a float tensor \[N, K\]"),
        ((matrix, 1, 16), {}, "bits: expected one of"),
        ((matrix, 4, 20), {}, "group_size: expected one of"),
        ((matrix, 4, 16), {"scale_dtype": torch.float64}, "scale_dtype: expected one of"),
        ((matrix[:0], 4, 16), {}, "n, k: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_weight(*args, **options)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("magnitude", [1.0, 2e-2, 2e-4, 2e-5])
def test_no_weight_lies_beyond_the_levels(
    magnitude: float, dtype: torch.dtype, symmetric: bool
) -> None:
    """A scale rounded down would leave the greatest weights behind, of 8 bits by many levels."""
    matrix = torch.randn(16, 128) * magnitude
    weight = quantize_weight(matrix, 8, 128, symmetric=symmetric, scale_dtype=dtype)
    steps = (weight.dequantize() - matrix).abs() / weight.scales.float().T
    assert steps.max() <= (1.0 if symmetric else 0.51) * 1.001


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["scales", "zeros", "perm"])
def test_parts_with_strides_are_refused_when_made(name: str, device: str) -> None:
    """R10: not by the first product."""
    whole = quantize_weight(torch.randn(256, 256), 4, 128).to(device)
    assert whole.zeros is not None
    parts = {
        "scales": whole.scales[:, 128:],
        "zeros": whole.zeros[:, 128:],
        "perm": torch.arange(512, dtype=torch.int32, device=device)[::2],
    }
    dense = {n: x if n == name else x.contiguous() for n, x in parts.items()}
    with pytest.raises(ValueError, match=f"{name}: expected a contiguous tensor"):
        PackedWeight(whole.qweight[2:], **dense, bits=4, group_size=128, shape=(128, 256))
