"""The masks of `attn_implementation="fastinfer"`: transformers' mask functions, as `KeyRanges`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from fastinfer.integrations.key_ranges import (
    Array,
    KeyRanges,
    bounds_of_segments,
    packed_segments,
    padded_segments,
)

try:
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
        remap_positions_for_packed_sequence,
        sdpa_mask,
        sliding_window_overlay,
    )
    from transformers.utils.import_utils import is_tracing
except ImportError as error:
    version = transformers.__version__
    raise ImportError(f"expected transformers 5.24 or newer, got {version}") from error

_MaskFunction = Callable[..., Any]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: _MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask that a model's layers get: None, `KeyRanges` as a tensor, or bool [B, 1, Sq, Sk].

    None is: each query sees all keys up to its own, the last query standing at the last key. The
    arguments are those of transformers' mask functions; see `transformers.masking_utils.sdpa_mask`.
    """
    device = options.get("device", "cpu")
    size = _Size(batch_size, q_length, kv_length, kv_offset)
    if is_tracing(attention_mask):
        ranges = _traced_ranges(size, q_offset, mask_function, attention_mask)
    else:
        ranges = _key_ranges(size, int(q_offset), mask_function, attention_mask, device)
    # Who gives no leave to skip a mask of many queries may be about to change it; packed sequences
    # are the exception: they give none either.
    skip = options.get("allow_is_causal_skip", True) or q_length == 1
    if ranges is not None and (skip or ranges.bounds is not None):
        whole = ranges.bounds is None and not ranges.window
        return None if whole else ranges.as_mask(device)
    # None would be read as causal, whatever it stands for here.
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    dense: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # type: ignore[arg-type]  # static caches pass a tensor
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return dense


@dataclass(frozen=True)
class _Size:
    """Rows, queries and keys of a mask, and the position of the first key."""

    batch: int
    queries: int
    keys: int
    first_key: int


def _traced_ranges(
    size: _Size, q_offset: int | Tensor, function: _MaskFunction, padding: Tensor | None
) -> KeyRanges | None:
    """What is known without the contents of tensors: a causal mask over the queries' own keys."""
    known = function is causal_mask_function and padding is None and isinstance(q_offset, int)
    return KeyRanges(None, 0) if known and size.queries == size.keys else None


def _key_ranges(
    size: _Size,
    q_offset: int,
    function: _MaskFunction,
    padding: Tensor | None,
    device: torch.device | str,
) -> KeyRanges | None:
    """What a mask means, if ranges can say it. Waits for the device."""
    pattern = _Pattern()
    if not pattern.read(function):
        return None
    if pattern.packed is not None:
        if padding is not None or size.keys != size.queries:
            return None
        return _ranges(packed_segments(pattern.packed.cpu().numpy()), size, pattern.window, device)
    num_keys = q_offset + size.queries - size.first_key  # the others are slots yet unused
    if not size.queries <= num_keys <= size.keys:
        return None
    window = pattern.window if pattern.window < num_keys else 0
    valid = np.ones((size.batch, num_keys), dtype=np.bool_)
    if padding is not None:
        given = padding[:, size.first_key : size.first_key + num_keys].bool().cpu().numpy()
        valid[:, : given.shape[1]] = given
        valid[:, given.shape[1] :] = False
    if num_keys == size.keys and valid.all():
        return KeyRanges(None, window)
    segments = padded_segments(valid, size.queries, num_keys - size.queries)
    return None if segments is None else _ranges(segments, size, window, device)


def _ranges(segments: Array, size: _Size, window: int, device: torch.device | str) -> KeyRanges:
    bounds = bounds_of_segments(segments, size.batch, size.queries, size.keys)
    return KeyRanges(torch.from_numpy(bounds).to(device), window)


class _Pattern:
    """What transformers' own functions, combined into a mask function, say together.

    They are closures; the code tells which one it is, and the variables what it was made of.
    """

    def __init__(self) -> None:
        self.window = 0
        self.packed: Tensor | None = None
        self._causal = self._remapped = False

    def read(self, function: _MaskFunction) -> bool:
        """Whether it is causal, maybe through a window or of packed sequences, and nothing else."""
        return self._add(function) and self._causal and self._remapped == (self.packed is not None)

    def _add(self, function: _MaskFunction) -> bool:
        if function is causal_mask_function:
            self._causal = True
            return True
        code = getattr(function, "__code__", None)
        variables = _variables(function)
        if code is _AND:
            return all(self._add(part) for part in variables["mask_functions"])
        if code is _REMAPPED:
            # Positions within a packed sequence count up, so distances are those of the tokens.
            self._remapped = True
            return self._add(variables["mask_function"])
        if code is _WINDOW and not self.window:
            self.window = int(variables["sliding_window"])
            return self.window > 0
        if code is _PACKED and self.packed is None:
            self.packed = variables["packed_sequence_mask"]
            return True
        return False


def _variables(function: _MaskFunction) -> dict[str, Any]:
    """What a closure was made of."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


_NO_TENSOR = torch.empty(0)
_AND = and_masks(causal_mask_function).__code__
_WINDOW = sliding_window_overlay(1).__code__
_PACKED = packed_sequence_mask_function(_NO_TENSOR).__code__
_REMAPPED = remap_positions_for_packed_sequence(causal_mask_function, _NO_TENSOR).__code__
