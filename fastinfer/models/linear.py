"""`Linear`: a projection without gradient, in the layout that is fastest where it runs."""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b; x [T, in_features], W [out_features, in_features], b [out_features] or None.

    `pack` moves an fp32 weight on an x86 CPU into oneDNN's blocked layout, for two reasons. It is
    faster at the few rows of a decode step. And there a row's result does not depend on the other
    rows of the batch (one accumulation order for any T), which the plain GEMM does not give, so
    that tokens stay the same under any batching.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = empty((out_features, in_features), dtype, device)
        self.bias: nn.Parameter | None = empty((out_features,), dtype, device) if bias else None
        self._packed: Tensor | None = None
        self._pair_single_rows = False

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            if self._pair_single_rows and x.shape[0] == 1:
                return self._run_packed(torch.cat((x, x)))[:1]
            return self._run_packed(x)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def plain_weight(self) -> Tensor:
        """The weight, to be filled; RuntimeError once it is packed."""
        if self.weight is None:
            raise RuntimeError(
                "Decoder.weight_slots: the weights are packed and can no longer be set"
            )
        return self.weight.data

    def pack(self) -> None:
        """Replaces the weight by its packed form where there is one; the plain one is dropped."""
        weight = self.weight
        if weight is None or not _can_pack(weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, _PACK_ROWS)
        self.weight = None
        # With AVX-512 and many inputs oneDNN sums a single row in an order of its own.
        probe = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0))
        self._pair_single_rows = not torch.equal(
            self._run_packed(probe[:1]), self._run_packed(probe)[:1]
        )

    def _run_packed(self, x: Tensor) -> Tensor:
        assert self._packed is not None
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, self.bias, "none", [], ""
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
