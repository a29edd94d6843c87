"""The CUDA RMSNorm on a Hopper GPU: values, shapes that misalign, streams, graphs, large
offsets.
"""

from __future__ import annotations

import pytest
import torch

from fastinfer import ops
from tests import reference
from tests.helpers import assert_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def eager(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 576, 3584, 4096, 5120, 16384, 28672])
def test_matches_reference(dtype: torch.dtype, hidden: int) -> None:
    x, weight = normal(33, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert_accurate(ops.rms_norm(x, weight), expected, eager(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_base_pointer_and_column_slice(dtype: torch.dtype) -> None:
    wide = normal(17, 2 * 3584 + 3, dtype=dtype)
    weight = normal(3584, dtype=dtype)
    x = wide[:, 1 : 1 + 3584]
    assert_accurate(ops.rms_norm(x, weight), reference.rms_norm(x, weight, 1e-6), eager(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_equals_the_two_steps(dtype: torch.dtype) -> None:
    x, residual, weight = (
        normal(9, 5120, dtype=dtype),
        normal(9, 5120, dtype=dtype),
        normal(5120, dtype=dtype),
    )
    total = x + residual
    expected = ops.rms_norm(total, weight, weight_offset=1.0)
    ops.fused_add_rms_norm_(x, residual, weight, weight_offset=1.0)
    assert torch.equal(residual, total)
    assert torch.equal(x, expected)


def test_zero_rows_leave_no_cuda_error() -> None:
    x = normal(0, 64, dtype=torch.bfloat16)
    assert ops.rms_norm(x, normal(64, dtype=torch.bfloat16)).shape == (0, 64)
    torch.cuda.synchronize()


def test_row_offset_beyond_2_31_elements() -> None:
    rows, hidden = 2**23 + 16, 256
    x = torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16)
    x[-1] = normal(hidden, dtype=torch.bfloat16)
    weight = normal(hidden, dtype=torch.bfloat16)
    out = ops.rms_norm(x, weight)
    assert_accurate(out[-1:], reference.rms_norm(x[-1:], weight, 1e-6), eager(x[-1:], weight))
    assert not out[:-1].any()


def test_side_stream_capture_and_replay() -> None:
    x, weight = normal(64, 4096, dtype=torch.bfloat16), normal(4096, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        ops.rms_norm(x, weight, out=out)
    x.copy_(normal(64, 4096, dtype=torch.bfloat16))
    graph.replay()
    assert torch.equal(out, ops.rms_norm(x, weight))


def test_tensor_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(8, 512, device="cuda:1")
    weight = torch.randn(512, device="cuda:1")
    with torch.cuda.device(0):
        out = ops.rms_norm(x, weight)
    assert_accurate(out, reference.rms_norm(x, weight, 1e-6), eager(x, weight))


def test_compiles_fullgraph() -> None:
    weight = normal(1024, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x: ops.rms_norm(x, weight) + 1, fullgraph=True)
    with torch.no_grad():
        for tokens in (2, 3, 17):
            x = normal(tokens, 1024, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), ops.rms_norm(x, weight) + 1)
