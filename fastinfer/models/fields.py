"""Typed reads of what configurations hold; errors name the key, what was expected and what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integer(fields: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """An integer; ``default`` where the key is missing or null, if there is one."""
    value = fields.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"model config: the key {key!r} is missing")
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"model config: {key} must be an integer, got {value!r}")
    return value


def optional_integer(fields: Mapping[str, Any], key: str, *, default: int | None) -> int | None:
    """An integer or null; ``default`` where the key is missing."""
    if key not in fields:
        return default
    return None if fields[key] is None else integer(fields, key)


def number(fields: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """A number; ``default`` where the key is missing or null, if there is one."""
    value = fields.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"model config: the key {key!r} is missing")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"model config: {key} must be a number, got {value!r}")
    return float(value)


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """Token ids from what configurations hold: nothing, one id, or a list of them."""
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"model config: {key} must be a token id or a list of them, got {value!r}")
    return ids


def unsupported(key: str, value: object, expected: str) -> ValueError:
    """The error for a feature that would change the result but is not implemented."""
    return ValueError(f"model config: {key} = {value!r} is not supported; expected {expected}")
