"""Options at the end of their range: they mean what they say, or are refused."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Backend
from tests.ops.test_attention import qkv


@pytest.mark.parametrize("options", [{"window_left": 2**63 - 1}, {"window_right": 2**63 - 1}])
def test_the_largest_window_is_no_window(backend: Backend, options: dict[str, int]) -> None:
    q = torch.randn(1, 3, 2, 8, device=backend.device)
    expected = backend.ops.flash_attention(q, q, q)
    for actual, wanted in zip(
        backend.ops.flash_attention(q, q, q, **options), expected, strict=True
    ):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("options", [{"scale": 1e300}, {"softcap": 1e300}, {"softcap": 1e-50}])
def test_numbers_that_float32_cannot_hold(backend: Backend, options: dict[str, float]) -> None:
    q = torch.randn(1, 3, 2, 8, device=backend.device)
    with pytest.raises(ValueError, match=rf"flash_attention: {next(iter(options))}: .*float32"):
        backend.ops.flash_attention(q, q, q, **options)


@pytest.mark.parametrize("sizes", [(513, 8), (8, 513), (0, 8), (8, 0)])
def test_head_sizes_outside_1_to_512_are_refused(backend: Backend, sizes: tuple[int, int]) -> None:
    inputs = qkv(torch.float32, 3, 5, head_dim=sizes[0], value_dim=sizes[1], device=backend.device)
    with pytest.raises(ValueError, match="flash_attention"):
        backend.ops.flash_attention(*inputs)


def test_tree_of_65_tokens_is_refused(backend: Backend) -> None:
    inputs = qkv(torch.float32, 65, 70, device=backend.device)
    mask = torch.ones(2, 65, dtype=torch.int64, device=backend.device)
    with pytest.raises(ValueError, match=r"flash_attention.*tree_mask"):
        backend.ops.flash_attention(*inputs, tree_mask=mask)
