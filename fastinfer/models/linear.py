"""`Linear`: a projection without gradient, in the layout that is fastest where it runs."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer.nn import LowBitLinear
from fastinfer.ops import quantize_weight

_GROUP_SIZE = 128


class Linear(nn.Module):
    """y = x W^T + b; x [T, in_features], W [out_features, in_features], b [out_features] or None.

    Once the weight is filled, `pack` brings it into the layout that it is used in:

    - with ``bits`` (2, 3, 4 or 8), as codes of so many bits, rounded to nearest in groups of 128
      inputs with a scale and a zero point in the weight's dtype. Before `allocate` such a weight
      has a shape and no memory, so that a model needs the memory of the layers being filled and not
      that of its plain weights;
    - else, an fp32 weight on an x86 CPU as `_OneDnnWeight`; any other one stays as it is.

    On the CPU a row's result does not depend on the other rows of the batch in either layout, which
    the plain product does not give, so that tokens stay the same under any batching.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        bits: int | None = None,
    ) -> None:
        super().__init__()
        self.bits = bits
        self._device = device
        place = device if bits is None else torch.device("meta")
        self.weight: nn.Parameter | None = empty((out_features, in_features), dtype, place)
        self.bias: nn.Parameter | None = empty((out_features,), dtype, device) if bias else None
        self._packed: LowBitLinear | _OneDnnWeight | None = None

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
        weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        if self.bits is not None:
            packed = quantize_weight(weight, self.bits, _GROUP_SIZE)
            self._packed = LowBitLinear.from_packed(packed, bias)
            self.weight = self.bias = None
        elif _can_pack(weight):
            self._packed = _OneDnnWeight(weight, bias)
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
