"""Rotary frequencies and their scaling to longer contexts; the decoder's cos-sin tables.

Frequencies are fp32 and computed in transformers' order of operations, since they are what models
were trained with; `ops.rotary_cos_sin` takes it from there in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.models.fields import integer, number, unsupported

HF_KINDS = ("linear", "dynamic", "llama3", "yarn")
GGUF_KINDS = ("linear", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a trained model are changed for a longer context.

    Raises:
        ValueError: an unknown kind, or numbers that give no finite positive frequencies.
    """

    kind: str
    """A key of `KINDS`."""
    factor: float = 1.0
    """The longer context over the original one."""
    original_context: int = 1
    """Tokens the unscaled model was made for."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / low_freq_factor are stretched in full ..."""
    high_freq_factor: float = 4.0
    """... and those below original_context / high_freq_factor not at all."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context are kept ..."""
    beta_slow: float = 1.0
    """... and those that turn less often than this are stretched in full."""
    truncate: bool = True
    """yarn: the bounds between them are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn: multiplies cosines and sines, and so the scores by its square."""
    frequency_factors: tuple[float, ...] = ()
    """factors: what each frequency is divided by."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"model config: rope scaling {self.kind!r}: one of {[*KINDS]} expected"
            )
        for name in ("factor", "original_context", "attention_factor", "beta_slow"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"model config: rope scaling: {name} > 0 expected, got {value}")
        if self.factor < 1:
            raise ValueError(f"model config: rope scaling: factor >= 1 expected, got {self.factor}")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not 0 < getattr(self, low) < getattr(self, high):
                raise ValueError(
                    f"model config: rope scaling: 0 < {low} < {high} expected, got "
                    f"{getattr(self, low)} and {getattr(self, high)}"
                )
        if not all(0 < f < math.inf for f in self.frequency_factors):
            raise ValueError("model config: rope scaling: frequency factors > 0 expected")


def inverse_frequencies(
    theta: float, dim: int, scaling: RopeScaling | None = None, max_model_len: int = 0
) -> Tensor:
    """The inverse frequencies theta^(-2i/dim) of dim/2 pairs, scaled: fp32 [dim / 2].

    Args:
        theta: the base.
        dim: how many features of a head are turned.
        scaling: None leaves the frequencies as they are.
        max_model_len: the longest sequence that occurs; only "dynamic" scaling depends on it.
    """
    if scaling is None:
        return _frequencies(theta, dim)
    return KINDS[scaling.kind](theta, dim, scaling, max_model_len)


def rotary_table(
    theta: float,
    dim: int,
    scaling: RopeScaling | None,
    max_model_len: int,
    device: torch.device,
) -> Tensor:
    """What `ops.rotary_embedding_` reads for positions below max_model_len: fp32 [P, dim]."""
    table = ops.rotary_cos_sin(
        inverse_frequencies(theta, dim, scaling, max_model_len), max_model_len
    )
    if scaling is not None and scaling.attention_factor != 1.0:
        table *= scaling.attention_factor
    return table.to(device)


def hf_scaling(
    rope: Mapping[str, Any], *, max_position_embeddings: int, original_context: int | None = None
) -> RopeScaling | None:
    """From config.json's `rope_parameters` (so transformers 5 writes it) or older `rope_scaling`.

    Args:
        rope: the object of one kind of layer.
        max_position_embeddings: the original context where nothing else says so.
        original_context: what config.json says about it outside the object; goes first.

    Raises:
        ValueError: a kind that is not known, named; a missing or malformed key.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if "mrope_section" in rope:
        raise unsupported("mrope_section", rope["mrope_section"], "a text model without it")
    if kind == "default":
        return None
    if kind not in HF_KINDS:
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported; expected 'default', "
            + ", ".join(map(repr, HF_KINDS))
        )
    factor = number(rope, "factor")
    if kind in ("linear", "dynamic"):  # they begin at the context in the config itself
        return RopeScaling(kind, factor, max_position_embeddings)
    if original_context is None:
        key = "original_max_position_embeddings"
        original_context = integer(rope, key, default=max_position_embeddings)
    if kind == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        return RopeScaling(
            kind, factor, original_context, low_freq_factor=low, high_freq_factor=high
        )
    return RopeScaling(
        kind,
        factor,
        original_context,
        beta_fast=number(rope, "beta_fast", default=32.0),
        beta_slow=number(rope, "beta_slow", default=1.0),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def gguf_scaling(
    fields: Mapping[str, Any], context: int, factors: tuple[float, ...] | None
) -> RopeScaling | None:
    """From a GGUF file's metadata (without the architecture's prefix) and `rope_freqs.weight`.

    Raises:
        ValueError: a kind or an option of one that is not supported, named.
    """
    kind = fields.get("rope.scaling.type", "none")
    known = {
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
    }
    for key, value in fields.items():
        if key == "rope.scale_linear" and value != 1.0:
            raise unsupported(key, value, "rope.scaling.factor")
        if key.startswith("rope.scaling.") and key not in known:
            raise unsupported(key, value, "one of " + ", ".join(sorted(known)))
    if factors is not None:
        if kind != "none":
            raise unsupported("rope.scaling.type", kind, "'none' beside rope_freqs.weight")
        return RopeScaling("factors", original_context=context, frequency_factors=factors)
    if kind == "none":
        return None
    if kind not in GGUF_KINDS:
        raise ValueError(
            f"model config: rope scaling {kind!r} is not supported; expected 'none', "
            + ", ".join(map(repr, GGUF_KINDS))
        )
    factor = number(fields, "rope.scaling.factor")
    original = integer(fields, "rope.scaling.original_context_length", default=context)
    attention = _yarn_attention_factor({}, factor) if kind == "yarn" else 1.0
    return RopeScaling(kind, factor, original, attention_factor=attention)


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _linear(theta: float, dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """Positions divided by the factor. Chen et al., "Position Interpolation", 2023."""
    return _frequencies(theta, dim) / scaling.factor


def _dynamic(theta: float, dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """NTK-aware: the base grows, so that slow pairs are stretched and fast ones hardly.

    transformers grows the base with the sequence, so that a key's rotation depends on when it was
    computed. Cached keys are turned once, and sequences of many lengths share a step: the base is
    the one for a sequence of max_model_len tokens. That equals transformers for a sequence of that
    length, and the unscaled model if max_model_len is within the original context.
    """
    length = max(max_model_len, scaling.original_context)
    ratio = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
    return _frequencies(theta * ratio ** (dim / (dim - 2)), dim)


def _llama3(theta: float, dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a blend between. Llama 3.1, 2024."""
    frequencies = _frequencies(theta, dim)
    context, factor = scaling.original_context, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, blended)
    return torch.where(wavelengths < context / high, frequencies, scaled)


def _yarn(theta: float, dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """Stretched by how often a pair turns over the original context. Peng et al., "YaRN", 2023."""
    if theta == 1.0:  # all pairs turn alike
        raise ValueError("model config: rope_theta must not be 1 with rope_type 'yarn'")

    def pair_that_turns(times: float) -> float:
        turns = scaling.original_context / (times * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _factors(theta: float, dim: int, scaling: RopeScaling, max_model_len: int) -> Tensor:
    """Each frequency divided by its own number, as GGUF files of Llama 3.1 carry them."""
    return _frequencies(theta, dim) / torch.tensor(scaling.frequency_factors)


KINDS: dict[str, Callable[[float, int, RopeScaling, int], Tensor]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": _factors,
}


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """What is given, or 0.1 ln(factor) + 1 (a ratio of two of these if `mscale` is given)."""
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(number(rope, "mscale")) / magnitude(number(rope, "mscale_all_dim"))
    return magnitude(1.0)
