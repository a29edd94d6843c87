"""Every op refuses bad tensors by ValueError that names op and argument, and writes nothing."""

import re

import pytest
import torch
from torch import Tensor

from tests.conftest import Backend
from tests.helpers import bits
from tests.ops.op_inputs import MUTATED, OPS, OUTPUTS, Arguments, everything, make, receivers

# Arguments that hold lengths, indices and masks.
INTEGERS = {
    "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table", "slot_mapping", "tree_mask", "plan",
    "positions", "top_k", "seeds", "qweight", "perm", "a_zero",
    "outlier_offsets", "outlier_columns",
}  # fmt: skip

# The same, where the name holds floats elsewhere.
INTEGER_OPERANDS = {("int8_scaled_mm", "a"), ("int8_scaled_mm", "b")}

# Matrix products with an epilogue.
PRODUCTS = [*(f"int{bits}_gemm" for bits in (2, 3, 4, 8)), "fp8_scaled_mm", "int8_scaled_mm"]

# Arguments that may have any rank >= 1: adding a dimension is not an error by itself.
ANY_RANK = {
    ("rms_norm", "x"), ("layer_norm", "x"), ("silu_and_mul", "x"), ("gelu_and_mul", "x"),
    ("quantize_fp8", "x"), ("quantize_int8", "x"), ("quantize_int8_asymmetric", "x"),
}  # fmt: skip

# Arguments that are read and written through all their strides.
ANY_STRIDES = {
    ("paged_attention", "block_table"),
    ("append_paged_kv_cache_", "k_scale"),
    ("append_paged_kv_cache_", "v_scale"),
    ("qk_norm_rope_append_", "k_scale"),
    ("qk_norm_rope_append_", "v_scale"),
    ("quantize_fp8", "scale"),
    ("quantize_fp8", "out_scale"),
    ("quantize_int8", "scale"),
    ("quantize_int8", "out_scale"),
    ("quantize_int8_asymmetric", "out_scale"),
    ("quantize_int8_asymmetric", "out_zero_point"),
    ("fp8_scaled_mm", "a_scale"),
    ("fp8_scaled_mm", "b_scale"),
    ("int8_scaled_mm", "a_scale"),
    ("int8_scaled_mm", "b_scale"),
    ("int8_scaled_mm", "a_zero"),
    *[(op, "out_scale") for op in PRODUCTS],
}

