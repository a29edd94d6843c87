"""`MergedLinear` of parts that quantize their activations."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fastinfer.nn import FP8Linear, Int8Linear, Int8W8A8Linear, MergedLinear, W8A8Linear
from tests.helpers import assert_bit_equal
from tests.nn.test_merged_linear import apart
from tests.nn.test_w8a8_linear import KINDS, fresh, make

kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
BLOCKS = KINDS["fp8-block-dynamic"]


class Doubled(FP8Linear):
    """Computes something else, which merging would lose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def sizes_of(kind: Any) -> tuple[int, ...]:
    """Parts with blocks begin at whole ones; the last may be partial."""
    return (256, 128, 30) if kind[1] == "block" else (100, 7, 64, 1)


@kinds
def test_parts(kind: Any) -> None:
    """Bit for bit: each part keeps its own codes and scales."""
    parts = [make(kind, n) for n in sizes_of(kind)]
    for part in parts:  # scales that no other part has
        part.weight_scale *= 1 + torch.rand(())
    merged = MergedLinear(parts)
    assert merged.split_sizes == sizes_of(kind)
    assert isinstance(merged.linear, kind[0])
    assert merged.linear.granularity == ("block" if kind[1] == "block" else "channel")
    for shape in ((1, 200), (5, 200), (2, 3, 200)):
        x = torch.randn(shape)
        y = merged(x)
        assert_bit_equal(y, apart(parts, x))
        for got, part in zip(merged.split(y), parts, strict=True):
            assert_bit_equal(got, part(x))


@pytest.mark.parametrize("layer", [FP8Linear, Int8W8A8Linear])
def test_parts_with_scales_per_feature_and_per_tensor(layer: type[W8A8Linear]) -> None:
    parts = [
        layer.from_linear(nn.Linear(200, n, bias=n != 7), granularity=granularity)
        for n, granularity in ((20, "tensor"), (7, "channel"), (64, "tensor"))
    ]
    x = torch.randn(3, 200)
    assert_bit_equal(MergedLinear(parts)(x), apart(parts, x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind[1] != "tensor"])
def test_merging_and_quantizing_may_change_places(kind: Any) -> None:
    """Where a scale covers no more than a part."""
    layer, granularity, activations = kind
    options = {
        "granularity": granularity,
        "activations": activations,
        "input_scale": 0.02 if activations == "static" else None,
    }
    plain = [nn.Linear(200, n) for n in sizes_of(kind)]
    quantized_first = MergedLinear([layer.from_linear(p, **options) for p in plain]).linear
    merged_first = layer.from_linear(MergedLinear(plain).linear, **options)  # type: ignore[arg-type]
    for name, tensor in merged_first.state_dict().items():
        assert_bit_equal(quantized_first.state_dict()[name], tensor, name)


@kinds
def test_survives_what_is_done_to_a_module(kind: Any) -> None:
    parts = [make(kind, n) for n in sizes_of(kind)]
    merged = MergedLinear(parts)
    x = torch.randn(3, 200)
    expected = merged(x)
    loaded = MergedLinear([fresh(part) for part in parts])  # whose scales are unset
    assert loaded(x).isnan().all()
    loaded.load_state_dict(merged.state_dict())
    for other in (loaded, copy.deepcopy(merged), pickle.loads(pickle.dumps(merged)), merged.half()):
        assert_bit_equal(other(x), expected)
    for part in parts:  # shares nothing that either would change
        part.weight_scale.zero_()
        if part.input_scale is not None:
            part.input_scale.zero_()
    assert_bit_equal(merged(x), expected)
    with torch.device("meta"):
        skeleton = MergedLinear([fresh(part) for part in parts])
    skeleton.load_state_dict(merged.state_dict(), assign=True)
    assert_bit_equal(skeleton(x), expected)


def static(scale: float) -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(64, 8), input_scale=scale)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([FP8Linear(64, 8), FP8Linear(96, 8)], ValueError, "expected in_features 64, got 96"),
        ([FP8Linear(64, 8), FP8Linear(64, 8, device="meta")], ValueError, "expected device"),
        (
            [Int8W8A8Linear(64, 8), Int8W8A8Linear(64, 8, activations="asymmetric")],
            ValueError,
            r"parts\[1\]: expected activations dynamic, got asymmetric",
        ),
        ([static(0.5), static(0.25)], ValueError, r"parts\[1\]: expected input_scale 0.5, got"),
        ([static(0.5), FP8Linear(64, 8)], ValueError, "expected activations static, got dynamic"),
        (
            [FP8Linear(200, 128, granularity="block"), FP8Linear(200, 128)],
            ValueError,
            r"parts\[1\]: expected granularity block, got channel or tensor",
        ),
        (
            [make(BLOCKS, 128), make(BLOCKS, 100), make(BLOCKS, 128)],
            ValueError,
            r"parts\[1\]: expected out_features that 128 divides, .*got 100",
        ),
        ([FP8Linear(64, 8), Int8W8A8Linear(64, 8)], TypeError, "got FP8Linear, Int8W8A8Linear"),
        ([Int8Linear(64, 8), Int8W8A8Linear(64, 8)], TypeError, "got Int8Linear, Int8W8A8Linear"),
        ([nn.Linear(64, 8), FP8Linear(64, 8)], TypeError, "got Linear, FP8Linear"),
        ([FP8Linear(64, 8), Doubled(64, 8)], TypeError, "got FP8Linear, Doubled"),
    ],
)
def test_refused(parts: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MergedLinear(parts)
