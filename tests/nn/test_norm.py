"""`RMSNorm` and `LayerNorm` in the place of torch's modules."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastinfer.nn
from fastinfer import ops
from tests.helpers import DTYPES, assert_accurate, assert_bit_equal, dtype_name, swapped

PAIRS = {
    "rms_norm": (fastinfer.nn.RMSNorm, nn.RMSNorm),
    "layer_norm": (fastinfer.nn.LayerNorm, nn.LayerNorm),
}
by_pair = pytest.mark.parametrize("name", PAIRS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def pair(name: str, *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's module with the same random weights."""
    ours, theirs = (kind(*args, **options) for kind in PAIRS[name])
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_as_accurate(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Errs from float64 no more than torch's module does, as far as tests of the ops allow."""
    expected = copy.deepcopy(theirs).double()(x.double())
    assert_accurate(ours(x), expected.detach(), theirs(x).detach())


@by_pair
@by_dtype
@pytest.mark.parametrize("shape", [(48,), (6, 8)], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-2])
def test_computes_what_torchs_module_computes(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], eps: float | None
) -> None:
    options = {} if eps is None else {"eps": eps}
    ours, theirs = pair(name, list(shape), dtype=dtype, **options)
    # Small enough that the default eps of RMSNorm, that of fp32, is seen.
    x = (torch.randn(3, 5, *shape) * 1e-3).to(dtype)
    with torch.no_grad():
        assert_as_accurate(ours, theirs, x)
        assert_as_accurate(ours, theirs, swapped(x))


@by_pair
def test_the_op_computes_without_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(name, 16)
    calls = []
    op = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *a, **k: calls.append(name) or op(*a, **k))
    with torch.no_grad():
        ours(torch.randn(2, 16))
    assert calls == [name]
    ours(torch.randn(2, 16))  # weights require grad
    assert calls == [name]
    ours.requires_grad_(False)(torch.randn(2, 16))
    assert calls == [name, name]


@by_pair
@by_dtype
def test_gradients_are_torchs(name: str, dtype: torch.dtype) -> None:
    ours, theirs = pair(name, 24, dtype=dtype)
    x, weights = torch.randn(4, 24).to(dtype), torch.randn(4, 24).to(dtype)

    def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (module(x) * weights.to(x.dtype)).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    exact = gradients(copy.deepcopy(theirs).double(), x.double())
    results = zip(gradients(ours, x), exact, gradients(theirs, x), strict=True)
    for got, expected, baseline in results:
        assert_accurate(got, expected, baseline)


@by_pair
def test_arguments_and_state_dict_are_torchs(name: str) -> None:
    for options in ({}, {"elementwise_affine": False}, {"dtype": torch.bfloat16}):
        ours, theirs = (kind([4, 6], 1e-3, **options) for kind in PAIRS[name])
        assert isinstance(ours, type(theirs)) and ours.eps == theirs.eps
        assert list(ours.state_dict()) == list(theirs.state_dict())
        for ours_, theirs_ in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_bit_equal(ours_.data, theirs_.data)


@by_pair
def test_what_the_op_does_not_take_is_torchs(name: str) -> None:
    plain, theirs = (kind(16, elementwise_affine=False) for kind in PAIRS[name])
    x = torch.randn(3, 16)
    assert_as_accurate(plain, theirs, x)
    ours, theirs = pair(name, 16, dtype=torch.float64)
    with torch.no_grad():
        assert ours(x.double()).dtype == torch.float64
        torch.testing.assert_close(ours(x.double()), theirs(x.double()))


def test_layer_norm_without_bias() -> None:
    ours, theirs = pair("layer_norm", 40, bias=False)
    with torch.no_grad():
        assert_as_accurate(ours, theirs, torch.randn(3, 40))


@by_dtype
@pytest.mark.parametrize("grad", [False, True])
def test_offset_of_the_weight(dtype: torch.dtype, grad: bool) -> None:
    norm = fastinfer.nn.RMSNorm(32, 1e-6, dtype=dtype, weight_offset=1.0)
    assert not norm.weight.any()  # neutral
    nn.init.normal_(norm.weight)
    x = torch.randn(5, 32).to(dtype)

    def formula(x: Tensor) -> Tensor:
        return F.rms_norm(x, (32,), norm.weight.to(x.dtype) + 1.0, 1e-6).detach()

    with torch.set_grad_enabled(grad):
        y = norm(x)
    assert y.requires_grad == grad
    assert_accurate(y.detach(), formula(x.double()), formula(x))
    plain = fastinfer.nn.RMSNorm(32, 1e-6, elementwise_affine=False, weight_offset=1.0)
    doubled = 2 * F.rms_norm(x.double(), (32,), None, 1e-6)
    assert_accurate(plain(x), doubled, 2 * F.rms_norm(x, (32,), None, 1e-6))


@by_pair
def test_another_shape_is_refused(name: str) -> None:
    ours, _ = pair(name, [4, 6])
    with torch.no_grad(), pytest.raises(ValueError, match=r"expected shape \[\.\.\., 4, 6\]"):
        ours(torch.randn(2, 6, 4))


@by_pair
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_compute_the_same(name: str, copied: Callable[[Any], Any]) -> None:
    ours, _ = pair(name, 16)
    x = torch.randn(2, 16)
    other = copied(ours)
    with torch.no_grad():
        assert_bit_equal(other(x), ours(x))
        other.weight.zero_()
        assert ours.weight.any()


@by_pair
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_as_one_graph(name: str, grad: bool) -> None:
    ours, _ = pair(name, 16)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 16)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(x), ours(x))
            assert compiled(x).requires_grad == grad
