"""Times low-bit products on a GPU under one configuration or another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

from fastinfer import tuning
from fastinfer.tuning import Config, Entry, Problem

_ROUNDS = 9
_GRAPH_US = 2000.0  # that a graph takes, about


class GpuBench:
    """A product on the current GPU, bf16, with integer zero points.

    Calls are captured in CUDA graphs, so that the device is timed and not the launches. Weights
    rotate through enough copies that none is found in the L2 cache. Rounds are interleaved: a clock
    that drifts drifts for all configurations.
    """

    def __init__(self, problem: Problem, device_name: str) -> None:
        self._problem, self._device_name = problem, device_name
        bits, m, n, k = problem.bits, problem.m, problem.n, problem.k
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        copies = 1 + min(255, 2 * l2 // max(1, n * k * bits // 8))
        tiles = (copies, -(-n // 64), -(-k // 64), bits * 128)
        groups = (copies, -(-k // problem.group_size), n)
        self._op = getattr(torch.ops.fastinfer, problem.op).out
        self._x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        self._weights = torch.randint(-(2**31), 2**31, tiles, dtype=torch.int32, device="cuda")
        self._scales = torch.rand(groups, device="cuda").add_(0.5).bfloat16()
        self._zeros = torch.randint(0, 2**bits, groups, device="cuda").bfloat16()
        self._out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")

    @torch.inference_mode()
    def microseconds(self, configs: Sequence[Config | None]) -> list[float]:
        """As `Bench` in fastinfer/tuner.py."""
        graphs = [self._capture(config) for config in configs]
        samples: list[list[float]] = [[] for _ in configs]
        for _ in range(_ROUNDS):
            for graph, times in zip(graphs, samples, strict=True):
                times.append(math.inf if graph is None else graph.microseconds())
        return [statistics.median(times) for times in samples]

    @torch.inference_mode()
    def agrees(self, config: Config) -> bool:
        """As `Bench` in fastinfer/tuner.py.

        Sums in fp32 differ by their order alone, by much less than 2^-12 of what sums are like;
        then each result may be rounded to the next number of its type.
        """
        expected, result = (self._result(choice).float() for choice in (None, config))
        typical = expected.square().mean().sqrt()
        allowed = expected.abs() * torch.finfo(torch.bfloat16).eps + typical * 2.0**-12
        return bool(((result - expected).abs() <= allowed).all())  # false where it is NaN

    def _result(self, config: Config | None) -> torch.Tensor:
        self._choose(config)
        self._out.fill_(math.nan)
        self._run(0)
        return self._out.clone()

    def _choose(self, config: Config | None) -> None:
        """By a table of one entry, as a measured file does."""
        entries = () if config is None else (Entry(self._problem, config, 1.0, 1.0),)
        if tuning.set_table(self._device_name, entries) != len(entries):
            raise RuntimeError(f"fastinfer tune: the library refuses {config} for {self._problem}")

    def _run(self, copy: int) -> None:
        weights, scales, zeros = self._weights[copy], self._scales[copy], self._zeros[copy]
        self._op(
            self._x, weights, scales, zeros, group_size=self._problem.group_size, out=self._out
        )

    def _run_turn(self) -> None:
        for copy in range(len(self._weights)):
            self._run(copy)

    def _capture(self, config: Config | None) -> _Graph | None:
        """None: it cannot be launched here, such as clusters that fit nowhere."""
        self._choose(config)
        try:
            self._run(0)
        except RuntimeError:
            if config is None:
                raise
            return None
        turn_us = _timed(self._run_turn)
        turns = max(1, round(_GRAPH_US / turn_us))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(turns):
                self._run_turn()
        return _Graph(graph, turns * len(self._weights))


class _Graph:
    """A number of calls."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self._graph, self._calls = graph, calls
        self._graph.replay()  # the first one uploads it

    def microseconds(self) -> float:
        """Of one call."""
        return _timed(self._graph.replay) / self._calls


def _timed(run: Callable[[], object]) -> float:
    """Microseconds on the device, which has nothing else to do."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
