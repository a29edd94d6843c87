"""Shapes and sizes of what the attention ops return, plans and scratch space included."""

from __future__ import annotations

import torch
from torch import Tensor

Size = int | torch.SymInt

# The constants of csrc/checks/attention_plan.h.
PLAN_COLUMNS = 8
_PLAN_HEADER_ROWS = 2
_PLAN_MIN_TILE_ROWS = 16
_PLAN_MIN_SPLIT = 256
_PLAN_MAX_PARTIAL_ROWS = 1024


def _plan_partial_rows(total_q: Size, max_seqlen_k: Size) -> Size:
    splits = (max_seqlen_k + _PLAN_MIN_SPLIT - 1) // _PLAN_MIN_SPLIT
    return torch.sym_min(_PLAN_MAX_PARTIAL_ROWS, total_q * splits)


def attention_plan_size(
    num_sequences: Size,
    total_q: Size,
    num_heads: Size,
    num_kv_heads: Size,
    max_seqlen_k: Size,
) -> Size:
    """Rows of a plan tensor [rows, 8]: a function of shapes and declared maxima, never of lengths.

    The arguments are those of `plan_attention`, num_sequences being the length of seq_lens.
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:  # type: ignore[operator]
        raise ValueError(
            "fastinfer::plan_attention: num_heads, num_kv_heads: expected num_heads to be a "
            f"multiple of num_kv_heads, both >= 1, got {num_heads} and {num_kv_heads}"
        )
    tile_tokens = torch.sym_max(1, _PLAN_MIN_TILE_ROWS // (num_heads // num_kv_heads))
    tiles = total_q // tile_tokens + num_sequences
    return _PLAN_HEADER_ROWS + tiles + _plan_partial_rows(total_q, max_seqlen_k)


def paged_attention_workspace_size(
    total_q: Size, num_heads: Size, value_dim: Size, max_seqlen_k: Size
) -> Size:
    """Elements of a `workspace` that is large enough for any lengths within these sizes.

    total_q and num_heads are those of q [total_q, num_heads, head_dim], value_dim is v_cache's last
    dimension, and max_seqlen_k is as declared.
    """
    return _plan_partial_rows(total_q, max_seqlen_k) * num_heads * (value_dim + 1)


def output_shapes(
    op: str, q: Tensor, v_name: str, v: Tensor, dense: bool
) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Shapes of out and lse; `v` holds the values. Ranks only: the op checks the rest."""
    rank = 4 if dense else 3
    if q.dim() != rank:
        raise ValueError(
            f"fastinfer::{op}: q: expected {rank} dimensions, got shape {tuple(q.shape)}"
        )
    if v.dim() == 0:
        raise ValueError(f"fastinfer::{op}: {v_name}: expected at least 1 dimension, got a scalar")
    if dense:
        batch, seqlen, heads, _ = q.shape
        return (batch, seqlen, heads, v.shape[-1]), (batch, heads, seqlen)
    total, heads, _ = q.shape
    return (total, heads, v.shape[-1]), (heads, total)


def out_dtypes(q: Tensor) -> list[torch.dtype]:
    """What `out` may be, the default first."""
    return [torch.bfloat16, torch.float16] if q.dtype == torch.float8_e4m3fn else [q.dtype]


def attention_outputs(
    op: str, q: Tensor, v_name: str, v: Tensor, dense: bool, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse, allocated where they are not given."""
    if out is None or lse is None:
        out_shape, lse_shape = output_shapes(op, q, v_name, v, dense)
        out = q.new_empty(out_shape, dtype=out_dtypes(q)[0]) if out is None else out
        lse = q.new_empty(lse_shape, dtype=torch.float32) if lse is None else lse
    return out, lse
