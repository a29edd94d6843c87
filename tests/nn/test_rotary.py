"""`RotaryEmbedding` against the formula in float64."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from fastinfer.nn import RotaryEmbedding
from tests.helpers import DTYPES, assert_accurate, assert_bit_equal, dtype_name

by_pairing = pytest.mark.parametrize("interleaved", [False, True])


def turned(x: Tensor, positions: Tensor, dim: int, interleaved: bool) -> Tensor:
    """The formula in x's dtype; x [B, S, H, D], positions [B, S]."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim)
    angles = positions.double()[..., None, None] * frequencies.double()
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    out = x.clone()
    pairs = [(i, i + dim // 2) if not interleaved else (2 * i, 2 * i + 1) for i in range(dim // 2)]
    for i, (a, b) in enumerate(pairs):
        out[..., a] = x[..., a] * cos[..., i] - x[..., b] * sin[..., i]
        out[..., b] = x[..., a] * sin[..., i] + x[..., b] * cos[..., i]
    return out


@by_pairing
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dim", [8, 12])
def test_is_the_formula(interleaved: bool, dtype: torch.dtype, grad: bool, dim: int) -> None:
    rotary = RotaryEmbedding(dim, 100, interleaved=interleaved)
    q, k = torch.randn(2, 5, 3, 12).to(dtype), torch.randn(2, 5, 1, 12).to(dtype)
    before = q.clone()
    positions = torch.randint(0, 100, (2, 5))
    results = rotary(q.requires_grad_(grad), k.requires_grad_(grad), positions)
    for x, y in zip((q.detach(), k.detach()), results, strict=True):
        assert y.requires_grad == grad and y.dtype == dtype
        expected = turned(x.double(), positions, dim, interleaved)
        assert_accurate(y.detach(), expected, turned(x, positions, dim, interleaved))
    assert_bit_equal(q.detach(), before)


@by_pairing
def test_gradient_turns_back(interleaved: bool) -> None:
    rotary = RotaryEmbedding(8, interleaved=interleaved)
    q, k = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    positions = torch.tensor([0, 3, 7, 2])
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, positions), (q, k))


def test_positions_broadcast_over_the_batch() -> None:
    rotary = RotaryEmbedding(8)
    for positions in (torch.arange(4), torch.tensor([5])):
        q, k = torch.randn(3, len(positions), 2, 8), torch.randn(3, len(positions), 1, 8)
        same = rotary(q, k, positions.expand(3, -1).contiguous())
        for got, expected in zip(rotary(q, k, positions), same, strict=True):
            assert_bit_equal(got, expected)


def test_casts_do_not_round_the_table() -> None:
    rotary = RotaryEmbedding(8, 64)
    table = rotary.cos_sin.clone()
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()):
        assert_bit_equal(cast(rotary).cos_sin, table)
    assert rotary.state_dict() == {}
    assert rotary.to("meta").cos_sin.is_meta


def test_other_frequencies_and_scaling() -> None:
    frequencies = torch.rand(4)
    rotary = RotaryEmbedding(8, 64, inv_freq=frequencies, attention_scaling=1.5)
    q = torch.zeros(1, 1, 8)
    q[..., 0] = 1.0
    out, _ = rotary(q, q, torch.tensor([9]))
    angle = 9.0 * frequencies[0].double()
    expected = torch.zeros(1, 1, 8, dtype=torch.float64)
    expected[..., 0], expected[..., 4] = 1.5 * angle.cos(), 1.5 * angle.sin()
    assert_accurate(out, expected, expected.float())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        RotaryEmbedding(7)
    with pytest.raises(ValueError, match="inv_freq: expected shape"):
        RotaryEmbedding(8, inv_freq=torch.ones(3))
    q = torch.randn(1, 1, 8)
    with pytest.raises(ValueError, match="position"):
        RotaryEmbedding(8, 16)(q, q, torch.tensor([16]))


def test_copies_and_compiled_modules_compute_the_same() -> None:
    rotary = RotaryEmbedding(8, 64)
    q, k, positions = torch.randn(2, 4, 2, 8), torch.randn(2, 4, 1, 8), torch.arange(4)
    expected = rotary(q, k, positions)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    for other in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), compiled):
        for got, wanted in zip(other(q, k, positions), expected, strict=True):
            assert_bit_equal(got, wanted)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("position", [-1, 8])
def test_positions_outside_of_the_table_are_refused(position: int, grad: bool) -> None:
    rotary = RotaryEmbedding(4, max_positions=8)
    q, k = (torch.randn(1, 2, 4, requires_grad=grad) for _ in range(2))
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        rotary(q, k, torch.tensor([position]))
