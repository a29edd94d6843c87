"""Merged projections that a state_dict lists as the ones they were made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def list_apart(module: nn.Module, parts: Mapping[str, Mapping[str, int]]) -> None:
    """From now on the module's state_dicts hold merged projections in parts, and load them so.

    Args:
        module: of whose children some are merged `nn.Linear`.
        parts: by the name of such a child, the names of its parts and their output features.
    """
    known = "_parts" in vars(module)
    vars(module)["_parts"] = {name: dict(sizes) for name, sizes in parts.items()}
    if not known:
        module.register_state_dict_post_hook(_take_apart)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_put_together)  # type: ignore[no-untyped-call]


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, dict[str, int]]]:
    """A merged tensor's name in a state_dict, and the names and sizes of its parts."""
    for merged, sizes in vars(module)["_parts"].items():
        for name, _ in module.get_submodule(merged).named_parameters(recurse=False):
            parts = {f"{prefix}{part}.{name}": size for part, size in sizes.items()}
            yield f"{prefix}{merged}.{name}", parts


def _take_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for merged, parts in _tensors(module, prefix):
        tensor = state_dict.pop(merged)
        state_dict.update(zip(parts, tensor.split([*parts.values()]), strict=True))


def _put_together(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for merged, parts in _tensors(module, prefix):
        if all(part in state_dict for part in parts):
            state_dict[merged] = torch.cat([state_dict.pop(part) for part in parts])
