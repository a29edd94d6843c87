"""`optimize` and `restore`: a transformers model with fastinfer's modules in it, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastinfer.integrations.output_hooks import remove_output_hooks
from fastinfer.integrations.report import Left, Report, Swapped
from fastinfer.integrations.rules import RULES, Rule, choose, has_hooks
from fastinfer.nn._linear import is_plain_linear

_STATE = "_fastinfer_optimized"
_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")  # of frequencies that never change
_NAMES = {
    "norms": ("RMSNorm", "LayerNorm"),
    "mlps": ("MLP", "Experts"),
    "attention": ("Attention", "RotaryEmbedding"),
}

Quantization = str | Callable[[nn.Linear], nn.Module]


@dataclass
class _State:
    """What `restore` needs: the modules that were replaced, in order, and the attention's name."""

    swaps: list[tuple[str, nn.Module]] = field(default_factory=list)
    attention: str | None = None
    restorable: bool = True
    dtype: torch.dtype | None = None
    """Of the model then; linear layers that were replaced do not see it change."""


def optimize(
    model: nn.Module,
    *,
    norms: bool = True,
    mlps: bool = True,
    attention: bool = True,
    quantization: Quantization | None = None,
    skip: Iterable[str] = ("lm_head",),
    restorable: bool = True,
) -> Report:
    """Replaces modules of a transformers model by fastinfer's, in place.

    It was made for Llama (SmolLM2), Mistral, Qwen2, Qwen3, Phi-3, Gemma-3 and GPT-2; in any other
    model it replaces what has the same structure and computes the same. Each replacement is
    compared with its original on a few random tokens first; what differs, or is not understood,
    stays, and the report says why. State_dicts keep their keys and values, but for quantized
    layers.

    Args:
        model: a transformers model, or any module for norms, MLPs and linear layers.
        norms: RMSNorm (also Gemma's) and LayerNorm.
        mlps: gated ones, as `fastinfer.nn.SwiGLU` or `GeGLU`; gate and up become one product.
        attention: `attn_implementation="fastinfer"`; q, k and v become one product, and rotary
            embedding happens in place.
        quantization: a name of the engine's ("int2", "int3", "int4", "int8", "fp8", "int8_w8a8"),
            or a function that makes a layer of a `torch.nn.Linear`; None: weights stay.
        skip: linear layers that stay, by path or last name.
        restorable: keep what `restore` needs. False saves the memory of weights that are quantized.

    Returns:
        What was changed, and what was left and why.

    Raises:
        ValueError: the model or a part of it is optimised already, or there is no such
            quantization; or `skip` is one string.

    Gradients are computed as before, but not through quantized layers. What collects results of
    layers by their class, as `output_attentions=True` does, does not see replaced ones.
    """
    if isinstance(skip, str):
        raise ValueError(f"fastinfer.optimize: skip: expected names, got one string {skip!r}")
    for path, module in model.named_modules():
        if hasattr(module, _STATE) or type(module).__module__.startswith(__package__ + "."):
            part = f"one whose part {path!r} is optimised" if path else "an optimised one"
            raise ValueError(f"fastinfer.optimize: expected a model as it was, got {part}")
    quantizer = None if quantization is None else _quantizer(quantization)
    remove_output_hooks(model)
    report, state = Report(), _State(restorable=restorable)
    setattr(model, _STATE, state)  # first, so that a model that is left half done can be restored
    if quantizer is not None:
        _quantize(model, quantizer, set(skip), report, state)
    state.dtype = _dtype(model)
    wanted = {"norms": norms, "mlps": mlps, "attention": False}
    if attention:
        wanted["attention"] = _set_attention(model, report, state)
    for rule in RULES:
        if wanted[rule.part]:
            _apply(rule, model, report, state)
    if wanted["attention"]:
        _replace_rotary(model, report, state)
    _name_the_unknown(model, wanted, report)
    return report


def restore(model: nn.Module) -> None:
    """Undoes `optimize`: the same module objects, with the values that the weights have now.

    Raises:
        ValueError: the model is not optimised, or was by `restorable=False`.
    """
    state = getattr(model, _STATE, None)
    if state is None:
        raise ValueError("fastinfer.restore: expected an optimised model, got one as it was")
    if not state.restorable:
        raise ValueError(
            "fastinfer.restore: expected a model optimised with restorable=True, got one whose "
            "original weights are gone"
        )
    remove_output_hooks(model)
    dtype = _dtype(model)
    cast = state.dtype is not None and dtype != state.dtype
    for path, original in reversed(state.swaps):
        replacement = model.get_submodule(path)
        _write_back(replacement, original)
        if cast and next(replacement.parameters(), None) is None:
            original.to(dtype=dtype)
        original.train(replacement.training)
        _put(model, replacement, original)
    if state.attention is not None:
        model.set_attn_implementation(state.attention)  # type: ignore[operator]
    delattr(model, _STATE)


# ------------------------------------------------------------------------------------- replacing


