"""`MergedLinear`: projections of the same input as one, such as q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastinfer.nn._linear import is_plain_linear
from fastinfer.nn.low_bit_linear import LowBitLinear
from fastinfer.ops._common import check
from fastinfer.ops.packed_weights import concatenate_packed


class MergedLinear(nn.Module):
    """y = [y_0 | y_1 | ...], the results of several linear layers, in one product.

    Each part keeps its own scales: nothing is rounded anew. A part without bias gets one of zeros
    where another one has it.

    Args:
        parts: at least one, all `torch.nn.Linear` or all `LowBitLinear`; their weights are copied.

    Raises:
        TypeError: another kind of module, or both kinds.
        ValueError: parts differ in in_features, dtype or device; or, of low-bit ones, in bits,
            group_size or perm.

    `linear` is the merged layer, and `split_sizes` the output features of the parts.
    """

    def __init__(self, parts: Sequence[nn.Linear] | Sequence[LowBitLinear]) -> None:
        super().__init__()
        modules: list[nn.Linear | LowBitLinear] = [*parts]
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


def _merge(parts: list[nn.Linear | LowBitLinear]) -> nn.Linear | LowBitLinear:
    if all(is_plain_linear(part) for part in parts):
        return _merge_plain([part for part in parts if isinstance(part, nn.Linear)])
    low_bit = [part for part in parts if isinstance(part, LowBitLinear)]
    if len(low_bit) == len(parts):
        _check_same("device", [part.qweight.device for part in low_bit])
        weight = concatenate_packed([part.packed_weight() for part in low_bit])
        return LowBitLinear.from_packed(weight, _merge_biases(low_bit, torch.float32))
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(
        f"MergedLinear: parts: expected all torch.nn.Linear or all LowBitLinear, got {kinds}"
    )


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


def _merge_biases(parts: Sequence[nn.Linear | LowBitLinear], dtype: torch.dtype) -> Tensor | None:
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
