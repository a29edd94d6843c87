"""The memory that a step travels through: packed on the host, copied to the device in one piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer._host import StepLayout
from fastinfer.models.batch import Batch


@dataclass(frozen=True)
class StepLimits:
    """The largest step: sequences, tokens, and tokens that a sequence may have in the cache."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int

    @property
    def max_rows(self) -> int:
        """The most sequences that can be in a step, each with at least one token."""
        return min(self.max_num_seqs, self.max_num_tokens)


class StepBuffers:
    """What a step reads, at an address that never changes.

    On a GPU the host writes one of two pinned buffers, in turn, and one copy takes it to the
    device; a buffer is written again only when the copy that read it has ended. On the CPU there is
    one buffer, and the model reads it where it was written.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        count = 2 if on_gpu else 1
        self._host = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(count)
        ]
        self._memory = [host.numpy().data for host in self._host]
        self._read = [torch.cuda.Event() for _ in self._host] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._device = device
        self.device = (
            torch.empty(nbytes, dtype=torch.uint8, device=device) if on_gpu else self._host[0]
        )

    def fill(self, pack: Callable[[memoryview], int], nbytes: int) -> int:
        """Lets ``pack`` write a step of so many bytes, sends it off, and returns pack's result."""
        if not self._read:
            return pack(self._memory[0])
        turn = self._turn = 1 - self._turn
        self._read[turn].synchronize()
        result = pack(self._memory[turn])
        self.device[:nbytes].copy_(self._host[turn][:nbytes], non_blocking=True)
        self._read[turn].record(torch.cuda.current_stream(self._device))
        return result

    def view(self, offset: int, size: int, dtype: torch.dtype) -> Tensor:
        """An array of the step, as the device sees it."""
        return self.device[offset : offset + size * dtype.itemsize].view(dtype)

    def batch(self, layout: StepLayout, max_seqlen_q: int, max_seqlen_k: int) -> Batch:
        """The model's view of a step with this layout."""
        tokens, seqs, width = layout.num_tokens, layout.num_seqs, layout.max_blocks
        view, int64, int32 = self.view, torch.int64, torch.int32
        return Batch(
            input_ids=view(layout.input_ids, tokens, int64),
            positions=view(layout.positions, tokens, int64),
            slot_mapping=view(layout.slot_mapping, tokens, int64),
            block_table=view(layout.block_table, seqs * width, int32).view(seqs, width),
            cu_seqlens_q=view(layout.cu_seqlens_q, seqs + 1, int32),
            seq_lens=view(layout.seq_lens, seqs, int32),
            logits_indices=view(layout.logits_indices, layout.num_logits, int64),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    def sampling(self, layout: StepLayout, rows: int, use: int) -> dict[str, Tensor]:
        """The arguments of `fastinfer.ops.sample` for the first ``rows`` rows of logits.

        ``use`` is what `BlockManager.pack` returned. What makes no difference is left out, and so
        for a greedy step is everything.
        """
        if not use & 1:
            return {}
        arrays = (
            (1, "temperature", layout.temperature, torch.float32),
            (2, "top_k", layout.top_k, torch.int32),
            (4, "top_p", layout.top_p, torch.float32),
            (8, "min_p", layout.min_p, torch.float32),
            (1, "seeds", layout.seeds, torch.int64),
            (1, "positions", layout.draw_positions, torch.int64),
        )
        return {
            name: self.view(offset, rows, dtype) for bit, name, offset, dtype in arrays if use & bit
        }


class ResultBuffers:
    """Receives what the sampling op gives for a step, token ids and flags, in one copy."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self._rows = rows
        self._device = torch.empty(9 * rows, dtype=torch.uint8, device=device)
        self._host = torch.empty(9 * rows, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def arrays(self, rows: int, on_host: bool = False) -> tuple[Tensor, Tensor]:
        """Token ids int64 [rows] and flags bool [rows]."""
        memory = self._host if on_host else self._device
        ids, flags = memory[: 8 * rows], memory[8 * self._rows : 8 * self._rows + rows]
        return ids.view(torch.int64), flags.view(torch.bool)

    def download(self) -> None:
        """Queues the copy to the host; it has arrived when the device has come to this point."""
        self._host.copy_(self._device, non_blocking=True)


class DeviceClock:
    """How long the device was at work, and how long the host did nothing but wait for it.

    On a GPU work is timed from the first command of a step to the last, by events; a gap in which
    the host was too slow to launch counts as work. On the CPU work and waiting are the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.busy_seconds = 0.0
        self.wait_seconds = 0.0
        self._started: float | None = None
        self._device = device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """The device is given work. Without effect when it has been started and not stopped."""
        if self._started is None:
            self._started = time.perf_counter()
            if self._on_gpu:
                self._begin.record(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        """Waits until the device has done all it was given."""
        waiting_since, started = time.perf_counter(), self._started
        if self._on_gpu:
            self._end.record(torch.cuda.current_stream(self._device))
            self._end.synchronize()
        now = time.perf_counter()
        if started is None:
            return
        self._started = None
        busy = self._begin.elapsed_time(self._end) / 1e3 if self._on_gpu else now - started
        self.busy_seconds += busy
        self.wait_seconds += now - waiting_since if self._on_gpu else busy
