"""`MergedLinear`: projections of the same input as one, such as q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer.nn._linear import QuantizedLinear, is_plain_linear
from fastinfer.nn.low_bit_linear import LowBitLinear
from fastinfer.nn.w8a8_linear import FP8Linear, Int8W8A8Linear, W8A8Linear
from fastinfer.ops._common import check
from fastinfer.ops.packed_weights import concatenate_packed


class MergedLinear(nn.Module):
    """y = [y_0 | y_1 | ...], the results of several linear layers, in one product.

    Each part keeps its own scales: nothing is rounded anew. A part without bias gets one of zeros
    where another one has it.

    Args:
        parts: at least one, all `torch.nn.Linear`, all `LowBitLinear`, all `FP8Linear` or all
            `Int8W8A8Linear`; their weights are copied.

    Raises:
        TypeError: another kind of module, or several kinds.
        ValueError: only some of a part's tensors were loaded; or parts differ in in_features, dtype
            or device; low-bit ones in bits, group_size or perm; those with 8-bit activations in
            what they do to x, since x is quantized once (`activations`, `input_scale`, whether
            there are blocks), or parts with blocks, but the last one, have features that 128 does
            not divide.

    Where parts have a scale for the whole weight, each feature of the merged one has its part's.
    `linear` is the merged layer, and `split_sizes` the output features of the parts.
    """

    def __init__(self, parts: Sequence[nn.Linear] | Sequence[QuantizedLinear]) -> None:
        super().__init__()
        modules: list[nn.Linear | QuantizedLinear] = [*parts]
        check("MergedLinear", len(modules) > 0, "parts: expected at least one, got none")
        self.linear = _merge(modules)
        self.split_sizes = tuple(part.out_features for part in modules)

    def forward(self, x: Tensor) -> Tensor:
        """y [..., sum(split_sizes)] of x [..., in_features]."""
        y: Tensor = self.linear(x)
        return y

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The parts' results: views into y."""
        return torch.split(y, list(self.split_sizes), -1)

    def extra_repr(self) -> str:
        """What sets this layer apart, for print()."""
        return f"split_sizes={self.split_sizes}"


def _merge(parts: list[nn.Linear | QuantizedLinear]) -> nn.Linear | QuantizedLinear:
    if all(is_plain_linear(part) for part in parts):
        return _merge_plain([part for part in parts if isinstance(part, nn.Linear)])
    for kind, merge in _MERGES.items():
        # A subclass with a forward of its own computes something else, which would be lost.
        if all(
            isinstance(part, kind) and type(part).forward is QuantizedLinear.forward
            for part in parts
        ):
            return merge(parts)
    expected = ", ".join(f"all {kind.__name__}" for kind in _MERGES)
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(
        f"MergedLinear: parts: expected all torch.nn.Linear, or {expected}; got {kinds}"
    )


def _merge_low_bit(parts: list[LowBitLinear]) -> LowBitLinear:
    weight = concatenate_packed([part.packed_weight() for part in parts])
    return LowBitLinear.from_packed(weight, _merge_biases(parts, torch.float32))


def _merge_w8a8(parts: list[W8A8Linear]) -> W8A8Linear:
    first = parts[0]
    for part in parts:
        part._check_whole()
    _check_same("in_features", [part.in_features for part in parts])
    _check_same("device", [part.weight.device for part in parts])
    _check_same("activations", [part.activations for part in parts])
    scales_of_x = [part.input_scale for part in parts if part.input_scale is not None]
    if scales_of_x and not first.weight.is_meta:
        # As texts, since unset ones are NaN, which equals nothing.
        _check_same("input_scale", [str(scale.item()) for scale in scales_of_x])
    blocks = first.granularity == "block"
    feature_wise = {"channel": "channel or tensor", "tensor": "channel or tensor"}
    _check_same("granularity", [feature_wise.get(p.granularity, p.granularity) for p in parts])
    for i, part in enumerate(parts[:-1] if blocks else ()):
        whole = part.out_features % 128 == 0
        check(
            "MergedLinear",
            whole,
            f"parts[{i}]: expected out_features that 128 divides, since the next part's blocks of "
            f"128 features begin there, got {part.out_features}",
        )
    scales = [
        part.weight_scale if blocks else part.weight_scale.expand(part.out_features, 1)
        for part in parts
    ]
    return type(first)._around(
        torch.cat([part.weight for part in parts]),
        torch.cat(scales),
        scales_of_x[0].clone() if scales_of_x else None,
        _merge_biases(parts, torch.float32),
        "block" if blocks else "channel",
        first.activations,
    )


_MERGES: dict[type[QuantizedLinear], Callable[[list[Any]], QuantizedLinear]] = {
    LowBitLinear: _merge_low_bit,
    FP8Linear: _merge_w8a8,
    Int8W8A8Linear: _merge_w8a8,
}


def _merge_plain(parts: list[nn.Linear]) -> nn.Linear:
    first = parts[0].weight
    _check_same("in_features", [part.in_features for part in parts])
    _check_same("dtype", [part.weight.dtype for part in parts])
    _check_same("device", [part.weight.device for part in parts])
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = _merge_biases(parts, first.dtype)
    merged = nn.Linear(first.shape[1], len(weight), bias=bias is not None, device="meta")
    trained = any(p.requires_grad for part in parts for p in part.parameters())
    merged.weight = nn.Parameter(weight, requires_grad=trained)
    if bias is not None:
        merged.bias = nn.Parameter(bias, requires_grad=trained)
    return merged


def _merge_biases(
    parts: Sequence[nn.Linear | QuantizedLinear], dtype: torch.dtype
) -> Tensor | None:
    given = [part.bias for part in parts]
    known = [bias for bias in given if bias is not None]
    if not known:
        return None
    return torch.cat(
        [
            known[0].new_zeros(part.out_features, dtype=dtype) if bias is None else bias.detach()
            for part, bias in zip(parts, given, strict=True)
        ]
    )


def _check_same(name: str, values: Sequence[object]) -> None:
    for i, value in enumerate(values):
        same = value == values[0]
        check("MergedLinear", same, f"parts[{i}]: expected {name} {values[0]}, got {value}")
