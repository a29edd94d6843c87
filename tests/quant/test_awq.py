"""AWQ: scales and clipping never lose on the objective, and folding changes no result."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastinfer.quant import awq, awq_scales, fold_into_norm, rtn
from fastinfer.quant.statistics import InputStatistics, output_error


def statistics_of(x: Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1])
    statistics.add(x)
    return statistics


def unequal_inputs(tokens: int, features: int) -> Tensor:
    """A few features are much larger, as in language models."""
    size = torch.where(torch.rand(features) < 0.05, 20.0, 0.5)
    return torch.randn(tokens, features) * size


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_win_over_rounding_to_nearest(bits: int, symmetric: bool) -> None:
    x = unequal_inputs(500, 160)
    weights, s = [torch.randn(48, 160), torch.randn(32, 160)], statistics_of(x)
    options: dict[str, Any] = {"bits": bits, "group_size": 64, "symmetric": symmetric}
    scales = awq_scales(weights, s.hessian, s.magnitude, **options)
    scaled = statistics_of(x / scales).hessian
    for weight in weights:
        nearest = rtn(weight, s.hessian, **options)
        got = awq(weight * scales, scaled, clip=False, **options)
        assert got.error < 0.8 * nearest.error
        # What is measured is the error of the product.
        out = (x / scales) @ got.weight.dequantize().t()
        difference = float((out - x @ weight.t()).square().sum(1).mean())
        assert got.error == pytest.approx(difference, rel=1e-3)


def test_equal_inputs_need_no_scales() -> None:
    k = 64
    scales = awq_scales([torch.randn(16, k)], torch.eye(k), torch.ones(k), bits=4, group_size=32)
    assert torch.equal(scales, torch.ones(k))


def test_inputs_of_one_feature_have_one_scale() -> None:
    source = torch.arange(16).repeat(4)  # 4 heads that share 16 values
    x = unequal_inputs(300, 16)[:, source]
    s = statistics_of(x)
    weight = torch.randn(24, 64)
    options: dict[str, Any] = {"bits": 3, "group_size": 32}
    scales = awq_scales([weight], s.hessian, s.magnitude, source=source, **options)
    assert scales.shape == (16,)
    of_input = scales[source]
    got = awq(weight * of_input, statistics_of(x / of_input).hessian, clip=False, **options)
    assert got.error <= rtn(weight, s.hessian, **options).error


@pytest.mark.parametrize("k", [128, 100])
@pytest.mark.parametrize("symmetric", [False, True])
def test_clipping_errs_less_in_each_group(k: int, symmetric: bool) -> None:
    weight, s = torch.randn(16, k) ** 3, statistics_of(torch.randn(1000, k))
    options: dict[str, Any] = {"bits": 3, "group_size": 64, "symmetric": symmetric}
    whole, clipped = (awq(weight, s.hessian, clip=c, **options).weight for c in (False, True))
    assert torch.equal(whole.codes(), rtn(weight, s.hessian, **options).weight.codes())
    narrower = 0
    for g, begin in enumerate(range(0, k, 64)):
        of = slice(begin, min(begin + 64, k))
        block = s.hessian[of, of]
        for row in range(16):
            errors = [
                output_error((weight - w.dequantize())[row : row + 1, of], block)
                for w in (whole, clipped)
            ]
            assert errors[1] <= errors[0] * (1 + 1e-5)
        narrower += int((clipped.scales[g] < whole.scales[g]).sum())
    assert narrower > 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_folded_norm_and_projection_compute_the_same(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(20, 48).double(), torch.randn(32, 48).double()
    norm = (torch.randn(48) + 0.5).to(dtype).double()
    norm[7] = -offset  # gives 0
    bias = torch.randn(48).double()
    scales = torch.rand(48) * 4 + 0.1
    folded, folded_bias, exact = fold_into_norm(norm, bias, scales, offset=offset, dtype=dtype)
    assert torch.equal(folded.to(dtype).double(), folded)
    assert exact.isfinite().all() and (exact > 0).all()
    kept = torch.arange(48) != 7
    torch.testing.assert_close(exact[kept], scales[kept], rtol=0.5, atol=0)
    expected = (x * (norm + offset)) @ weight.t()
    got = (x * (folded + offset)) @ (weight * exact).t()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert folded_bias is not None
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(folded_bias * exact, bias, rtol=step, atol=0)


def test_folded_mlp_computes_the_same() -> None:
    x, gate, up = torch.randn(9, 16).double(), torch.randn(24, 16).double(), torch.randn(24, 16)
    down, scales = torch.randn(16, 24).double(), torch.rand(24).double() + 0.5

    def mlp(up: Tensor, down: Tensor) -> Tensor:
        return (F.silu(x @ gate.t()) * (x @ up.double().t())) @ down.t()

    torch.testing.assert_close(mlp(up / scales[:, None], down * scales), mlp(up.double(), down))


def test_bad_input_is_refused_by_name() -> None:
    weight, h, magnitude = torch.randn(8, 32), torch.eye(32), torch.ones(32)
    with pytest.raises(ValueError, match="weights: expected at least one"):
        awq_scales([], h, magnitude, bits=4)
    with pytest.raises(ValueError, match=r"weights\[1\]: expected the 32 columns"):
        awq_scales([weight, torch.randn(8, 16)], h, magnitude, bits=4, group_size=16)
    with pytest.raises(ValueError, match=r"magnitude: expected shape \(32,\), got \(31,\)"):
        awq_scales([weight], h, magnitude[1:], bits=4, group_size=16)
    with pytest.raises(ValueError, match=r"source: expected shape \(32,\)"):
        awq_scales([weight], h, magnitude, bits=4, group_size=16, source=torch.arange(4))
    for call in (
        lambda w, h: awq_scales([w], h, magnitude, bits=4, group_size=16),
        lambda w, h: awq(w, h, bits=4, group_size=16),
    ):
        with pytest.raises(
            ValueError, match=r"weight: expected finite values, got nan at \[0, 0\]"
        ):
            call(weight * torch.tensor(torch.nan), h)
        with pytest.raises(ValueError, match=r"hessian: expected finite values, got nan"):
            call(weight, h * torch.tensor(torch.nan))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
def test_magnitudes_are_numbers(value: float) -> None:
    weight, h, magnitude = torch.randn(8, 32), torch.eye(32), torch.ones(32)
    magnitude[5] = value
    with pytest.raises(ValueError, match=rf"magnitude: expected finite .* >= 0, got {value} at 5"):
        awq_scales([weight], h, magnitude, bits=4, group_size=16)


def test_each_feature_is_the_source_of_an_input() -> None:
    weight, h, magnitude = torch.randn(8, 32), torch.eye(32), torch.ones(32)
    for source in (torch.arange(32) * 2, torch.arange(32) - 1):
        with pytest.raises(ValueError, match="source: expected each of 0"):
            awq_scales([weight], h, magnitude, bits=4, group_size=16, source=source)
