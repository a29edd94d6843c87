"""`SwiGLU` and `GeGLU` in the place of modules with three projections."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn import GatedMLP, GeGLU, Int8Linear, SwiGLU
from tests.helpers import DTYPES, assert_accurate, assert_bit_equal, dtype_name

KINDS: dict[str, tuple[Callable[..., GatedMLP], dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "swiglu": (SwiGLU, {}, F.silu),
    "geglu": (GeGLU, {}, F.gelu),
    "geglu_tanh": (GeGLU, {"tanh_approx": True}, lambda x: F.gelu(x, approximate="tanh")),
}
by_kind = pytest.mark.parametrize("name", KINDS)


class Apart(nn.Module):
    """What models have: three projections, an activation, a product."""

    def __init__(self, name: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40, bias), nn.Linear(24, 40, bias)
        self.down_proj = nn.Linear(40, 24, bias)
        self.activation = KINDS[name][2]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return y


def pair(name: str, bias: bool = False) -> tuple[GatedMLP, Apart]:
    """Ours and the plain module with the same weights."""
    kind, options, _ = KINDS[name]
    theirs = Apart(name, bias)
    ours = kind(24, 40, bias, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@by_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bias", [False, True])
def test_computes_what_the_three_projections_compute(
    name: str, dtype: torch.dtype, bias: bool
) -> None:
    ours, theirs = pair(name, bias)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    x = (4 * torch.randn(2, 3, 24)).to(dtype)
    expected = copy.deepcopy(theirs).double()(x.double()).detach()
    with torch.no_grad():
        assert_accurate(ours(x), expected, theirs(x))
    y = ours(x)
    assert y.requires_grad
    assert_accurate(y.detach(), expected, theirs(x).detach())


@by_kind
def test_gradients_are_those_of_the_three_projections(name: str) -> None:
    ours, theirs = pair(name, bias=True)
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(5, 24)
    found = []
    for module in (ours, exact, theirs):
        own = x.to(next(module.parameters()).dtype).clone().requires_grad_()
        module(own).square().sum().backward()
        found.append((own.grad, module))
    (got, _), (expected, _), (baseline, _) = found
    assert_accurate(got, expected, baseline)
    for projection in ("gate_proj", "up_proj"):
        half = slice(0, 40) if projection == "gate_proj" else slice(40, 80)
        assert_accurate(
            ours.gate_up_proj.weight.grad[half],
            getattr(exact, projection).weight.grad,
            getattr(theirs, projection).weight.grad,
        )


@by_kind
def test_state_dict_goes_either_way(name: str) -> None:
    ours, theirs = pair(name, bias=True)
    outer, other = nn.ModuleDict({"mlp": ours}), nn.ModuleDict({"mlp": theirs})
    state, wanted = outer.state_dict(), other.state_dict()
    assert set(state) == set(wanted)
    for key, tensor in wanted.items():
        assert_bit_equal(state[key], tensor)
    nn.init.zeros_(ours.gate_up_proj.weight)
    outer.load_state_dict(wanted)
    assert_bit_equal(ours.gate_up_proj.weight[:40].detach(), theirs.gate_proj.weight.detach())
    assert_bit_equal(ours.gate_up_proj.weight[40:].detach(), theirs.up_proj.weight.detach())
    other.load_state_dict(outer.state_dict())
    del wanted["mlp.gate_proj.weight"]
    with pytest.raises(RuntimeError, match=r"mlp\.gate_proj\.weight"):
        outer.load_state_dict(wanted)


def test_a_state_dict_may_come_in_pieces() -> None:
    mlp, other = SwiGLU(8, 12), SwiGLU(8, 12)
    state = other.state_dict()
    for name in [*state]:
        result = mlp.load_state_dict({name: state[name]}, strict=False)
        assert set(result.missing_keys) >= {n for n in state if n[:4] == name[:4]} - {name}
        assert result.unexpected_keys == []
        assert_bit_equal(mlp.state_dict()[name], state[name], name)
    for name, tensor in state.items():
        assert_bit_equal(mlp.state_dict()[name], tensor, name)
    del state["up_proj.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"up_proj\.weight"'):
        mlp.load_state_dict(state)


def test_a_part_that_has_not_come_is_nan() -> None:
    mlp, state = SwiGLU(8, 12, device="meta"), SwiGLU(8, 12).state_dict()
    up = state.pop("up_proj.weight")
    mlp.load_state_dict(state, strict=False, assign=True)
    assert mlp(torch.ones(1, 8)).isnan().all()
    mlp.load_state_dict({"up_proj.weight": up}, strict=False, assign=True)
    assert mlp(torch.ones(1, 8)).isfinite().all()


def test_parts_of_other_sizes_are_refused() -> None:
    mlp = SwiGLU(8, 12)
    before = mlp.state_dict()["gate_proj.weight"].clone()
    state = {"gate_proj.weight": torch.zeros(14, 8), "up_proj.weight": torch.zeros(10, 8)}
    with pytest.raises(
        RuntimeError, match=r"mismatch for gate_proj\.weight: expected \(12, 8\), got"
    ):
        mlp.load_state_dict(state, strict=False)
    assert_bit_equal(mlp.state_dict()["gate_proj.weight"], before)


def test_the_op_computes_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair("swiglu")
    calls = []
    op = ops.silu_and_mul
    monkeypatch.setattr(ops, "silu_and_mul", lambda x: calls.append(x.shape) or op(x))
    ours(torch.randn(2, 24))
    assert calls == []
    with torch.no_grad():
        ours(torch.randn(2, 24))
    assert calls == [(2, 80)]


def test_quantized_projections() -> None:
    theirs = Apart("swiglu")
    parts = [Int8Linear.from_linear(p) for p in (theirs.gate_proj, theirs.up_proj)]
    ours = SwiGLU.from_projections(*parts, Int8Linear.from_linear(theirs.down_proj))
    x = torch.randn(3, 24)
    with torch.no_grad():
        between = F.silu(parts[0](x)) * parts[1](x)
        torch.testing.assert_close(ours(x), ours.down_proj(between))
    assert "gate_up_proj.qweight" in ours.state_dict()
    other = copy.deepcopy(ours)
    other.load_state_dict(ours.state_dict())


def test_a_merged_projection_keeps_its_name() -> None:
    gate_up, down = nn.Linear(24, 80, bias=False), nn.Linear(40, 24, bias=False)
    ours = SwiGLU.from_merged(gate_up, down)
    assert list(ours.state_dict()) == ["gate_up_proj.weight", "down_proj.weight"]
    assert ours.gate_up_proj is gate_up and ours.down_proj is down


def test_projections_that_cannot_be_merged_are_refused() -> None:
    down = nn.Linear(40, 24)
    with pytest.raises(ValueError, match="in_features"):
        SwiGLU.from_projections(nn.Linear(24, 40), nn.Linear(23, 40), down)
    with pytest.raises(ValueError, match="up: expected 40 output features"):
        SwiGLU.from_projections(nn.Linear(24, 40), nn.Linear(24, 41), down)
    with pytest.raises(TypeError, match="parts: expected all"):
        SwiGLU.from_projections(nn.Linear(24, 40), Int8Linear(24, 40), down)


@by_kind
def test_copies_compute_the_same(name: str) -> None:
    ours, _ = pair(name)
    x = torch.randn(2, 24)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            assert_bit_equal(other(x), ours(x))
        nn.init.zeros_(other.gate_up_proj.weight)
        assert not other.state_dict()["gate_proj.weight"].any()  # its own, not the original's
        assert ours.state_dict()["gate_proj.weight"].any()


@by_kind
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_as_one_graph(name: str, grad: bool) -> None:
    ours, _ = pair(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        for rows in (3, 5):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(compiled(x), ours(x))
