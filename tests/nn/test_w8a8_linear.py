"""`FP8Linear` and `Int8W8A8Linear`: their products, and that their buffers survive what is done to
a module.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn import FP8Linear, Int8W8A8Linear, QuantizedLinear, W8A8Linear
from tests.helpers import DTYPES, assert_bit_equal, column_slice, dtype_name
from tests.nn.helpers import CASTS, assert_same, checked
from tests.reference import quantize as reference

FP8, INT8 = FP8Linear, Int8W8A8Linear
KINDS: dict[str, tuple[type[W8A8Linear], str, str]] = {
    f"{'fp8' if kind is FP8 else 'int8'}-{granularity}-{activations}": (
        kind,
        granularity,
        activations,
    )
    for kind in (FP8, INT8)
    for granularity in kind._granularities
    for activations in kind._activations
}
SOME = [KINDS["fp8-channel-dynamic"], KINDS["fp8-block-static"], KINDS["int8-channel-asymmetric"]]
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def make(
    kind: tuple[type[W8A8Linear], str, str], n: int = 150, k: int = 200, *, bias: bool = True
) -> W8A8Linear:
    """A quantized random layer."""
    layer, granularity, activations = kind
    return layer.from_linear(
        nn.Linear(k, n, bias=bias),
        granularity=granularity,
        input_scale=0.02 if activations == "static" else None,
        activations=activations,
    )


def fresh(like: W8A8Linear) -> W8A8Linear:
    """A new module, constructed with the arguments that `like` would have been."""
    return type(like)(
        like.in_features,
        like.out_features,
        granularity=like.granularity,
        activations=like.activations,
        bias=like.bias is not None,
    )


def dequantized(module: W8A8Linear) -> Tensor:
    """The weight in float64."""
    weight, scale = module.weight.double(), module.weight_scale.double()
    n, k = weight.shape
    if module.granularity != "block":
        return weight * scale
    return weight * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def rounded(module: W8A8Linear, x: Tensor) -> Tensor:
    """What the layer sees of x, in float64."""
    k = x.shape[-1]
    zero: Tensor | float = 0.0
    if module.activations == "asymmetric":
        codes, scale, zero = reference.quantize_int8_asymmetric(x)
    else:
        block = (1, 128) if module.granularity == "block" else (1, -1)
        if module.input_scale is not None:
            block = (-1, -1)
        quantize = reference.quantize_fp8 if isinstance(module, FP8) else reference.quantize_int8
        codes, scale = quantize(x, scale=module.input_scale, block=block)
    matrix = codes.view(-1, k).double()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, 1)[:, :k]
    return ((matrix - zero) * scale.double()).view(x.shape)


def check(module: W8A8Linear, x: Tensor) -> Tensor:
    """The result, which is right."""
    return checked(module, x, rounded(module, x), dequantized(module))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@kinds
def test_product(kind: Any, dtype: torch.dtype) -> None:
    """Any number of rows, each dtype of x."""
    for bias in (True, False):
        module = make(kind, bias=bias)
        for rows in (1, 17, 200):
            check(module, torch.randn(rows, 200).to(dtype))


@kinds
def test_near_the_plain_layer(kind: Any) -> None:
    """Independent of every scale's place: 8 bits on both sides cost some hundredths."""
    linear = nn.Linear(200, 150)
    layer, granularity, activations = kind
    x = torch.randn(64, 200).relu() + 0.1
    limit = 448 if layer is FP8 else 127
    module = layer.from_linear(
        linear,
        granularity=granularity,
        input_scale=float(x.max()) / limit if activations == "static" else None,
        activations=activations,
    )
    plain = linear(x).detach()
    error = (module(x) - plain).norm() / plain.norm()
    assert error < (0.06 if layer is FP8 else 0.02)


def test_asymmetric_codes_are_finer_where_x_has_one_sign() -> None:
    linear, x = nn.Linear(200, 150), torch.rand(64, 200)
    plain = linear(x).detach()
    errors = [
        (INT8.from_linear(linear, activations=activations)(x) - plain).norm()
        for activations in ("dynamic", "asymmetric")
    ]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (4, 3), (0, 3), (3, 0, 2), (2, 1, 3)])
