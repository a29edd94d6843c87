"""`Linear`: the packed layout gives the same numbers, whatever else is in the batch."""

import pytest
import torch
import torch.nn.functional as F

from fastinfer.models.linear import Linear, _can_pack, _OneDnnWeight
from tests.helpers import assert_accurate

CPU = torch.device("cpu")


def make(n_in: int, n_out: int, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    linear = Linear(n_in, n_out, bias=bias, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(n_in)
    for parameter in linear.parameters():
        parameter.data.normal_(generator=generator)
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_in", "n_out"), [(576, 960), (1536, 576), (64, 256), (37, 19), (1, 1)])
def test_packed_is_accurate(n_in: int, n_out: int, bias: bool) -> None:
    linear = make(n_in, n_out, bias)
    x = torch.randn(33, n_in)
    baseline = linear(x)
    weight, b = linear.weight, linear.bias
    assert weight is not None
    reference = F.linear(x.double(), weight.double(), None if b is None else b.double())
    linear.pack()
    # One running sum per output instead of several, so its error grows like sqrt(n_in) and not
    # like that of the partial sums: up to 4 times at these sizes.
    assert_accurate(linear(x), reference, baseline, multiple=4.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n_in", "n_out"), [(576, 960), (1536, 576), (64, 256), (37, 19)])
def test_packed_rows_do_not_depend_on_the_batch(n_in: int, n_out: int, bias: bool) -> None:
    linear = make(n_in, n_out, bias)
    assert linear.weight is not None
    if not _can_pack(linear.weight):
        pytest.skip("weights are packed on x86 only")
    linear.pack()
    x = torch.randn(130, n_in)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in (2, 3, 7, 8, 16, 33, 64, 130):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows
    assert torch.equal(linear(x[50:57]), alone[50:57])


def test_packing_gives_up_the_plain_weight_and_keeps_its_bits() -> None:
    linear = make(40, 24, bias=False)
    assert linear.weight is not None
    if not _can_pack(linear.weight):
        pytest.skip("weights are packed on x86 only")
    before = linear.weight.clone()
    linear.pack()
    linear.pack()  # once more changes nothing
    assert linear.weight is None
    assert isinstance(linear._packed, _OneDnnWeight)
    assert torch.equal(linear._packed.weight.to_dense(), before)


def test_half_precision_is_not_packed() -> None:
    linear = make(16, 8, bias=True, dtype=torch.bfloat16)
    linear.pack()
    assert linear.weight is not None
    assert linear(torch.zeros(2, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_no_rows() -> None:
    linear = make(16, 8, bias=True)
    linear.pack()
    assert linear(torch.zeros(0, 16)).shape == (0, 8)
