"""`Linear`: a projection without gradient, in the layout that is fastest where it runs."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer.nn import FP8Linear, Int8W8A8Linear, LowBitLinear, QuantizedLinear

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
      each token by a scale of its own. Before `allocate` such a weight has a shape and no memory,
      so that a model needs the memory of the layers being filled and not that of its plain weights;
    - else, an fp32 weight on an x86 CPU as `_OneDnnWeight`; any other one stays as it is.

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
    ) -> None:
        super().__init__()
        self.quantization = quantization
        self._device = device
        place = device if quantization is None else torch.device("meta")
        self.weight: nn.Parameter | None = empty((out_features, in_features), dtype, place)
        self.bias: nn.Parameter | None = empty((out_features,), dtype, device) if bias else None
        self._packed: QuantizedLinear | _OneDnnWeight | None = None

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
        """Gives a weight that will be quantized the memory to be filled."""
        weight = self.weight
        if weight is not None and weight.is_meta:
            self.weight = empty(tuple(weight.shape), weight.dtype, self._device)

    def pack(self) -> None:
        """Replaces the weight by its packed form where there is one; the plain one is dropped.

        Raises:
            ValueError: a weight that cannot be quantized: NaN, infinity, or beyond its scales.
        """
        if self.weight is None:
            return
        if self.quantization is not None:
            n, k = self.weight.shape
            linear = nn.Linear(k, n, bias=self.bias is not None, device="meta")
            linear.weight, linear.bias = self.weight, self.bias  # type: ignore[assignment]
            self._packed = QUANTIZATIONS[self.quantization](linear)
            self.weight = self.bias = None
        elif _can_pack(self.weight.data):
            bias = None if self.bias is None else self.bias.data
            self._packed = _OneDnnWeight(self.weight.data, bias)
            self.weight = None


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
