"""Projections that others quantized: what a `quantization_config` says; codes to `PackedWeight`.

A row of the table `_METHODS` for each `quant_method`. Which projections are quantized is told by
the tensors that a checkpoint holds and not by lists of exceptions (`ignore`,
`modules_to_not_convert`, `lm_head`), which say the same where they are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastinfer.models.fields import unsupported
from fastinfer.ops.packed_weights import GROUP_SIZES, PackedWeight
from fastinfer.ops.repack import (
    repack_awq,
    repack_awq_gemv,
    repack_compressed_tensors,
    repack_gptq,
)

Fields = Mapping[str, Any]
_CODES = ("I32",)
_SCALES = ("F16", "BF16", "F32")
_INDICES = ("I32", "I64")


class Header(NamedTuple):
    """What a file says of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: str


class Scheme(NamedTuple):
    """How a projection was quantized."""

    bits: int
    group_size: int
    symmetric: bool
    variant: str = ""
    """What a method calls its ways of storing the same."""
    act_order: bool = False


Headers = Mapping[str, Header]
Tensors = Mapping[str, Tensor]
Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]


@dataclass(frozen=True)
class _Method:
    """A row of `_METHODS`. Tensors go by the last part of their names, such as "qweight"."""

    schemes: Callable[[Fields], Callable[[str], Scheme]]
    """From a configuration, the scheme of a projection by its name."""
    codes: str
    """The tensor that every quantized projection has."""
    shape: Callable[[Headers, Scheme, Callable[[str], Tensor]], tuple[int, int]]
    """(N, K), as well as headers (and small tensors, which may be read) tell."""
    expected: Callable[[int, int, Scheme], Expected]
    """Shapes and types of all tensors of a projection."""
    optional: Callable[[Scheme], tuple[str, ...]]
    """Those that may be missing."""
    repack: Callable[[Tensors, Scheme], PackedWeight]


class QuantizedFormat:
    """The quantized projections of a checkpoint, by its `quantization_config`.

    Raises:
        ValueError: a method, or an option of one, that is not supported; named.
    """

    def __init__(self, fields: Fields) -> None:
        self.method: str = fields.get("quant_method")  # type: ignore[assignment]
        method = _METHODS.get(self.method) if isinstance(self.method, str) else None
        if method is None:
            raise ValueError(
                f"model config: quantization_config: quant_method {self.method!r} is not "
                f"supported; expected one of {', '.join(map(repr, _METHODS))}"
            )
        self._method = method
        self._scheme_of = method.schemes(fields)
        self._suffixes = {*method.expected(32, 32, Scheme(4, 32, False))}

    @property
    def codes(self) -> str:
        """The last part of the name of the tensor that every quantized projection has."""
        return self._method.codes

    def split(self, name: str) -> tuple[str, str] | None:
        """Projection and last part of the name of a tensor of codes, None for other tensors."""
        module, _, suffix = name.rpartition(".")
        return (module, suffix) if suffix in self._suffixes else None

    def shape(
        self, module: str, headers: Headers, read: Callable[[str], Tensor]
    ) -> tuple[int, int]:
        """(N, K) of a projection, whose tensors are checked by their headers.

        Raises:
            ValueError: a tensor is missing, or of another shape or type than expected.
        """
        scheme = self._scheme_of(module)
        first = [self.codes, *(["weight_shape"] if "weight_shape" in self._suffixes else [])]
        for suffix in first:
            if suffix not in headers:
                raise ValueError(f"tensor {module}.{suffix} is missing, which goes with the others")
        codes = headers[self.codes]
        if len(codes.shape) != 2 or 0 in codes.shape:
            raise ValueError(
                f"tensor {module}.{self.codes}: a matrix expected, got shape {codes.shape}"
            )
        n, k = self._method.shape(headers, scheme, read)
        if scheme.group_size not in (*GROUP_SIZES, -1, k):
            raise ValueError(
                f"{module}: group_size {scheme.group_size} is not supported; expected one of "
                f"{GROUP_SIZES}, or -1 or {k} for all inputs"
            )
        expected = self._method.expected(n, k, scheme)
        optional = self._method.optional(scheme)
        for suffix, (shape, dtypes) in expected.items():
            header = headers.get(suffix)
            where = f"tensor {module}.{suffix}"
            if header is None:
                if suffix in optional:
                    continue
                raise ValueError(f"{where} of shape {shape} is missing")
            if header.shape != shape:
                raise ValueError(f"{where}: shape {shape} expected, got {header.shape}")
            if header.dtype not in dtypes:
                raise ValueError(f"{where}: {' or '.join(dtypes)} expected, got {header.dtype}")
        return n, k

    def pack(self, module: str, tensors: Tensors) -> PackedWeight:
        """A projection's weight, its codes, scales and zero points as they are.

        Raises:
            ValueError: tensors do not fit together, such as groups of another size.
        """
        return self._method.repack(tensors, self._scheme_of(module))


