"""How every kernel is launched, and what launchers ask of a device."""

from __future__ import annotations

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

    num_sms: int
    shared_memory: int  # bytes a block can have
    fp8: bool = True  # has products of e4m3


@cache
def device_of(index: int) -> Device:
    """The properties of a GPU, looked up once; those of a small one under the interpreter."""
    if INTERPRETED:
        return Device(4, 64 << 10)
    found = torch.cuda.get_device_properties(index)
    shared = getattr(found, "shared_memory_per_block_optin", 64 << 10)
    return Device(found.multi_processor_count, shared, (found.major, found.minor) >= (8, 9))


# Kernel -> (device, options, what Triton specialises on) -> (compiled kernel, constexprs). Triton's
# own launcher finds the compiled kernel anew at each call, which takes tens of microseconds.
_compiled: dict[Any, dict[Any, tuple[Any, list[Any]]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **options: Any) -> None:
    """Runs a Triton kernel on the device of ``like``, on its current stream.

    Args:
        kernel: a `triton.jit` function whose constexprs come last.
        grid: its programs; all at least 1.
        like: a tensor of the call.
        args: the kernel's arguments in order.
        options: constexprs by name, num_warps and num_stages.
    """
    if INTERPRETED:
        kernel[grid](*args, **options)
        return
    device = like.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, like, *args, **options)
    key = (device, *options.values(), *map(_specialization, args))
    known = _compiled.setdefault(kernel, {})
    found = known.get(key)
    if found is None:
        compiled = kernel[grid](*args, **options)
        names = kernel.arg_names[len(args) :]
        known[key] = (compiled, [options[name] for name in names])
        return
    compiled, constexprs = found
    compiled[(*grid, 1, 1)[:3]](*args, *constexprs)


def _specialization(x: Any) -> Any:
    """What the compiled code may rely on: Triton distinguishes dtypes, pointers and integers that
    are multiples of 16, the integer 1, and integers that need 64 bits.
    """
    kind = type(x)
    if kind is int:
        if x == 1:
            return 1
        return (x & 15 == 0, -0x80000000 <= x <= 0x7FFFFFFF)
    if x is None or kind is float:
        return kind
    if kind is bool:
        return (x,)
    return (x.dtype, x.data_ptr() & 15 == 0)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()