@kinds
def test_leading_shapes(kind: Any, shape: tuple[int, ...]) -> None:
    check(make(kind), torch.randn(*shape, 200))


@kinds
def test_strided_input(kind: Any) -> None:
    """Parts of a fused projection, a transposed batch, columns far apart."""
    module = make(kind)
    x = torch.randn(4, 3, 200)
    expected = module(x)
    assert_bit_equal(module(column_slice(x)), expected)
    assert_bit_equal(module(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    for rows in (x[0], x):
        apart = torch.stack((rows, rows), -1)[..., 0]
        assert apart.stride(-1) == 2
        assert_bit_equal(module(apart), module(rows))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (64, 64), (130, 129), (10, 2000)])
@kinds
def test_sizes_that_nothing_divides(kind: Any, n: int, k: int) -> None:
    module = make(kind, n, k)
    for rows in (1, 5):
        check(module, torch.randn(rows, k))
    fresh(module).load_state_dict(module.state_dict())


@kinds
def test_a_row_does_not_depend_on_the_others(kind: Any) -> None:
    module, x = make(kind), torch.randn(40, 200)
    x[7] = torch.nan
    together = module(x)
    finite = [i for i in range(40) if i != 7]
    assert_bit_equal(torch.cat([module(x[i : i + 1]) for i in finite]), together[finite])
    assert together[finite].isfinite().all()
    static_int8 = module.activations == "static" and isinstance(module, INT8)
    assert together[7].isfinite().all() if static_int8 else together[7].isnan().all()


@kinds
def test_from_linear_rounds_to_nearest(kind: Any) -> None:
    layer, granularity, _ = kind
    linear = nn.Linear(200, 150)
    module = layer.from_linear(linear, granularity=granularity)
    quantize = reference.quantize_fp8 if layer is FP8 else reference.quantize_int8
    block = {"channel": (1, -1), "tensor": (-1, -1), "block": (128, 128)}[granularity]
    codes, scale = quantize(linear.weight.detach(), block=block)
    assert_bit_equal(module.weight, codes)
    assert_bit_equal(module.weight_scale, scale)
    assert module.bias is not None and torch.equal(module.bias, linear.bias)


@pytest.mark.parametrize("layer", [FP8, INT8])
def test_from_linear_of_other_dtypes(layer: type[W8A8Linear]) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        linear = nn.Linear(96, 40, dtype=dtype)
        module = layer.from_linear(linear)
        assert module.weight_scale.dtype == torch.float32
        assert module.bias is not None and module.bias.dtype == torch.float32
        assert torch.equal(module.bias.to(dtype), linear.bias.float().to(dtype))
        check(module, torch.randn(3, 96).bfloat16())
    transposed = nn.Linear(96, 40)
    transposed.weight = nn.Parameter(torch.randn(96, 40).t())
    check(layer.from_linear(transposed), torch.randn(3, 96))


@kinds
def test_from_quantized(kind: Any) -> None:
    """A checkpoint's tensors, whatever shape it gives to vectors and single numbers."""
    module = make(kind)
    layer, granularity, activations = kind
    options: dict[str, Any] = {"activations": activations}
    for number in (lambda s: s, lambda s: s.view(1), lambda s: s.view(())):
        scale = module.weight_scale
        if granularity == "channel":
            scale = scale[:, 0]
        elif granularity == "tensor":
            scale = number(scale)
        if module.input_scale is not None:
            options["input_scale"] = number(module.input_scale)
        again = layer.from_quantized(module.weight, scale, module.bias, **options)
        assert_same(again, module)
        assert (again.granularity, again.activations) == (granularity, activations)
        assert again.weight.data_ptr() == module.weight.data_ptr()
    if activations != "asymmetric":
        options.pop("activations")
        again = layer.from_quantized(module.weight, scale, **options)
        assert again.activations == activations and again.bias is None
    # Weights that lie [K, N], and scales in the model's dtype.
    stored = module.weight.t().contiguous().t()
    halves = module.weight_scale.bfloat16()
    again = layer.from_quantized(stored, halves, module.bias, **options)
    assert again.weight_scale.dtype == torch.float32
    check(again, torch.randn(3, 200))


