"""flash_attention, flash_attention_varlen and paged_attention: what to launch, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fastinfer.triton_kernels.attention_config import AttentionConfig, choose_config
from fastinfer.triton_kernels.attention_kernel import (
    DENSE,
    FLOAT,
    FP8,
    INT8,
    PAGED,
    RAGGED,
    attention_kernel,
)
from fastinfer.triton_kernels.attention_merge import merge_splits_kernel, tile
from fastinfer.triton_kernels.attention_plan import (
    MIN_SPLIT,
    NARROW_ROWS,
    choose_tiles,
    partial_rows,
    plan_attention,
    plan_rows,
)
from fastinfer.triton_kernels.launch import Device, device_of, launch, next_power_of_2

_MAX_WINDOW = 2**29  # beyond any length, and sums with it stay in 32 bits


@dataclass
class _Problem:
    """A call in terms of the kernel. Strides are (outer, token, head)."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    layout: int
    num_sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    window_left: int
    window_right: int
    softcap: float
    sinks: Tensor | None
    tree_mask: Tensor | None
    batch_invariant: bool
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1] if self.layout == PAGED else self.k.shape[-2]

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def total_q(self) -> int:
        return self.q.shape[0] * self.q.shape[1] if self.layout == DENSE else self.q.shape[0]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_left: int, window_right: int,
    softcap: float, sinks: Tensor | None, tree_mask: Tensor | None, batch_invariant: bool,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Dense; arguments as in `fastinfer.ops.flash_attention`, causal being window_right 0."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    p = _Problem(
        q, k, v, out, lse, DENSE, batch, seqlen_q, seqlen_k, scale, window_left, window_right,
        softcap, sinks, tree_mask, batch_invariant, q_scale, k_scale, v_scale,
    )  # fmt: skip
    if _needs_plan(p, device_of(q.get_device())):
        p.cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
        p.seq_lens = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device)
        _run_planned(p, None, None)
    else:
        _run_direct(p)


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, scale: float, window_left: int, window_right: int,
    softcap: float, sinks: Tensor | None, tree_mask: Tensor | None, batch_invariant: bool,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """Ragged; arguments as in `fastinfer.ops.flash_attention_varlen`."""
    p = _Problem(
        q, k, v, out, lse, RAGGED, cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k, scale,
        window_left, window_right, softcap, sinks, tree_mask, batch_invariant, q_scale, k_scale,
        v_scale, cu_seqlens_q, cu_seqlens_k,
    )  # fmt: skip
    # A plan gives a short sequence the tiles that it has alone. With batch_invariant there always
    # is one, since the kernels with and without may differ in a last bit.
    if batch_invariant or _needs_plan(p, device_of(q.get_device())):
        p.seq_lens = cu_seqlens_k.diff()
        _run_planned(p, None, None)
    else:
        _run_direct(p)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cu_seqlens_q: Tensor,
    seq_lens: Tensor, max_seqlen_q: int, max_seqlen_k: int, scale: float, window_left: int,
    window_right: int, softcap: float, sinks: Tensor | None, tree_mask: Tensor | None,
    batch_invariant: bool, k_scale: Tensor | None, v_scale: Tensor | None, plan: Tensor | None,
    workspace: Tensor | None, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Paged; arguments as in `fastinfer.ops.paged_attention`."""
    p = _Problem(
        q, k_cache, v_cache, out, lse, PAGED, seq_lens.shape[0], max_seqlen_q, max_seqlen_k,
        scale, window_left, window_right, softcap, sinks, tree_mask, batch_invariant, None,
        k_scale, v_scale, cu_seqlens_q, None, seq_lens, block_table,
    )  # fmt: skip
    _run_planned(p, plan, workspace)


def _needs_plan(p: _Problem, device: Device) -> bool:
    """Too few tiles to fill the device, and keys long enough to cut."""
    if p.batch_invariant or p.max_seqlen_k <= 512:
        return False
    tile_tokens = choose_tiles(p.max_seqlen_q, p.group, False)
    tokens = tile_tokens.wide or tile_tokens.narrow
    tiles = triton.cdiv(p.max_seqlen_q, tokens) * p.num_sequences * p.num_kv_heads
    return bool(tiles < device.num_sms)


def _run_direct(p: _Problem) -> None:
    """A program for each tile: the grid covers the longest sequence that may come."""
    tiles = choose_tiles(p.max_seqlen_q, p.group, p.batch_invariant)
    tokens = tiles.wide or tiles.narrow
    config = _config(p, tiles.narrow_rows, tiles.wide == 0)
    sub_tiles = triton.cdiv(tokens * p.group, config.block_m)
    grid = (triton.cdiv(p.max_seqlen_q, tokens) * sub_tiles, p.num_kv_heads, p.num_sequences)
    if p.num_sequences > 65535 or p.num_kv_heads > 65535:
        return _run_planned(p, None, None)
    _launch(p, config, grid, tokens, None, None, None, tiles.wide > 0)
    return None


def _run_planned(p: _Problem, plan: Tensor | None, workspace: Tensor | None) -> None:
    """Persistent programs over the plan's items, then the merging of what it cut."""
    device = device_of(p.q.get_device())
    tiles = choose_tiles(p.max_seqlen_q, p.group, p.batch_invariant)
    # A given plan is not read here: it may have been made for other options, and cut sequences.
    never_cut = p.batch_invariant and plan is None
    max_partial = 0 if never_cut else partial_rows(p.total_q, p.max_seqlen_k)
    assert p.cu_seqlens_q is not None and p.seq_lens is not None
    if plan is None:
        rows = plan_rows(p.num_sequences, p.total_q, p.group, p.max_seqlen_k)
        plan = torch.empty((rows, 8), dtype=torch.int32, device=p.q.device)
        plan_attention(
            p.cu_seqlens_q, p.seq_lens, p.total_q, p.num_heads, p.num_kv_heads, p.max_seqlen_q,
            p.max_seqlen_k, p.window_left, p.window_right, p.batch_invariant, plan,
        )  # fmt: skip
    value_dim = p.v.shape[-1]
    partial_out = partial_lse = p.lse  # not used: the plan cuts nothing
    if max_partial > 0:
        if workspace is None:
            floats = max_partial * p.num_heads * (value_dim + 1)
            workspace = torch.empty(floats, dtype=torch.float32, device=p.q.device)
        partial_out = workspace[: max_partial * p.num_heads * value_dim]
        partial_lse = workspace[max_partial * p.num_heads * value_dim :]
    parts = [(tiles.narrow_rows, tiles.narrow, False)]
    if tiles.wide:
        parts.insert(0, (0, tiles.wide, True))
    for rows, tokens, wide in parts:
        config = _config(p, rows, not wide)
        programs = device.num_sms * config.programs_per_sm
        # Never more programs than there can be units.
        sub_tiles = triton.cdiv(tokens * p.group, config.block_m)
        most = (plan.shape[0] - 2) * p.num_kv_heads * sub_tiles
        _launch(p, config, (min(programs, most),), tokens, plan, partial_out, partial_lse, wide)
    if max_partial > 0:
        _merge(p, plan, max_partial, partial_out, partial_lse)