def quantized_format(fields: Fields) -> QuantizedFormat | None:
    """What the `quantization_config` of a config.json says; None if there is none.

    Raises:
        ValueError: as `QuantizedFormat`, or it is no object.
    """
    config = fields.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"model config: quantization_config must be an object, got {config!r}")
    return QuantizedFormat(config)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _groups(k: int, scheme: Scheme) -> int:
    return 1 if scheme.group_size == -1 else -(-k // scheme.group_size)


def _option(fields: Fields, where: str, name: str, accepted: tuple[Any, ...], value: Any) -> Any:
    """The value, which must be one of those accepted, and of their type (1 is not True)."""
    if not any(value == a and type(value) is type(a) for a in accepted):
        raise unsupported(f"{where}{name}", value, " or ".join(map(repr, accepted)))
    return value


def _integer_option(where: str, name: str, value: Any) -> int:
    if type(value) is not int or (value < 1 and value != -1):
        raise unsupported(f"{where}{name}", value, "a positive number, or -1 for all inputs")
    return value


def _object(key: str, value: Any) -> Fields:
    if not isinstance(value, Mapping):
        raise ValueError(f"model config: {key}: an object expected, got {value!r}")
    return value


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"model config: {where}no regular expression: {text!r}") from error


# ------------------------------------------------------------------------------------------- GPTQ


def _gptq_schemes(fields: Fields) -> Callable[[str], Scheme]:
    where = "quantization_config (gptq): "
    label = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    if fields.get("is_marlin_format"):
        label = "marlin"
    _option(fields, where, "checkpoint_format", ("gptq", "gptq_v2"), label)
    _option(fields, where, "pack_dtype", ("int32",), fields.get("pack_dtype") or "int32")
    rules = [
        (_pattern(where, rule.removeprefix("+:")), _object(where + f"dynamic: {rule}", changes))
        for rule, changes in _object(where + "dynamic", fields.get("dynamic") or {}).items()
        if not rule.startswith("-:")  # those are not quantized, as the tensors tell too
    ]

    def scheme(settings: Fields) -> Scheme:
        bits = _option(settings, where, "bits", (2, 3, 4, 8), settings.get("bits"))
        group_size = _integer_option(where, "group_size", settings.get("group_size", -1))
        # Where it is not said, zero points are read; those of a symmetric file say so themselves.
        symmetric = _option(settings, where, "sym", (True, False), settings.get("sym", False))
        return Scheme(bits, group_size, symmetric, label, bool(settings.get("desc_act")))

    common = scheme(fields)
    changed = [(pattern, scheme({**fields, **changes})) for pattern, changes in rules]
    return lambda module: next((s for p, s in changed if p.match(module)), common)


def _gptq_shape(headers: Headers, scheme: Scheme, read: object) -> tuple[int, int]:
    rows, n = headers["qweight"].shape
    g_idx = headers.get("g_idx")
    # Rows may be filled up at the end; only g_idx has as many entries as there are columns.
    if g_idx is not None and len(g_idx.shape) == 1 and _words(*g_idx.shape, scheme.bits) == rows:
        return n, g_idx.shape[0]
    return n, rows * 32 // scheme.bits