# Dimensions whose size something else fixes: (op, argument, dimension).
SIZES = [
    ("flash_attention", "q", 0), ("flash_attention", "q", 3), ("flash_attention", "q", 2),
    ("flash_attention", "k", 0), ("flash_attention", "k", 1), ("flash_attention", "k", 2),
    ("flash_attention", "k", 3), ("flash_attention", "v", 0), ("flash_attention", "v", 1),
    ("flash_attention", "v", 2), ("flash_attention", "sinks", 0),
    ("flash_attention", "tree_mask", 0), ("flash_attention", "tree_mask", 1),
    ("flash_attention", "q_scale", 0), ("flash_attention", "k_scale", 0),
    ("flash_attention", "v_scale", 0),
    ("flash_attention_varlen", "q", 0), ("flash_attention_varlen", "q", 1),
    ("flash_attention_varlen", "q", 2), ("flash_attention_varlen", "k", 0),
    ("flash_attention_varlen", "k", 1), ("flash_attention_varlen", "k", 2),
    ("flash_attention_varlen", "v", 0), ("flash_attention_varlen", "v", 1),
    ("flash_attention_varlen", "cu_seqlens_q", 0), ("flash_attention_varlen", "cu_seqlens_k", 0),
    ("flash_attention_varlen", "sinks", 0), ("flash_attention_varlen", "tree_mask", 0),
    ("flash_attention_varlen", "q_scale", 0), ("flash_attention_varlen", "k_scale", 0),
    ("flash_attention_varlen", "v_scale", 0),
    ("paged_attention", "q", 0), ("paged_attention", "q", 1), ("paged_attention", "q", 2),
    ("paged_attention", "k_cache", 0), ("paged_attention", "k_cache", 1),
    ("paged_attention", "k_cache", 2), ("paged_attention", "k_cache", 3),
    ("paged_attention", "v_cache", 0), ("paged_attention", "v_cache", 1),
    ("paged_attention", "v_cache", 2), ("paged_attention", "block_table", 0),
    ("paged_attention", "cu_seqlens_q", 0), ("paged_attention", "seq_lens", 0),
    ("paged_attention", "sinks", 0), ("paged_attention", "tree_mask", 0),
    ("paged_attention", "k_scale", 0), ("paged_attention", "k_scale", 1),
    ("paged_attention", "k_scale", 2), ("paged_attention", "v_scale", 0),
    ("paged_attention", "v_scale", 1), ("paged_attention", "v_scale", 2),
    ("paged_attention", "plan", 0), ("paged_attention", "plan", 1),
    ("plan_attention", "cu_seqlens_q", 0), ("plan_attention", "seq_lens", 0),
    ("merge_attention_states", "outs", 0), ("merge_attention_states", "outs", 1),
    ("merge_attention_states", "outs", 2), ("merge_attention_states", "lses", 0),
    ("merge_attention_states", "lses", 1), ("merge_attention_states", "lses", 2),
    ("merge_attention_states", "sinks", 0),
    ("rms_norm", "x", 1), ("rms_norm", "weight", 0),
    ("layer_norm", "x", 1), ("layer_norm", "weight", 0), ("layer_norm", "bias", 0),
    ("silu_and_mul", "x", 1), ("gelu_and_mul", "x", 1),
    *[
        (f"int{bits}_gemm", name, dim)
        for bits in (2, 3, 4, 8)
        for name, dims in (("x", 1), ("qweight", 3), ("scales", 2), ("zeros", 2), ("perm", 1),
                           ("bias", 1), ("norm_weight", 1), ("outlier_offsets", 1),
                           ("outlier_columns", 1), ("outlier_values", 1))
        for dim in (range(dims) if name != "x" else [1])
    ],
    *[
        (op, name, dim)
        for op in ("fp8_scaled_mm", "int8_scaled_mm")
        for name, dims in (("a", 2), ("b", 2), ("a_scale", 2), ("b_scale", 2), ("bias", 1))
        for dim in range(dims)
    ],
    ("int8_scaled_mm", "a_zero", 0), ("int8_scaled_mm", "a_zero", 1),
    *[(op, "residual", dim) for op in PRODUCTS for dim in (0, 1)],
    ("quantize_fp8", "x", 0), ("quantize_fp8", "scale", 0), ("quantize_fp8", "scale", 1),
    ("quantize_int8", "x", 0), ("quantize_int8", "scale", 0), ("quantize_int8", "scale", 1),
    ("sample", "temperature", 0), ("sample", "top_k", 0), ("sample", "top_p", 0),
    ("sample", "min_p", 0), ("sample", "seeds", 0), ("sample", "positions", 0),
    ("append_paged_kv_cache_", "k", 0), ("append_paged_kv_cache_", "k", 1),
    ("append_paged_kv_cache_", "k", 2), ("append_paged_kv_cache_", "v", 0),
    ("append_paged_kv_cache_", "v", 1), ("append_paged_kv_cache_", "v", 2),
    ("append_paged_kv_cache_", "k_cache", 0), ("append_paged_kv_cache_", "k_cache", 1),
    ("append_paged_kv_cache_", "k_cache", 2), ("append_paged_kv_cache_", "k_cache", 3),
    ("append_paged_kv_cache_", "v_cache", 0), ("append_paged_kv_cache_", "v_cache", 3),
    ("append_paged_kv_cache_", "slot_mapping", 0), ("append_paged_kv_cache_", "k_scale", 0),
    ("append_paged_kv_cache_", "k_scale", 1), ("append_paged_kv_cache_", "v_scale", 2),
    ("qk_norm_rope_append_", "qkv", 0), ("qk_norm_rope_append_", "qkv", 1),
    ("qk_norm_rope_append_", "q_out", 0), ("qk_norm_rope_append_", "q_out", 1),
    ("qk_norm_rope_append_", "q_out", 2), ("qk_norm_rope_append_", "k_cache", 0),
    ("qk_norm_rope_append_", "k_cache", 1), ("qk_norm_rope_append_", "k_cache", 2),
    ("qk_norm_rope_append_", "k_cache", 3), ("qk_norm_rope_append_", "v_cache", 0),
    ("qk_norm_rope_append_", "v_cache", 1), ("qk_norm_rope_append_", "v_cache", 3),
    ("qk_norm_rope_append_", "slot_mapping", 0), ("qk_norm_rope_append_", "positions", 0),
    ("qk_norm_rope_append_", "cos_sin", 1), ("qk_norm_rope_append_", "bias", 0),
    ("qk_norm_rope_append_", "q_weight", 0), ("qk_norm_rope_append_", "k_weight", 0),
    ("qk_norm_rope_append_", "k_scale", 0), ("qk_norm_rope_append_", "v_scale", 2),
    ("fused_add_rms_norm_", "x", 0), ("fused_add_rms_norm_", "x", 1),
    ("fused_add_rms_norm_", "residual", 0), ("fused_add_rms_norm_", "residual", 1),
    ("fused_add_rms_norm_", "weight", 0),
    ("fused_add_layer_norm_", "x", 1), ("fused_add_layer_norm_", "residual", 0),
    ("fused_add_layer_norm_", "weight", 0), ("fused_add_layer_norm_", "bias", 0),
    ("rotary_embedding_", "q", 0), ("rotary_embedding_", "k", 0), ("rotary_embedding_", "k", 2),
    ("rotary_embedding_", "positions", 0), ("rotary_embedding_", "cos_sin", 1),
]  # fmt: skip


