"""Runs the model over one step: owns the KV pages and packs the scheduler's step into a `Batch`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

import torch
from torch import Tensor
from tqdm import tqdm

from fastinfer import _host
from fastinfer.engine.buffers import DeviceClock, StepBuffers, StepLimits
from fastinfer.engine.graphs import Function, Ladder, Rung
from fastinfer.engine.scheduler import ScheduledSequence
from fastinfer.models.batch import Batch
from fastinfer.models.decoder import Decoder


@dataclass
class StepLogits:
    """Logits [R, V] of a step's R sequences that sample, and the arguments of `ops.sample`."""

    logits: Tensor
    sampling: dict[str, Tensor]


class ModelRunner:
    """The model, its KV pages, and the buffers of a step.

    Args:
        decoder: the model.
        blocks: the sequences; their blocks are the pages made here.
        dtype: of the pages.
        limits: the largest step.
        ladder: the sizes that steps are filled up to; None: a step runs at its own size.
        record: runs a function and returns what repeats it: a `Recorder`, or `run_directly`. With a
            ladder, it is called once for each size.
        clock: is started when the device gets work.
    """

    def __init__(
        self,
        decoder: Decoder,
        blocks: _host.BlockManager,
        *,
        dtype: torch.dtype,
        limits: StepLimits,
        ladder: Ladder | None = None,
        record: Callable[[Function], Function] | None = None,
        clock: DeviceClock,
    ) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._ladder = ladder
        self._record = record
        config, device = decoder.config, decoder.embed_tokens.device
        self._clock = clock
        # Keys and values of a layer: [num_blocks, num_kv_heads, block_size, head_dim]. They stay
        # unset: no op reads a slot that was not written, and untouched memory costs nothing.
        shape = (blocks.num_blocks, config.num_kv_heads, blocks.block_size, config.head_dim)
        pages = [
            torch.empty((2, *shape), dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.kv_caches = [(both[0], both[1]) for both in pages]

        rows = limits.max_rows + 1  # one takes what steps are filled up with
        self._max_blocks = -(-limits.max_model_len // blocks.block_size)
        largest = _host.step_layout(limits.max_num_tokens, rows, self._max_blocks, rows)
        self._buffers = StepBuffers(largest.nbytes, device)
        # Where a recorded step leaves the hidden states of the tokens whose logits are wanted.
        self._hidden = torch.empty((rows, config.hidden_size), dtype=dtype, device=device)
        self._sizes: dict[Rung, tuple[_host.StepLayout, Batch]] = {}
        self._replays: dict[Rung, Function] = {}

    @torch.inference_mode()
    def run(self, step: Sequence[ScheduledSequence]) -> StepLogits:
        """Computes the step's tokens; returns the logits of the sequences that sample."""
        requests, starts, counts, samples, padding = zip(*step, strict=True)
        ids = [request.request_id for request in requests]
        sizes = list(map(add, counts, padding)) if any(padding) else counts
        tokens, rows, longest = sum(sizes), sum(samples), max(sizes)

        rung = self._ladder.rung(tokens, longest) if self._ladder else None
        if rung is not None:
            layout, _ = self._fixed(rung)
        else:
            end = max(map(add, starts, sizes))
            width = -(-end // self._blocks.block_size)
            layout = _host.step_layout(tokens, len(step), width, rows)
        use = self._fill(layout, ids, starts, counts, samples, padding)
        self._clock.start()
        if rung is not None:
            self._run_fixed(rung)
            hidden = self._hidden[:rows]
        else:
            hidden = self._forward(self._buffers.batch(layout, longest, end))
        return StepLogits(
            self._decoder.compute_logits(hidden), self._buffers.sampling(layout, rows, use)
        )

    @torch.inference_mode()
    def run_filler(self, num_tokens: int, num_seqs: int) -> Tensor:
        """Computes a step of tokens that mean nothing; returns num_seqs rows of hidden states.

        It takes the memory of a real step of this size, and changes no page.
        """
        layout = _host.step_layout(num_tokens, num_seqs, self._max_blocks, num_seqs)
        self._fill(layout, [], [], [], [], [])
        batch = self._buffers.batch(layout, num_tokens, self._max_blocks * self._blocks.block_size)
        return self._forward(batch)

    @torch.inference_mode()
    def record_rungs(self, rungs: Sequence[Rung]) -> None:
        """Records steps of these sizes, which otherwise happens when a step first has one."""
        progress = tqdm(
            rungs, desc="recording CUDA graphs", delay=1.0, disable=not sys.stderr.isatty()
        )
        for rung in progress:
            self._fill(self._fixed(rung)[0], [], [], [], [], [])
            self._run_fixed(rung)
        if self._hidden.is_cuda:
            torch.cuda.empty_cache()  # what the first runs took on the recorder's own stream

    def _fill(self, layout: _host.StepLayout, *lists: Sequence[int]) -> int:
        def pack(memory: memoryview) -> int:
            return self._blocks.pack(memory, layout, *lists)

        return self._buffers.fill(pack, layout.nbytes)

    def _forward(self, batch: Batch) -> Tensor:
        hidden: Tensor = self._decoder(batch, self.kv_caches)
        return hidden.index_select(0, batch.logits_indices)

    def _fixed(self, rung: Rung) -> tuple[_host.StepLayout, Batch]:
        """The layout and the batch of a step on a rung."""
        if rung not in self._sizes:
            layout = _host.step_layout(
                rung.num_tokens, rung.num_seqs, self._max_blocks, rung.num_logits
            )
            longest = self._max_blocks * self._blocks.block_size
            self._sizes[rung] = layout, self._buffers.batch(layout, rung.max_seqlen_q, longest)
        return self._sizes[rung]

    def _run_fixed(self, rung: Rung) -> None:
        """Computes the step that fills the buffers, which has the rung's layout."""
        replay = self._replays.get(rung)
        if replay is not None:
            replay()
            return
        assert self._record is not None
        self._replays[rung] = self._record(partial(self._forward_fixed, self._fixed(rung)[1]))

    def _forward_fixed(self, batch: Batch) -> None:
        hidden = self._decoder(batch, self.kv_caches)
        rows = self._hidden[: len(batch.logits_indices)]
        torch.index_select(hidden, 0, batch.logits_indices, out=rows)
