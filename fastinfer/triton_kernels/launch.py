"""How every kernel is launched, and what launchers ask of a device."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton decides so when it is imported; kernels then run in Python on CPU tensors."""


@dataclass(frozen=True)
class Device:
    """What the choice of a configuration depends on."""

    capability: tuple[int, int]
    num_sms: int
    shared_memory: int  # bytes a block can have


@cache
def device_of(index: int) -> Device:
    """The properties of a GPU, looked up once; those of a small one under the interpreter."""
    if INTERPRETED:
        return Device((8, 0), 4, 64 << 10)
    found = torch.cuda.get_device_properties(index)
    shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
    return Device((found.major, found.minor), found.multi_processor_count, shared)


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Runs a Triton kernel on the device of ``like``, on its current stream.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs; all at least 1.
        like: a tensor of the call.
        args: the kernel's arguments in order.
        options: constexprs by name, num_warps and num_stages.
    """
    with _guard(like):
        kernel[grid](*args, **options)


def _guard(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    if not like.is_cuda or like.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(like.device)