def _gptq_expected(n: int, k: int, scheme: Scheme) -> Expected:
    groups = _groups(k, scheme)
    return {
        "qweight": ((_words(k, scheme.bits), n), _CODES),
        "qzeros": ((groups, _words(n, scheme.bits)), _CODES),
        "scales": ((groups, n), _SCALES),
        "g_idx": ((k,), _INDICES),
    }


def _gptq_optional(scheme: Scheme) -> tuple[str, ...]:
    return (*(["qzeros"] if scheme.symmetric else []), *([] if scheme.act_order else ["g_idx"]))


def _gptq_repack(tensors: Tensors, scheme: Scheme) -> PackedWeight:
    g_idx = tensors.get("g_idx")
    # Without act-order some writers leave it at 0, which is not how groups lie. (Nor may it be
    # dropped: it alone says how many columns there are.)
    if g_idx is not None and not scheme.act_order and not g_idx.any() and scheme.group_size != -1:
        columns = torch.arange(len(g_idx), dtype=g_idx.dtype, device=g_idx.device)
        g_idx = columns // scheme.group_size
    weight = repack_gptq(
        tensors["qweight"],
        tensors.get("qzeros"),
        tensors["scales"],
        g_idx,
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
        checkpoint_format=scheme.variant,  # type: ignore[arg-type]
    )
    # Zero points of symmetric weights are told apart by their value: read by the wrong label, all
    # of them are one off.
    off = 1 if scheme.variant == "gptq" else -1
    half = 2 ** (scheme.bits - 1)
    if weight.zeros is not None and bool((weight.zeros == half + off).all()):
        other = "gptq_v2" if scheme.variant == "gptq" else "gptq"
        raise ValueError(
            f"qzeros: the checkpoint_format {scheme.variant!r} would make all zero points "
            f"{half + off}, which are {half} if it is {other!r}: the label looks wrong"
        )
    return weight


# -------------------------------------------------------------------------------------------- AWQ


def _awq_schemes(fields: Fields) -> Callable[[str], Scheme]:
    where = "quantization_config (awq): "
    version = str(fields.get("version") or "gemm").lower()
    _option(fields, where, "version", ("gemm", "gemv"), version)
    backend = fields.get("backend") or "autoawq"
    _option(fields, where, "backend", ("autoawq",), backend)
    bits = _option(fields, where, "bits", (4,), fields.get("bits", fields.get("w_bit")))
    group_size = fields.get("group_size", fields.get("q_group_size", 128))
    zero_point = fields.get("zero_point", True)
    _option(fields, where, "zero_point", (True, False), zero_point)
    group_size = _integer_option(where, "group_size", group_size)
    scheme = Scheme(bits, group_size, not zero_point, version)
    return lambda module: scheme


def _awq_shape(headers: Headers, scheme: Scheme, read: object) -> tuple[int, int]:
    rows, words = headers["qweight"].shape
    return (8 * words, rows) if scheme.variant == "gemm" else (rows, 8 * words)


