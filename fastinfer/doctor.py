"""`fastinfer doctor`: versions, driver, what was built, the devices, and each op's backend and
why.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastinfer.tuning import InUse

# A statically linked CUDA 13 runtime needs at least this driver (reported as 1000 * major + 10 *
# minor).
REQUIRED_DRIVER_CUDA = 13000


def driver_cuda_version() -> int | None:
    """The newest CUDA version the installed driver supports, without starting a CUDA context; None
    without a driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver_line(version: int | None) -> str:
    if version is None:
        return "none found"
    text = f"supports CUDA {version // 1000}.{version % 1000 // 10}"
    if version < REQUIRED_DRIVER_CUDA:
        text += "; the CUDA kernels of this build need 13.0 (driver 580 or newer)"
    return text


def print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of cells, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _tuned_row(device: str, file: InUse) -> tuple[str, ...]:
    entries = f"{file.entries} entries"
    if file.unusable:
        entries += f" and {file.unusable} that this build has no kernel for"
    return device, entries, str(file.path)


def main() -> int:
    """Print the report; 0 when every op has a backend on the CPU, 1 when the installation is
    broken.
    """
    import torch

    print("versions")
    packages = ("fastinfer", "torch", "triton", "numpy", "transformers", "safetensors", "gguf")
    print_table([("python", platform.python_version()), *((p, _version(p)) for p in packages)])
    print(f"platform\n  {platform.platform()}, {torch.get_num_threads()} threads")
    print(f"driver\n  {_driver_line(driver_cuda_version())}")

    try:
        from fastinfer import _library, tuning
        from fastinfer.ops import backends
    except (ImportError, OSError) as error:
        print(f"ops library\n  cannot be loaded: {error}", file=sys.stderr)
        return 1
    archs = ", ".join(f"sm_{arch}" for arch in _library.cuda_archs()) or "not built"
    print("built")
    print_table([("cpu kernels", _library.cpu_isa()), ("cuda kernels", archs)])

    print("measured configurations of low-bit products (fastinfer tune)")
    print_table([_tuned_row(device, file) for device, file in tuning.in_use.items()])
    if not tuning.in_use:
        print(f"  none in {tuning.folder()}")

    devices = ["cpu"]
    print("devices\n  cpu  " + (platform.processor() or platform.machine()))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}")
        capability = f"{properties.major}.{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        print(f"  cuda:{index}  {properties.name}, compute capability {capability}, {memory}")
    broken = False
    for device in devices:
        print(f"ops on {device}")
        table = backends(device)
        missing = any(backend == "none" for backend, _ in table.values())
        broken = broken or (device == "cpu" and missing)
        print_table([(op, backend, reason) for op, (backend, reason) in table.items()])
    return 1 if broken else 0
