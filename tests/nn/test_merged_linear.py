"""`MergedLinear`: what its parts compute, side by side."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn import Int4Linear, Int8Linear, LowBitLinear, MergedLinear
from fastinfer.ops import packed_weights
from tests.helpers import assert_bit_equal
from tests.nn.test_low_bit_linear import BITS, make

# Features of the parts: whole tiles of 64, none, and only a last one that is partial.
SIZES = {"whole": (128, 64, 64), "odd": (100, 7, 64, 1), "last": (64, 128, 30)}


def apart(parts: list[Any], x: Tensor) -> Tensor:
    return torch.cat([part(x) for part in parts], -1)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_low_bit_parts(bits: int, sizes: tuple[int, ...]) -> None:
    """Bit for bit: each part keeps its own codes and scales."""
    parts = [make(bits, n) for n in sizes]
    merged = MergedLinear(parts)
    assert merged.split_sizes == sizes
    assert isinstance(merged.linear, LowBitLinear) and merged.linear.bits == bits
    for shape in ((1, 200), (5, 200), (2, 3, 200)):
        x = torch.randn(shape)
        y = merged(x)
        assert_bit_equal(y, apart(parts, x))
        for got, part in zip(merged.split(y), parts, strict=True):
            assert_bit_equal(got, part(x))
            assert got._base is not None


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_merging_and_quantizing_may_change_places(sizes: tuple[int, ...]) -> None:
    plain = [nn.Linear(200, n) for n in sizes]
    quantized_first = MergedLinear([Int4Linear.from_linear(p) for p in plain]).linear
    merged_first = Int4Linear.from_linear(MergedLinear(plain).linear)  # type: ignore[arg-type]
    for name, tensor in merged_first.state_dict().items():
        assert_bit_equal(quantized_first.state_dict()[name], tensor, name)


def test_large_parts_go_through_several_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [make(3, n, bias=False) for n in (70, 90, 300)]
    expected = MergedLinear(parts).state_dict()
    monkeypatch.setattr(packed_weights, "_BLOCK_ELEMENTS", 1)  # 64 rows are a block
    for name, tensor in MergedLinear(parts).state_dict().items():
        assert_bit_equal(tensor, expected[name], name)
    assert_bit_equal(MergedLinear(parts)(torch.eye(200)), apart(parts, torch.eye(200)))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_parts_without_zeros_bias_or_of_other_scales(sizes: tuple[int, ...]) -> None:
    for first in ({"zeros": False}, {"bias": False}, {"scale_dtype": torch.float16}):
        parts = [make(4, sizes[0], **first), *(make(4, n) for n in sizes[1:])]
        x = torch.randn(3, 200)
        assert_bit_equal(MergedLinear(parts)(x), apart(parts, x))
    parts = [make(4, n, zeros=False, bias=False) for n in sizes]
    merged = MergedLinear(parts).linear
    assert isinstance(merged, LowBitLinear) and merged.zeros is None and merged.bias is None


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_parts_with_one_order_of_columns(sizes: tuple[int, ...]) -> None:
    parts = [make(4, n, perm=True) for n in sizes]
    with pytest.raises(ValueError, match=r"weights\[1\]: expected the perm of weights\[0\]"):
        MergedLinear(parts)
    for part in parts:
        part.perm = parts[0].perm
    x = torch.randn(3, 200)
    assert_bit_equal(MergedLinear(parts)(x), apart(parts, x))
    parts[1].perm = None
    with pytest.raises(ValueError, match=r"weights\[1\]: expected the perm of weights\[0\]"):
        MergedLinear(parts)


@pytest.mark.parametrize("count", [1, 2])
def test_what_parts_become_later_changes_nothing(count: int) -> None:
    """A merged layer shares no memory with its parts."""
    parts = [LowBitLinear.from_linear(nn.Linear(200, 64), outliers=0.02) for _ in range(count)]
    for part in parts:
        part.perm = torch.randperm(200, generator=torch.manual_seed(1), dtype=torch.int32)
    merged, x = MergedLinear(parts), torch.randn(3, 200)
    before = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    for part in parts:
        part.load_state_dict(
            LowBitLinear(200, 64, 4, perm=True, outliers=256).state_dict()
            | {"perm": torch.arange(200, dtype=torch.int32)}
        )
    for name, tensor in merged.state_dict().items():
        assert_bit_equal(tensor, before[name], name)
    assert merged(x).isfinite().all()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", ["plain", "perm", "outliers"])
def test_merged_on_the_meta_device(kind: str, sizes: tuple[int, ...]) -> None:
    """A skeleton to load into: orders of columns have no entries yet that could differ."""
    parts = [make(4, n, perm=kind == "perm") for n in sizes]
    if kind == "outliers":
        parts = [LowBitLinear.from_linear(nn.Linear(200, n), outliers=0.02) for n in sizes]
    for part in parts:
        part.perm = parts[0].perm
    skeleton = MergedLinear([copy.deepcopy(part).to("meta") for part in parts])
    assert {b.device.type for b in skeleton.buffers()} == {"meta"}
    skeleton.load_state_dict(MergedLinear(parts).state_dict(), assign=True)
    x = torch.randn(3, 200)
    assert_bit_equal(skeleton(x), apart(parts, x))


def test_an_order_of_columns_on_the_meta_device_is_not_none_of_it() -> None:
    parts = [LowBitLinear(64, 8, 4, 64, device="meta", perm=perm) for perm in (True, False)]
    with pytest.raises(ValueError, match=r"weights\[1\]: expected the perm of weights\[0\]"):
        MergedLinear(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_parts(dtype: torch.dtype) -> None:
    parts = [nn.Linear(48, n, bias=n != 7, dtype=dtype) for n in (20, 7, 64)]
    merged = MergedLinear(parts)
    assert merged.split_sizes == (20, 7, 64) and type(merged.linear) is nn.Linear
    x = torch.randn(2, 5, 48, dtype=dtype)
    weight, bias = merged.linear.weight, merged.linear.bias
    assert_bit_equal(weight.detach(), torch.cat([p.weight.detach() for p in parts]))
    assert torch.equal(bias[20:27], torch.zeros(7, dtype=dtype))
    torch.testing.assert_close(merged(x), apart(parts, x))
    assert MergedLinear([nn.Linear(4, 2, bias=False)]).linear.bias is None


def test_plain_parts_may_be_trained() -> None:
    parts = [nn.Linear(8, 4), nn.Linear(8, 4)]
    assert MergedLinear(parts).linear.weight.requires_grad
    for part in parts:
        part.requires_grad_(False)
    merged = MergedLinear(parts)
    assert not any(p.requires_grad for p in merged.parameters())


def test_survives_what_is_done_to_a_module() -> None:
    parts = [make(4, n) for n in (100, 7)]
    merged = MergedLinear(parts)
    x = torch.randn(3, 200)
    expected = merged(x)
    loaded = MergedLinear([LowBitLinear(200, 100, 4, 64), LowBitLinear(200, 7, 4, 64)])
    loaded.load_state_dict(merged.state_dict())
    for other in (loaded, copy.deepcopy(merged), pickle.loads(pickle.dumps(merged)), merged.half()):
        assert_bit_equal(other(x), expected)
        assert other.split_sizes == (100, 7)
    assert "split_sizes=(100, 7)" in repr(merged)
    # The parts and the merged layer share nothing that either would change.
    parts[0].scales.zero_()
    assert_bit_equal(merged(x), expected)


def test_compiles_as_one_graph() -> None:
    torch._dynamo.reset()
    merged = MergedLinear([make(4, n) for n in (100, 7)])

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return merged.split(merged(x))

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 200)
    for got, expected in zip(compiled(x), run(x), strict=True):
        assert_bit_equal(got, expected)


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "expected at least one"),
        ([Int4Linear(64, 8), Int8Linear(64, 8)], ValueError, "expected bits 4, got 8"),
        ([Int4Linear(64, 8), Int4Linear(96, 8)], ValueError, "expected columns 64, got 96"),
        (
            [Int4Linear(64, 8, 32), Int4Linear(64, 8, 64)],
            ValueError,
            "expected group_size 32, got 64",
        ),
        ([nn.Linear(64, 8), nn.Linear(96, 8)], ValueError, "expected in_features 64, got 96"),
        ([nn.Linear(64, 8), nn.Linear(64, 8).half()], ValueError, "expected dtype"),
        ([nn.Linear(64, 8), nn.Linear(64, 8, device="meta")], ValueError, "expected device"),
        ([Int4Linear(64, 8), Int4Linear(64, 8, device="meta")], ValueError, "expected device"),
        ([nn.Linear(64, 8), Int4Linear(64, 8)], TypeError, "got Linear, Int4Linear"),
        ([nn.Linear(64, 8), Adapted(64, 8)], TypeError, "got Linear, Adapted"),
        ([nn.Identity()], TypeError, "got Identity"),
    ],
)
def test_refused(parts: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MergedLinear(parts)


@pytest.mark.parametrize("perm", [False, True])
def test_concatenating_weights_of_several_devices_is_refused(perm: bool) -> None:
    layers = [LowBitLinear(64, 8, 4, 64, device=device, perm=perm) for device in ("cpu", "meta")]
    for order in (layers, layers[::-1]):
        with pytest.raises(ValueError, match=r"weights\[1\]: expected device .*, got"):
            ops.concatenate_packed([layer.packed_weight() for layer in order])


def test_concatenating_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="concatenate_packed: weights: expected at least one"):
        ops.concatenate_packed([])
