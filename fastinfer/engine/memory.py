"""Where the engine runs, and how much memory its KV pages get."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastinfer import _host, ops
from fastinfer.engine.buffers import DeviceClock, StepLimits
from fastinfer.engine.runner import ModelRunner
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder

_CPU_KV_CACHE_BYTES = 1 << 30
# For recorded graphs, libraries' workspaces, and what fragments.
_GPU_RESERVE_BYTES = 512 << 20
_FP32_COPIES = 6  # of the logits: what penalties and logprobs work with


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
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    block_size: int,
    limits: StepLimits,
    memory: int | None,
    gpu_memory_utilization: float,
    graphs: bool,
) -> int:
    """How many KV blocks there will be.

    They fill ``memory`` bytes; None: 1 GiB on the CPU, and on a GPU what a share
    ``gpu_memory_utilization`` of it leaves beside the weights and the largest step. Never more than
    ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.

    Raises:
        ValueError: not one block fits.
    """
    block_bytes = _block_bytes(decoder.config, dtype, block_size)
    needed = f"at least one block of {block_size} tokens ({block_bytes} bytes)"
    if memory is None and decoder.embed_tokens.device.type == "cuda":
        step = _gpu_step_bytes(decoder, dtype, block_size, limits, graphs)
        torch.cuda.empty_cache()
        unused, total = torch.cuda.mem_get_info(decoder.embed_tokens.device)
        used = total - unused
        free = int(total * gpu_memory_utilization) - used - step - _GPU_RESERVE_BYTES
        if free < block_bytes:
            raise ValueError(
                f"LLM: no memory is left for the KV cache, which needs {needed}: of "
                f"{_gib(total)}, gpu_memory_utilization {gpu_memory_utilization} allows "
                f"{_gib(total * gpu_memory_utilization)}; weights and other programs take "
                f"{_gib(used)}, and a step of {limits.max_num_tokens} tokens {_gib(step)}. "
                "Use a larger gpu_memory_utilization, or a smaller max_num_batched_tokens"
            )
    else:
        free = _CPU_KV_CACHE_BYTES if memory is None else memory
        if free < block_bytes:
            raise ValueError(f"LLM: kv_cache_memory_bytes must hold {needed}, got {free}")
    useful = limits.max_num_seqs * -(-limits.max_model_len // block_size)
    return min(free // block_bytes, useful)


def _block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    values = config.num_layers * config.num_kv_heads * 2 * config.head_dim
    return values * block_size * dtype.itemsize


def _gpu_step_bytes(
    decoder: Decoder, dtype: torch.dtype, block_size: int, limits: StepLimits, graphs: bool
) -> int:
    """How many bytes of the GPU the largest step takes for a while, found by running it.

    Its tokens mean nothing. Graphs, and the run before each is recorded, keep their temporary
    memory apart from that of the rest.
    """
    device = decoder.embed_tokens.device
    pages = _host.BlockManager(1, block_size, False)
    clock = DeviceClock(device)
    runner = ModelRunner(decoder, pages, dtype=dtype, limits=limits, clock=clock)

    def forward() -> Tensor:
        return runner.run_filler(limits.max_num_tokens, limits.max_rows)

    def sample() -> None:
        with torch.inference_mode():
            logits = decoder.compute_logits(hidden)
            copies = [logits.float() for _ in range(_FP32_COPIES)]
            ops.sample(copies[-1])

    def peak(run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    hidden = forward()  # compiles kernels
    return peak(forward) * (1 + graphs) + peak(sample)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
