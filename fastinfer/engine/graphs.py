"""Steps of fixed sizes: which sizes there are, and how a GPU records and replays one.

A CUDA graph repeats the same launches on the same addresses. A step is therefore filled up to the
next size of a ladder, with tokens that mean nothing; what the kernels need to know about lengths
they read on the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastinfer.engine.buffers import StepLimits

Function = Callable[[], None]


@dataclass(frozen=True)
class Rung:
    """A size of step: T tokens of B sequences, of which each has at most max_seqlen_q tokens."""

    num_tokens: int
    num_seqs: int
    max_seqlen_q: int

    @property
    def num_logits(self) -> int:
        """At most so many of its sequences sample."""
        return min(self.num_tokens, self.num_seqs)


class Ladder:
    """The sizes for a `StepLimits`.

    ``decode``: sequences with one token each; 1, 2, 4, then multiples of 8 to 64, of 16 to 256, of
    32 beyond. ``mixed``: any numbers of tokens; 16, 32, then multiples of 64 to 512 and four sizes
    for every doubling beyond, so that at most a fifth of a large step is filler. They have a row
    for each sequence that may run, and one that takes the filler.
    """

    def __init__(self, limits: StepLimits) -> None:
        tokens, rows = limits.max_num_tokens, limits.max_rows
        self.decode = [Rung(n, n, 1) for n in _capped(_decode_sizes(rows), rows)]
        self.mixed = [Rung(n, min(rows, n) + 1, n) for n in _capped(_mixed_sizes(tokens), tokens)]

    def rung(self, num_tokens: int, max_count: int) -> Rung | None:
        """The smallest rung that a step fits on; None if there is none.

        The step has so many tokens, and no sequence of it more than max_count.
        """
        rungs = self.decode if max_count == 1 else self.mixed
        index = bisect.bisect_left(rungs, num_tokens, key=lambda rung: rung.num_tokens)
        return rungs[index] if index < len(rungs) else None


def _decode_sizes(most: int) -> list[int]:
    return [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]


def _mixed_sizes(most: int) -> list[int]:
    sizes = [16, 32, *range(64, 512, 64)]
    size = 512
    while size <= most:
        sizes += range(size, 2 * size, size // 4)
        size *= 2
    return sizes


def _capped(sizes: list[int], cap: int) -> list[int]:
    return [size for size in sizes if size < cap] + [cap]


class Recorder:
    """Records functions as CUDA graphs, which share the memory of what is temporary in them.

    That is sound because they run one at a time, and what they leave behind is in memory that is
    not theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Function) -> Function:
        """Runs the function once and then records it; returns what repeats it.

        The first run compiles kernels and allocates what stays.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        replay: Function = graph.replay
        return replay


def run_directly(function: Function) -> Function:
    """Stands in for a `Recorder` where there are no CUDA graphs: the function itself repeats it."""
    function()
    return function