@kinds
def test_state_dict(kind: Any) -> None:
    """A strict load brings back every bit."""
    for bias in (True, False):
        module = make(kind, bias=bias)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        static = {"input_scale"} if module.activations == "static" else set()
        assert set(state) == {"weight", "weight_scale"} | static | ({"bias"} if bias else set())
        loaded = fresh(module)
        assert loaded(torch.randn(2, 200)).isnan().all()  # not yet: no scale is silently 1
        loaded.load_state_dict(state)
        assert_same(loaded, module)
        assigned = fresh(module)
        assigned.load_state_dict(state, assign=True)
        assert_same(assigned, module)


@kinds
def test_a_missing_scale_is_an_error(kind: Any) -> None:
    module = make(kind)
    for name in ("weight_scale", "input_scale"):
        state = module.state_dict()
        if state.pop(name, None) is None:
            continue
        with pytest.raises(RuntimeError, match=rf'Missing key.*"{name}"'):
            fresh(module).load_state_dict(state)
        loaded = fresh(module)
        loaded.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match=f"missing: {name}"):
            loaded(torch.randn(2, 200))


def test_state_dict_of_another_kind_is_refused() -> None:
    dynamic, static = make(KINDS["fp8-channel-dynamic"]), make(KINDS["fp8-channel-static"])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"input_scale"'):
        fresh(dynamic).load_state_dict(static.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"input_scale"'):
        fresh(static).load_state_dict(dynamic.state_dict())
    for name in ("fp8-tensor-dynamic", "fp8-block-dynamic"):
        with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
            fresh(dynamic).load_state_dict(make(KINDS[name]).state_dict())
    for n, k in ((151, 200), (150, 100)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            fresh(dynamic).load_state_dict(make(KINDS["fp8-channel-dynamic"], n, k).state_dict())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", SOME)
def test_loading_rounds_nothing(kind: Any, assign: bool) -> None:
    module = make(kind)
    state = module.state_dict()
    for name, dtype in (
        ("weight", torch.bfloat16),
        ("weight", torch.uint8),
        ("weight", torch.int8 if isinstance(module, FP8) else torch.float8_e4m3fn),
        ("weight_scale", torch.float64),
        ("weight_scale", torch.int32),
    ):
        spoilt = {**state, name: state[name].to(dtype)}
        with pytest.raises(RuntimeError, match=rf"{name}: expected torch.*got {dtype}"):
            fresh(module).load_state_dict(spoilt, assign=assign)
    loaded = fresh(module)
    halves = {**state, "bias": state["bias"].half(), "weight_scale": state["weight_scale"].half()}
    loaded.load_state_dict(halves, assign=assign)
    assert loaded.bias is not None and loaded.bias.dtype == torch.float32
    assert_bit_equal(loaded.weight_scale, state["weight_scale"].half().float())
    check(loaded, torch.randn(3, 200).bfloat16())


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_loading_a_scale_that_none_can_be(value: float) -> None:
    module = make(KINDS["fp8-channel-static"])
    state = {**module.state_dict(), "input_scale": torch.full((1, 1), value)}
    with pytest.raises(RuntimeError, match="input_scale: expected a finite number above 0"):
        fresh(module).load_state_dict(state)
    if value not in (0.0, -1.0):
        state = module.state_dict()
        state["weight_scale"] = torch.full_like(state["weight_scale"], value)
        with pytest.raises(RuntimeError, match="weight_scale: expected finite values"):
            fresh(module).load_state_dict(state)


@pytest.mark.parametrize("kind", SOME)
def test_assigned_views(kind: Any) -> None:
    """Views into a file, or of other strides, are taken as they are or copied."""
    module = make(kind)
    storage = torch.empty(module.weight.numel() + 1, dtype=torch.uint8)
    odd = storage[1:].view(module.weight.dtype).view(150, 200).copy_(module.weight)
    for view in (odd, module.weight.t().contiguous().t()):
        loaded = fresh(module)
        loaded.load_state_dict({**module.state_dict(), "weight": view}, assign=True)
        assert_same(loaded, module)
    assert module.bias is not None
    bias = torch.stack((module.bias, module.bias), 1)[:, 0]
    loaded.load_state_dict({**module.state_dict(), "bias": bias}, assign=True)
    assert_same(loaded, module)


@kinds
def test_no_cast_changes_a_buffer(kind: Any) -> None:
    module = make(kind)
    expected = copy.deepcopy(module)
    for cast in CASTS:
        assert cast(module) is module
        assert_same(module, expected)


@kinds
def test_moved_to_another_device(kind: Any) -> None:
    """All of it moves, and comes back through a load."""
    module = make(kind)
    meta = copy.deepcopy(module).to(device="meta", dtype=torch.float16)
    assert {b.device.type for b in meta.buffers()} == {"meta"}
    assert meta.weight.dtype == module.weight.dtype and meta.weight_scale.dtype == torch.float32
    back = meta.to_empty(device="cpu")
    back.load_state_dict(module.state_dict())
    assert_same(back, module)
    with torch.device("meta"):
        skeleton = fresh(module)
    assert skeleton.weight.is_meta
    skeleton.load_state_dict(module.state_dict(), assign=True)
    assert_same(skeleton, module)


@kinds
def test_copies(kind: Any) -> None:
    module = make(kind)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(copied, module)
        assert copied.weight.data_ptr() != module.weight.data_ptr()
        assert repr(copied) == repr(module)


def test_repr() -> None:
    assert repr(make(KINDS["fp8-block-static"])) == (
        "FP8Linear(in_features=200, out_features=150, granularity=block, activations=static, "
        "bias=True)"
    )
    assert isinstance(make(KINDS["int8-tensor-dynamic"]), QuantizedLinear)


@pytest.mark.parametrize("layer", [FP8, INT8])
@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 8), {}, "in_features: expected at least 1, got 0"),
        ((8, -1), {}, "out_features: expected at least 1, got -1"),
        ((8, 8), {"granularity": "group"}, r"granularity: expected one of \(.*got 'group'"),
        ((8, 8), {"activations": "none"}, r"activations: expected one of \(.*got 'none'"),
        ((8, 8), {"activations": None}, r"activations: expected one of \(.*got None"),
    ],
)
def test_refused_when_constructed(layer: Any, sizes: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{layer.__name__}: {message}"):
        layer(*sizes, **options)


def test_what_one_kind_lacks() -> None:
    linear = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"Int8W8A8Linear: granularity: expected .*got 'block'"):
        INT8.from_linear(linear, granularity="block")
    with pytest.raises(ValueError, match=r"FP8Linear: activations: expected .*got 'asymmetric'"):
        FP8.from_linear(linear, activations="asymmetric")
    with pytest.raises(ValueError, match="input_scale: activations 'static' take an input_scale"):
        FP8.from_linear(linear, activations="static")
    with pytest.raises(ValueError, match="input_scale: activations 'asymmetric' take no input_sc"):
        INT8.from_linear(linear, activations="asymmetric", input_scale=0.1)


