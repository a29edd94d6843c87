"""State dicts that hold some tensors of a quantized layer: the files of a checkpoint that is cut
between them, or one that lacks something.
"""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastinfer.nn import FP8Linear, Int8W8A8Linear, LowBitLinear, MergedLinear, QuantizedLinear
from tests.helpers import assert_bit_equal
from tests.nn.helpers import assert_same
from tests.nn.test_low_bit_linear import make

ALONE = ("bias", "input_scale")  # what may be replaced without the weight


def low_bit(**parts: Any) -> LowBitLinear:
    return make(4, 70, 96, **parts)


def with_outliers() -> LowBitLinear:
    return LowBitLinear.from_linear(nn.Linear(96, 70), group_size=64, outliers=0.05)


def static() -> FP8Linear:
    return FP8Linear.from_linear(nn.Linear(96, 70), input_scale=0.02)


MAKERS = {
    "low-bit": lambda: low_bit(perm=True),
    "low-bit-plain": lambda: low_bit(zeros=False, bias=False),
    "low-bit-outliers": with_outliers,
    "fp8-static": static,
    "fp8-block": lambda: FP8Linear.from_linear(nn.Linear(96, 70), granularity="block"),
    "int8": lambda: Int8W8A8Linear.from_linear(nn.Linear(96, 70, bias=False)),
}
makers = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def fresh(like: QuantizedLinear) -> QuantizedLinear:
    """A new module for tensors of these shapes."""
    sizes, bias = (like.in_features, like.out_features), like.bias is not None
    if isinstance(like, LowBitLinear):
        columns = like.outlier_columns
        return LowBitLinear(
            *sizes,
            like.bits,
            like.group_size,
            bias=bias,
            zeros=like.zeros is not None,
            perm=like.perm is not None,
            outliers=None if columns is None else len(columns),
        )
    assert isinstance(like, (FP8Linear, Int8W8A8Linear))
    return type(like)(*sizes, granularity=like.granularity, activations=like.activations, bias=bias)


def load(module: nn.Module, state: dict[str, Tensor], assign: bool = False) -> list[str]:
    """What was missing."""
    # Assigned tensors become the module's own.
    given = {name: tensor.clone() for name, tensor in state.items()}
    return module.load_state_dict(given, strict=False, assign=assign).missing_keys


@pytest.mark.parametrize("assign", [False, True])
@makers
def test_a_layer_without_one_of_its_tensors_is_refused(maker: Any, assign: bool) -> None:
    """Whether it held another weight before or none: it would compute finite nonsense."""
    expected = maker()
    state, x = expected.state_dict(), torch.randn(3, 96)
    for name, new in itertools.product(state, (maker, lambda: fresh(expected))):
        module = new()
        others = {key: tensor for key, tensor in state.items() if key != name}
        assert load(module, others, assign) == [name]
        message = f"{type(module).__name__}: expected all of its tensors.*missing: {name}$"
        with pytest.raises(ValueError, match=message):
            module(x)
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with pytest.raises(ValueError, match=message):
                copied(x)
        load(module, {name: state[name]}, assign)
        assert_same(module, expected)


@makers
def test_tensors_that_come_one_by_one(maker: Any) -> None:
    """As from a checkpoint's files, each of which is loaded by itself."""
    expected = maker()
    state, x = expected.state_dict(), torch.randn(3, 96)
    for order in (list(state), list(reversed(state))):
        for module in (maker(), fresh(expected)):
            weight_came = False
            for i, name in enumerate(order):
                load(module, {name: state[name]})
                weight_came |= name not in ALONE
                if i + 1 < len(order) and weight_came:
                    with pytest.raises(ValueError, match=f"missing: .*{order[-1]}"):
                        module(x)
            assert_same(module, expected)


@makers
def test_what_may_be_replaced_alone(maker: Any) -> None:
    module, other, x = maker(), maker(), torch.randn(3, 96)
    for name in ALONE:
        if name in module.state_dict():
            load(module, {name: 2 * other.state_dict()[name]})
            assert module(x).isfinite().all()
            blank = fresh(module)
            load(blank, {name: other.state_dict()[name]})
            assert blank(x).isnan().all()  # it has no weight yet
    assert set(load(module, {"lora.weight": x})) == set(module.state_dict())
    assert module(x).isfinite().all()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("value", [0.0, -0.5, torch.nan, torch.inf])
def test_an_input_scale_is_checked_with_whatever_it_comes(value: float, assign: bool) -> None:
    state = static().state_dict()
    scale = torch.full((1, 1), value)
    message = f"1: fastinfer::FP8Linear: input_scale: expected a finite number above 0, got {value}"
    for names in ((), ("bias",), ("weight",), tuple(state)):
        given = {f"1.{name}": state[name] for name in names} | {"1.input_scale": scale}
        for module in (static(), fresh(static())):
            with pytest.raises(RuntimeError, match=message) as error:
                load(nn.Sequential(nn.ReLU(), module), given, assign)
            assert str(error.value).count("input_scale") == 1
    meta = fresh(static()).to("meta")
    load(meta, {"input_scale": scale.to("meta")}, assign)


