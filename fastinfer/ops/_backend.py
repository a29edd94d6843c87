"""Which backend each op uses on a device, and why, read from torch's dispatcher.

Nothing here is listed by hand: the ops are those whose schemas the library registered, an op's
family is the file of `fastinfer.ops` that holds its wrapper.
"""

from __future__ import annotations

import torch

import fastinfer._library

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
        op -> (backend, reason). The backend is "cpu" (C++), "cuda" (hand-written GPU kernel) or
        "none": the op cannot run there, and the reason says why and what helps.

    Raises:
        RuntimeError: the device's type is not known to torch.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    missing = _missing_device(device)
    result = {}
    for name, overloads in sorted(_overloads().items()):
        if missing is not None:
            result[name] = ("none", missing)
        elif device.type == "cpu":
            result[name] = _choose(overloads, "cpu", f"C++, {fastinfer._library.cpu_isa()}")
        else:
            result[name] = _choose(
                overloads, "cuda", "hand-written kernel for compute capability 9.0"
            )
    return result


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
    if torch.version.hip is not None:
        return "the GPU kernels are for NVIDIA GPUs, this torch is built for ROCm"
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            return "this torch is built without CUDA; install a CUDA build of torch"
        return "torch finds no usable CUDA GPU (torch.cuda.is_available() is False)"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CUDA_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"the GPU kernels need compute capability 9.0 (Hopper); {name} has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


def _choose(overloads: list[str], backend: str, reason: str) -> tuple[str, str]:
    key = {"cpu": "CPU", "cuda": "CUDA"}[backend]
    if all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in overloads):
        return backend, reason
    if backend == "cpu":
        return "none", "no CPU kernel in this build of fastinfer"
    return "none", (
        "no GPU kernel in this build of fastinfer; run it on the CPU, or build where a CUDA "
        "compiler is found (FASTINFER_CUDA=1) if the op has a GPU kernel"
    )