def _swap(model: nn.Module, path: str, new: nn.Module, report: Report, state: _State) -> None:
    original = model.get_submodule(path)
    report.swapped.append(Swapped(path, type(original).__name__, type(new).__name__))
    if state.restorable:
        _share_parts(new, original)
        state.swaps.append((path, original))
    _put(model, original, new)


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """The new module in each place of the old one."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(path, new)


def _apply(rule: Rule, model: nn.Module, report: Report, state: _State) -> None:
    users = _users(model)
    for path, module in list(model.named_modules()):
        if path and rule.applies(module):
            replacement = choose(rule, module)
            if isinstance(replacement, nn.Module) and any(
                users[id(parameter)] > 1 for parameter, *_ in _parts(replacement, module)
            ):
                replacement = "its weights are another module's, too"
            if isinstance(replacement, str):
                report.left.append(Left(path, type(module).__name__, replacement))
            else:
                _swap(model, path, replacement, report, state)


def _users(model: nn.Module) -> Counter[int]:
    """How many modules have each parameter, by its id."""
    return Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))


def _parts(merged: nn.Module, original: nn.Module) -> Iterable[tuple[nn.Parameter, Tensor, bool]]:
    """Parameters of the original, what of the merged one they are, and whether that is trained."""
    for name, sizes in vars(merged).get("_parts", {}).items():
        for tensor, parameter in merged.get_submodule(name).named_parameters(recurse=False):
            pieces = torch.split(parameter.detach(), [*sizes.values()])
            for part, piece in zip(sizes, pieces, strict=True):
                old = original.get_submodule(part).get_parameter(tensor)
                yield old, piece, parameter.requires_grad


def _share_parts(merged: nn.Module, original: nn.Module) -> None:
    """The originals become views of the merged weight, so that memory holds it once."""
    for parameter, piece, _ in _parts(merged, original):
        parameter.data = piece


def _write_back(replacement: nn.Module, original: nn.Module) -> None:
    """The original gets what its replacement holds by now, on the device where that is."""
    for parameter, piece, trained in _parts(replacement, original):
        parameter.data = piece.clone()
        parameter.requires_grad_(trained)
    for name, parameter in replacement.named_parameters(recurse=False):
        setattr(original, name, parameter)
    tensor = next(iter([*replacement.parameters(), *replacement.buffers()]), None)
    if tensor is not None:
        original.to(tensor.device)


def _dtype(model: nn.Module) -> torch.dtype | None:
    """That of the first weight which is not quantized: in a language model, the embedding."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _name_the_unknown(model: nn.Module, wanted: dict[str, bool], report: Report) -> None:
    """Modules that are called like those that are replaced, and that no rule has recognised."""
    names = tuple(name for part, known in _NAMES.items() if wanted[part] for name in known)
    known = {x.path for x in report.swapped} | {x.path for x in report.left}
    for path, module in model.named_modules():
        kind = type(module).__name__
        ours = type(module).__module__.startswith("fastinfer.")
        inside = path.rpartition(".")[0] in known
        if path not in known and not inside and not ours and kind.endswith(names):
            report.left.append(Left(path, kind, "is built in a way that is not known"))


# ---------------------------------------------------------------------------- linears, attention


def _quantizer(quantization: Quantization) -> Callable[[nn.Linear], nn.Module]:
    if not isinstance(quantization, str):
        return quantization
    from fastinfer.models.linear import QUANTIZATIONS

    if quantization not in QUANTIZATIONS:
        raise ValueError(
            f"fastinfer.optimize: quantization: expected one of {', '.join(QUANTIZATIONS)}, or a "
            f"function, got {quantization!r}"
        )
    return QUANTIZATIONS[quantization]


def _quantize(
    model: nn.Module,
    quantizer: Callable[[nn.Linear], nn.Module],
    skip: set[str],
    report: Report,
    state: _State,
) -> None:
    users = _users(model)
    for path, module in list(model.named_modules()):
        linear = _as_linear(module)
        if linear is None or not path:
            continue
        reason = None
        if path in skip or path.rpartition(".")[2] in skip:
            reason = "skipped by name"
        elif users[id(module.weight)] > 1:
            reason = "its weight is another module's, too"
        elif has_hooks(module):
            reason = "has hooks"
        else:
            try:
                _swap(model, path, quantizer(linear).train(module.training), report, state)
            except (TypeError, ValueError) as error:
                reason = str(error)
        if reason is not None:
            report.left.append(Left(path, type(module).__name__, reason))


def _as_linear(module: Any) -> nn.Linear | None:
    """A linear layer as one of torch's; GPT-2's have the weight the other way round."""
    if is_plain_linear(module):
        linear: nn.Linear = module
        return linear
    if type(module).__name__ != "Conv1D" or not hasattr(module, "nf"):
        return None
    n_in, n_out = module.nx, module.nf
    if module.weight.shape != (n_in, n_out):
        return None
    linear = nn.Linear(n_in, n_out, bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().t().contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _set_attention(model: Any, report: Report, state: _State) -> bool:
    """Whether the model's attention is fastinfer's from now on."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        report.attention = "not a transformers model"
        return False
    from fastinfer.integrations.transformers import NAME

    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        report.attention = "transformers cannot change it for this model"
        return False
    state.attention = before
    report.attention = before, NAME
    return True


def _replace_rotary(model: nn.Module, report: Report, state: _State) -> None:
    from fastinfer.integrations.merged_attention import MergedAttention, RotaryTables

    merged = any(isinstance(m, MergedAttention) for m in model.modules())
    apart = any(RULES[-1].applies(m) for m in model.modules() if not isinstance(m, MergedAttention))
    for path, module in list(model.named_modules()):
        if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            continue
        types = getattr(module, "rope_type", None)
        types = set(types.values()) if isinstance(types, dict) else {types}
        reason = None
        if not merged or apart:
            reason = "layers that use it stay as they are"
        elif not types.issubset(_ROTARY_TYPES):
            reason = (
                f"frequencies of type {', '.join(map(str, types))} may change from step to step"
            )
        elif not RotaryTables.agrees(module):
            reason = "computes something else"
        if reason is None:
            _swap(model, path, RotaryTables(module), report, state)
        else:
            report.left.append(Left(path, type(module).__name__, reason))
