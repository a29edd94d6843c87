"""What every wrapper shares: the refusal of grad, and checks for fake implementations."""

from __future__ import annotations

import torch
from torch import Tensor


def refuse_grad(op: str, **tensors: Tensor | None) -> None:
    """Inference ops have no derivative: refuse loudly instead of detaching silently."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(
                f"fastinfer::{op}: {name} requires grad, but this op has no derivative; "
                "call it under torch.no_grad() or torch.inference_mode(), or detach the tensor"
            )


def check(op: str, condition: bool, message: str) -> None:
    """A shape or dtype condition of a fake implementation; ValueError as in the kernels."""
    torch._check_value(condition, lambda: f"fastinfer::{op}: {message}")


def check_out(
    op: str, name: str, out: Tensor, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype
) -> None:
    """`out` must have exactly this shape and dtype."""
    check(op, out.dtype == dtype, f"{name}: expected dtype {dtype}, got {out.dtype}")
    check(op, out.dim() == len(shape), f"{name}: expected shape {shape}, got {tuple(out.shape)}")
    for got, expected in zip(out.shape, shape, strict=True):
        check(op, got == expected, f"{name}: expected shape {shape}, got {tuple(out.shape)}")


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """All tensors live on one device.

    A call that mixes devices may be dispatched to the fake (a meta tensor sends it there), which
    would do nothing and say nothing.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    for name, tensor in given.items():
        check(
            op,
            tensor.device == given[first].device,
            f"{name}: expected the same device as {first} ({given[first].device}), "
            f"got {tensor.device}",
        )
