"""What the tests of all quantized layers share."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer.nn import QuantizedLinear
from tests.helpers import assert_accurate, assert_bit_equal

# What a model's owner may do to all of its modules.
CASTS: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.double(),
    lambda m: m.float(),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.to("cpu", torch.float16),
    lambda m: m.type(torch.float16),
]


def checked(module: QuantizedLinear, x: Tensor, seen: Tensor, weight: Tensor) -> Tensor:
    """The result for x, which is right: against float64, and F.linear in x's own dtype.

    `seen` is what the layer's product has for x, and `weight` the matrix in float64.
    """
    y = module(x)
    assert y.dtype == x.dtype and y.shape == (*x.shape[:-1], module.out_features)
    bias = module.bias

    def linear(dtype: torch.dtype) -> Tensor:
        return F.linear(seen.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    assert_accurate(y, linear(torch.float64), linear(x.dtype))
    return y


def assert_same(module: QuantizedLinear, expected: QuantizedLinear) -> None:
    """The same buffers, bit for bit, and so the same results."""
    state, wanted = module.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_bit_equal(state[name], tensor, name)
    x = torch.randn(3, expected.in_features)
    assert_bit_equal(module(x), expected(x))
