"""Sources as they come: sizes that divide nothing, weights that are not numbers or contradict each
other, folders with more in them than a model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastinfer.models import load
from fastinfer.quant import Recipe, Scheme
from fastinfer.quantizer import quantize_model
from tests.models.tools import paged_logits
from tests.quantizer.conftest import TEXT

Make = Callable[..., Path]
OPTIONS: dict[str, Any] = {"samples": 8, "seq_len": 32}


def logits_of(path: Path) -> Tensor:
    return torch.cat(paged_logits(load(path).decoder, [[5, 17, 88, 200, 319, 40, 3]], 8))


@pytest.mark.parametrize("group_size", [-1, 128, 32])
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq"])
def test_odd_widths(folder: Make, tmp_path: Path, format: str, group_size: int) -> None:
    source, out = folder(intermediate_size=83), tmp_path / "out"
    quantize_model(source, out, Recipe(Scheme("rtn", 8, group_size)), [TEXT], format=format,
                   **OPTIONS)  # fmt: skip
    plain = logits_of(source)
    assert float((logits_of(out) - plain).norm() / plain.norm()) < 0.1
