"""`LowBitLinear`: its product, and that its buffers survive whatever is done to a module."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn import Int4Linear, Int8Linear, LowBitLinear
from tests.helpers import DTYPES, assert_bit_equal, column_slice, dtype_name
from tests.nn.helpers import CASTS, assert_same, checked

BITS = [2, 3, 4, 8]
PARTS = ["zeros", "perm", "bias"]


def make(
    bits: int = 4,
    n: int = 100,
    k: int = 200,
    *,
    zeros: bool = True,
    perm: bool = False,
    bias: bool = True,
    scale_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> LowBitLinear:
    """A quantized random layer."""
    weight = ops.quantize_weight(
        torch.randn(n, k), bits, 64, symmetric=not zeros, scale_dtype=scale_dtype
    )
    order = torch.randperm(k, dtype=torch.int32) if perm else None
    weight = ops.PackedWeight(
        weight.qweight, weight.scales, weight.zeros, order, bits, 64, weight.shape
    )
    return LowBitLinear.from_packed(weight, torch.randn(n) if bias else None, **options)


def fresh(like: LowBitLinear) -> LowBitLinear:
    """A new module, constructed with the arguments that `like` would have been."""
    return LowBitLinear(
        like.in_features,
        like.out_features,
        like.bits,
        like.group_size,
        bias=like.bias is not None,
        zeros=like.zeros is not None,
        perm=like.perm is not None,
        scale_dtype=like.scales.dtype,
    )


def check(module: LowBitLinear, x: Tensor) -> Tensor:
    """The result, which is right."""
    return checked(module, x, x, module.packed_weight().dequantize(torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bits", BITS)
def test_product(bits: int, dtype: torch.dtype) -> None:
    """R10: any number of rows; R15: bf16 no worse than bf16 must be."""
    for parts in ({}, {"zeros": False}, {"perm": True}, {"bias": False}):
        module = make(bits, **parts)
        for rows in (1, 17, 300):
            check(module, torch.randn(rows, 200).to(dtype))


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=dtype_name)
def test_dtypes_of_scales_and_activations_are_independent(scale_dtype: torch.dtype) -> None:
    module = make(scale_dtype=scale_dtype)
    for dtype in DTYPES:
        check(module, torch.randn(5, 200).to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (4, 3), (0, 3), (3, 0, 2), (2, 1, 3)])
def test_leading_shapes(shape: tuple[int, ...]) -> None:
    check(make(), torch.randn(*shape, 200))


def test_strided_input() -> None:
    """R08: parts of a fused projection, a transposed batch, columns far apart."""
    module = make()
    x = torch.randn(4, 3, 200)
    expected = module(x)
    assert_bit_equal(module(column_slice(x)), expected)
    assert_bit_equal(module(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    for rows in (x[0], x):
        apart = torch.stack((rows, rows), -1)[..., 0]
        assert apart.stride(-1) == 2
        assert_bit_equal(module(apart), module(rows))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (64, 64), (10, 7392), (10, 10944)])
def test_sizes_that_nothing_divides(n: int, k: int) -> None:
    """R09: the last group is partial, or the only one."""
    for group_size in (128, -1):
        linear = nn.Linear(k, n)
        module = LowBitLinear.from_linear(linear, group_size=group_size)
        for rows in (1, 5):
            check(module, torch.randn(rows, k))
        fresh(module).load_state_dict(module.state_dict())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_from_linear_rounds_to_nearest(bits: int, symmetric: bool) -> None:
    linear = nn.Linear(200, 100)
    module = LowBitLinear.from_linear(linear, bits=bits, group_size=32, symmetric=symmetric)
    expected = ops.quantize_weight(linear.weight.detach(), bits, 32, symmetric=symmetric)
    assert_bit_equal(module.qweight, expected.qweight)
    assert_bit_equal(module.scales, expected.scales)
    assert (module.zeros is None) == symmetric
    assert module.bias is not None and torch.equal(module.bias, linear.bias)
    # Half a step is what rounding may cost, and a step at an end that a zero point moved.
    step = expected.scales.max()
    assert (module.packed_weight().dequantize() - linear.weight).abs().max() <= 1.01 * step


def test_from_linear_of_halves() -> None:
    linear = nn.Linear(96, 40, dtype=torch.bfloat16)
    module = Int4Linear.from_linear(linear)
    assert module.scales.dtype == torch.bfloat16
    assert module.bias is not None and module.bias.dtype == torch.float32
    assert torch.equal(module.bias.bfloat16(), linear.bias)
    check(module, torch.randn(3, 96).bfloat16())
    assert Int4Linear.from_linear(linear, scale_dtype=torch.float32).scales.dtype == torch.float32


def test_classes_with_a_fixed_number_of_bits() -> None:
    linear = nn.Linear(96, 40, bias=False)
    for kind, bits in ((Int4Linear, 4), (Int8Linear, 8)):
        module = kind.from_linear(linear)
        assert type(module) is kind and module.bits == bits
        loaded = kind(96, 40, bias=False)
        loaded.load_state_dict(module.state_dict())
        assert_same(loaded, module)
        with pytest.raises(ValueError, match=rf"{kind.__name__}: bits: expected {bits}, got 2"):
            kind.from_linear(linear, bits=2)
    assert LowBitLinear.from_linear(linear).bits == 4


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("without", [None, *PARTS])
def test_state_dict(bits: int, without: str | None) -> None:
    """R18: a strict load brings back every bit."""
    module = make(bits, **{part: part != without for part in PARTS})
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert set(state) == {"qweight", "scales", *PARTS} - {without}
    loaded = fresh(module)
    assert loaded(torch.randn(2, 200)).isnan().all()  # not yet: no scale is silently 1
    loaded.load_state_dict(state)
    assert_same(loaded, module)
    assigned = fresh(module)
    assigned.load_state_dict(state, assign=True)
    assert_same(assigned, module)


@pytest.mark.parametrize("part", PARTS)
def test_state_dict_of_another_kind_is_refused(part: str) -> None:
    with_all, without = make(perm=True), make(**{"perm": True, part: False})
    with pytest.raises(RuntimeError, match=rf'Unexpected key.*"{part}"'):
        fresh(without).load_state_dict(with_all.state_dict())
    with pytest.raises(RuntimeError, match=rf'Missing key.*"{part}"'):
        fresh(with_all).load_state_dict(without.state_dict())


def test_state_dict_of_another_weight_is_refused() -> None:
    module = make(4)
    for other in (make(8), make(4, n=101), make(4, k=300)):
        with pytest.raises(RuntimeError, match="size mismatch for"):
            fresh(module).load_state_dict(other.state_dict())
    state = make(perm=True).state_dict()
    state["perm"][3] = state["perm"][4]
    with pytest.raises(RuntimeError, match=r"perm: expected each of 0 .. 199 once"):
        fresh(make(perm=True)).load_state_dict(state)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_rounds_no_scales(assign: bool) -> None:
    wide, narrow = make(scale_dtype=torch.float32), make(scale_dtype=torch.float16)
    target = fresh(narrow)
    with pytest.raises(RuntimeError, match=r"scales: expected torch.float16.*got torch.float32"):
        target.load_state_dict(wide.state_dict(), assign=assign)
    target = fresh(wide)  # holds what fp16 holds
    target.load_state_dict(narrow.state_dict(), assign=assign)
    x = torch.randn(3, 200)
    assert_bit_equal(target(x), narrow(x))
    target = fresh(wide)
    state = {**wide.state_dict(), "bias": wide.state_dict()["bias"].half()}
    target.load_state_dict(state, assign=assign)
    assert target.bias is not None and target.bias.dtype == torch.float32
    target(x.bfloat16())
    with pytest.raises(RuntimeError, match=r"qweight: expected torch.int32"):
        target.load_state_dict({**state, "qweight": state["qweight"].long()}, assign=assign)


def test_a_weight_at_an_odd_address() -> None:
    """A view into a file: copied when it is loaded, instead of refused at the first request."""
    module = make()
    storage = torch.empty(module.qweight.numel() + 1, dtype=torch.int32)
    view = storage[1:].view(module.qweight.shape).copy_(module.qweight)
    loaded = fresh(module)
    loaded.load_state_dict({**module.state_dict(), "qweight": view}, assign=True)
    assert_same(loaded, module)
    weight = ops.PackedWeight(view, module.scales, module.zeros, None, 4, 64, (100, 200))
    assert_same(LowBitLinear.from_packed(weight, module.bias), module)


def test_within_a_model() -> None:
    def model(first: nn.Module, second: nn.Module) -> nn.Module:
        return nn.Sequential(first, nn.ModuleDict({"out": second}))

    made = model(make(perm=True), make(8, n=20, k=100))
    loaded = model(LowBitLinear(200, 100, 4, 64, perm=True), LowBitLinear(100, 20, 8, 64))
    assert "1.out.scales" in made.state_dict()
    loaded.load_state_dict(made.state_dict())
    assert_same(loaded[0], made[0])  # type: ignore[index]


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=dtype_name)
def test_no_cast_changes_a_buffer(scale_dtype: torch.dtype) -> None:
    module = make(perm=True, scale_dtype=scale_dtype)
    expected = copy.deepcopy(module)
    for cast in CASTS:
        assert cast(module) is module
        assert_same(module, expected)


def test_moved_to_another_device() -> None:
    """R18: all of it moves, and comes back through a load."""
    module = make(perm=True)
    meta = copy.deepcopy(module).to(device="meta", dtype=torch.float16)
    assert {b.device.type for b in meta.buffers()} == {"meta"} and len([*meta.buffers()]) == 5
    assert meta.scales.dtype == torch.float32
    back = meta.to_empty(device="cpu")
    back.load_state_dict(module.state_dict())
    assert_same(back, module)


def test_built_on_the_meta_device() -> None:
    module = make(perm=True)
    with torch.device("meta"):
        skeleton = fresh(module)
    assert skeleton.qweight.is_meta
    skeleton.load_state_dict(module.state_dict(), assign=True)
    assert_same(skeleton, module)


def test_copies() -> None:
    module = make(3, perm=True)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(copied, module)
        assert copied.qweight.data_ptr() != module.qweight.data_ptr()
        assert repr(copied) == repr(module)


def test_repr() -> None:
    assert repr(make(perm=True)) == (
        "LowBitLinear(in_features=200, out_features=100, bits=4, group_size=64, bias=True, "
        "zeros=True, perm=True, scale_dtype=torch.float32)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, 4), "in_features: expected at least 1, got 0"),
        ((8, -1, 4), "out_features: expected at least 1, got -1"),
        ((8, 8, 5), r"bits: expected one of \(2, 3, 4, 8\), got 5"),
        ((256, 8, 4, 48), "group_size: expected one of .*got 48"),
        ((256, 8, 4, 0), "group_size: expected one of .*got 0"),
        ((256, 8, 4, 512), "group_size: expected one of .*got 512"),
    ],
)
def test_refused_when_constructed(arguments: tuple[int, ...], message: str) -> None:
    """R10."""
    with pytest.raises(ValueError, match="LowBitLinear: " + message):
        LowBitLinear(*arguments)


def test_other_arguments_refused() -> None:
    with pytest.raises(ValueError, match="scale_dtype: expected one of"):
        Int8Linear(64, 64, scale_dtype=torch.float64)
    weight = make().packed_weight()
    for bias in (torch.zeros(99), torch.zeros(100).int(), torch.zeros(1, 100)):
        with pytest.raises(ValueError, match=r"LowBitLinear: bias: expected floats of shape"):
            LowBitLinear.from_packed(weight, bias)
    with pytest.raises(ValueError, match="bias: expected on cpu, got meta"):
        LowBitLinear.from_packed(weight, torch.zeros(100, device="meta"))


def test_from_linear_takes_linear_layers_only() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for module in (nn.Conv1d(4, 4, 1), Adapted(64, 64)):
        with pytest.raises(TypeError, match=r"from_linear: expected a torch.nn.Linear, got"):
            LowBitLinear.from_linear(module)  # type: ignore[arg-type]
    spoilt = nn.Linear(64, 64)
    spoilt.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"weight: expected finite values, got nan at \[3, 4\]"):
        LowBitLinear.from_linear(spoilt)


@pytest.mark.parametrize("shape", [(3, 100), (2, 400), (100,), ()])
def test_input_of_another_width(shape: tuple[int, ...]) -> None:
    # [2, 400] would make four rows of 200.
    with pytest.raises(ValueError, match=r"LowBitLinear: x: expected shape \[..., 200\], got"):
        make()(torch.randn(shape))


def test_input_of_another_dtype() -> None:
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match="int4_gemm: x: expected dtype"):
            make()(torch.zeros(3, 200, dtype=dtype))


def test_no_silent_detach() -> None:
    module, x = make(), torch.randn(3, 200, requires_grad=True)
    with pytest.raises(NotImplementedError, match="int4_gemm: x requires grad"):
        module(x)
    with torch.no_grad():
        check(module, x)
    module = LowBitLinear.from_packed(module.packed_weight(), nn.Parameter(torch.randn(100)))
    assert not any(b.requires_grad for b in module.buffers()) and not [*module.parameters()]
    check(module, x.detach())


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_as_one_graph(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    for parts in ({"perm": True}, {"zeros": False, "bias": False}):
        module = make(**parts)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for shape in ((2, 200), (5, 200), (300, 200), (2, 3, 200)):
            x = torch.randn(shape)
            assert_bit_equal(compiled(x), module(x))
