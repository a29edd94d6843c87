"""`graph`: decode steps of a transformers model as CUDA graphs."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MAX_GRAPHS = 8
_UNGRAPHED = ("output_attentions", "output_hidden_states", "labels")

Function = Callable[[], Any]
Capture = Callable[[Function, Function], tuple[Any, Function]]
_Path = tuple[str, ...]


def capture_cuda_graph(step: Function, rehearse: Function) -> tuple[Any, Function]:
    """The result of a step that was recorded, not run, and what runs it, leaving the result there.

    It is rehearsed twice before, since what allocates or compiles at its first call cannot be
    recorded.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            rehearse()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = step()
    return result, recorded.replay


class GraphedModel:
    """A model whose decode steps over a static cache replay graphs, until `close`.

    It is a context manager, too. See `graph`.
    """

    def __init__(self, model: Any, capture: Capture = capture_cuda_graph) -> None:
        self.model = model
        self._capture = capture
        self._graphs: dict[Any, _Graph] = {}
        self._places: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._forward = model.forward
        self._compiles = model.generation_config.disable_compile
        # transformers would compile the model where there is a static cache.
        model.generation_config.disable_compile = True

        @functools.wraps(self._forward)
        def forward(*args: Any, **options: Any) -> Any:
            return self._step(args, options)

        model.forward = forward

    @property
    def num_graphs(self) -> int:
        """How many graphs there are: one for each cache and kind of step."""
        return len(self._graphs)

    def close(self) -> None:
        """The model is as before; memory of the graphs is free."""
        if vars(self.model).pop("forward", None) is not None:
            self.model.generation_config.disable_compile = self._compiles
        self._graphs.clear()

    def __enter__(self) -> GraphedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("fastinfer.graph: graphs cannot be copied; close() them first")

    def _step(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        cache = options.get("cache", options.get("past_key_values"))
        if args or cache is None or not _is_decode_step(cache, options):
            return self._forward(*args, **options)
        # A cache that is gone may leave its address to another one: its tensors tell them apart.
        places = tuple(layer.keys.data_ptr() for layer in cache.layers)
        if self._places.setdefault(cache, places) != places:
            # Beam search moves what is in a cache to new tensors at each step.
            self._places[cache] = None
            return self._forward(*args, **options)
        tensors = _tensors(options)
        others = tuple(
            (name, repr(x))
            for name, x in options.items()
            if not isinstance(x, (Tensor, dict)) and x is not cache
        )
        kinds = tuple((path, x.shape, x.dtype, x.device) for path, x in tensors.items())
        key = (places, others, kinds)
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._graphs) == _MAX_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            graph = self._graphs[key] = _Graph(
                self._forward, cache, options, tensors, self._capture
            )
        return graph(tensors)


class _Graph:
    """One recorded step, and the tensors that it reads."""

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: Any,
        options: dict[str, Any],
        tensors: dict[_Path, Tensor],
        capture: Capture,
    ) -> None:
        self._inputs = {path: x.clone() for path, x in tensors.items()}
        self._cache = cache  # whose memory the graph writes
        lengths = [layer.cumulative_length for layer in cache.layers]
        before = [length.clone() for length in lengths]
        own = _with_tensors(options, self._inputs)

        def step() -> Any:
            with torch.no_grad():
                return forward(**own)

        def rehearse() -> None:
            step()
            # What it wrote is written again; how far it came must be undone.
            for length, value in zip(lengths, before, strict=True):
                length.copy_(value)

        self._output, self._replay = capture(step, rehearse)

    def __call__(self, tensors: dict[_Path, Tensor]) -> Any:
        for path, x in tensors.items():
            self._inputs[path].copy_(x)
        self._replay()
        output = copy.copy(self._output)
        output.logits = output.logits.clone()  # the next step writes over them
        return output


def _tensors(options: dict[str, Any]) -> dict[_Path, Tensor]:
    """The tensors among the options, and those in dicts, such as a mask for each kind of layer."""
    found: dict[_Path, Tensor] = {
        (name,): x for name, x in options.items() if isinstance(x, Tensor)
    }
    for name, inner in options.items():
        if isinstance(inner, dict):
            found |= {(name, key): x for key, x in inner.items()}
    return found


def _with_tensors(options: dict[str, Any], tensors: dict[_Path, Tensor]) -> dict[str, Any]:
    """The options with these tensors in the places of their own."""
    new = {name: dict(x) if isinstance(x, dict) else x for name, x in options.items()}
    for path, x in tensors.items():
        inner = new if len(path) == 1 else new[path[0]]
        inner[path[-1]] = x
    return new


def _is_decode_step(cache: Any, options: dict[str, Any]) -> bool:
    """Whether a call is one token for each row, over caches whose lengths are on the device."""
    ids = options.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1:
        return False
    if torch.is_grad_enabled() or any(options.get(name) for name in _UNGRAPHED):
        return False
    if options.get("return_dict") is False or torch.compiler.is_compiling():
        return False
    inner = [x for option in options.values() if isinstance(option, dict) for x in option.values()]
    if not all(isinstance(x, Tensor) for x in inner):
        return False
    return all(_is_static(layer) and layer.is_initialized for layer in cache.layers)


def _is_static(layer: Any) -> bool:
    return (
        isinstance(getattr(layer, "cumulative_length", None), Tensor)
        and not layer.is_sliding
        and layer.is_compileable
    )


def graph(model: Any) -> GraphedModel:
    """From now on a transformers model's decode steps are recorded as CUDA graphs, and replayed.

        with fastinfer.graph(model):
            model.generate(**inputs, cache_implementation="static")

    A step is a call with one token for each row and a static cache, without gradients. Each cache
    and each kind of step (rows, dtypes, options) has a graph of its own, of which the last eight
    are kept. All other calls, such as the prompt's and beam search's, run as before. What a step
    gives besides logits is not its own: the next one writes over it.

    Best after `fastinfer.optimize`, whose attention reads on the device how long sequences are.

    Args:
        model: on one CUDA device, its layers without sliding windows: their static caches count on
            the host, which a graph cannot repeat.

    Returns:
        What `close` ends it by; a context manager.

    Raises:
        ValueError: another device, sliding windows, or there are graphs of it already.
    """
    from transformers import StaticCache

    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"fastinfer.graph: model: expected one CUDA device, got {names}")
    check_graphable(model, StaticCache(config=model.config, max_cache_len=8))
    return GraphedModel(model)


def check_graphable(model: Any, cache: Any) -> None:
    """ValueError if the model's static cache cannot be part of a graph, or it has graphs."""
    if "forward" in vars(model):
        raise ValueError("fastinfer.graph: model: expected its own forward, got a replaced one")
    bad = sorted({type(layer).__name__ for layer in cache.layers if not _is_static(layer)})
    if bad:
        raise ValueError(
            "fastinfer.graph: model: expected layers whose caches count on the device, got "
            f"{', '.join(bad)}"
        )