@pytest.mark.parametrize("scale", [0.0, -0.5, torch.inf, torch.nan, torch.ones(2), torch.ones(0)])
def test_input_scales_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match=r"input_scale: expected (a finite|one) number"):
        FP8.from_linear(nn.Linear(64, 64), input_scale=scale)


def test_quantized_weights_refused() -> None:
    module = make(KINDS["fp8-channel-dynamic"])
    weight, scale = module.weight, module.weight_scale
    for spoilt, message in (
        ({"weight": weight.half()}, r"weight: expected torch.float8_e4m3fn \[N, K\], got"),
        ({"weight": weight[0]}, r"weight: expected torch.float8_e4m3fn \[N, K\], got"),
        ({"weight": weight[:, :0]}, r"weight: expected torch.float8_e4m3fn \[N, K\], got"),
        ({"weight_scale": scale[:-1]}, r"weight_scale: expected shape .*got \(149, 1\)"),
        ({"weight_scale": scale.t()}, r"weight_scale: expected shape .*got \(1, 150\)"),
        ({"weight_scale": scale.double()}, "weight_scale: expected one of"),
        ({"weight_scale": scale * torch.nan}, "weight_scale: expected finite values"),
        ({"weight_scale": scale.to("meta")}, "weight_scale: expected the same device"),
        ({"bias": torch.zeros(149)}, r"bias: expected floats of shape \(150,\)"),
        ({"bias": torch.zeros(150).int()}, r"bias: expected floats of shape \(150,\)"),
        ({"input_scale": torch.zeros(1)}, "input_scale: expected a finite number above 0"),
        ({"input_scale": torch.ones(1).int()}, "input_scale: expected one of"),
    ):
        with pytest.raises(ValueError, match="FP8Linear: " + message):
            FP8.from_quantized(**{"weight": weight, "weight_scale": scale, **spoilt})