def tensor_arguments(op: str) -> list[str]:
    schema = getattr(torch.ops.fastinfer, op).default._schema
    return [a.name for a in schema.arguments if "Tensor" in str(a.type)]


TENSORS = [(op, name) for op in OPS for name in tensor_arguments(op)]
RECEIVERS = [(op, name) for op, names in OUTPUTS.items() for name in names]
by_tensor = pytest.mark.parametrize(("op", "name"), TENSORS)
by_receiver = pytest.mark.parametrize(("op", "name"), RECEIVERS)


def assert_refused(
    backend: Backend, op: str, arguments: Arguments, names: list[str], overload: str = "default"
) -> None:
    """Wrapper and overload both raise ValueError with the op and one of `names` in the text."""
    pattern = rf"\b{re.escape(op)}\b.*\b({'|'.join(map(re.escape, names))})\b"
    watched = {n: arguments[n] for n in MUTATED.get(op, ()) if arguments.get(n) is not None}
    watched |= {n: arguments[n] for n in OUTPUTS.get(op, ()) if n in arguments}
    before = {n: x.clone() for n, x in watched.items() if not x.is_meta}
    for call in (getattr(backend.ops, op), getattr(getattr(backend.library, op), overload)):
        with pytest.raises(ValueError, match=pattern):
            call(**arguments)
    for name, old in before.items():
        assert torch.equal(bits(watched[name]), bits(old)), name


def wrong_dtypes(x: Tensor) -> list[torch.dtype]:
    if x.dtype == torch.bool:
        return [torch.uint8, torch.float32]
    if x.is_floating_point() or x.dtype == torch.int8:
        return [torch.float64, torch.int32]
    return [torch.float32, torch.int64 if x.dtype == torch.int32 else torch.int32]


def spread(x: Tensor) -> Tensor:
    """Equal to x, with stride 2 in the last dimension."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    return wide[..., ::2].copy_(x)


@by_tensor
def test_wrong_dtype(backend: Backend, op: str, name: str) -> None:
    for dtype in wrong_dtypes(everything(op, backend.device)[name]):
        arguments = everything(op, backend.device)
        arguments[name] = arguments[name].to(dtype)
        assert_refused(backend, op, arguments, [name])


@by_tensor
def test_wrong_rank(backend: Backend, op: str, name: str) -> None:
    original = everything(op, backend.device)[name]
    wrong = [original.flatten()[0]]
    if (op, name) not in ANY_RANK:
        wrong.append(original.unsqueeze(0))
    for x in wrong:
        arguments = everything(op, backend.device)
        arguments[name] = x
        # Where a first argument sets the rank, the one that disagrees with it is named.
        partners = {"outs": ["lses"], "lses": ["outs"], "x": ["residual"], "residual": ["x"]}
        assert_refused(backend, op, arguments, [name, *partners.get(name, [])])


@pytest.mark.parametrize(("op", "name", "dim"), SIZES)
def test_size_that_disagrees(backend: Backend, op: str, name: str, dim: int) -> None:
    """Which of two tensors that disagree is named is the op's choice."""
    arguments = everything(op, backend.device)
    x = arguments[name]
    arguments[name] = x.narrow(dim, 0, x.shape[dim] - 1).contiguous()
    assert_refused(backend, op, arguments, tensor_arguments(op))


