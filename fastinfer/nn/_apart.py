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


def _tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter, dict[str, int]]]:
    """A merged tensor's name in a state_dict, itself, and the names and sizes of its parts."""
    for merged, sizes in vars(module)["_parts"].items():
        for name, tensor in module.get_submodule(merged).named_parameters(recurse=False):
            parts = {f"{prefix}{part}.{name}": size for part, size in sizes.items()}
            yield f"{prefix}{merged}.{name}", tensor, parts


def _take_apart(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for merged, _tensor, parts in _tensors(module, prefix):
        tensor = state_dict.pop(merged)
        state_dict.update(zip(parts, tensor.split([*parts.values()]), strict=True))


def _put_together(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    """Each part that came takes its place; the others keep theirs, as tensors of their own do."""
    for merged, tensor, parts in _tensors(module, prefix):
        if not any(part in state_dict for part in parts):
            continue
        pieces = dict(zip(parts, torch.split(tensor.detach(), [*parts.values()]), strict=True))
        for part, piece in pieces.items():
            if part not in state_dict:
                missing_keys.append(part)
                continue
            loaded = state_dict.pop(part)
            if loaded.shape == piece.shape:
                pieces[part] = loaded
            else:
                errors.append(
                    f"size mismatch for {part}: expected {tuple(piece.shape)}, "
                    f"got {tuple(loaded.shape)}"
                )
        # A part without memory beside one that has some is NaN until it comes, too.
        device = next((x.device for x in pieces.values() if not x.is_meta), tensor.device)
        whole = [
            torch.full_like(x, torch.nan, device=device) if x.is_meta else x
            for x in pieces.values()
        ]
        state_dict[merged] = torch.cat(whole)
