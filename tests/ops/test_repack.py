"""Checkpoint formats: each written value by value, read exactly, and written back bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.ops import packed_weights
from fastinfer.ops.packed_weights import PackedWeight, pack_codes, quantize_weight, unpack_codes
from fastinfer.ops.repack import (
    AwqTensors,
    repack_awq,
    repack_awq_gemv,
    repack_compressed_tensors,
    repack_gptq,
    to_awq,
    to_awq_gemv,
    to_compressed_tensors,
    to_gptq,
)
from tests.helpers import assert_bit_equal, column_slice, dtype_name
from tests.reference.checkpoints import (
    Matrix,
    awq_file,
    compressed_file,
    gemv_file,
    gptq_file,
    int32,
    random_matrix,
    signed,
)

by_bits = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def check_weight(weight: PackedWeight, matrix: Matrix, *, symmetric: bool = False) -> None:
    n, k = matrix.shape
    assert weight.shape == (n, k) and weight.bits == matrix.bits
    assert (weight.zeros is None) == symmetric
    assert weight.scales.dtype == matrix.scales.dtype
    assert_bit_equal(weight.codes(), torch.tensor(matrix.codes, dtype=torch.uint8))
    assert_bit_equal(weight.dequantize(), matrix.values())


def check_tensors(actual: Any, expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        got = getattr(actual, name)
        assert got.is_contiguous(), name
        assert_bit_equal(got, tensor, name)


# -------------------------------------------------------------------------------------------- AWQ


@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(8, 16, 16), (40, 100, 32), (64, 128, 64), (104, 85, 16), (16, 320, 128), (40, 96, -1)],
)
def test_awq(n: int, k: int, group_size: int) -> None:
    """R14, and R09 with the partial last groups."""
    matrix = random_matrix(n, k, 4, group_size)
    file = awq_file(matrix)
    weight = repack_awq(*file, group_size=group_size)
    check_weight(weight, matrix)
    assert weight.perm is None
    check_tensors(to_awq(weight), file._asdict())


@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(1, 64, -1), (3, 136, 32), (40, 1056, 32), (100, 200, 64), (5, 2880, 128), (70, 320, -1)],
)
def test_awq_gemv(n: int, k: int, group_size: int) -> None:
    matrix = random_matrix(n, k, 4, group_size)
    file = gemv_file(matrix)
    weight = repack_awq_gemv(*file, group_size=group_size)
    check_weight(weight, matrix)
    check_tensors(to_awq_gemv(weight), file._asdict())


@pytest.mark.parametrize(("k", "group_size"), [(128, 32), (1280, 128), (192, 64), (256, -1)])
def test_awq_gemm_and_gemv_of_one_matrix(k: int, group_size: int) -> None:
    """R14."""
    matrix = random_matrix(72, k, 4, group_size)
    gemm = repack_awq(*awq_file(matrix), group_size=group_size)
    gemv = repack_awq_gemv(*gemv_file(matrix), group_size=group_size)
    assert_bit_equal(gemm.qweight, gemv.qweight)
    assert_bit_equal(gemm.scales, gemv.scales)
    assert gemm.zeros is not None and gemv.zeros is not None
    assert_bit_equal(gemm.zeros, gemv.zeros)


def test_awq_nibbles_as_recorded() -> None:
    """Columns 0 to 7 with codes 0 to 7, by hand."""
    file = AwqTensors(int32([[0x75316420]]), int32([[0]]), torch.ones(1, 8))
    weight = repack_awq(*(x.repeat(16, 1) if x is file.qweight else x for x in file), group_size=-1)
    assert weight.codes()[:, 3].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    rows = repack_awq_gemv(int32([[0x76543210] * 16]), None, torch.ones(1, 8), group_size=128)
    assert rows.codes()[0, :8].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_padding_of_awq_gemv_is_ignored() -> None:
    matrix = random_matrix(5, 128, 4, 64)
    file = gemv_file(matrix)
    file.scales[:, 2:] = float("nan")
    file.qzeros[:, 1:] = -1
    file.qzeros[:, 0] |= 0x7FFFFF00
    check_weight(repack_awq_gemv(*file, group_size=64), matrix)


@pytest.mark.parametrize("repack", [repack_awq, repack_awq_gemv])
def test_awq_without_zero_points(repack: Callable[..., PackedWeight]) -> None:
    matrix = random_matrix(16, 64, 4, 32, symmetric=True)
    file = awq_file(matrix) if repack is repack_awq else gemv_file(matrix)
    plain = repack(file.qweight, None, file.scales, group_size=32)
    check_weight(plain, matrix, symmetric=True)
    check_weight(repack(*file, group_size=32), matrix)
    back = to_awq(plain) if repack is repack_awq else to_awq_gemv(plain)
    check_tensors(back, file._asdict())


def test_what_awq_cannot_hold_is_refused() -> None:
    matrix = torch.randn(12, 100)
    weight = quantize_weight(matrix, 4, 16)
    with pytest.raises(ValueError, match="weight: expected a multiple of 8 rows, got 12"):
        to_awq(weight)
    with pytest.raises(ValueError, match="weight: expected a multiple of 8 columns, got 100"):
        to_awq_gemv(weight)
    with pytest.raises(ValueError, match="group_size: expected 32, 64, or 128 and more, got 16"):
        to_awq_gemv(quantize_weight(matrix[:, :96], 4, 16))
    perm = torch.randperm(100).int()
    ordered = PackedWeight(weight.qweight, weight.scales, None, perm, 4, 16, (12, 100))
    assert weight.zeros is not None
    between = PackedWeight(
        weight.qweight, weight.scales, weight.zeros + 0.5, None, 4, 16, (12, 100)
    )
    for write in (to_awq, to_awq_gemv):
        with pytest.raises(ValueError, match="weight: expected 4 bits, got 3"):
            write(quantize_weight(matrix, 3, 16))
        with pytest.raises(ValueError, match="weight: expected no perm"):
            write(ordered)
    with pytest.raises(ValueError, match="expected zeros that are integers from 0 to 15"):
        to_gptq(between)


# ------------------------------------------------------------------------------------------- GPTQ


@by_bits
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True], ids=["ordered", "act_order"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(1, 16, 16), (40, 100, 32), (64, 128, 64), (100, 85, 16), (33, 96, -1)],
)
def test_gptq(bits: int, version: Any, act_order: bool, n: int, k: int, group_size: int) -> None:
    """R09, R11: with zero points 0 among them, which v1 stores as 2^bits - 1."""
    matrix = random_matrix(n, k, bits, group_size, act_order=act_order)
    matrix.zeros[0, 0] = 0
    file = gptq_file(matrix, version)
    weight = repack_gptq(
        **file, bits=bits, group_size=group_size, symmetric=False, checkpoint_format=version
    )
    check_weight(weight, matrix)
    assert (weight.perm is not None) == (act_order and matrix.groups > 1)
    check_tensors(to_gptq(weight, version), file)


@by_bits
def test_gptq_versions_of_one_matrix(bits: int) -> None:
    """R11."""
    matrix = random_matrix(70, 128, bits, 32)
    v1, v2 = (
        repack_gptq(
            **gptq_file(matrix, version), bits=bits, group_size=32, symmetric=False,
            checkpoint_format=version,
        )
        for version in ("gptq", "gptq_v2")
    )  # fmt: skip
    assert v1.zeros is not None and v2.zeros is not None
    assert_bit_equal(v1.zeros, v2.zeros)
    assert_bit_equal(v1.dequantize(), v2.dequantize())


@by_bits
@pytest.mark.parametrize("act_order", [False, True], ids=["ordered", "act_order"])
def test_symmetric_gptq(bits: int, act_order: bool) -> None:
    """R12: zero points are ignored, whatever they are, and need not be there."""
    matrix = random_matrix(40, 96, bits, 32, symmetric=True, act_order=act_order)
    expected = matrix.values()
    for qzeros in (
        gptq_file(matrix, "gptq")["qzeros"],
        gptq_file(matrix, "gptq_v2")["qzeros"],
        torch.zeros(1, 1, dtype=torch.int32),
        None,
    ):
        file = {**gptq_file(matrix, "gptq"), "qzeros": qzeros}
        weight = repack_gptq(**file, bits=bits, group_size=32, symmetric=True)
        check_weight(weight, matrix, symmetric=True)
    assert_bit_equal(weight.dequantize(), expected)
    check_tensors(to_gptq(weight), gptq_file(matrix, "gptq"))
    file = gptq_file(matrix, "gptq")
    zeros = repack_gptq(**file, bits=bits, group_size=32, symmetric=False)
    assert_bit_equal(zeros.dequantize(), expected)
    with pytest.raises(ValueError, match="qzeros: required unless symmetric, got None"):
        repack_gptq(**{**file, "qzeros": None}, bits=bits, group_size=32, symmetric=False)


def test_three_bits_straddle_words_as_recorded() -> None:
    """32 values i % 8: by hand. Value 10 begins in word 0, value 21 in word 1."""
    column = int32([[signed(0x88FAC688)], [signed(0xC688FAC6)], [signed(0xFAC688FA)]])
    weight = repack_gptq(column, None, torch.ones(1, 1), bits=3, group_size=-1, symmetric=True)
    assert weight.codes().tolist() == [[i % 8 for i in range(32)]]


@by_bits
def test_without_g_idx(bits: int) -> None:
    matrix = random_matrix(24, 96, bits, 32)
    file = gptq_file(matrix, "gptq")
    del file["g_idx"]
    check_weight(repack_gptq(**file, bits=bits, group_size=32, symmetric=False), matrix)


def test_columns_in_order_need_no_permutation() -> None:
    matrix = random_matrix(8, 80, 4, 32)
    for g_idx in (torch.arange(80).int() // 32, torch.arange(80) // 32):
        file = {**gptq_file(matrix, "gptq"), "g_idx": g_idx}
        assert repack_gptq(**file, bits=4, group_size=32, symmetric=False).perm is None


def test_act_order_sorts_columns_by_group() -> None:
    matrix = random_matrix(8, 80, 4, 32, act_order=True)
    weight = repack_gptq(**gptq_file(matrix, "gptq"), bits=4, group_size=32, symmetric=False)
    assert weight.perm is not None
    perm = weight.perm.tolist()
    assert sorted(perm) == list(range(80))
    assert [matrix.g_idx[column] for column in perm] == [i // 32 for i in range(80)]
    for begin in (0, 32, 64):  # within a group columns keep their order
        assert perm[begin : begin + 32] == sorted(perm[begin : begin + 32])
    packed = unpack_codes(weight.qweight, 4, 8, 80).numpy()
    assert (packed == matrix.codes[:, perm]).all()


def test_shards_of_act_order_are_refused() -> None:
    """R13: half of the columns have scattered groups; the other errors of g_idx with it."""
    matrix = random_matrix(8, 128, 4, 32, act_order=True)
    file = gptq_file(matrix, "gptq")
    options: dict[str, Any] = {"bits": 4, "group_size": 32, "symmetric": False}
    half = {
        "qweight": file["qweight"][:8],
        "qzeros": file["qzeros"][:2],
        "scales": file["scales"][:2],
        "g_idx": file["g_idx"][:64],
    }
    with pytest.raises(ValueError, match=r"g_idx: expected groups 0 \.\. 1 .* repack the whole"):
        repack_gptq(**half, **options)
    for g_idx in (file["g_idx"] + 1, file["g_idx"] - 1, file["g_idx"] * 0):
        with pytest.raises(ValueError, match=r"g_idx: expected groups 0 \.\. 3 with 32 columns"):
            repack_gptq(**{**file, "g_idx": g_idx}, **options)
    with pytest.raises(ValueError, match=r"g_idx: expected torch\.int32 or torch\.int64"):
        repack_gptq(**{**file, "g_idx": file["g_idx"].float()}, **options)


def test_a_split_of_sorted_columns_equals_the_whole() -> None:
    """R13: what to do instead."""
    matrix = random_matrix(8, 128, 4, 32, act_order=True)
    weight = repack_gptq(**gptq_file(matrix, "gptq"), bits=4, group_size=32, symmetric=False)
    assert weight.perm is not None and weight.zeros is not None
    x = torch.randn(3, 128, dtype=torch.float64)
    total = torch.zeros(3, 8, dtype=torch.float64)
    for tile, groups in ((0, slice(0, 2)), (1, slice(2, 4))):
        part = PackedWeight(
            weight.qweight[:, tile : tile + 1].contiguous(), weight.scales[groups],
            weight.zeros[groups], None, 4, 32, (8, 64),
        )  # fmt: skip
        columns = weight.perm[64 * tile : 64 * tile + 64].long()
        total += x[:, columns] @ part.dequantize(torch.float64).t()
    torch.testing.assert_close(total, x @ matrix.values().double().t())


# ----------------------------------------------------------------------------- compressed-tensors


@by_bits
@pytest.mark.parametrize("act_order", [False, True], ids=["ordered", "act_order"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(1, 16, 16), (40, 100, 32), (64, 128, 64), (100, 85, 16), (33, 96, -1)],
)
def test_compressed_tensors(bits: int, act_order: bool, n: int, k: int, group_size: int) -> None:
    matrix = random_matrix(n, k, bits, group_size, act_order=act_order, dtype=torch.bfloat16)
    file = compressed_file(matrix)
    weight = repack_compressed_tensors(**file, bits=bits, group_size=group_size, symmetric=False)
    check_weight(weight, matrix)
    back = to_compressed_tensors(weight)
    if weight.perm is None:
        assert back.weight_g_idx is None
        del file["weight_g_idx"]
    check_tensors(back, file)


@by_bits
def test_symmetric_compressed_tensors(bits: int) -> None:
    """R12."""
    matrix = random_matrix(40, 96, bits, 32, symmetric=True)
    file = compressed_file(matrix)
    unset = torch.full((96,), -1, dtype=torch.int32)
    for change in (
        {},
        {"weight_zero_point": None},
        {"weight_g_idx": unset},
        {"weight_g_idx": None},
    ):
        weight = repack_compressed_tensors(
            **{**file, **change}, bits=bits, group_size=32, symmetric=True
        )
        check_weight(weight, matrix, symmetric=True)
        assert weight.perm is None
    back = to_compressed_tensors(weight)
    assert back.weight_zero_point is None
    assert_bit_equal(back.weight_packed, file["weight_packed"])
    plain = repack_compressed_tensors(
        file["weight_packed"], file["weight_scale"], (40, 96), file["weight_zero_point"],
        bits=bits, group_size=32, symmetric=False,
    )  # fmt: skip
    assert_bit_equal(plain.dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="weight_zero_point: required unless symmetric"):
        repack_compressed_tensors(
            **{**file, "weight_zero_point": None}, bits=bits, group_size=32, symmetric=False
        )


# -------------------------------------------------------------------------------- between formats


@by_bits
@pytest.mark.parametrize("n", [1, 40, 64, 100])
@pytest.mark.parametrize("k", [16, 100, 128, 2880])
@pytest.mark.parametrize("act_order", [False, True], ids=["ordered", "act_order"])
def test_round_trips(bits: int, n: int, k: int, act_order: bool) -> None:
    group_size = 128 if k == 2880 else 16
    groups = -(-k // group_size)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 2**bits, (groups, n)).to(torch.bfloat16)
    order = torch.randperm(k) // group_size
    perm = order.sort(stable=True).indices.int() if act_order else None
    if groups == 1:
        perm = None
    scales = torch.rand(groups, n).to(torch.bfloat16)
    weight = PackedWeight(pack_codes(codes, bits), scales, zeros, perm, bits, group_size, (n, k))
    options: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": False}
    compressed = to_compressed_tensors(weight)
    copies = [
        repack_gptq(*to_gptq(weight), **options),
        repack_gptq(*to_gptq(weight, "gptq_v2"), **options, checkpoint_format="gptq_v2"),
        repack_compressed_tensors(**compressed._asdict(), **options),
    ]
    if bits == 4 and perm is None and n % 8 == 0:
        copies.append(repack_awq(*to_awq(weight), group_size=group_size))
    if bits == 4 and perm is None and k % 8 == 0 and group_size == 128:
        copies.append(repack_awq_gemv(*to_awq_gemv(weight), group_size=group_size))
    for copy in copies:
        for name in ("qweight", "scales", "zeros", "perm"):
            ours, theirs = getattr(weight, name), getattr(copy, name)
            if ours is None:
                assert theirs is None
            else:
                assert_bit_equal(theirs, ours, name)


def test_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """R09, at a size that has several blocks of rows, the last one partial."""
    monkeypatch.setattr(packed_weights, "_BLOCK_ELEMENTS", 64 * 88)
    matrix = random_matrix(136, 88, 4, 32)
    check_weight(repack_awq(*awq_file(matrix), group_size=32), matrix)
    check_tensors(to_awq(repack_awq(*awq_file(matrix), group_size=32)), awq_file(matrix)._asdict())
    gemv = repack_awq_gemv(*gemv_file(matrix), group_size=32)
    check_tensors(to_awq_gemv(gemv), gemv_file(matrix)._asdict())
    ordered = random_matrix(136, 88, 3, 32, act_order=True)
    gptq = gptq_file(ordered, "gptq")
    weight = repack_gptq(**gptq, bits=3, group_size=32, symmetric=False)
    check_weight(weight, ordered)
    check_tensors(to_gptq(weight), gptq)
    check_tensors(to_compressed_tensors(weight), compressed_file(ordered))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_name)
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    """R15: zero points up to 255 are exact in each."""
    matrix = random_matrix(16, 64, 8, 16, dtype=dtype)
    matrix.zeros[0] = (0, 255, 254, 129)
    weight = repack_gptq(**gptq_file(matrix, "gptq"), bits=8, group_size=16, symmetric=False)
    check_weight(weight, matrix)
    assert weight.zeros is not None
    assert weight.zeros[:, 0].tolist() == [0, 255, 254, 129]


def test_any_strides() -> None:
    matrix = random_matrix(40, 64, 4, 16)
    file = [column_slice(tensor) for tensor in awq_file(matrix)]
    check_weight(repack_awq(*file, group_size=16), matrix)
    gptq = {
        name: tensor if tensor.dim() == 1 else tensor.t().contiguous().t()
        for name, tensor in gptq_file(matrix, "gptq").items()
    }
    check_weight(repack_gptq(**gptq, bits=4, group_size=16, symmetric=False), matrix)


def test_on_the_device(request: pytest.FixtureRequest) -> None:
    device = str(request.config.getoption("--device"))
    matrix = random_matrix(40, 64, 3, 16, act_order=True)
    file = {name: tensor.to(device) for name, tensor in gptq_file(matrix, "gptq").items()}
    weight = repack_gptq(**file, bits=3, group_size=16, symmetric=False)
    assert weight.qweight.device.type == torch.device(device).type
    check_weight(weight.to("cpu"), matrix)
    check_tensors(to_gptq(weight), file)


# -------------------------------------------------------------------------------------- refusals


def test_bad_awq_is_refused() -> None:
    file = awq_file(random_matrix(16, 64, 4, 32))
    gemv = gemv_file(random_matrix(16, 64, 4, 32))
    for repack, good, change, message in (
        (repack_awq, file, {"qweight": file.qweight.long()}, r"qweight: expected torch\.int32"),
        (repack_awq, file, {"qweight": file.qweight[0]}, "qweight: expected a matrix"),
        (repack_awq, file, {"qweight": file.qweight[:0]}, "qweight: expected a matrix"),
        (repack_awq, file, {"qweight": file.qweight.t()}, r"scales: expected shape \(1, 512\)"),
        (repack_awq, file, {"qzeros": file.qzeros[:1]}, r"qzeros: expected shape \(2, 2\)"),
        (repack_awq, file, {"scales": file.scales[:, :8]}, r"scales: expected shape \(2, 16\)"),
        (repack_awq, file, {"scales": file.scales.int()}, r"scales: expected torch\.float16 or"),
        (repack_awq, file, {"scales": file.scales.to("meta")}, "scales: expected the same device"),
        (repack_awq, file, {"group_size": 16}, r"scales: expected shape \(4, 16\)"),
        (repack_awq, file, {"group_size": 20}, "group_size: expected one of"),
        (repack_awq_gemv, gemv, {"qzeros": gemv.qzeros[:, :1]}, r"qzeros: expected .* \(16, 4\)"),
        (repack_awq_gemv, gemv, {"scales": gemv.scales[:, :2]}, r"scales: expected .* \(16, 32\)"),
        (repack_awq_gemv, gemv, {"group_size": 16}, "group_size: expected 32, 64"),
    ):
        arguments = {**good._asdict(), "group_size": 32, **change}
        with pytest.raises(ValueError, match=message):
            repack(**arguments)


def test_bad_gptq_is_refused() -> None:
    file = gptq_file(random_matrix(40, 96, 3, 32), "gptq")
    for change, message in (
        ({"bits": 5}, "bits: expected one of"),
        ({"bits": 4}, r"qweight: expected shape \(12, 40\), got \(9, 40\)"),
        ({"qweight": file["qweight"].short()}, r"qweight: expected torch\.int32"),
        ({"qweight": file["qweight"][:8]}, r"qweight: expected shape \(9, 40\), got \(8, 40\)"),
        ({"qweight": file["qweight"][:8], "g_idx": None}, "qweight: expected a multiple of 3 rows"),
        ({"qzeros": file["qzeros"][:, :3]}, r"qzeros: expected shape \(3, 4\), got \(3, 3\)"),
        ({"scales": file["scales"].t()}, r"scales: expected shape \(3, 40\), got \(40, 3\)"),
        ({"group_size": 64}, r"scales: expected shape \(2, 40\)"),
        ({"g_idx": file["g_idx"][:64]}, r"qweight: expected shape \(6, 40\), got \(9, 40\)"),
        ({"checkpoint_format": "v2"}, "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'v2'"),
    ):
        arguments: dict[str, Any] = {
            **file, "bits": 3, "group_size": 32, "symmetric": False, **change,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            repack_gptq(**arguments)
    with pytest.raises(ValueError, match="checkpoint_format"):
        to_gptq(quantize_weight(torch.randn(8, 16), 4, 16), "v1")  # type: ignore[arg-type]


def test_bad_compressed_tensors_are_refused() -> None:
    file = compressed_file(random_matrix(40, 96, 4, 32))
    ten_a_word = torch.zeros(40, 10, dtype=torch.int32)
    for change, message in (
        ({"bits": 6}, "bits: expected one of"),
        ({"bits": 3, "weight_packed": ten_a_word}, r"weight_packed: expected shape \(40, 9\)"),
        ({"weight_packed": file["weight_packed"].t()}, r"weight_packed: expected shape \(40, 12\)"),
        ({"weight_shape": (40,)}, "weight_shape: expected N and K"),
        ({"weight_shape": torch.tensor([96, 40])}, r"weight_packed: expected shape \(96, 5\)"),
        ({"weight_scale": file["weight_scale"].t()}, r"weight_scale: expected shape \(40, 3\)"),
        ({"weight_scale": file["weight_scale"].double()}, "weight_scale: expected torch"),
        (
            {"weight_zero_point": file["weight_zero_point"].t()},
            r"weight_zero_point: expected shape \(5, 3\)",
        ),
        ({"weight_g_idx": torch.zeros(96, dtype=torch.int32)}, "weight_g_idx: expected groups"),
        ({"group_size": -1}, r"weight_scale: expected shape \(40, 1\)"),
    ):
        arguments: dict[str, Any] = {
            **file, "bits": 4, "group_size": 32, "symmetric": False, **change,
        }  # fmt: skip
        with pytest.raises(ValueError, match=message):
            repack_compressed_tensors(**arguments)


def test_a_single_row_of_3_bits() -> None:
    """A stream of one row whose last word is not full: one group, or one output feature."""
    for n, group_size in [(17, 64), (1, 16)]:
        weight = quantize_weight(torch.randn(n, 64), 3, group_size)
        gptq = to_gptq(weight)
        again = repack_gptq(*gptq, bits=3, group_size=group_size, symmetric=False)
        torch.testing.assert_close(again.dequantize(), weight.dequantize(), rtol=0, atol=0)
        assert to_compressed_tensors(weight).weight_packed.shape == (n, 6)
