"""The library's schemas, the Python wrappers and the fakes say the same."""

import inspect
import re
from typing import Any

import pytest
import torch

import fastinfer.ops

IN_PLACE = {
    "append_paged_kv_cache_": {"k_cache", "v_cache", "k_scale", "v_scale"},
    "qk_norm_rope_append_": {"q_out", "k_cache", "v_cache", "k_scale", "v_scale"},
    "fused_add_rms_norm_": {"x", "residual"},
    "fused_add_layer_norm_": {"x", "residual"},
    "rotary_embedding_": {"q", "k"},
}
WITH_OUTPUT = {
    "flash_attention": {"out", "lse"},
    "flash_attention_varlen": {"out", "lse"},
    "paged_attention": {"out", "lse", "workspace"},
    "plan_attention": {"out"},
    "merge_attention_states": {"out", "lse"},
    "rms_norm": {"out"},
    "layer_norm": {"out"},
    "silu_and_mul": {"out"},
    "gelu_and_mul": {"out"},
    "int2_gemm": {"out"},
    "int3_gemm": {"out"},
    "int4_gemm": {"out"},
    "int8_gemm": {"out"},
    "quantize_fp8": {"out", "out_scale"},
    "quantize_int8": {"out", "out_scale"},
    "quantize_int8_asymmetric": {"out", "out_scale", "out_zero_point"},
    "fp8_scaled_mm": {"out"},
    "int8_scaled_mm": {"out"},
    "sample": {"token_ids", "valid"},
}
OPS = sorted(IN_PLACE | WITH_OUTPUT)
OVERLOADS = [(op, "default") for op in OPS] + [(op, "out") for op in sorted(WITH_OUTPUT)]

by_op = pytest.mark.parametrize("op", OPS)
by_overload = pytest.mark.parametrize(("op", "overload"), OVERLOADS)


def schema(op: str, overload: str = "default") -> Any:
    return getattr(getattr(torch.ops.fastinfer, op), overload)._schema


def registered() -> set[str]:
    """Names of the public overloads that the library registered."""
    names = torch._C._dispatch_get_all_op_names()
    return {n.removeprefix("fastinfer::") for n in names if n.startswith("fastinfer::")}


def test_the_library_has_these_ops_and_no_others() -> None:
    expected = {op if overload == "default" else f"{op}.{overload}" for op, overload in OVERLOADS}
    assert {name for name in registered() if not name.startswith("_")} == expected
    assert set(fastinfer.ops.op_names()) == set(OPS)


@by_op
def test_every_op_is_exported_under_its_name(op: str) -> None:
    assert op in fastinfer.ops.__all__
    assert getattr(fastinfer.ops, op).__name__ == op


@by_op
def test_wrapper_has_the_arguments_and_defaults_of_the_schema(op: str) -> None:
    parameters = dict(inspect.signature(getattr(fastinfer.ops, op)).parameters)
    receivers = WITH_OUTPUT.get(op, set())
    for name in receivers:
        extra = parameters.pop(name)
        assert extra.kind is inspect.Parameter.KEYWORD_ONLY and extra.default is None, name
    arguments = schema(op).arguments
    assert list(parameters) == [argument.name for argument in arguments]
    for argument in arguments:
        parameter = parameters[argument.name]
        keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert keyword_only == argument.kwarg_only, argument.name
        if argument.has_default_value():
            default = argument.default_value
            if isinstance(default, list):  # no list in Python: every call would share it
                default = tuple(default)
            assert parameter.default == default, argument.name
            assert type(parameter.default) is type(default), argument.name
        else:
            assert parameter.default is inspect.Parameter.empty, argument.name


@pytest.mark.parametrize("op", sorted(WITH_OUTPUT))
def test_out_overload_is_the_functional_one_and_its_receivers(op: str) -> None:
    plain, out = schema(op), schema(op, "out")
    described = [(a.name, str(a.real_type), a.kwarg_only, a.has_default_value() and a.default_value)
                 for a in plain.arguments]  # fmt: skip
    shared = [(a.name, str(a.real_type), a.kwarg_only, a.has_default_value() and a.default_value)
              for a in out.arguments if a.name not in WITH_OUTPUT[op]]  # fmt: skip
    assert shared == described
    assert {a.name for a in out.arguments if a.alias_info is not None} == WITH_OUTPUT[op]
    assert all(a.kwarg_only for a in out.arguments if a.name in WITH_OUTPUT[op])


@by_overload
def test_exactly_the_mutated_arguments_are_marked(op: str, overload: str) -> None:
    described = schema(op, overload)
    expected = WITH_OUTPUT[op] if overload == "out" else IN_PLACE.get(op, set())
    written = {a.name for a in described.arguments if a.alias_info and a.alias_info.is_write}
    assert written == expected
    letters = [tuple(a.alias_info.before_set) for a in described.arguments if a.alias_info]
    assert len(letters) == len(set(letters)), "two mutated arguments share an alias set"
    returns_nothing = overload == "out" or op in IN_PLACE
    assert (len(described.returns) == 0) == returns_nothing
    assert all(r.alias_info is None for r in described.returns)


@by_op
def test_in_place_ops_and_no_others_end_in_an_underscore(op: str) -> None:
    assert op.endswith("_") == (op in IN_PLACE)


@by_overload
def test_sizes_are_symbolic(op: str, overload: str) -> None:
    """`int` in a schema recompiles for each value; SymInt does not."""
    assert not re.search(r"\bint\b", str(schema(op, overload)))


@by_overload
def test_every_overload_has_a_fake_and_a_cpu_kernel(op: str, overload: str) -> None:
    name = f"fastinfer::{op}" if overload == "default" else f"fastinfer::{op}.{overload}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")


@by_op
def test_docstring_names_every_argument(op: str) -> None:
    wrapper = getattr(fastinfer.ops, op)
    text = inspect.getdoc(wrapper) or ""
    assert len(text.splitlines()) > 5
    for name in inspect.signature(wrapper).parameters:
        assert name in text, f"{op}: {name} is not in the docstring"


@by_op
def test_wrapper_is_typed(op: str) -> None:
    signature = inspect.signature(getattr(fastinfer.ops, op))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
