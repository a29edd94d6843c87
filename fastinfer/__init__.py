"""fastinfer: kernels for LLM inference on PyTorch, with a thin engine on top.

import fastinfer.ops                      # torch.ops.fastinfer.* and typed wrappers
import fastinfer.nn                       # drop-in modules built on them
from fastinfer import LLM, SamplingParams # the engine; needs the extra `fastinfer[engine]`
from fastinfer import optimize, restore   # a transformers model with fastinfer's modules, and back
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastinfer.engine.llm import LLM
    from fastinfer.engine.sampling_params import SamplingParams
    from fastinfer.integrations.graph import graph
    from fastinfer.integrations.optimize import optimize, restore

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "graph", "nn", "ops", "optimize", "restore"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import fastinfer` needs neither transformers nor the native libraries.
    if name == "LLM":
        from fastinfer.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from fastinfer.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "graph":
        from fastinfer.integrations.graph import graph

        return graph
    if name in ("optimize", "restore"):
        from fastinfer.integrations import optimize as module

        return getattr(module, name)
    if name in ("nn", "ops"):
        import importlib

        return importlib.import_module(f"fastinfer.{name}")
    raise AttributeError(f"module 'fastinfer' has no attribute {name!r}")
