"""Runs the model over one step: owns the KV pages and packs the scheduler's step into a `Batch`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastinfer import _host, ops
from fastinfer.engine.scheduler import ScheduledSequence
from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder

_CPU_KV_CACHE_BYTES = 1 << 30


def resolve_device(device: str | torch.device) -> torch.device:
    """The device to run on; "auto" is a GPU that every op has a backend for, else the CPU.

    Raises:
        ValueError: not a CPU or a GPU, or ops have no backend for it (they are named).
    """
    if device == "auto":
        usable = torch.cuda.is_available() and not _unsupported_ops(torch.device("cuda"))
        return torch.device("cuda" if usable else "cpu")
    if str(device).split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"LLM: device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    resolved = torch.device(device)
    missing = _unsupported_ops(resolved)
    if missing:
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in missing.items())
        raise ValueError(f"LLM: device {str(device)!r} cannot run all ops. {reasons}")
    return resolved


def _unsupported_ops(device: torch.device) -> dict[str, list[str]]:
    """The ops that cannot run on the device, by the reason."""
    result: dict[str, list[str]] = {}
    for op, (backend, reason) in ops.backends(device).items():
        if backend == "none":
            result.setdefault(reason, []).append(op)
    return result


def num_kv_blocks(
    config: ModelConfig, dtype: torch.dtype, block_size: int, memory: int | None
) -> int:
    """How many KV blocks fit into ``memory`` bytes (None: 1 GiB); ValueError if not one does."""
    memory = _CPU_KV_CACHE_BYTES if memory is None else memory
    values = config.num_layers * config.num_kv_heads * 2 * config.head_dim
    block_bytes = values * block_size * dtype.itemsize
    if memory < block_bytes:
        raise ValueError(
            f"LLM: kv_cache_memory_bytes must hold at least one block of {block_size} tokens "
            f"({block_bytes} bytes), got {memory}"
        )
    return memory // block_bytes


class ModelRunner:
    """The model, its KV pages (of the given dtype) and the buffer of a step."""

    def __init__(self, decoder: Decoder, blocks: _host.BlockManager, *, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._blocks = blocks
        config, device = decoder.config, decoder.embed_tokens.device
        self._buffer = torch.empty(0, dtype=torch.uint8)
        # Keys and values of a layer: [num_blocks, num_kv_heads, block_size, head_dim]. They stay
        # unset: no op reads a slot that was not written, and untouched memory costs nothing.
        shape = (blocks.num_blocks, config.num_kv_heads, blocks.block_size, config.head_dim)
        pages = [
            torch.empty((2, *shape), dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.kv_caches = [(both[0], both[1]) for both in pages]

    @torch.inference_mode()
    def run(self, step: Sequence[ScheduledSequence]) -> Tensor:
        """Computes the step's tokens; returns logits [R, V] of the R sequences that sample."""
        batch = self._pack(step)
        hidden = self._decoder(batch, self.kv_caches)
        return self._decoder.compute_logits(hidden.index_select(0, batch.logits_indices))

    def _pack(self, step: Sequence[ScheduledSequence]) -> Batch:
        """Fills the step's buffer and returns views of it; they hold until the next call."""
        counts = [s.num_tokens for s in step]
        ends = [s.start + s.num_tokens for s in step]
        num_logits = [int(s.samples) for s in step]
        tokens, seqs, logits = sum(counts), len(step), sum(num_logits)
        max_blocks = -(-max(ends) // self._blocks.block_size)
        layout = _host.step_layout(tokens, seqs, max_blocks, logits)
        if layout.nbytes > self._buffer.numel():
            self._buffer = torch.empty(2 * layout.nbytes, dtype=torch.uint8)
        ids, starts = [s.request.request_id for s in step], [s.start for s in step]
        self._blocks.pack(self._buffer.numpy().data, layout, ids, starts, counts, num_logits)

        def view(offset: int, size: int, dtype: torch.dtype) -> Tensor:
            return self._buffer[offset : offset + size * dtype.itemsize].view(dtype)

        table = view(layout.block_table, seqs * max_blocks, torch.int32)
        return Batch(
            input_ids=view(layout.input_ids, tokens, torch.int64),
            positions=view(layout.positions, tokens, torch.int64),
            slot_mapping=view(layout.slot_mapping, tokens, torch.int64),
            block_table=table.view(seqs, max_blocks),
            cu_seqlens_q=view(layout.cu_seqlens_q, seqs + 1, torch.int32),
            seq_lens=view(layout.seq_lens, seqs, torch.int32),
            logits_indices=view(layout.logits_indices, logits, torch.int64),
            max_seqlen_q=max(counts),
            max_seqlen_k=max(ends),
        )
