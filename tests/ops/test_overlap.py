"""Tensors that share memory: the same view is fine where an op says so, else it is refused."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Backend


def test_norm_into_its_own_input(backend: Backend) -> None:
    x, weight = torch.randn(4, 8, device=backend.device), torch.randn(8, device=backend.device)
    expected = backend.ops.rms_norm(x, weight)
    assert torch.equal(backend.ops.rms_norm(x, weight, out=x), expected)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norm_output_shifted_over_its_input(backend: Backend, op: str) -> None:
    buffer, weight = torch.randn(72, device=backend.device), torch.ones(8, device=backend.device)
    x, out = buffer[:64].view(8, 8), buffer[8:].view(8, 8)
    with pytest.raises(ValueError, match=rf"{op}: out: .*overlapping"):
        getattr(backend.ops, op)(x, weight, out=out)


@pytest.mark.parametrize("op", ["fused_add_rms_norm_", "fused_add_layer_norm_"])
def test_residual_that_is_the_input(backend: Backend, op: str) -> None:
    x, weight = torch.randn(4, 8, device=backend.device), torch.ones(8, device=backend.device)
    before = x.clone()
    with pytest.raises(ValueError, match=rf"{op}: residual: .*overlapping"):
        getattr(backend.ops, op)(x, x, weight)
    assert torch.equal(x, before)


def test_rotary_of_one_tensor_twice(backend: Backend) -> None:
    device = backend.device
    q, positions = torch.randn(3, 2, 8, device=device), torch.arange(3, device=device)
    with pytest.raises(ValueError, match=r"rotary_embedding_: k: .*overlapping"):
        backend.ops.rotary_embedding_(q, q, positions, torch.randn(4, 8, device=device))


def test_rotary_of_slices_of_one_projection(backend: Backend) -> None:
    device = backend.device
    qkv, positions = torch.randn(3, 4, 8, device=device), torch.arange(3, device=device)
    q, k = qkv[:, :2].clone(), qkv[:, 2:].clone()
    cos_sin = torch.randn(4, 8, device=device)
    backend.ops.rotary_embedding_(q, k, positions, cos_sin)
    backend.ops.rotary_embedding_(qkv[:, :2], qkv[:, 2:], positions, cos_sin)
    assert torch.equal(qkv, torch.cat((q, k), dim=1))


def test_one_cache_for_keys_and_values(backend: Backend) -> None:
    device = backend.device
    k, cache = torch.randn(2, 1, 8, device=device), torch.zeros(2, 1, 8, 8, device=device)
    with pytest.raises(ValueError, match=r"append_paged_kv_cache_: v_cache: .*overlapping"):
        backend.ops.append_paged_kv_cache_(k, k, cache, cache, torch.arange(2, device=device))
    assert not cache.any()