def _awq_expected(n: int, k: int, scheme: Scheme) -> Expected:
    groups = _groups(k, scheme)
    if scheme.variant == "gemv":
        size = k if scheme.group_size == -1 else scheme.group_size
        multiple = {64: 2, 32: 4}.get(size, 1)
        width = -(-groups // (8 * multiple)) * multiple
        shapes = ((n, k // 8), (n, width), (n, 8 * width))
    else:
        shapes = ((k, n // 8), (groups, n // 8), (groups, n))
    return {
        "qweight": (shapes[0], _CODES),
        "qzeros": (shapes[1], _CODES),
        "scales": (shapes[2], _SCALES),
    }


def _awq_optional(scheme: Scheme) -> tuple[str, ...]:
    return ("qzeros",) if scheme.symmetric else ()


def _awq_repack(tensors: Tensors, scheme: Scheme) -> PackedWeight:
    repack = repack_awq if scheme.variant == "gemm" else repack_awq_gemv
    qzeros = None if scheme.symmetric else tensors["qzeros"]
    return repack(tensors["qweight"], qzeros, tensors["scales"], group_size=scheme.group_size)


# ----------------------------------------------------------------------------- compressed-tensors

_COMPRESSED_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}


def _compressed_schemes(fields: Fields) -> Callable[[str], Scheme]:
    where = "quantization_config (compressed-tensors): "
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = fields.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise unsupported(where + key, value, "none")
    named: list[tuple[re.Pattern[str], Scheme]] = []
    general: list[Scheme] = []
    for name, group in _object(where + "config_groups", fields.get("config_groups")).items():
        group = _object(where + name, group)
        label = group.get("format") or fields.get("format")
        _option(fields, where, "format", ("pack-quantized",), label)
        scheme = _compressed_scheme(where, group)
        for target in group.get("targets") or ():
            if target == "Linear":
                general.append(scheme)
            elif target.startswith("re:"):
                named.append((_pattern(where, target[3:]), scheme))
            else:  # by its whole name
                named.append((re.compile(re.escape(target) + "$"), scheme))

    def scheme_of(module: str) -> Scheme:
        for pattern, scheme in named:
            if pattern.match(module):
                return scheme
        if not general:
            raise ValueError(
                f"{module}: quantized, but no config_groups of the config has it among its targets"
            )
        return general[0]

    return scheme_of


def _compressed_scheme(where: str, group: Fields) -> Scheme:
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise unsupported(where + key, group[key], "none")
    weights = _object(where + "weights", group.get("weights"))
    bits = _option(weights, where, "num_bits", (2, 3, 4, 8), weights.get("num_bits"))
    _option(weights, where, "type", ("int",), weights.get("type", "int"))
    _option(weights, where, "strategy", ("group", "channel"), weights.get("strategy"))
    symmetric = weights.get("symmetric", True)
    _option(weights, where, "symmetric", (True, False), symmetric)
    order = weights.get("actorder") or "weight"
    order = "group" if order is True else order
    _option(weights, where, "actorder", (*_COMPRESSED_ORDERS,), order)
    group_size = -1
    if weights["strategy"] == "group":
        group_size = _integer_option(where, "group_size", weights.get("group_size"))
    return Scheme(bits, group_size, symmetric, act_order=_COMPRESSED_ORDERS[order])


def _compressed_shape(
    headers: Headers, scheme: Scheme, read: Callable[[str], Tensor]
) -> tuple[int, int]:
    shape = [-1]
    if headers["weight_shape"].shape == (2,) and headers["weight_shape"].dtype in _INDICES:
        shape = read("weight_shape").tolist()
    if min(shape) < 1:
        raise ValueError(f"tensor weight_shape: two sizes expected, got {headers['weight_shape']}")
    return shape[0], shape[1]


def _compressed_expected(n: int, k: int, scheme: Scheme) -> Expected:
    groups = _groups(k, scheme)
    return {
        "weight_packed": ((n, _words(k, scheme.bits)), _CODES),
        "weight_scale": ((n, groups), _SCALES),
        "weight_shape": ((2,), _INDICES),
        "weight_zero_point": ((_words(n, scheme.bits), groups), _CODES),
        "weight_g_idx": ((k,), _INDICES),
    }


def _compressed_optional(scheme: Scheme) -> tuple[str, ...]:
    zeros = ["weight_zero_point"] if scheme.symmetric else []
    return (*zeros, *([] if scheme.act_order else ["weight_g_idx"]))


def _compressed_repack(tensors: Tensors, scheme: Scheme) -> PackedWeight:
    return repack_compressed_tensors(
        tensors["weight_packed"],
        tensors["weight_scale"],
        tensors["weight_shape"],
        tensors.get("weight_zero_point"),
        tensors.get("weight_g_idx"),
        bits=scheme.bits,
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
    )


_METHODS: dict[str, _Method] = {
    "gptq": _Method(
        _gptq_schemes, "qweight", _gptq_shape, _gptq_expected, _gptq_optional, _gptq_repack
    ),
    "awq": _Method(_awq_schemes, "qweight", _awq_shape, _awq_expected, _awq_optional, _awq_repack),
    "compressed-tensors": _Method(
        _compressed_schemes,
        "weight_packed",
        _compressed_shape,
        _compressed_expected,
        _compressed_optional,
        _compressed_repack,
    ),
}
