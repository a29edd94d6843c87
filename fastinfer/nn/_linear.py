"""What the modules share that take the place of `torch.nn.Linear`."""

from __future__ import annotations

from torch import nn


def is_plain_linear(module: object) -> bool:
    """Whether a module computes x W^T + b and nothing else.

    Subclasses of `nn.Linear` may compute something else (adapters, other packages' quantized
    layers), which replacing them would silently leave out.
    """
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
