"""The portable GPU kernels, one file per family; loaded when an op first needs one.

Importing this registers, for each private op `fastinfer::_portable_<op>` of csrc/schema.cpp, the
launcher in the table below as its kernel for CUDA tensors, and for CPU tensors under Triton's
interpreter (TRITON_INTERPRET=1). The C++ door (csrc/portable) has checked every argument; what a
launcher is given is legal, and it launches on the current stream of the tensors' device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

LAUNCHERS = {
    "rms_norm": "norm",
    "fused_add_rms_norm_": "norm",
    "layer_norm": "norm",
    "fused_add_layer_norm_": "norm",
    "silu_and_mul": "activation",
    "gelu_and_mul": "activation",
    "quantize_fp8": "quantize",
    "quantize_int8": "quantize",
    "quantize_int8_asymmetric": "quantize",
    "rotary_embedding_": "rotary",
    "append_paged_kv_cache_": "kv_cache",
    "qk_norm_rope_append_": "qk_norm_rope_append",
    "low_bit_gemm": "low_bit_gemm",
    "scaled_mm": "scaled_mm",
    "sample": "sampling",
    "flash_attention": "attention",
    "flash_attention_varlen": "attention",
    "paged_attention": "attention",
    "plan_attention": "attention_plan",
    "merge_attention_states": "attention_merge",
}
"""Op -> the file of this package whose function of the same name launches its kernels."""

_library = torch.library.Library("fastinfer", "IMPL")


def _register(op: str, module: str) -> None:
    function: Callable[..., None] | None = None

    def launch(*args: Any) -> None:
        nonlocal function
        try:
            if function is None:
                found = importlib.import_module(f"{__name__}.{module}")
                function = getattr(found, op)
            function(*args)
        except Exception as error:
            from fastinfer import _library

            _library.report_portable_error(f"{type(error).__name__}: {error}")
            raise

    for key in ("CUDA", "CPU"):
        _library.impl(f"_portable_{op}", launch, key)


for _op, _module in LAUNCHERS.items():
    _register(_op, _module)
