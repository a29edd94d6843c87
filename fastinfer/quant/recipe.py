"""`Recipe`: how each projection of a model is to be quantized."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from fastinfer.ops.packed_weights import BITS, GROUP_SIZES

METHODS = {"rtn": BITS, "gptq": BITS, "awq": (3, 4)}
"""The methods, and the bits that each has."""
ORDERS = ("none", "act", "static", "group")
"""Orders in which GPTQ takes columns: see `fastinfer.quant.gptq`."""


@dataclass(frozen=True)
class Scheme:
    """How a weight is quantized.

    Args:
        method: "rtn", "gptq" or "awq".
        bits: 2, 3, 4 or 8; with "awq" 3 or 4.
        group_size: inputs that share a scale: 16, 32, 64, 128, or -1 for all of them.
        symmetric: without zero points; None leaves it to the format that the codes are saved in.
        order: of columns in GPTQ: "none", "act", "static" or "group".
        damping: of GPTQ's Hessian, as a share of its mean diagonal, at least 0.

    Raises:
        ValueError: a value is not as above.
    """

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool | None = None
    order: str = "none"
    damping: float = 0.01

    def __post_init__(self) -> None:
        _check("method", self.method, tuple(METHODS))
        _check(f"bits of {self.method!r}", self.bits, METHODS[self.method])
        _check("group_size", self.group_size, (*GROUP_SIZES, -1))
        _check("symmetric", self.symmetric, (True, False, None))
        _check("order", self.order, ORDERS)
        number = isinstance(self.damping, int | float) and not isinstance(self.damping, bool)
        if not number or not 0 <= self.damping < float("inf"):
            raise ValueError(f"recipe: damping: expected a number >= 0, got {self.damping!r}")
        if self.method != "gptq" and self.order != "none":
            raise ValueError(
                f"recipe: order: expected 'none' with method {self.method!r}, got {self.order!r}"
            )


@dataclass(frozen=True)
class Recipe:
    """A scheme for all projections, and other ones for some.

    Args:
        default: the scheme of whatever no pattern matches.
        overrides: by name or pattern (`fnmatch`: ``*``, ``?``, ``[...]``, case matters) of
            projections, such as "model.layers.0.self_attn.q_proj" or "*.mlp.down_proj"; None: it
            stays plain. Of several that match, the first one holds.

    Raises:
        ValueError, TypeError: something else.
    """

    default: Scheme = field(default_factory=Scheme)
    overrides: Mapping[str, Scheme | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.default, Scheme):
            raise TypeError(f"recipe: default: expected a Scheme, got {self.default!r}")
        for pattern, scheme in self.overrides.items():
            if scheme is not None and not isinstance(scheme, Scheme):
                raise TypeError(f"recipe: {pattern}: expected a Scheme or None, got {scheme!r}")

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of a projection; None: it stays plain."""
        for pattern, scheme in self.overrides.items():
            if fnmatchcase(name, pattern):
                return scheme
        return self.default

    def check_names(self, names: Collection[str]) -> None:
        """Every override decides about a projection of the model.

        Raises:
            ValueError: one matches nothing, in which case a few that there are are named, or
                nothing that those before it do not.
        """
        open_names = set(names)
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:8])
                raise ValueError(
                    f"recipe: {pattern!r} matches no projection of the model, which has {some}, …"
                )
            decided = {name for name in open_names if fnmatchcase(name, pattern)}
            if not decided:
                raise ValueError(
                    f"recipe: {pattern!r} decides nothing, since all that it matches is matched by "
                    "patterns before it: expected the particular before the general"
                )
            open_names -= decided

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the inverse of `from_dict`."""
        overrides = {p: None if s is None else asdict(s) for p, s in self.overrides.items()}
        return {**asdict(self.default), "overrides": overrides}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """From what JSON holds: the fields of the default scheme, and `overrides`.

        An override is null, or an object with the fields in which it differs from the default:

            {"method": "gptq", "bits": 4, "overrides": {"*.down_proj": {"bits": 8}}}

        Raises:
            ValueError: an unknown name, named, or a value that `Scheme` refuses.
        """
        values = dict(_object("recipe", values))
        overrides = _object("recipe: overrides", values.pop("overrides", {}))
        default = _scheme("recipe", {}, values)
        base = asdict(default)
        return cls(
            default,
            {
                pattern: None
                if changes is None
                else _scheme(f"recipe: {pattern}", base, _object(f"recipe: {pattern}", changes))
                for pattern, changes in overrides.items()
            },
        )


def _scheme(where: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> Scheme:
    known = [f.name for f in fields(Scheme)]
    for name in changes:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r}; expected one of {', '.join(known)}")
    try:
        return Scheme(**{**base, **changes})
    except ValueError as error:
        raise ValueError(str(error).replace("recipe", where, 1)) from error


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {value!r}")
    return value


def _check(name: str, value: object, accepted: tuple[Any, ...]) -> None:
    # Of the same type, since True == 1 and 4.0 == 4.
    if not any(value == a and type(value) is type(a) for a in accepted):
        raise ValueError(f"recipe: {name}: expected one of {accepted}, got {value!r}")
