"""What flash_attention and flash_attention_varlen refuse of e4m3 tensors and scales; compiling."""

from typing import Any

import pytest
import torch

from tests.conftest import Backend
from tests.helpers import assert_bit_equal
from tests.ops.op_inputs import copied, make
from tests.reference.fp8 import FP8

OPS = ["flash_attention", "flash_attention_varlen"]
SCALES = ["q_scale", "k_scale", "v_scale"]
by_op = pytest.mark.parametrize("op", OPS)
by_scale = pytest.mark.parametrize("name", SCALES)


def assert_refused(backend: Backend, op: str, arguments: dict[str, Any], name: str) -> None:
    """By the wrapper, the functional overload and the fake, naming the argument."""
    calls = [getattr(backend.ops, op)]
    if "out" not in arguments:
        calls.append(getattr(backend.library, op).default)
    for call in calls:
        with pytest.raises(ValueError, match=rf"{op}: {name}: expected"):
            call(**arguments)


@by_op
@by_scale
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, FP8])
def test_scale_of_another_dtype(backend: Backend, op: str, name: str, dtype: torch.dtype) -> None:
    arguments = make(op, "fp8", device=backend.device)
    arguments[name] = arguments[name].to(dtype)
    assert_refused(backend, op, arguments, name)


@by_op
@by_scale
def test_scale_of_another_shape(backend: Backend, op: str, name: str) -> None:
    good = make(op, "fp8", device=backend.device)
    heads = good[name].shape[0]
    for shape in [(heads + 1,), (heads - 1,), (1, heads), (heads, 1), ()]:
        wrong = torch.ones(shape, device=backend.device)
        assert_refused(backend, op, {**good, name: wrong}, name)
    spread = torch.ones(2 * heads, device=backend.device)[::2]
    assert_refused(backend, op, {**good, name: spread}, name)


@by_op
@by_scale
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_of_tensors_that_need_none(
    backend: Backend, op: str, name: str, dtype: torch.dtype
) -> None:
    scale = make(op, "fp8", device=backend.device)[name]
    arguments = {**make(op, dtype=dtype, device=backend.device), name: scale}
    assert_refused(backend, op, arguments, name)
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    assert_refused(backend, op, meta, name)


@by_op
def test_mixed_dtypes(backend: Backend, op: str) -> None:
    fp8 = make(op, "fp8", device=backend.device)
    for name in "kv":
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
            assert_refused(backend, op, {**fp8, name: fp8[name].to(dtype)}, name)
        half = make(op, dtype=torch.bfloat16, device=backend.device)
        assert_refused(backend, op, {**half, name: half[name].to(FP8)}, name)
    without_scales = {n: x for n, x in fp8.items() if n not in SCALES}
    queries = without_scales["q"].to(torch.bfloat16)
    assert_refused(backend, op, {**without_scales, "q": queries}, "k")


@by_op
def test_the_other_fp8_format(backend: Backend, op: str) -> None:
    fp8 = make(op, "fp8", device=backend.device)
    others = {name: fp8[name].to(torch.float8_e5m2) for name in "qkv"}
    assert_refused(backend, op, {**fp8, **others}, "q")


@by_op
@pytest.mark.parametrize("dtype", [torch.float32, FP8, torch.float8_e5m2])
def test_output_of_another_dtype(backend: Backend, op: str, dtype: torch.dtype) -> None:
    arguments = make(op, "fp8", device=backend.device)
    out, lse = getattr(backend.ops, op)(**arguments)
    wrong = torch.empty(out.shape, dtype=dtype, device=backend.device)
    assert_refused(backend, op, {**arguments, "out": wrong, "lse": lse}, "out")


def test_pages_take_no_fp8_queries(backend: Backend) -> None:
    arguments = make("paged_attention", device=backend.device)
    arguments["q"] = arguments["q"].to(FP8)
    with pytest.raises(ValueError, match="paged_attention: q: expected dtype"):
        backend.ops.paged_attention(**arguments)


@by_op
def test_fakes(op: str) -> None:
    """On meta tensors: bf16 unless out is given, and that may be fp16."""
    arguments = make(op, "fp8", device="meta")
    packet = getattr(torch.ops.fastinfer, op)
    out, lse = packet.default(**arguments)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        packet.out(**arguments, out=out.to(dtype), lse=lse)
    with pytest.raises(ValueError, match=rf"{op}: out: expected dtype"):
        packet.out(**arguments, out=out.float(), lse=lse)
    with pytest.raises(ValueError, match=rf"{op}: k_scale: expected shape"):
        packet.default(**{**arguments, "k_scale": arguments["q_scale"]})


@by_op
def test_compiled_with_a_given_output(backend: Backend, op: str) -> None:
    """One graph, and fp16 results land in the given tensor."""
    torch._dynamo.reset()
    wrapper = getattr(backend.ops, op)
    arguments = make(op, "fp8", device=backend.device)
    out, lse = wrapper(**copied(arguments))
    eager, compiled = (
        {"out": torch.zeros_like(out, dtype=torch.float16), "lse": torch.zeros_like(lse)}
        for _ in range(2)
    )
    wrapper(**arguments, **eager)
    torch.compile(wrapper, fullgraph=True, backend="aot_eager")(**arguments, **compiled)
    for name, wanted in eager.items():
        assert_bit_equal(compiled[name], wanted)
