"""One layer: scales that are folded into what comes before change nothing, and each projection is
quantized for the inputs that it will have.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastinfer.models.loader import open_checkpoint
from fastinfer.quant import Scheme
from fastinfer.quantizer import layer as module
from fastinfer.quantizer.layer import _scale, _sites, quantize_layer
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


@pytest.mark.parametrize("sequential", [True, False])
def test_what_a_projection_is_quantized_for(
    folder: Make, monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    source, ids = folder(), torch.randint(2, 320, (6, 24))
    seen: list[torch.Tensor] = []

    def rtn(weight: torch.Tensor, hessian: torch.Tensor, **options: Any) -> Any:
        seen.append(hessian)
        return module.rtn(weight, hessian, **options)

    monkeypatch.setitem(module._METHODS, "rtn", rtn)
    walk = Walk(open_checkpoint(source), ids, torch.device("cpu"))
    layer = walk.load(0)
    linears = [layer.qkv, layer.attention_out, layer.up, layer.down]
    plain = [walk.observe(0, linears)[linear].hessian for linear in linears]
    schemes = {p.name: Scheme("rtn", 2, 16) for p in walk.projections(0)}
    quantize_layer(walk, 0, schemes, torch.float32, sequential=sequential)
    # With all projections quantized, each has the inputs that those before it give.
    quantized = [walk.observe(0, linears)[linear].hessian for linear in linears]
    expected = quantized if sequential else plain
    sites = [0, 0, 0, 1, 2, 2, 3]
    assert all(torch.equal(h, expected[i]) for h, i in zip(seen, sites, strict=True))
    assert not torch.equal(plain[3], quantized[3])