@pytest.mark.parametrize("layer", [FP8, INT8])
def test_from_linear_takes_finite_linear_layers_only(layer: type[W8A8Linear]) -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for module in (nn.Conv1d(4, 4, 1), Adapted(64, 64)):
        with pytest.raises(TypeError, match=r"from_linear: expected a torch.nn.Linear, got"):
            layer.from_linear(module)  # type: ignore[arg-type]
    for granularity in layer._granularities:
        for value in (torch.nan, -torch.inf):
            spoilt = nn.Linear(200, 150)
            spoilt.weight.data[140, 4] = value
            message = rf"weight: expected finite values, got {value} at \[140, 4\]"
            with pytest.raises(ValueError, match=message):
                layer.from_linear(spoilt, granularity=granularity)


@pytest.mark.parametrize("shape", [(3, 100), (2, 400), (100,), ()])
def test_input_of_another_width(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"FP8Linear: x: expected shape \[..., 200\], got"):
        make(KINDS["fp8-channel-dynamic"])(torch.randn(shape))


@kinds
def test_input_of_another_dtype(kind: Any) -> None:
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(ValueError, match=r"quantize_.*: x: expected dtype"):
            make(kind)(torch.zeros(3, 200, dtype=dtype))


@kinds
def test_no_silent_detach(kind: Any) -> None:
    module, x = make(kind), torch.randn(3, 200, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"quantize_.*: x requires grad"):
        module(x)
    with torch.no_grad():
        check(module, x)
    module = type(module).from_quantized(
        module.weight, nn.Parameter(module.weight_scale), nn.Parameter(torch.randn(150))
    )
    assert not any(b.requires_grad for b in module.buffers()) and not [*module.parameters()]


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_as_one_graph(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    for kind in SOME:
        module = make(kind)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for shape in ((2, 200), (5, 200), (300, 200), (2, 3, 200)):
            x = torch.randn(shape)
            assert_bit_equal(compiled(x), module(x))


def test_the_ops_are_those_that_anyone_can_call() -> None:
    module, x = make(KINDS["fp8-block-dynamic"]), torch.randn(3, 200)
    codes, scale = ops.quantize_fp8(x, block=(1, 128))
    expected = ops.fp8_scaled_mm(
        codes, module.weight, scale, module.weight_scale, module.bias, out_dtype=x.dtype
    )
    assert_bit_equal(module(x), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_input_scale_of_any_shape(shape: tuple[int, ...]) -> None:
    layer = FP8Linear.from_linear(nn.Linear(64, 8), input_scale=torch.full(shape, 0.1))
    with torch.no_grad():
        assert layer.input_scale is not None and layer.input_scale.shape == (1, 1)
        assert layer(torch.randn(2, 64)).isfinite().all()
