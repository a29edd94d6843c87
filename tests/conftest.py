"""What all tests share: a fixed seed for each test, and the backends that ops are tested on."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops: where its tensors live, and how it is called."""

    name: str
    device: str
    ops: ModuleType  # the Python wrappers
    library: Any  # torch's op namespace: overload packets, by name


BACKENDS = ["cpu"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that this machine can run; a new one is added here and nowhere else."""
    import fastinfer.ops

    return Backend(request.param, "cpu", fastinfer.ops, torch.ops.fastinfer)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(20260725)
