"""What the loaders of the checkpoint formats have in common."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fastinfer.ops.packed_weights import PackedWeight


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor in a file, not read yet."""

    name: str
    """In the file, for messages."""
    slot: str | None
    """Its name in `Decoder.weight_slots`; None if the format has no such weight."""
    shape: tuple[int, ...]
    dtype: str
    """In the file, for messages."""
    is_float: bool
    """Whether it holds real numbers, quantized or not."""
    copy_to: Callable[[Tensor], None]
    """Reads it into a tensor of that shape, of any float type, strides and device."""
    is_buffer: bool = False
    """Not a weight: it follows from the config, and is left out."""
    read_codes: Callable[[torch.device], PackedWeight] | None = None
    """Of a projection that is quantized in the file: its weight as it is, on a device."""
    beside_codes: bool = False
    """The bias of such a projection, which some writers add as zeros where a model has none."""


def extra(module: str, purpose: str) -> ModuleType:
    """Imports a package that only the extra `fastinfer[engine]` brings.

    Raises:
        ImportError: saying what it is for and how to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"fastinfer: {purpose} needs the package {module.partition('.')[0]}: "
            f"pip install 'fastinfer[engine]' ({error})"
        ) from error
