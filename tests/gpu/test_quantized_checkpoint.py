"""Checkpoints that others quantized, on a GPU: the same codes and scales as on the CPU."""

from pathlib import Path

import pytest
import torch

from fastinfer.models import Decoder, load
from fastinfer.nn import LowBitLinear
from tests.helpers import assert_bit_equal
from tests.models.test_quantized_checkpoint import written

CASES = ["gptq-3-act-order", "gptq-v2", "awq-gemm", "awq-gemv", "compressed-by-group"]


def low_bit_layers(decoder: Decoder) -> list[LowBitLinear]:
    return [module for module in decoder.modules() if isinstance(module, LowBitLinear)]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_cpu(tmp_path: Path, case: str) -> None:
    _, folder = written(tmp_path, case)
    on_cpu, on_gpu = (
        low_bit_layers(load(folder, dtype=torch.bfloat16, device=device).decoder)
        for device in ("cpu", "cuda")
    )
    assert len(on_cpu) == len(on_gpu) == 4 * 2
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert {buffer.device.type for buffer in ours.buffers()} == {"cuda"}
        for name, buffer in theirs.named_buffers():
            assert_bit_equal(ours.get_buffer(name).cpu(), buffer)
        x = torch.randn(5, ours.in_features, dtype=torch.bfloat16)
        expected = theirs(x.float())
        assert (ours(x.cuda()).cpu() - expected).norm() < 2**-7 * expected.norm()
