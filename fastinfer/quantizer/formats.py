"""How quantized projections are stored: a row of `FORMATS` for each kind of checkpoint."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastinfer.ops import to_awq, to_compressed_tensors, to_gptq
from fastinfer.ops.packed_weights import PackedWeight
from fastinfer.quant import Scheme

Schemes = Mapping[str, Scheme | None]
Config = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """A row of `FORMATS`."""

    config: Callable[[Schemes], Config]
    """The `quantization_config` of config.json for the schemes of all projections; ValueError where
    the format has no place for one."""
    tensors: Callable[[PackedWeight, Scheme, Config], Mapping[str, Tensor | None]]
    """Of a projection, by the last part of their names."""
    scale_dtype: torch.dtype | None = None
    """That readers expect; None: the checkpoint's own."""
    row_multiple: int = 1
    """Output features of a projection come in such numbers."""
    symmetric: bool = True
    """What schemes are that do not say: as this format's readers load it, and its writers do."""

    def complete(self, scheme: Scheme | None) -> Scheme | None:
        """The scheme, with what it leaves to the format."""
        if scheme is None or scheme.symmetric is not None:
            return scheme
        return replace(scheme, symmetric=self.symmetric)


def _quantized(schemes: Schemes) -> dict[str, Scheme]:
    found = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not found:
        raise ValueError("recipe: expected a scheme for some projection, got none for any")
    return found


def _plain(schemes: Schemes) -> list[str]:
    return [name for name, scheme in schemes.items() if scheme is None]


# ----------------------------------------------------------------------------- compressed-tensors


def _compressed_config(schemes: Schemes) -> Config:
    if any(_has_g_idx(scheme) for scheme in _quantized(schemes).values()):
        _log.warning(
            "format 'compressed-tensors': columns in order 'act' need weight_g_idx, which "
            "the package compressed-tensors reads no more since version 0.20; orders 'static' and "
            "'group' do without; format 'gptq' has a place for it"
        )
    groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for name, scheme in _quantized(schemes).items():
        groups.setdefault(tuple(_compressed_weights(scheme).items()), []).append(name)
    config_groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(groups) == 1 else names,
            "weights": dict(weights),
            "input_activations": None,
            "output_activations": None,
        }
        for i, (weights, names) in enumerate(groups.items())
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": ["lm_head", *_plain(schemes)],
        "kv_cache_scheme": None,
    }


def _has_g_idx(scheme: Scheme) -> bool:
    return scheme.order == "act" and scheme.group_size != -1


def _compressed_weights(scheme: Scheme) -> Config:
    whole = scheme.group_size == -1
    order = {"none": None, "act": "group"}.get(scheme.order, "static")
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else scheme.group_size,
        "actorder": None if whole else order,
        "dynamic": False,
        "observer": "minmax",
    }


def _compressed_tensors(
    weight: PackedWeight, scheme: Scheme, config: Config
) -> Mapping[str, Tensor | None]:
    tensors = to_compressed_tensors(weight)._asdict()
    # Also where all of a projection's inputs happen to be one group, since the config promises it.
    if _has_g_idx(scheme):
        tensors["weight_g_idx"] = weight.group_index().int()
    return tensors


# ------------------------------------------------------------------------------------------- GPTQ


def _gptq_config(schemes: Schemes) -> Config:
    quantized = _quantized(schemes)
    settings = {name: tuple(_gptq_settings(s).items()) for name, s in quantized.items()}
    common = Counter(settings.values()).most_common(1)[0][0]
    dynamic: dict[str, Config] = {
        f"+:{re.escape(name)}$": dict(own) for name, own in settings.items() if own != common
    }
    dynamic |= {f"-:{re.escape(name)}$": {} for name in _plain(schemes)}
    # Without zero points the two formats differ by a constant; with them the first cannot tell
    # zero point 0 from 2^bits.
    symmetric = all(s.symmetric for s in quantized.values())
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if symmetric else "gptq_v2",
        **dict(common),
        "dynamic": dynamic,
        "lm_head": False,
        "pack_dtype": "int32",
    }


def _gptq_settings(scheme: Scheme) -> Config:
    return {
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": scheme.order == "act",
    }


def _gptq_tensors(weight: PackedWeight, scheme: Scheme, config: Config) -> Mapping[str, Tensor]:
    return to_gptq(weight, config["checkpoint_format"])._asdict()


# -------------------------------------------------------------------------------------------- AWQ


def _awq_config(schemes: Schemes) -> Config:
    quantized = _quantized(schemes)
    kinds = {(s.bits, s.group_size, s.symmetric, s.order == "act") for s in quantized.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"format 'awq': expected one scheme for all quantized projections, got {len(kinds)}"
        )
    bits, group_size, symmetric, by_activation = kinds.pop()
    if bits != 4 or by_activation:
        got = f"{bits} bits" + (" in order of activation" if by_activation else "")
        raise ValueError(f"format 'awq': expected 4 bits and columns in order, got {got}")
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": bits,
        "group_size": group_size,
        "zero_point": not symmetric,
        "modules_to_not_convert": _plain(schemes) or None,
    }


def _awq_tensors(weight: PackedWeight, scheme: Scheme, config: Config) -> Mapping[str, Tensor]:
    return to_awq(weight)._asdict()


FORMATS: dict[str, Format] = {
    "compressed-tensors": Format(_compressed_config, _compressed_tensors),
    "gptq": Format(_gptq_config, _gptq_tensors, torch.float16),
    "awq": Format(_awq_config, _awq_tensors, torch.float16, row_multiple=8, symmetric=False),
}