def _config(p: _Problem, rows: int, narrow: bool) -> AttentionConfig:
    return choose_config(
        device_of(p.q.get_device()),
        rows=rows,
        narrow=narrow,
        head_dim=_padded(p.q.shape[-1]),
        value_dim=_padded(p.v.shape[-1]),
        itemsize=max(2, p.q.element_size()),  # e4m3 queries are decoded to fp16
        kv_itemsize=min(p.k.element_size(), p.v.element_size()),
    )


def _padded(dim: int) -> int:
    return max(16, next_power_of_2(dim))


def _format(stored: Tensor) -> int:
    return {torch.int8: INT8, torch.float8_e4m3fn: FP8}.get(stored.dtype, FLOAT)


def _bytes(stored: Tensor) -> Tensor:
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


def _strides(x: Tensor, layout: int) -> tuple[int, int, int]:
    """(outer, token, head) of a float tensor of the given layout."""
    if layout == DENSE:
        return x.stride(0), x.stride(1), x.stride(2)
    if layout == RAGGED:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0), x.stride(2), x.stride(1)


def _scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    if scale is None:
        return 0, 0, 0
    if scale.dim() == 1:
        return 0, 0, scale.stride(0)
    return scale.stride(0), scale.stride(2), scale.stride(1)


def _launch(
    p: _Problem,
    config: AttentionConfig,
    grid: tuple[int, ...],
    tile_tokens: int,
    plan: Tensor | None,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    wide: bool,
) -> None:
    query_layout = DENSE if p.layout == DENSE else RAGGED
    dense = p.layout == DENSE
    table = p.block_table
    # The kernel's scale is positive, so that a maximum before scaling is one after it.
    sign = 0 if p.scale == 0.0 else (1 if p.scale > 0.0 else -1)
    options: dict[str, Any] = {
        "GROUP": p.group,
        "HEAD_DIM": p.q.shape[-1],
        "VALUE_DIM": p.v.shape[-1],
        "D": _padded(p.q.shape[-1]),
        "DV": _padded(p.v.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SUB_TILES": triton.cdiv(tile_tokens * p.group, config.block_m),
        "LAYOUT": p.layout,
        "BLOCK_SIZE": p.k.shape[2] if p.layout == PAGED else 0,
        "Q_FORMAT": _format(p.q),
        "K_FORMAT": _format(p.k),
        "V_FORMAT": _format(p.v),
        "SCALE_SIGN": sign,
        "SOFTCAP": p.softcap > 0.0,
        "SINKS": p.sinks is not None,
        "TREE": p.tree_mask is not None,
        "LEFT": p.window_left >= 0,
        "RIGHT": p.window_right >= 0,
        # What else is in the batch must not choose the code of a row that asks for the same bits.
        "ONE_TOKEN": tile_tokens == 1 or (p.max_seqlen_q == 1 and not p.batch_invariant),
        "PLANNED": plan is not None,
        "WIDE": wide,
        "PRECISION": "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    launch(
        attention_kernel, grid, p.q,
        _bytes(p.q), _bytes(p.k), _bytes(p.v), p.out, p.lse, partial_out, partial_lse, plan,
        p.cu_seqlens_q, p.cu_seqlens_k, p.seq_lens, table, p.q_scale, p.k_scale, p.v_scale,
        p.sinks, p.tree_mask,
        *_strides(p.q, query_layout), *_strides(p.k, p.layout), *_strides(p.v, p.layout),
        *_strides(p.out, query_layout),
        p.lse.stride(0) if dense else 0, p.lse.stride(1) if dense else p.lse.stride(0),
        *_scale_strides(p.k_scale), *_scale_strides(p.v_scale),
        *(table.stride() if table is not None else (0, 0)),
        p.tree_mask.stride(0) if dense and p.tree_mask is not None else 0,
        p.max_seqlen_q, p.max_seqlen_k,
        min(p.window_left, _MAX_WINDOW), min(p.window_right, _MAX_WINDOW),
        abs(p.scale) or 1.0, p.softcap, p.num_heads, p.num_kv_heads, tile_tokens, grid[0],
        **options,
    )  # fmt: skip


def _merge(
    p: _Problem, plan: Tensor, max_partial: int, partial_out: Tensor | None,
    partial_lse: Tensor | None,
) -> None:  # fmt: skip
    value_dim, dense = p.v.shape[-1], p.layout == DENSE
    rows, splits = tile(p.num_heads, triton.cdiv(p.max_seqlen_k, MIN_SPLIT), value_dim)
    # A tile that is split leaves at least two rows.
    most = min(max_partial // 2, p.total_q // max(1, NARROW_ROWS[0] // p.group) + p.num_sequences)
    grid = (max(1, most), triton.cdiv(p.num_heads, rows))
    launch(
        merge_splits_kernel, grid, p.q,
        partial_out, partial_lse, plan, plan.shape[0], p.cu_seqlens_q, p.sinks, p.out, p.lse,
        p.num_heads, *_strides(p.out, DENSE if dense else RAGGED),
        p.lse.stride(0) if dense else 0, p.lse.stride(1) if dense else p.lse.stride(0),
        SINKS=p.sinks is not None, ROWS=rows, SPLITS=splits,
        VALUE_DIM=value_dim, DV=next_power_of_2(value_dim), DENSE=dense, num_warps=4,
    )  # fmt: skip
