"""What the loaders of the checkpoint formats have in common."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor


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
