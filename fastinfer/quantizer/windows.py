"""A window of tokens as a step of the decoder: one sequence from its beginning."""

from __future__ import annotations

import torch
from torch import Tensor

from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig

_BLOCK_SIZE = 16


def window_batch(ids: Tensor) -> Batch:
    """The tokens [T] of one sequence, whose pages are the first ones of the cache, in order."""
    count, device = len(ids), ids.device
    places = torch.arange(count, device=device)
    blocks = torch.arange(-(-count // _BLOCK_SIZE), dtype=torch.int32, device=device)
    return Batch(
        input_ids=ids,
        positions=places,
        slot_mapping=places,
        block_table=blocks[None],
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        logits_indices=places,
        max_seqlen_q=count,
        max_seqlen_k=count,
    )


def window_cache(
    config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer for a window."""
    shape = (-(-length // _BLOCK_SIZE), config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    return (
        torch.zeros(shape, dtype=dtype, device=device),
        torch.zeros(shape, dtype=dtype, device=device),
    )
