"""Loads the ops library: after this import `torch.ops.fastinfer.*` exists."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

PATH = Path(__file__).with_name("_ops.so")

if not PATH.is_file():
    raise ImportError(
        f"fastinfer: the ops library {PATH.name} is missing beside {Path(__file__).name}; "
        "install fastinfer (pip install .) or build it in place (python setup.py develop_inplace)"
    )
_backend = os.environ.get("FASTINFER_BACKEND", "")
if _backend not in ("", "triton"):
    raise ImportError(f"FASTINFER_BACKEND: expected 'triton' or nothing, got {_backend!r}")
FORCED = _backend == "triton"
"""Whether Triton kernels run where hand-written ones exist, as the library found it when loaded."""
torch.ops.load_library(str(PATH))
_functions = ctypes.CDLL(str(PATH))

import fastinfer.triton_kernels  # noqa: E402, F401  (its kernels need the schemas)


def cpu_isa() -> str:
    """The instruction set the CPU kernels run with: "avx2" or "generic"."""
    return _build_info("fastinfer_cpu_isa")


def cuda_archs() -> list[str]:
    """The GPU architectures the CUDA kernels were built for; empty when none were built."""
    return _build_info("fastinfer_cuda_archs").split()


def cuda_ops() -> list[str]:
    """The ops with a hand-written GPU kernel in this build; the others run on Triton."""
    return _build_info("fastinfer_cuda_ops").split()


def rows_bucket(m: int) -> int:
    """The row count that stands for m where configurations of low-bit products are measured."""
    function = _functions.fastinfer_rows_bucket
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    bucket: int = function(m)
    return bucket


def report_portable_error(text: str) -> None:
    """Tells the library why a Triton launcher fails: on its way through C++ the error loses its
    text, and the library raises it with this one.
    """
    _functions.fastinfer_portable_error(text.encode())


def _build_info(symbol: str) -> str:
    function = getattr(_functions, symbol)
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()
