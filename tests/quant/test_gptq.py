"""GPTQ against its definition in float64, against rounding to nearest, and bad input."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastinfer.quant import Quantized, gptq, rtn
from fastinfer.quant.statistics import InputStatistics, output_error
from tests.reference.gptq import gptq_reference

ORDERS = ["none", "act", "static", "group"]


def inputs(tokens: int, features: int) -> Tensor:
    """Correlated, and of unequal size, as activations are."""
    mixed = torch.randn(tokens, features) @ (torch.randn(features, features) / features**0.5)
    return (mixed + 0.3 * torch.randn(tokens, 1)) * torch.randn(features).exp()


def hessian_of(x: Tensor) -> Tensor:
    statistics = InputStatistics(x.shape[1])
    for part in x.split(100):
        statistics.add(part)
    return statistics.hessian


def order_and_groups(h: Tensor, order: str, size: int) -> tuple[list[int], list[list[int]]]:
    """The order of columns and the groups, by the words of the docstring."""
    k = len(h)
    by_diagonal = sorted(range(k), key=lambda j: -float(h[j, j]))
    groups = [list(range(g, min(g + size, k))) for g in range(0, k, size)]
    if order == "none":
        return list(range(k)), groups
    if order == "act":
        return by_diagonal, [by_diagonal[g : g + size] for g in range(0, k, size)]
    if order == "static":
        return by_diagonal, groups
    partial = [g for g in groups if len(g) < size]
    whole = sorted(
        (g for g in groups if len(g) == size), key=lambda g: -max(float(h[j, j]) for j in g)
    )
    in_order = [sorted(g, key=lambda j: -float(h[j, j])) for g in whole + partial]
    return [j for g in in_order for j in g], groups


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bits", "size", "symmetric", "k"),
    [(4, 16, False, 40), (3, 16, True, 48), (2, -1, False, 33), (8, 32, True, 150)],
)
def test_equals_the_definition(order: str, bits: int, size: int, symmetric: bool, k: int) -> None:
    weight = torch.randn(9, k, dtype=torch.float64)
    h = hessian_of(inputs(300, k).double())
    got = gptq(weight, h, bits=bits, group_size=size, symmetric=symmetric, order=order, damping=0.0)
    columns, groups = order_and_groups(h, order, k if size == -1 else size)
    expected = gptq_reference(weight, h, columns, groups, bits, symmetric, order == "static")
    torch.testing.assert_close(
        got.weight.dequantize(torch.float64), expected, rtol=1e-12, atol=1e-12
    )
    assert got.error == pytest.approx(output_error(weight - expected, h), rel=1e-9)
    assert got.relative_error == pytest.approx(got.error / output_error(weight, h))
    assert (got.weight.perm is None) == (order != "act" or size == -1)
    assert (got.weight.zeros is None) == symmetric


# With 2 bits, the order of columns decides whether anything is gained.
@pytest.mark.parametrize(
    ("order", "bits"), [(o, b) for o in ORDERS for b in (2, 3, 4, 8) if (o, b) != ("none", 2)]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_better_than_rounding_to_nearest(order: str, bits: int, symmetric: bool) -> None:
    weight, h = torch.randn(64, 192), hessian_of(inputs(2000, 192))
    options = {"bits": bits, "group_size": 64, "symmetric": symmetric}
    nearest = rtn(weight, h, **options)  # type: ignore[arg-type]
    assert gptq(weight, h, order=order, **options).error < 0.9 * nearest.error  # type: ignore[arg-type]


def test_statistics_are_the_mean_products() -> None:
    x = inputs(250, 20).bfloat16()
    statistics = InputStatistics(20)
    for part in x.split(64):
        statistics.add(part[None])
    exact = x.double()
    assert statistics.count == 250
    torch.testing.assert_close(statistics.hessian, exact.t() @ exact / 250, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.magnitude, exact.abs().mean(0), rtol=1e-5, atol=1e-5)
    d = torch.randn(5, 20, dtype=torch.float64)
    assert output_error(d, exact.t() @ exact / 250) == pytest.approx(
        float((exact @ d.t()).square().sum() / 250)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_dead_columns_are_rounded_to_nearest(order: str) -> None:
    dead = torch.tensor([3, 17, 18, 40])
    x = inputs(500, 48)
    x[:, dead] = 0
    weight, h = torch.randn(8, 48), hessian_of(x)
    got = gptq(weight, h, bits=8, group_size=16, order=order, damping=0.0)
    step = got.weight.scales.max()
    assert ((got.weight.dequantize() - weight)[:, dead].abs() <= 0.51 * step).all()
    # They change nothing of the others: with smaller weights there, these keep their codes.
    weight[:, dead] *= 0.1
    changed = weight.clone()
    changed[:, dead] *= 0.5
    alive = [j for j in range(48) if j not in dead.tolist()]
    one, other = (
        gptq(w, h, bits=8, group_size=-1, symmetric=True, order=order).weight.codes()[:, alive]
        for w in (weight, changed)
    )
    assert torch.equal(one, other)


def test_all_dead_is_rounding_to_nearest() -> None:
    weight, h = torch.randn(8, 48), torch.zeros(48, 48)
    got, expected = (f(weight, h, bits=4, group_size=16) for f in (gptq, rtn))
    assert torch.equal(got.weight.codes(), expected.weight.codes())
    assert got.error == got.relative_error == 0


@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_one_sample_and_singular_hessians(damping: float) -> None:
    weight, x = torch.randn(16, 96), inputs(1, 96)
    h = hessian_of(x)
    got = gptq(weight, h, bits=4, group_size=32, damping=damping)
    assert got.error < rtn(weight, h, bits=4, group_size=32).error
    assert got.weight.dequantize().isfinite().all()


def test_damping_recovers_from_small_negative_eigenvalues() -> None:
    h = hessian_of(inputs(500, 32))
    values, vectors = torch.linalg.eigh(h)
    values[0] = -1e-4 * values.mean()
    bent = vectors @ values.diag() @ vectors.t()
    got = gptq(torch.randn(8, 32), bent, bits=4, group_size=16, damping=0.0)
    assert got.weight.dequantize().isfinite().all()
    with pytest.raises(ValueError, match="hessian: expected a positive semidefinite matrix"):
        gptq(torch.randn(8, 32), -(10.0**9) * h, bits=4, group_size=16)


def test_scales_are_stored_as_asked() -> None:
    weight, h = torch.randn(16, 64), hessian_of(inputs(200, 64))
    assert gptq(weight.bfloat16(), h, bits=4).weight.scales.dtype == torch.bfloat16
    half = gptq(weight, h, bits=4, scale_dtype=torch.float16).weight
    assert half.scales.dtype == half.zeros.dtype == torch.float16  # type: ignore[union-attr]


Quantizer = Callable[..., Quantized]


@pytest.mark.parametrize("quantize", [gptq, rtn])
def test_bad_input_is_refused_by_name(quantize: Quantizer) -> None:
    weight, h = torch.randn(8, 32), torch.eye(32)
    refused = functools.partial(pytest.raises, ValueError)
    with refused(match=r"weight: expected finite values, got nan at \[2, 5\]"):
        quantize(weight.index_put((torch.tensor(2), torch.tensor(5)), torch.tensor(torch.nan)), h,
                 bits=4)  # fmt: skip
    with refused(match=r"hessian: expected finite values, got inf at \[1, 4\]"):
        bad = h.clone()
        bad[1, 4] = torch.inf
        quantize(weight, bad, bits=4)
    with refused(match=r"hessian: expected shape \(32, 32\), got \(31, 31\)"):
        quantize(weight, torch.eye(31), bits=4)
    with refused(match="hessian: expected a float tensor, got torch.int64"):
        quantize(weight, h.long(), bits=4)
    with refused(match="bits: expected one of"):
        quantize(weight, h, bits=5)
    with refused(match="group_size: expected one of"):
        quantize(weight, h, bits=4, group_size=20)
    with refused(match="weight: expected a float tensor"):
        quantize(weight.long(), h, bits=4)
    with refused(match="scale_dtype: expected one"):
        quantize(weight * 1e9, h, bits=4, scale_dtype=torch.float16)
    with pytest.raises(NotImplementedError, match="weight requires grad"):
        quantize(weight.requires_grad_(), h, bits=4)


def test_bad_options_are_refused_by_name() -> None:
    weight, h = torch.randn(8, 32), torch.eye(32)
    with pytest.raises(ValueError, match="order: expected one of"):
        gptq(weight, h, bits=4, order="random")
    with pytest.raises(ValueError, match="damping: expected at least 0, got -1"):
        gptq(weight, h, bits=4, damping=-1)
