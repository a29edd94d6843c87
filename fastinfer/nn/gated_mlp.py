"""`SwiGLU` and `GeGLU`: feed-forward layers whose gate and up projections are one product."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn._apart import list_apart
from fastinfer.nn._linear import QuantizedLinear
from fastinfer.nn.merged_linear import MergedLinear
from fastinfer.nn.norm import OP_DTYPES, wants_grad

Projection = nn.Linear | QuantizedLinear
_MLP = TypeVar("_MLP", bound="GatedMLP")


class GatedMLP(nn.Module):
    """y = (act(x W_gate^T) * (x W_up^T)) W_down^T: what `SwiGLU` and `GeGLU` share.

    Args:
        hidden_size: features of x and y.
        intermediate_size: features between.
        bias: whether the projections have one.
        device, dtype: of the weights.

    `gate_up_proj` computes both projections of x at once, gate first. In the state_dict its tensors
    are `gate_proj.weight`, `up_proj.weight` (and biases), as in modules that keep them apart; so
    state_dicts go either way. Quantized ones, and those of `from_merged`, keep the name
    `gate_up_proj`.

    x may be fp32, bf16 or fp16. What a gradient is wanted of, and any other dtype, torch's own
    functions compute, so this is differentiable where its projections are.

    Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj: Projection = nn.Linear(
            hidden_size, 2 * intermediate_size, bias, device=device, dtype=dtype
        )
        self.down_proj: nn.Module = nn.Linear(
            intermediate_size, hidden_size, bias, device=device, dtype=dtype
        )
        list_apart(self, _parts(intermediate_size, intermediate_size))

    @classmethod
    def from_projections(
        cls: type[_MLP], gate: Projection, up: Projection, down: nn.Module, **options: Any
    ) -> _MLP:
        """The layer of these projections. Gate and up are copied into one; `down` is kept.

        Args:
            gate, up: both `torch.nn.Linear`, or both quantized, as `MergedLinear` takes them.
            down: what maps the features between to y.
            options: of the class, such as GeGLU's `tanh_approx`.

        Raises:
            TypeError, ValueError: gate and up cannot be merged (see `MergedLinear`), or differ in
                output features.
        """
        if gate.out_features != up.out_features:
            raise ValueError(
                f"{cls.__name__}: up: expected {gate.out_features} output features as gate has, "
                f"got {up.out_features}"
            )
        merged = MergedLinear(cast(list[nn.Linear], [gate, up])).linear
        mlp = cls.from_merged(merged, down, **options)
        if isinstance(merged, nn.Linear):
            list_apart(mlp, _parts(gate.out_features, up.out_features))
        return mlp

    @classmethod
    def from_merged(cls: type[_MLP], gate_up: Projection, down: nn.Module, **options: Any) -> _MLP:
        """The layer of a gate-up projection that is one already, gate first, and of `down`."""
        mlp = cls(1, 1, device="meta", **options)
        mlp.gate_up_proj, mlp.down_proj = gate_up, down
        list_apart(mlp, {})
        return mlp

    def forward(self, x: Tensor) -> Tensor:
        """y [..., hidden_size] of x [..., hidden_size]."""
        gate_up = self.gate_up_proj(x)
        if wants_grad(gate_up) or gate_up.dtype not in OP_DTYPES:
            gate, up = gate_up.chunk(2, -1)
            between = self._activation(gate) * up
        else:
            between = self._gated(gate_up)
        y: Tensor = self.down_proj(between)
        return y

    def _gated(self, gate_up: Tensor) -> Tensor:
        """act(gate) * up, by the op."""
        raise NotImplementedError

    def _activation(self, gate: Tensor) -> Tensor:
        """act(gate), by torch."""
        raise NotImplementedError


class SwiGLU(GatedMLP):
    """`GatedMLP` with act(a) = silu(a) = a / (1 + exp(-a)), as in Llama, Mistral and Qwen."""

    def _gated(self, gate_up: Tensor) -> Tensor:
        return ops.silu_and_mul(gate_up)

    def _activation(self, gate: Tensor) -> Tensor:
        return F.silu(gate)


class GeGLU(GatedMLP):
    """`GatedMLP` with act(a) = gelu(a), by erf, or by tanh as in Gemma with `tanh_approx`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tanh_approx: bool = False,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.tanh_approx = tanh_approx

    def extra_repr(self) -> str:
        """What sets this layer apart, for print()."""
        return f"tanh_approx={self.tanh_approx}"

    def _gated(self, gate_up: Tensor) -> Tensor:
        return ops.gelu_and_mul(gate_up, tanh_approx=self.tanh_approx)

    def _activation(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh" if self.tanh_approx else "none")


def _parts(gate: int, up: int) -> dict[str, dict[str, int]]:
    return {"gate_up_proj": {"gate_proj": gate, "up_proj": up}}