def contiguous(arguments: Arguments) -> Arguments:
    """The same values, contiguous, in tensors of their own."""
    return {
        n: x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x
        for n, x in arguments.items()
    }


@by_tensor
def test_last_dimension_not_dense(backend: Backend, op: str, name: str) -> None:
    arguments = everything(op, backend.device)
    arguments[name] = spread(arguments[name])
    if (op, name) in ANY_STRIDES:
        dense = contiguous(arguments)
        results = [getattr(backend.ops, op)(**given) for given in (arguments, dense)]
        ours_of, wanted_of = ((r,) if isinstance(r, Tensor) else r or () for r in results)
        for ours, wanted in zip(ours_of, wanted_of, strict=True):
            assert torch.equal(bits(ours), bits(wanted))
        for changed in MUTATED.get(op, ()):
            assert torch.equal(arguments[changed], dense[changed])
        return
    assert_refused(backend, op, arguments, [name])


@pytest.mark.parametrize(("op", "name"), [t for t in TENSORS if len(tensor_arguments(t[0])) > 1])
def test_other_device(backend: Backend, op: str, name: str) -> None:
    """One argument on another device; `meta` is the one that is always there."""
    arguments = everything(op, backend.device)
    arguments[name] = arguments[name].to("meta")
    assert_refused(backend, op, arguments, tensor_arguments(op))


@by_receiver
def test_output_of_wrong_dtype_rank_size_or_stride(backend: Backend, op: str, name: str) -> None:
    arguments = everything(op, backend.device)
    good = receivers(op, arguments)
    x = good[name]
    wrong = [
        x.to(torch.int16), x.unsqueeze(0), x[..., :-1].contiguous(), x[:-1].contiguous(),
        x.new_zeros(()),
    ]  # fmt: skip
    if (op, name) not in ANY_STRIDES:
        wrong.append(spread(x))
    if x.dim() > 1 and x.shape[0] > 1:
        wrong.append(x[:1].expand(x.shape))
    for bad in wrong:
        assert_refused(backend, op, {**arguments, **good, name: bad}, [name], "out")


@by_receiver
def test_output_on_another_device(backend: Backend, op: str, name: str) -> None:
    arguments = everything(op, backend.device)
    good = receivers(op, arguments)
    bad = {**arguments, **good, name: good[name].to("meta")}
    assert_refused(backend, op, bad, [name, *tensor_arguments(op)], "out")


@pytest.mark.parametrize(("op", "name"), [(op, n) for op, names in MUTATED.items() for n in names])
def test_expanded_tensor_that_would_be_written(backend: Backend, op: str, name: str) -> None:
    arguments = everything(op, backend.device)
    x = arguments[name]
    arguments[name] = x[:1].expand(x.shape)
    assert_refused(backend, op, arguments, [name])


DIFFERENTIABLE = [t for t in TENSORS if t[1] not in INTEGERS and t not in INTEGER_OPERANDS]


@pytest.mark.parametrize(("op", "name"), DIFFERENTIABLE)
def test_tensor_that_requires_grad(backend: Backend, op: str, name: str) -> None:
    """No op has a derivative: refused while grad mode is on, taken while it is off."""
    arguments = everything(op, backend.device)
    if not arguments[
        name
    ].is_floating_point():  # a quantized cache; its float form can ask for grad
        arguments = make(op, device=backend.device)
    arguments[name] = arguments[name].clone().requires_grad_()
    wrapper = getattr(backend.ops, op)
    with pytest.raises((RuntimeError, ValueError), match=rf"{op}.*\b{name}\b.*grad"):
        wrapper(**arguments)
    with torch.no_grad():
        wrapper(**arguments)
    with torch.inference_mode():
        wrapper(**arguments)
