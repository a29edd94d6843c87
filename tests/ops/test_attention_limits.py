"""Options at the end of their range: they mean what they say, or are refused."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import Backend


@pytest.mark.parametrize("options", [{"window_left": 2**63 - 1}, {"window_right": 2**63 - 1}])
def test_the_largest_window_is_no_window(backend: Backend, options: dict[str, int]) -> None:
    q = torch.randn(1, 3, 2, 8)
    expected = backend.ops.flash_attention(q, q, q)
    for actual, wanted in zip(
        backend.ops.flash_attention(q, q, q, **options), expected, strict=True
    ):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("options", [{"scale": 1e300}, {"softcap": 1e300}, {"softcap": 1e-50}])
def test_numbers_that_float32_cannot_hold(backend: Backend, options: dict[str, float]) -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=rf"flash_attention: {next(iter(options))}: .*float32"):
        backend.ops.flash_attention(q, q, q, **options)
