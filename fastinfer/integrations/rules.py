"""Which modules of a model `fastinfer.optimize` replaces, and by what: one table.

A rule knows a module by its structure, never by its class's name alone, and proposes replacements.
One of them is taken if it computes what the module computes on inputs that tell them apart: models
have norms and feed-forward layers that look the same and are not.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastinfer.nn import GatedMLP, GeGLU, LayerNorm, RMSNorm, SwiGLU, W8A8Linear
from fastinfer.nn._linear import QuantizedLinear, is_plain_linear

Proposals = Iterator[nn.Module]


@dataclass(frozen=True)
class Rule:
    """How modules of one kind are replaced."""

    part: str
    """The option of `optimize` that switches it."""
    applies: Callable[[nn.Module], bool]
    why_not: Callable[[nn.Module], str | None]
    """A reason that the structure gives to leave a module."""
    propose: Callable[[nn.Module], Proposals]
    probe: Callable[[nn.Module, Tensor], tuple[tuple[Any, ...], dict[str, Any]]]
    """The inputs of a module to compare it on, made of random numbers [2, 3, features]."""
    features: Callable[[Any], int]


# --------------------------------------------------------------------------------------- norms


def _is_norm(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters()}
    return (
        not isinstance(module, (RMSNorm, LayerNorm))
        and (_eps(module) is not None or isinstance(module, nn.RMSNorm))
        and names in ({"weight"}, {"weight", "bias"})
        and all(p.dim() == 1 for p in module.parameters())
        and not any(True for _ in module.buffers())
    )


def _eps(module: nn.Module) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _norms(module: Any) -> Proposals:
    size, eps = module.weight.shape[0], _eps(module)
    bias = getattr(module, "bias", None)
    kinds: list[nn.Module] = [LayerNorm(size, eps or 0.0, bias=bias is not None, device="meta")]
    if bias is None:
        kinds += [RMSNorm(size, eps, device="meta", weight_offset=offset) for offset in (0.0, 1.0)]
    for norm in kinds:
        norm.weight = module.weight  # the very parameter: nothing is copied
        if bias is not None:
            norm.bias = bias
        yield norm


# ---------------------------------------------------------------------------------------- MLPs


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_mlp(module: nn.Module) -> bool:
    children = _children(module)
    merged, apart = {"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}
    return not isinstance(module, GatedMLP) and (merged <= children or apart <= children)


def _why_not_mlp(module: nn.Module) -> str | None:
    if any(True for _ in module.parameters(recurse=False)):
        return "has parameters of its own"
    if any(_drops(m) for m in module.modules()):
        return "has dropout"
    names = _children(module) & {"gate_up_proj", "gate_proj", "up_proj"}
    return _why_not_merge([module.get_submodule(name) for name in sorted(names)])


def _drops(module: nn.Module) -> bool:
    """Whether training would show what a comparison does not."""
    options = ((name, p) for name, p in vars(module).items() if isinstance(p, float))
    own = any("dropout" in name and p > 0.0 for name, p in options)
    return own or (isinstance(module, nn.Dropout) and module.p > 0.0)


def _why_not_merge(projections: list[nn.Module]) -> str | None:
    if not all(_is_projection(p) for p in projections):
        kinds = sorted({type(p).__name__ for p in projections if not _is_projection(p)})
        return f"has projections that are no plain linear layers: {', '.join(kinds)}"
    if any(has_hooks(p) for p in projections):
        return "has projections with hooks"
    if len({getattr(p, "bias", None) is None for p in projections}) > 1:
        return "has projections with and without a bias"
    trained = {p.requires_grad for linear in projections for p in linear.parameters()}
    if len(projections) > 1 and len(trained) > 1:
        return "has projections of which only some are trained"
    return None


def _is_projection(module: nn.Module) -> bool:
    own = type(module).forward is QuantizedLinear.forward
    return is_plain_linear(module) or (isinstance(module, QuantizedLinear) and own)


_GATED: tuple[tuple[type[GatedMLP], dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    (SwiGLU, {}, F.silu),
    (GeGLU, {"tanh_approx": True}, functools.partial(F.gelu, approximate="tanh")),
    (GeGLU, {}, F.gelu),
)


def _mlps(module: Any) -> Proposals:
    # The kinds of GELU are closer to each other than many a rounding error of a whole layer.
    x = torch.linspace(-8, 8, 257)
    given = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    for kind, options, activation in _GATED:
        if given is None or not torch.allclose(given(x), activation(x), rtol=0.0, atol=1e-5):
            continue
        if hasattr(module, "gate_up_proj"):
            yield kind.from_merged(module.gate_up_proj, module.down_proj, **options)
        else:
            parts = module.gate_proj, module.up_proj, module.down_proj
            yield kind.from_projections(*parts, **options)


def _mlp_features(module: Any) -> int:
    first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.gate_proj
    return int(first.in_features)


# ----------------------------------------------------------------------------------- attention


def _is_attention(module: nn.Module) -> bool:
    children = _children(module)
    apart = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return apart <= children or {"qkv_proj", "o_proj"} <= children


def _why_not_attention(module: nn.Module) -> str | None:
    from fastinfer.integrations.merged_attention import MergedAttention

    names = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    projections = [c for n, c in module.named_children() if n in names]
    return MergedAttention.why_not(module) or _why_not_merge(projections)


def _attentions(module: nn.Module) -> Proposals:
    from fastinfer.integrations.merged_attention import MergedAttention

    yield MergedAttention(module)


def _attention_features(module: Any) -> int:
    first = module.qkv_proj if hasattr(module, "qkv_proj") else module.q_proj
    return int(first.in_features)


def _attention_inputs(module: Any, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rope = getattr(module.config, "rope_parameters", None) or {}
    size = int(module.head_dim * rope.get("partial_rotary_factor", 1.0))
    angles = torch.arange(x.shape[1] * (size // 2), device=x.device).view(1, -1, size // 2) * 0.37
    cos, sin = (torch.cat((a, a), -1).to(x.dtype) for a in (angles.cos(), angles.sin()))
    return (), {
        "hidden_states": x,
        "position_embeddings": (cos, sin),
        "attention_mask": None,
    }


def _plain_inputs(module: nn.Module, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x,), {}


def _no_reason(module: nn.Module) -> str | None:
    return None


RULES = (
    Rule("norms", _is_norm, _no_reason, _norms, _plain_inputs, lambda m: m.weight.shape[0]),
    Rule("mlps", _is_mlp, _why_not_mlp, _mlps, _plain_inputs, _mlp_features),
    Rule(
        "attention", _is_attention, _why_not_attention, _attentions, _attention_inputs,
        _attention_features,
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------- comparison


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens around what a module computes.

    Accelerate's hooks are a forward of the object's own.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def choose(rule: Rule, module: nn.Module) -> nn.Module | str:
    """The replacement of a module that the rule applies to, or why there is none."""
    if has_hooks(module):
        return "has hooks"
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in tensors):
        return "is on the meta device"
    if len({t.device for t in tensors}) > 1:
        return "is on several devices"
    reason = rule.why_not(module)
    if reason is not None:
        return reason
    # Ours take x alone. What is not given in the comparison may be given by the model.
    if rule.probe is _plain_inputs and len(inspect.signature(module.forward).parameters) > 1:
        return "takes more than one input"
    # In half precision, rounding would hide differences. Quantized layers keep their dtypes.
    exact = copy.deepcopy(module).float().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, rule.features(module), generator=generator) + 0.5
    x[1] *= 0.01  # so that eps matters
    args, options = rule.probe(exact, x.to(tensors[0].device))
    # Codes of activations may be rounded the other way.
    tolerance = 2e-2 if any(isinstance(m, W8A8Linear) for m in module.modules()) else 1e-4
    try:
        with torch.no_grad():
            expected = _first(exact(*args, **options))
            for index, candidate in enumerate(rule.propose(exact)):
                if _agree(_first(candidate.eval()(*args, **options)), expected, tolerance):
                    found = next(itertools.islice(rule.propose(module), index, None))
                    return found.train(module.training)
    except Exception as error:  # of a module that nobody here knows
        return f"cannot be compared: {type(error).__name__}: {error}"
    return "computes something else"


def _first(result: Any) -> Tensor:
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


def _agree(got: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether both rows agree; zeros, which any weight of zeros gives, prove nothing."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    difference = (got.double() - expected.double()).flatten(1).norm(dim=1)
    size = expected.double().flatten(1).norm(dim=1)
    return bool((difference <= tolerance * size).all() and (size > 0).all())