def test_the_key_is_named_as_in_the_state_dict() -> None:
    made = nn.Sequential(nn.ReLU(), nn.ModuleDict({"out": low_bit()}))
    state = made.state_dict()
    del state["1.out.scales"], state["1.out.zeros"]
    load(made, state)
    with pytest.raises(ValueError, match=r"missing: 1\.out\.scales, 1\.out\.zeros$"):
        made[1]["out"](torch.randn(3, 96))  # type: ignore[index]


@pytest.mark.parametrize("maker", [low_bit, static])
def test_nothing_else_is_made_of_a_layer_in_part(maker: Any) -> None:
    parts = [maker(), maker()]
    load(parts[1], {"bias": torch.zeros(70)})
    MergedLinear(parts)
    scale = "scales" if maker is low_bit else "weight_scale"
    load(parts[1], {scale: parts[0].state_dict()[scale]})
    with pytest.raises(ValueError, match=r"expected all of its tensors.*missing: "):
        MergedLinear(parts)
    if isinstance(parts[1], LowBitLinear):
        with pytest.raises(ValueError, match=r"expected all of its tensors.*missing: qweight"):
            parts[1].packed_weight()


def test_the_whole_is_checked_when_the_last_part_comes() -> None:
    module = low_bit(perm=True)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["perm"][3] = state["perm"][4]
    scales = state.pop("scales")
    load(module, state)
    with pytest.raises(RuntimeError, match=r"perm: expected each of 0 .. 95 once"):
        load(module, {"scales": scales})


def test_a_tensor_of_another_shape_is_missing_still() -> None:
    """Of a load that failed, and whose error somebody caught."""
    module, expected = low_bit(), low_bit()
    state = expected.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for scales"):
        load(module, {**state, "scales": state["scales"][:, :-1]})
    with pytest.raises(ValueError, match=r"missing: scales$"):
        module(torch.randn(3, 96))
    load(module, {"scales": state["scales"]})
    assert_same(module, expected)


def test_a_whole_state_dict_after_a_part() -> None:
    module, expected = low_bit(), low_bit()
    load(module, {"qweight": expected.qweight})
    module.load_state_dict(expected.state_dict())
    assert_same(module, expected)
    assert_bit_equal(module.packed_weight().dequantize(), expected.packed_weight().dequantize())


@makers
def test_a_tensor_that_cannot_be_copied_is_missing_still(maker: Any) -> None:
    """torch reports it with all other errors, and copies the rest."""
    module, other = maker(), maker()
    name = "scales" if isinstance(module, LowBitLinear) else "weight_scale"
    state = other.state_dict()
    state[name] = state[name].to("meta")
    with pytest.raises(RuntimeError, match=name):
        module.load_state_dict(state)
    with pytest.raises(ValueError, match=f"missing: {name}$"):
        module(torch.randn(2, 96))
    module.load_state_dict(other.state_dict())
    assert_same(module, other)


def test_an_error_of_another_layer_hides_none_of_this_one() -> None:
    net = nn.Sequential(nn.Linear(96, 96), static())
    state = {key: value.clone() for key, value in net.state_dict().items()}
    state["1.input_scale"].fill_(-1)
    state["0.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"(?s)0\.bias.*input_scale"):
        net.load_state_dict(state)
    with pytest.raises(ValueError, match="expected all of its tensors"):
        net(torch.randn(2, 96))


@pytest.mark.parametrize("kind", [LowBitLinear, FP8Linear, Int8W8A8Linear])
def test_a_layer_on_the_meta_device_has_nothing_to_be_rounded(kind: Any) -> None:
    with pytest.raises(ValueError, match=rf'{kind.__name__}\(\.\.\., device="meta"\)'):
        kind.from_linear(nn.Linear(96, 70, device="meta"))


def test_a_static_scale_asks_nothing_of_the_number_of_rows() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = static()

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x[mask])

    x, mask = torch.randn(3, 96), torch.tensor([True, False, True])
    module = Chosen()
    with torch.no_grad():
        exported = torch.export.export(module, (x, mask)).module()
        assert_bit_equal(exported(x, mask), module(x, mask))


def test_what_was_refused_is_awaited_whatever_else_comes() -> None:
    module = low_bit(perm=True)
    good = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="perm"):
        module.load_state_dict(good | {"perm": torch.zeros_like(good["perm"])})
    module.load_state_dict({"bias": good["bias"]}, strict=False)
    with pytest.raises(ValueError, match=r"missing: .*perm"):
        module(torch.randn(2, 96))
    module.load_state_dict(good)
    module(torch.randn(2, 96))


def test_an_input_scale_is_checked_beside_a_tensor_of_another_shape() -> None:
    module = static()
    state = {"input_scale": torch.full_like(module.input_scale, -1.0), "bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"(?s)bias.*input_scale"):
        module.load_state_dict(state, strict=False)
    with pytest.raises(ValueError, match=r"missing: input_scale$"):
        module(torch.randn(2, 96))
