"""Weights that stand beside the codes: in the low-bit products, and in packed weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.nn import LowBitLinear, MergedLinear
from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    assert_accurate,
    assert_bit_equal,
    column_slice,
    dtype_name,
    poison,
)

BITS = [2, 3, 4, 8]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_bits = pytest.mark.parametrize("bits", BITS)


def sparse(counts: list[int], k: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """So many entries of each feature, in any columns, some more than once."""
    entries = sum(counts)
    return {
        "outlier_offsets": torch.tensor([0, *counts]).cumsum(0).int(),
        "outlier_columns": torch.randint(0, k, (entries,), dtype=torch.int32),
        "outlier_values": torch.randn(entries).to(dtype),
    }


def make(
    bits: int,
    m: int,
    counts: list[int],
    k: int,
    *,
    dtype: torch.dtype = torch.float32,
    value_dtype: torch.dtype = torch.float32,
    perm: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of a product, without whose outliers nothing would be right."""
    n = len(counts)
    scales = (torch.rand(-(-k // 32), n) + 0.5) / (2**bits * k**0.5)
    made = {
        "x": torch.randn(m, k).to(dtype),
        "qweight": reference.pack_codes(torch.randint(0, 2**bits, (n, k)), bits),
        "scales": scales,
        "bias": torch.randn(n),
        **sparse(counts, k, value_dtype),
    }
    if perm:
        made["perm"] = torch.randperm(k, dtype=torch.int32)
    return {name: tensor.to(device) for name, tensor in made.items()} | {"group_size": 32}


def check(backend: Backend, bits: int, arguments: dict[str, Any], **options: Any) -> Tensor:
    out = getattr(backend.ops, f"int{bits}_gemm")(**arguments, **options)
    dtype = arguments["x"].dtype
    exact, rounded = (
        reference.low_bit_gemm(bits, **arguments, **options, dtype=d)
        for d in (torch.float64, dtype)
    )
    assert_accurate(out, exact, rounded)
    return out


@by_dtype
@pytest.mark.parametrize("m", [1, 5, 33, 300])
def test_product(backend: Backend, m: int, dtype: torch.dtype) -> None:
    """Features without any, with some, and one with more than there are columns."""
    counts = [i % 5 for i in range(69)] + [130]
    for bits in BITS:
        arguments = make(bits, m, counts, 100, dtype=dtype, device=backend.device)
        check(backend, bits, arguments)


def test_many_of_a_feature_err_as_a_product_does(backend: Backend) -> None:
    """In fp32, beside torch's own sum of their products. A sum of one after the other would err
    three times as much.
    """
    for counts in ([15, 16, 17, 160, 161], [500] * 70):
        arguments = make(4, 4, counts, 100, device=backend.device)
        check(backend, 4, arguments)
    out = backend.ops.int4_gemm(**arguments)
    exact = reference.low_bit_gemm(4, **arguments)
    codes = {name: x for name, x in arguments.items() if not name.startswith("outlier")}
    x, columns = arguments["x"], arguments["outlier_columns"].long()
    products = (x[:, columns] * arguments["outlier_values"]).view(4, 70, 500)
    summed = reference.low_bit_gemm(4, **codes, dtype=torch.float32) + products.sum(-1)
    assert_accurate(out, exact, summed)


@by_dtype
@pytest.mark.parametrize("value_dtype", DTYPES, ids=dtype_name)
def test_dtypes_of_values_and_act_order(
    backend: Backend, dtype: torch.dtype, value_dtype: torch.dtype
) -> None:
    arguments = make(
        4, 5, [3] * 70, 100, dtype=dtype, value_dtype=value_dtype, perm=True, device=backend.device
    )
    check(backend, 4, arguments)


@pytest.mark.parametrize("half", [40, 64])
def test_with_a_norm_before_and_an_epilogue(backend: Backend, half: int) -> None:
    arguments = make(3, 5, [2] * (2 * half), 100, perm=True, device=backend.device)
    norm_weight = torch.rand(100, device=backend.device)
    residual = torch.randn(5, half, device=backend.device)
    check(
        backend, 3, arguments, norm_weight=norm_weight, activation="silu", gated=True,
        residual=residual,
    )  # fmt: skip


@pytest.mark.parametrize(("n", "k"), [(1, 1), (65, 1), (1, 65), (130, 40)])
def test_odd_sizes(backend: Backend, n: int, k: int) -> None:
    for counts in ([1] * n, [0] * (n - 1) + [7], [7] + [0] * (n - 1)):
        check(backend, 4, make(4, 3, counts, k, device=backend.device))


def test_none_at_all(backend: Backend) -> None:
    """An empty matrix is no matrix; and no rows, no result."""
    arguments = make(4, 3, [0] * 70, 100, device=backend.device)
    out = check(backend, 4, arguments)
    if backend.name != "cuda":  # where another kernel may order sums otherwise
        plain = {name: x for name, x in arguments.items() if not name.startswith("outlier")}
        assert_bit_equal(out, backend.ops.int4_gemm(**plain))
    arguments = make(4, 0, [2] * 70, 100, device=backend.device)
    assert backend.ops.int4_gemm(**arguments).shape == (0, 70)


@by_dtype
def test_rows_do_not_see_each_other(backend: Backend, dtype: torch.dtype) -> None:
    rows = 300 if backend.name == "cpu" else 16
    arguments = make(4, rows, [3, 70] * 35, 100, dtype=dtype, device=backend.device)
    whole, x = backend.ops.int4_gemm(**arguments), arguments["x"]
    for some in (slice(1), slice(6, 7), slice(rows - 1, rows), slice(257)):
        part = backend.ops.int4_gemm(**arguments | {"x": x[some]})
        assert_bit_equal(part, whole[some])
    changed = column_slice(x)
    changed[2] = torch.nan
    out = backend.ops.int4_gemm(**arguments | {"x": changed})
    assert out[2].isnan().all()
    others = [0, 1, *range(3, rows)]
    assert_bit_equal(out[others], whole[others])


def test_nothing_outside_the_arguments_is_read(backend: Backend) -> None:
    arguments = make(4, 5, [3] * 70, 100, perm=True, device=backend.device)
    expected = backend.ops.int4_gemm(**arguments)
    for name in ("outlier_offsets", "outlier_columns", "outlier_values"):
        x = arguments[name]
        around = torch.full((x.numel() + 512,), poison(x.dtype), dtype=x.dtype, device=x.device)
        arguments[name] = around[256 : 256 + x.numel()].copy_(x)
    assert_bit_equal(backend.ops.int4_gemm(**arguments), expected)


WRONG_CONTENTS: dict[str, tuple[str, int, int, str]] = {
    "columns before the first": ("outlier_columns", 7, -1, "got -1 at index 7"),
    "columns beyond the last": ("outlier_columns", 7, 100, r"\[0, 100\).* got 100 at index 7"),
    "columns far beyond": ("outlier_columns", 7, 2**31 - 1, "at index 7"),
    "first offset": ("outlier_offsets", 0, 1, "expected 0 at first, got 1"),
    "descending offsets": ("outlier_offsets", 5, 3, "got 3 after 12 at index 5"),
    "last offset": ("outlier_offsets", 70, 211, "expected 210 at last, .*, got 211"),
    "offsets far beyond": ("outlier_offsets", 70, 2**31 - 1, "expected 210 at last"),
    "offsets far before": ("outlier_offsets", 9, -(2**31), "at index 9"),
}


@pytest.mark.parametrize("case", WRONG_CONTENTS)
def test_wrong_contents(backend: Backend, case: str) -> None:
    """Refused where contents are read; elsewhere nothing outside is read, and a column outside
    makes NaN of its feature.
    """
    name, index, value, message = WRONG_CONTENTS[case]
    arguments = make(4, 5, [3] * 70, 100, device=backend.device)
    expected = backend.ops.int4_gemm(**arguments)
    arguments[name][index] = value
    if backend.reads_contents:
        with pytest.raises(ValueError, match=f"int4_gemm: {name}: .*{message}"):
            backend.ops.int4_gemm(**arguments)
        return
    out = backend.ops.int4_gemm(**arguments)
    near = {index - 1, index} if name == "outlier_offsets" else {index // 3}
    if name == "outlier_columns":
        assert out[:, index // 3].isnan().all()
    others = [n for n in range(70) if n not in near]
    assert_bit_equal(out[:, others], expected[:, others])


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "one of three": (
        "outlier_offsets, outlier_columns, outlier_values: expected all three or none, got 1",
        {"outlier_columns": None, "outlier_values": None},
    ),
    "two of three": ("outlier_.*got 2 of them", {"outlier_offsets": None}),
    "offsets of N": (
        r"outlier_offsets: expected shape \[71\], got \[70\]",
        {"outlier_offsets": torch.zeros(70, dtype=torch.int32)},
    ),
    "offsets of 64 bits": (
        "outlier_offsets: expected dtype int32, got int64",
        {"outlier_offsets": torch.zeros(71).long()},
    ),
    "fewer values": (
        r"outlier_values: expected shape \[210\], got \[209\]",
        {"outlier_values": torch.zeros(209)},
    ),
    "values of integers": (
        "outlier_values: expected dtype float32 or", {"outlier_values": torch.zeros(210).int()}
    ),
    "columns of two dimensions": (
        "outlier_columns: expected 1 dim",
        {"outlier_columns": torch.zeros(1, 210, dtype=torch.int32)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(backend: Backend, case: str) -> None:
    message, changed = REFUSED[case]
    arguments = make(4, 5, [3] * 70, 100, device=backend.device)
    arguments |= {n: x if x is None else x.to(backend.device) for n, x in changed.items()}
    with pytest.raises(ValueError, match=f"int4_gemm: {message}"):
        backend.ops.int4_gemm(**arguments)


# ------------------------------------------------------------------------------- packed weights


def with_outliers(
    n: int, k: int, bits: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Tensor, ops.PackedWeight]:
    """A weight with some enormous elements, and what is made of it."""
    weight = torch.randn(n, k).to(dtype)
    weight[torch.rand(n, k) < 0.01] *= 20
    return weight, ops.quantize_weight_with_outliers(weight, bits, 64, **options)


@by_bits
@by_dtype
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_greatest_weights_are_kept(bits: int, dtype: torch.dtype, symmetric: bool) -> None:
    """Exactly; the others are what `quantize_weight` makes of them alone."""
    weight, packed = with_outliers(70, 200, bits, dtype, fraction=0.02, symmetric=symmetric)
    assert packed.outliers is not None
    columns = packed.outliers.columns.view(70, 4).long()  # ceil(0.02 * 200)
    assert (columns.diff() > 0).all() and packed.outliers.values.dtype == dtype
    kept = torch.zeros(70, 200, dtype=torch.bool).scatter(1, columns, True)
    magnitude = weight.abs()
    least = torch.where(kept, magnitude, torch.inf).amin(1)
    assert (torch.where(kept, 0, magnitude).amax(1) <= least).all()
    others = ops.quantize_weight(torch.where(kept, 0, weight), bits, 64, symmetric=symmetric)
    assert_bit_equal(packed.qweight, others.qweight)
    assert_bit_equal(packed.scales, others.scales)
    restored = packed.dequantize(torch.float64)
    assert torch.equal(restored[kept], weight[kept].double())
    assert torch.equal(restored[~kept], others.dequantize(torch.float64)[~kept])


@by_bits
def test_what_is_left_errs_less(bits: int) -> None:
    weight, packed = with_outliers(64, 512, bits, fraction=0.02)
    plain = ops.quantize_weight(weight, bits, 64)
    errors = [(w.dequantize() - weight).square().mean().sqrt() for w in (packed, plain)]
    assert errors[0] < 0.6 * errors[1], errors


def test_all_of_them() -> None:
    weight, packed = with_outliers(3, 100, 4, fraction=1.0)
    assert torch.equal(packed.dequantize(), weight)


def test_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, packed = with_outliers(200, 100, 3)
    monkeypatch.setattr("fastinfer.ops.packed_weights._BLOCK_ELEMENTS", 6400)
    again = ops.quantize_weight_with_outliers(weight, 3, 64)
    assert again.outliers is not None and packed.outliers is not None
    assert_bit_equal(again.outliers.values, packed.outliers.values)
    assert_bit_equal(again.outliers.columns, packed.outliers.columns)
    assert_bit_equal(again.dequantize(), packed.dequantize())


def test_dequantize_in_the_original_order() -> None:
    """Entries that share a place add up."""
    _, packed = with_outliers(5, 64, 4)
    perm = torch.randperm(64, dtype=torch.int32)
    entries = ops.Outliers(
        torch.tensor([0, 2, 2, 3, 3, 3], dtype=torch.int32),
        torch.tensor([7, 7, 63], dtype=torch.int32),
        torch.tensor([1.0, 2.0, 4.0]),
    )
    packed = replace(packed, perm=perm, outliers=entries)
    expected = replace(packed, outliers=None).dequantize()
    expected[0, perm[7]] += 3.0
    expected[2, perm[63]] += 4.0
    assert torch.equal(packed.dequantize(), expected)
    moved = packed.to("cpu").outliers
    assert moved is not None and torch.equal(moved.values, entries.values)


def test_product_of_a_packed_weight(backend: Backend) -> None:
    """One kernel does what the two parts of the weight ask for."""
    _, packed = with_outliers(100, 200, 3, fraction=0.03)
    packed = packed.to(backend.device)
    assert packed.outliers is not None
    x = torch.randn(5, 200, device=backend.device)
    out = ops.int3_gemm(
        x, packed.qweight, packed.scales, packed.zeros, group_size=64,
        outlier_offsets=packed.outliers.offsets, outlier_columns=packed.outliers.columns,
        outlier_values=packed.outliers.values,
    )  # fmt: skip
    matrix = packed.dequantize(torch.float64)
    assert_accurate(out, x.double() @ matrix.T, x @ matrix.float().T)


def test_concatenated() -> None:
    """With a weight that has none, and one of another dtype."""
    parts = [
        with_outliers(70, 100, 4, fraction=0.02)[1],
        ops.quantize_weight(torch.randn(3, 100), 4, 64),
        with_outliers(64, 100, 4, torch.bfloat16, fraction=0.05)[1],
    ]
    whole = ops.concatenate_packed(parts)
    assert_bit_equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert ops.concatenate_packed([parts[1], parts[1]]).outliers is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offsets", torch.zeros(5, dtype=torch.int32), r"offsets: expected shape \(6,\)"),
        ("offsets", torch.zeros(6, dtype=torch.int32), "ascending numbers from 0 to 5"),
        ("offsets", torch.tensor([0, 3, 2, 5, 5, 5]).int(), "got descending ones"),
        ("offsets", torch.zeros(6), "expected one of .*int32.* got torch.float32"),
        ("columns", torch.tensor([0, 1, 2, 3, 64]).int(), r"in \[0, 64\), got 0 to 64"),
        ("columns", torch.tensor([0, 1, 2, 3]).int(), r"values: expected shape \(4,\)"),
        ("values", torch.zeros(5, dtype=torch.float64), "got torch.float64"),
        ("values", torch.zeros(10)[::2], "values: expected a contiguous tensor"),
    ],
)
def test_bad_outliers_are_refused(name: str, value: Tensor, message: str) -> None:
    _, packed = with_outliers(5, 64, 4)  # one in each row
    assert packed.outliers is not None
    with pytest.raises(ValueError, match=f"PackedWeight: outliers.*{message}"):
        replace(packed, outliers=replace(packed.outliers, **{name: value}))


def test_bad_quantization_is_refused() -> None:
    op = "quantize_weight_with_outliers"
    for fraction in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=rf"{op}: fraction: expected .* got {fraction}"):
            ops.quantize_weight_with_outliers(torch.randn(4, 64), 4, 64, fraction=fraction)
    for value in (torch.nan, torch.inf):
        weight = torch.randn(4, 64)
        weight[2, 5] = value
        with pytest.raises(ValueError, match=rf"{op}: weight: expected finite .* \[2, 5\]"):
            ops.quantize_weight_with_outliers(weight, 4, 64)


@pytest.mark.parametrize("export", [ops.to_awq, ops.to_awq_gemv, ops.to_gptq])
def test_formats_have_no_place_for_them(export: Any) -> None:
    _, packed = with_outliers(64, 64, 4)
    with pytest.raises(ValueError, match="weight: expected no outliers"):
        export(packed)
    with pytest.raises(ValueError, match="weight: expected no outliers"):
        ops.to_compressed_tensors(packed)


# --------------------------------------------------------------------------------------- modules


def test_linear_layer() -> None:
    linear = torch.nn.Linear(200, 70)
    module = LowBitLinear.from_linear(linear, bits=3, group_size=64, outliers=0.02)
    x = torch.randn(5, 200)
    y = module(x)
    matrix = module.packed_weight().dequantize(torch.float64)
    exact = x.double() @ matrix.T + linear.bias.double()
    assert_accurate(y, exact.detach(), (x @ matrix.float().T + linear.bias).detach())
    assert "outliers=280" in repr(module)  # ceil(0.02 * 200) of each

    other = LowBitLinear(200, 70, 3, 64, scale_dtype=torch.float32, outliers=280)
    assert other(x).isnan().all()
    other.load_state_dict(module.state_dict())
    assert_bit_equal(other(x), y)
    plain = LowBitLinear(200, 70, 3, 64)
    with pytest.raises(RuntimeError, match="outlier_values"):
        plain.load_state_dict(module.state_dict())
    state = module.state_dict() | {"outlier_columns": module.outlier_columns + 200}
    with pytest.raises(RuntimeError, match=r"outliers.columns: expected values in \[0, 200\)"):
        other.load_state_dict(state)
    moved = module.to(torch.bfloat16)
    assert moved.outlier_values is not None and moved.outlier_values.dtype == torch.float32
    with pytest.raises(ValueError, match="outliers: expected None or at least 0, got -1"):
        LowBitLinear(200, 70, 3, outliers=-1)


def test_merged_layers() -> None:
    layers = [torch.nn.Linear(200, n, bias=False) for n in (70, 30)]
    parts = [LowBitLinear.from_linear(layers[0], bits=4, group_size=64, outliers=0.02)]
    parts.append(LowBitLinear.from_linear(layers[1], bits=4, group_size=64))
    merged = MergedLinear(parts)
    x = torch.randn(3, 200)
    for ours, part in zip(merged.split(merged(x)), parts, strict=True):
        assert_bit_equal(ours.contiguous(), part(x))


def test_linear_layer_compiles_as_one_graph() -> None:
    module = LowBitLinear.from_linear(torch.nn.Linear(64, 70), bits=4, group_size=64, outliers=0.05)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 64)
    assert_bit_equal(compiled(x), module(x))


@pytest.mark.parametrize(
    ("k", "fraction", "count"), [(100, 0.07, 7), (3200, 0.07, 224), (10, 0.01, 1)]
)
def test_as_many_as_the_fraction_says(k: int, fraction: float, count: int) -> None:
    """Although 0.07 * 100 is a little more than 7 in floating point."""
    packed = ops.quantize_weight_with_outliers(torch.randn(2, k), 4, -1, fraction=fraction)
    assert packed.outliers is not None and len(packed.outliers.values) == 2 * count
