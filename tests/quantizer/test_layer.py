"""One layer: scales that are folded into what comes before change nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastinfer.models.loader import open_checkpoint
from fastinfer.quant import Scheme
from fastinfer.quantizer.layer import _scale, _sites
from fastinfer.quantizer.walk import Walk

Make = Callable[..., Path]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"])
@torch.no_grad()
def test_folding_changes_no_result(folder: Make, kind: str) -> None:
    changes = {} if kind != "phi3" else {"head_dim": 12, "pad_token_id": 0}
    source = folder(kind, dtype=torch.bfloat16, **changes)
    ids = torch.randint(2, 320, (6, 24))
    plain, folded = (Walk(open_checkpoint(source), ids, torch.device("cpu")) for _ in range(2))
    plain.load(0)
    layer = folded.load(0)
    norm, down = layer.input_norm.weight.clone(), layer.down.plain_weight().clone()
    schemes = {p.name: Scheme("awq", 3, 16) for p in folded.projections(0)}
    _scale(folded, 0, _sites(folded, 0), schemes)
    assert not torch.equal(layer.input_norm.weight, norm)
    assert torch.equal(layer.down.plain_weight(), down) == (kind == "gpt2")
    plain.advance(0)
    folded.advance(0)
    # Biases of norms are rounded to the checkpoint's type; nothing else is.
    tolerance = 2e-2 if kind == "gpt2" else 1e-4
    torch.testing.assert_close(folded.states, plain.states, rtol=tolerance, atol=tolerance)
