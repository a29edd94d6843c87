"""One layer of a model: what its projections read, where their scales go, and its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastinfer.models.architectures import architecture
from fastinfer.models.layer import DecoderLayer
from fastinfer.models.linear import Linear
from fastinfer.models.norm import LayerNorm, Norm
from fastinfer.ops.packed_weights import PackedWeight
from fastinfer.quant import (
    Quantized,
    Scheme,
    awq,
    awq_scales,
    fold_into_norm,
    gptq,
    rtn,
)
from fastinfer.quantizer.walk import Projection, Walk

Schemes = Mapping[str, Scheme | None]


@dataclass(frozen=True)
class _Rows:
    """Features of the projection before, which its output is linear in."""

    linear: Linear
    first: int
    source: Tensor | None
    """int64 [in_features]: the feature that each input is; None: as they stand."""


@dataclass(frozen=True)
class _Site:
    """Projections of one input, and the operation that it comes from."""

    linear: Linear
    projections: Sequence[Projection]
    before: Norm | _Rows | None
    """None: scales cannot be folded into it."""


def quantize_layer(
    walk: Walk, i: int, schemes: Schemes, scale_dtype: torch.dtype, *, sequential: bool
) -> dict[str, Quantized]:
    """Quantizes a loaded layer's projections; it computes with the result from then on.

    Args:
        walk: at that layer.
        i: its number.
        schemes: of all its projections; None: it stays plain.
        scale_dtype: fp16, bf16 or fp32.
        sequential: each projection sees inputs that the quantized ones before it in the layer made;
            else those that the plain layer makes, which takes half of the time.

    Returns:
        The quantized projections by name.

    Raises:
        ValueError: NaN or infinity in weights or activations, with the projection's name.
    """
    sites = _sites(walk, i)
    _scale(walk, i, sites, schemes)
    wanted = [s for s in sites if any(schemes[p.name] for p in s.projections)]
    stages = [[site] for site in wanted] if sequential else [wanted] if wanted else []
    exempt = _unclipped(walk, i)
    found: dict[str, Quantized] = {}
    for stage in stages:
        statistics = walk.observe(i, [site.linear for site in stage])
        for site in stage:
            hessian = statistics[site.linear].hessian
            for projection in site.projections:
                scheme = schemes[projection.name]
                if scheme is None:
                    continue
                options = _options(scheme, clip=projection.name not in exempt)
                result = _named(
                    projection.name,
                    _METHODS[scheme.method],
                    projection.weight,
                    hessian,
                    scale_dtype=scale_dtype,
                    **options,
                )
                set_codes(projection, result.weight)
                found[projection.name] = result
    return found


def set_codes(projection: Projection, weight: PackedWeight) -> None:
    """A loaded layer computes with what the codes stand for."""
    projection.weight.copy_(weight.dequantize())


def round_plain(walk: Walk, i: int, quantized: Mapping[str, object]) -> None:
    """A loaded layer computes with what is saved of its plain weights."""
    for name, slot in walk.decoder.layer_slots(i).items():
        if name.removesuffix(".weight") not in quantized:
            slot.copy_(slot.to(walk.dtype))


def _options(scheme: Scheme, *, clip: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "bits": scheme.bits, "group_size": scheme.group_size, "symmetric": bool(scheme.symmetric),
    }  # fmt: skip
    if scheme.method == "gptq":
        options |= {"order": scheme.order, "damping": scheme.damping}
    if scheme.method == "awq":
        options["clip"] = clip
    return options


_METHODS: dict[str, Any] = {"rtn": rtn, "gptq": gptq, "awq": awq}


def _named(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _sites(walk: Walk, i: int) -> list[_Site]:
    """In the order in which they are computed."""
    layer, config = walk.decoder.layer(i), walk.config
    of: dict[Linear, list[Projection]] = {}
    for projection in walk.projections(i):
        of.setdefault(projection.linear, []).append(projection)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    inputs = torch.arange(heads * dim, device=walk.device)
    # Query heads that share a KV head read the same values.
    source = inputs // dim // (heads // kv_heads) * dim + inputs % dim
    before: dict[Linear, Norm | _Rows | None] = {
        layer.qkv: layer.input_norm,
        layer.attention_out: _Rows(layer.qkv, (heads + kv_heads) * dim, source),
        layer.up: layer.mlp_norm,
        # A gate is multiplied by the other half; without one, the activation is in between.
        layer.down: _Rows(layer.up, config.intermediate_size, None) if config.gated_mlp else None,
    }
    return [_Site(linear, of[linear], operation) for linear, operation in before.items()]


def _unclipped(walk: Walk, i: int) -> set[str]:
    """Queries and keys, whose product follows; also where values are in the same matrix."""
    layer: DecoderLayer = walk.decoder.layer(i)
    parts = [p.name for p in walk.projections(i) if p.linear is layer.qkv]
    split = len(architecture(walk.config.architecture).names.qkv) > 1
    return set(parts[:2] if split else parts)


@torch.no_grad()
def _scale(walk: Walk, i: int, sites: Sequence[_Site], schemes: Schemes) -> None:
    """Gives inputs of AWQ's projections their scales, which the operations before take back."""
    wanted = [
        (site, chosen)
        for site in sites
        if site.before is not None
        and (chosen := [p for p in site.projections if _is_awq(schemes[p.name])])
    ]
    if not wanted:
        return
    statistics = walk.observe(i, [site.linear for site, _ in wanted])
    for site, chosen in wanted:
        scheme = schemes[chosen[0].name]
        assert scheme is not None and site.before is not None
        observed = statistics[site.linear]
        scales = _named(
            chosen[0].name,
            awq_scales,
            [p.weight for p in chosen],
            observed.hessian,
            observed.magnitude,
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=bool(scheme.symmetric),
            source=site.before.source if isinstance(site.before, _Rows) else None,
        )
        site.linear.plain_weight().mul_(_fold(walk, site.before, scales))


def _is_awq(scheme: Scheme | None) -> bool:
    return scheme is not None and scheme.method == "awq"


def _fold(walk: Walk, before: Norm | _Rows, scales: Tensor) -> Tensor:
    """Divides what comes before by scales; returns those of the inputs."""
    if isinstance(before, Norm):
        bias = before.bias.data if isinstance(before, LayerNorm) else None
        weight, new_bias, scales = fold_into_norm(
            before.weight.data, bias, scales, offset=before.weight_offset, dtype=walk.dtype
        )
        before.weight.data.copy_(weight)
        if isinstance(before, LayerNorm) and new_bias is not None:
            before.bias.data.copy_(new_bias)
        return scales
    rows = slice(before.first, before.first + len(scales))
    before.linear.plain_weight()[rows].div_(scales[:, None])
    if before.linear.bias is not None:
        before.linear.bias.data[rows].div_(scales)
    return scales if before.source is None else scales[before.source]
