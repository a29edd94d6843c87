"""`Linear`: a projection without gradient, in the layout that is fastest where it runs."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer.nn import FP8Linear, Int8W8A8Linear, LowBitLinear, QuantizedLinear
from fastinfer.ops.packed_weights import PackedWeight, concatenate_packed, same_order

QUANTIZATIONS: dict[str, Callable[[nn.Linear], QuantizedLinear]] = {
    "int2": functools.partial(LowBitLinear.from_linear, bits=2, group_size=128),
    "int3": functools.partial(LowBitLinear.from_linear, bits=3, group_size=128),
    "int4": functools.partial(LowBitLinear.from_linear, bits=4, group_size=128),
    "int8": functools.partial(LowBitLinear.from_linear, bits=8, group_size=128),
    "fp8": FP8Linear.from_linear,
    "int8_w8a8": Int8W8A8Linear.from_linear,
}
"""What a projection can be made into when its weight is filled."""


class Linear(nn.Module):
    """y = x W^T + b; x [T, in_features], W [out_features, in_features], b [out_features] or None.

    Once the weight is filled, `pack` brings it into the layout that it is used in:

    - with ``quantization``, one of `QUANTIZATIONS`, rounded to nearest. "int2" to "int8" are codes
      of so many bits in groups of 128 inputs, with a scale and a zero point in the weight's dtype;
      "fp8" and "int8_w8a8" are codes with a scale for each output feature, and x is quantized too,
      each token by a scale of its own;
    - where `set_codes` gave the weight of some features or all, these codes as they are, in one
      product as far as it can compute them;
    - else, an fp32 weight on an x86 CPU as `_OneDnnWeight`; any other one stays as it is.

    With ``quantization`` or ``deferred`` a weight has a shape and no memory before `allocate`, so
    that a model needs the memory of the layers being filled and not that of its plain weights.

    On the CPU a row's result does not depend on the other rows of the batch in any of these
    layouts, which the plain product does not give, so that tokens stay the same under any batching.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__()
        self.quantization = quantization
        self.device = device
        deferred = deferred or quantization is not None
        place = torch.device("meta") if deferred else device
        self.weight: nn.Parameter | None = empty((out_features, in_features), dtype, place)
        self.bias: nn.Parameter | None = empty((out_features,), dtype, device) if bias else None
        self._codes: dict[int, PackedWeight] = {}
        self._packed: QuantizedLinear | Linear | _OneDnnWeight | _Pieces | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            out: Tensor = self._packed(x)
            return out
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def plain_weight(self) -> Tensor:
        """The weight, to be filled; RuntimeError once it is packed."""
        if self.weight is None:
            raise RuntimeError(
                "Decoder.weight_slots: the weights are packed and can no longer be set"
            )
        return self.weight.data

    def allocate(self) -> None:
        """Gives a weight that has none the memory to be filled."""
        weight = self.weight
        if weight is not None and weight.is_meta:
            self.weight = empty(tuple(weight.shape), weight.dtype, self.device)

    def release(self) -> None:
        """Drops the values of a weight that is not packed: it is as before `allocate`."""
        if self.weight is not None:
            self.weight = empty(tuple(self.weight.shape), self.weight.dtype, torch.device("meta"))

    def set_codes(self, first: int, weight: PackedWeight) -> None:
        """Takes the weight of output features from ``first`` on as codes that others chose."""
        self._codes[first] = weight

    def pack(self) -> None:
        """Replaces the weight by its packed form where there is one; the plain one is dropped.

        Raises:
            ValueError: a weight that cannot be quantized: NaN, infinity, or beyond its scales.
        """
        if self.weight is None:
            return
        if self._codes:
            pieces = self._pieces(self.weight)
            self._packed = pieces[0] if len(pieces) == 1 else _Pieces(pieces)
            self.weight = self.bias = None
            self._codes = {}
        elif self.quantization is not None:
            n, k = self.weight.shape
            linear = nn.Linear(k, n, bias=self.bias is not None, device="meta")
            linear.weight, linear.bias = self.weight, self.bias  # type: ignore[assignment]
            self._packed = QUANTIZATIONS[self.quantization](linear)
            self.weight = self.bias = None
        elif _can_pack(self.weight.data):
            bias = None if self.bias is None else self.bias.data
            self._packed = _OneDnnWeight(self.weight.data, bias)
            self.weight = None

    def _pieces(self, weight: Tensor) -> list[LowBitLinear | Linear]:
        """The fewest layers that compute the output features, in their order."""
        runs: list[tuple[int, list[PackedWeight]]] = []
        row = 0  # the first feature that no run has
        for first, codes in sorted(self._codes.items()):
            if row < first:
                runs.append((first - row, []))
            if row == first and runs and runs[-1][1] and _one_product(runs[-1][1][-1], codes):
                size, parts = runs[-1]
                runs[-1] = (size + codes.shape[0], [*parts, codes])
            else:
                runs.append((codes.shape[0], [codes]))
            row = first + codes.shape[0]
        if row < weight.shape[0]:
            runs.append((weight.shape[0] - row, []))
        pieces: list[LowBitLinear | Linear] = []
        row = 0
        for size, parts in runs:
            bias = None if self.bias is None else self.bias.data[row : row + size]
            if parts:
                merged = concatenate_packed(parts) if len(parts) > 1 else parts[0]
                pieces.append(LowBitLinear.from_packed(merged, bias))
            else:
                pieces.append(_plain(weight[row : row + size], bias))
            row += size
        return pieces


class _Pieces(nn.Module):
    """Layers of the same input, whose output features follow one another."""

    def __init__(self, pieces: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(pieces)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([piece(x) for piece in self.pieces], -1)


class _OneDnnWeight:
    """An fp32 weight in oneDNN's blocked layout.

    It is faster at the few rows of a decode step, and has one accumulation order for any number of
    rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias
        # With AVX-512 and many inputs oneDNN sums a single row in an order of its own.
        probe = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0))
        self._pair_single_rows = not torch.equal(self._run(probe[:1]), self._run(probe)[:1])

    def __call__(self, x: Tensor) -> Tensor:
        if self._pair_single_rows and x.shape[0] == 1:
            return self._run(torch.cat((x, x)))[:1]
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self._bias, "none", [], ""
        )
        return out


def _one_product(weight: PackedWeight, other: PackedWeight) -> bool:
    same = (weight.bits, weight.group_size) == (other.bits, other.group_size)
    return same and same_order(weight.perm, other.perm)


def _plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """A packed layer of some of a weight's rows, as copies: the weight itself may be dropped."""
    n, k = weight.shape
    linear = Linear(k, n, bias=bias is not None, dtype=weight.dtype, device=weight.device)
    linear.plain_weight().copy_(weight)
    if linear.bias is not None and bias is not None:
        linear.bias.data.copy_(bias)
    linear.pack()
    return linear


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter without gradient, not yet filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


# The row count the layout is chosen for: for one row oneDNN takes another layout, whose results
# differ between one row and several.
_PACK_ROWS = 32


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch._C._has_mkldnn
    )
