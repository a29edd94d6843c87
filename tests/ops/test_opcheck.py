"""torch.library.opcheck over every overload, with real data (R32)."""

import pytest
import torch

from tests.conftest import Backend
from tests.ops.op_inputs import OUTPUTS, VARIANTS, Arguments, make, on_device, receivers

ALL_CHECKS = [
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
]  # fmt: skip


def checks_of(arguments: Arguments) -> list[str]:
    """All but test_schema with fp8 tensors: torch compares by arithmetic, which they have not."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    fp8 = any(x.dtype == torch.float8_e4m3fn for x in tensors)
    return [c for c in ALL_CHECKS if c != "test_schema"] if fp8 else ALL_CHECKS


@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_functional_and_in_place_overloads(backend: Backend, op: str, variant: str) -> None:
    arguments = make(op, variant, device=backend.device)
    overload = getattr(backend.library, op).default
    torch.library.opcheck(overload, (), arguments, test_utils=checks_of(arguments))


@pytest.mark.parametrize(("op", "variant"), [pair for pair in VARIANTS if pair[0] in OUTPUTS])
def test_out_overloads(backend: Backend, op: str, variant: str) -> None:
    arguments = make(op, variant, device=backend.device)
    arguments |= receivers(op, arguments)
    overload = getattr(backend.library, op).out
    torch.library.opcheck(overload, (), arguments, test_utils=checks_of(arguments))


@pytest.mark.parametrize("op", ["rms_norm", "silu_and_mul", "fused_add_rms_norm_", "quantize_int8"])
def test_strided_input(backend: Backend, op: str) -> None:
    """The fake gives a contiguous result for a column slice, as the kernel does."""
    arguments = make(op)
    for name in ("x", "residual"):
        if name in arguments:
            wide = torch.randn(arguments[name].shape[0], 100)
            arguments[name] = wide[:, 3 : 3 + arguments[name].shape[1]]
    arguments = on_device(arguments, backend.device)
    torch.library.opcheck(getattr(backend.library, op).default, (), arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op",
    [
        "rms_norm", "flash_attention", "paged_attention", "append_paged_kv_cache_",
        "qk_norm_rope_append_", "quantize_fp8", "sample",
    ],
)  # fmt: skip
def test_half_precision(backend: Backend, op: str, dtype: torch.dtype) -> None:
    arguments = make(op, dtype=dtype, device=backend.device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(backend.library, op).default, (), arguments, test_utils=checks)
