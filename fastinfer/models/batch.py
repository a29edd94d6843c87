"""`Batch`: what one ragged step of the model reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Batch:
    """One step: T tokens of B sequences, each with at least one token, laid end to end.

    A prefill chunk, a decode token and drafted tokens to verify differ only in their counts.
    """

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: each token's place in its own sequence."""
    slot_mapping: Tensor
    """int64 [T]: where its key and value go, block * block_size + offset."""
    block_table: Tensor
    """int32 [B, max_blocks]: the pages of each sequence, in order."""
    cu_seqlens_q: Tensor
    """int32 [B + 1]: sequence b owns the tokens cu_seqlens_q[b] .. cu_seqlens_q[b + 1]."""
    seq_lens: Tensor
    """int32 [B]: tokens of each sequence in the cache, this step's included."""
    logits_indices: Tensor
    """int64 [R]: the tokens whose logits are wanted."""
    max_seqlen_q: int
    """At least the largest number of tokens that one sequence has in this step."""
    max_seqlen_k: int
    """At least the largest of seq_lens."""
