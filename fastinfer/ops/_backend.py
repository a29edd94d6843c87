"""Which backend each op uses on a device, and why.

Nothing here is listed by hand: the ops are those whose schemas the library registered, an op's
family is the file of `fastinfer.ops` that holds its wrapper.
"""

from __future__ import annotations

import importlib.util

import torch

import fastinfer._library
from fastinfer.triton_kernels.launch import INTERPRETED

# The hand-written GPU kernels use instructions that only this compute capability has (Hopper).
_CUDA_CAPABILITY = (9, 0)


def op_names() -> list[str]:
    """The public ops, sorted, without overloads."""
    return sorted(_overloads())


def op_families() -> dict[str, list[str]]:
    """Family ("attention", "kv_cache", "norm", ...) -> its ops."""
    from fastinfer import ops  # it imports this file

    families: dict[str, list[str]] = {}
    for name in op_names():
        module: str = getattr(ops, name).__module__
        families.setdefault(module.rpartition(".")[2], []).append(name)
    return families


def backends(device: str | torch.device | None = None) -> dict[str, tuple[str, str]]:
    """The backend of every public op on a device.

    Args:
        device: such as "cpu", "cuda" or "cuda:1"; default: the current GPU if torch finds one,
            else the CPU.

    Returns:
        op -> (backend, reason). The backend is "cpu" (C++), "triton" (portable GPU kernel), "cuda"
        (hand-written GPU kernel) or "none": the op cannot run there, and the reason says why.

    Raises:
        RuntimeError: the device's type is not known to torch.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return {name: _choose(name, device) for name in op_names()}


def _choose(op: str, device: torch.device) -> tuple[str, str]:
    forced = fastinfer._library.FORCED
    if device.type == "cpu":
        if forced and INTERPRETED:
            if importlib.util.find_spec("triton") is None:
                return "none", "FASTINFER_BACKEND=triton needs the package triton"
            return "triton", "FASTINFER_BACKEND=triton, in Triton's interpreter"
        return "cpu", f"C++, {fastinfer._library.cpu_isa()}"
    missing = _missing_device(device)
    if missing is not None:
        return "none", missing
    if op not in fastinfer._library.cuda_ops():
        return "triton", "portable kernel"
    if forced:
        return "triton", "FASTINFER_BACKEND=triton"
    if torch.cuda.get_device_capability(device) != _CUDA_CAPABILITY:
        return "triton", "the hand-written kernel needs compute capability 9.0"
    return "cuda", "hand-written kernel for compute capability 9.0"


def _overloads() -> dict[str, list[str]]:
    """Public op -> the qualified names of its overloads."""
    result: dict[str, list[str]] = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, overload = qualified.partition("::")
        name = overload.partition(".")[0]
        if namespace == "fastinfer" and not name.startswith("_"):
            result.setdefault(name, []).append(qualified)
    return result


def _missing_device(device: torch.device) -> str | None:
    """Why no op at all runs on the device."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"fastinfer has kernels for cpu and cuda devices, not for {device.type}"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this torch is built without CUDA; install a CUDA build of torch"
        return "torch finds no usable CUDA GPU (torch.cuda.is_available() is False)"
    if importlib.util.find_spec("triton") is None:
        return "the GPU kernels need the package triton"
    return None
