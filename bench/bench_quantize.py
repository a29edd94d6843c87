"""quantize_fp8, quantize_int8 and quantize_int8_asymmetric against torch's composition, eager and
compiled.
"""

from __future__ import annotations

import pytest
import torch

from bench.bench_norm import peers
from bench.harness import Case
from fastinfer import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = {"token": (1, -1), "tensor": (-1, -1), "1x128": (1, 128), "128x128": (128, 128)}
FORMATS = {
    "quantize_fp8": (ops.quantize_fp8, torch.float8_e4m3fn, 448.0),
    "quantize_int8": (ops.quantize_int8, torch.int8, 127.0),
}
SHAPES = {
    "cpu": [(1, 1536), (64, 4096), (1024, 4096)],
    "cuda": [(1, 4096), (64, 4096), (8192, 8192)],
}


def pytest_generate_tests(metafunc):
    device = metafunc.config.getoption("--bench-device")
    # What a model on the device computes in.
    metafunc.parametrize("dtype", ["fp32", "bf16"] if device == "cpu" else ["bf16"])
    metafunc.parametrize("shape", SHAPES[device], ids=lambda s: f"{s[0]}x{s[1]}")


def composition(storage, limit, block):
    """The same scales and codes by torch's ops; whole blocks only."""

    def eager(x):
        rows, columns = (n if b == -1 else min(n, b) for n, b in zip(x.shape, block, strict=True))
        tiled = x.float().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = tiled.abs().amax((1, 3), keepdim=True) / limit
        scaled = tiled / torch.where(scale == 0.0, 1.0, scale)
        if storage == torch.int8:
            scaled = scaled.round()
        return scaled.clamp(-limit, limit).to(storage).view(x.shape), scale[:, 0, :, 0]

    return eager


def asymmetric(x):
    value = x.float()
    high = value.amax(1, keepdim=True).clamp(min=0.0)
    low = value.amin(1, keepdim=True).clamp(max=0.0)
    scale = (high - low) / 255.0
    scale = torch.where(scale == 0.0, 1.0, scale)
    zero_point = -128 - (low / scale).round()
    codes = ((value / scale).round() + zero_point).clamp(-128.0, 127.0)
    return codes.to(torch.int8), scale, zero_point.to(torch.int32)


def case(suite, name, dtype, shape, run, eager):
    rows, columns = shape
    return Case(
        name=f"{name}/{dtype}/{rows}x{columns}",
        make=lambda: (torch.randn(shape, device=suite.device).to(DTYPES[dtype]),),
        run=run,
        peers=peers(eager, suite.device),
        bytes_moved=rows * columns * (DTYPES[dtype].itemsize + 1),
    )


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("op", FORMATS)
def test_quantize(record, suite, op, block, dtype, shape):
    function, storage, limit = FORMATS[op]
    sizes = BLOCKS[block]
    record(
        case(
            suite,
            f"{op}/{block}",
            dtype,
            shape,
            lambda x: function(x, block=sizes),
            composition(storage, limit, sizes),
        )
    )


@pytest.mark.parametrize("op", FORMATS)
def test_quantize_static(record, suite, op, dtype, shape):
    function, storage, limit = FORMATS[op]
    scale = torch.full((1, 1), 4.0 / limit, device=suite.device)

    def eager(x):
        scaled = x.float() / scale
        if storage == torch.int8:
            scaled = scaled.round()
        return scaled.clamp(-limit, limit).to(storage)

    record(
        case(
            suite,
            f"{op}/static",
            dtype,
            shape,
            lambda x: function(x, scale=scale, block=(-1, -1)),
            eager,
        )
    )


def test_quantize_int8_asymmetric(record, suite, dtype, shape):
    record(
        case(
            suite,
            "quantize_int8_asymmetric",
            dtype,
            shape,
            ops.quantize_int8_asymmetric,
            asymmetric,
        )
    )
