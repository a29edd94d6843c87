"""What the attention ops do to shapes and dtypes, for torch.compile; registered on import."""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._attention_sizes import (
    PLAN_COLUMNS,
    Size,
    attention_outputs,
    attention_plan_size,
    out_dtypes,
)
from fastinfer.ops._common import check, check_devices, check_out


def _fake_outputs(
    op: str, q: Tensor, k: Tensor, v: Tensor, rank: int, v_name: str, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    check(op, q.is_floating_point(), f"q: expected a float dtype, got {q.dtype}")
    out, lse = attention_outputs(op, q, v_name, v, rank == 4 and v_name == "v", None, None)
    check(op, k.dim() == rank, f"k: expected {rank} dimensions, got shape {tuple(k.shape)}")
    check(op, v.dim() == rank, f"v: expected {rank} dimensions, got shape {tuple(v.shape)}")
    check(op, k.shape[-1] == q.shape[-1], f"k: expected head_dim {q.shape[-1]}, got {k.shape[-1]}")
    if sinks is not None:
        check_out(op, "sinks", sinks, (q.shape[-2],), torch.float32)
    return out, lse


def _one_device(op: str, options: dict[str, object], **tensors: Tensor | None) -> None:
    """`check_devices` of the named tensors and of those among the options."""
    more = {name: value for name, value in options.items() if isinstance(value, Tensor)}
    check_devices(op, **tensors, **more)


def _check_scales(op: str, options: dict[str, object], q: Tensor, k: Tensor) -> None:
    """The scales among the options of an op without pages."""
    for name, like in (("q_scale", q), ("k_scale", k), ("v_scale", k)):
        scale = options.get(name)
        if isinstance(scale, Tensor):
            fits = q.dtype == torch.float8_e4m3fn
            check(op, fits, f"{name}: expected no scale since q is {q.dtype}, got a tensor")
            check_out(op, name, scale, (like.shape[-2],), torch.float32)


def _check_outputs(
    op: str, q: Tensor, expected: tuple[Tensor, Tensor], out: Tensor, lse: Tensor
) -> None:
    allowed = out_dtypes(q)
    dtype = out.dtype if out.dtype in allowed else allowed[0]
    check_out(op, "out", out, tuple(expected[0].shape), dtype)
    check_out(op, "lse", lse, tuple(expected[1].shape), expected[1].dtype)


@torch.library.register_fake("fastinfer::flash_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **_options: object
) -> tuple[Tensor, Tensor]:
    op = "flash_attention"
    _one_device(op, _options, q=q, k=k, v=v, sinks=sinks)
    result = _fake_outputs(op, q, k, v, 4, "v", sinks)
    _check_scales(op, _options, q, k)
    return result


@torch.library.register_fake("fastinfer::flash_attention.out")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor,
    **_options: object,
) -> None:
    op = "flash_attention"
    _one_device(op, _options, q=q, k=k, v=v, sinks=sinks, out=out, lse=lse)
    _check_outputs(op, q, _fake_outputs(op, q, k, v, 4, "v", sinks), out, lse)
    _check_scales(op, _options, q, k)


@torch.library.register_fake("fastinfer::flash_attention_varlen")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    sinks: Tensor | None = None,
    **_options: object,
) -> tuple[Tensor, Tensor]:
    op = "flash_attention_varlen"
    _one_device(
        op, _options, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        sinks=sinks,
    )  # fmt: skip
    result = _fake_outputs(op, q, k, v, 3, "v", sinks)
    _check_scales(op, _options, q, k)
    return result


@torch.library.register_fake("fastinfer::flash_attention_varlen.out")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor,
    **_options: object,
) -> None:
    op = "flash_attention_varlen"
    _one_device(
        op, _options, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        sinks=sinks, out=out, lse=lse,
    )  # fmt: skip
    _check_outputs(op, q, _fake_outputs(op, q, k, v, 3, "v", sinks), out, lse)
    _check_scales(op, _options, q, k)


@torch.library.register_fake("fastinfer::paged_attention")
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    **_options: object,
) -> tuple[Tensor, Tensor]:
    op = "paged_attention"
    _one_device(
        op, _options, q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
        cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, sinks=sinks,
    )  # fmt: skip
    return _fake_outputs(op, q, k_cache, v_cache, 4, "v_cache", sinks)


@torch.library.register_fake("fastinfer::paged_attention.out")
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    sinks: Tensor | None = None,
    out: Tensor,
    lse: Tensor,
    **_options: object,
) -> None:
    op = "paged_attention"
    _one_device(
        op, _options, q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table,
        cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, sinks=sinks, out=out, lse=lse,
    )  # fmt: skip
    _check_outputs(op, q, _fake_outputs(op, q, k_cache, v_cache, 4, "v_cache", sinks), out, lse)


def _plan_shape(
    seq_lens: Tensor, total_q: Size, num_heads: Size, num_kv_heads: Size, max_seqlen_k: Size
) -> tuple[Size, Size]:
    op = "plan_attention"
    check(op, seq_lens.dim() == 1, f"seq_lens: expected [batch], got {tuple(seq_lens.shape)}")
    rows = attention_plan_size(seq_lens.shape[0], total_q, num_heads, num_kv_heads, max_seqlen_k)
    return rows, PLAN_COLUMNS


@torch.library.register_fake("fastinfer::plan_attention")
def _(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    total_q: Size,
    num_heads: Size,
    num_kv_heads: Size,
    max_seqlen_q: Size,
    max_seqlen_k: Size,
    **_options: object,
) -> Tensor:
    check_devices("plan_attention", cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens)
    shape = _plan_shape(seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_k)
    return seq_lens.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("fastinfer::plan_attention.out")
def _(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    total_q: Size,
    num_heads: Size,
    num_kv_heads: Size,
    max_seqlen_q: Size,
    max_seqlen_k: Size,
    out: Tensor,
    **_options: object,
) -> None:
    check_devices("plan_attention", cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, out=out)
    shape = _plan_shape(seq_lens, total_q, num_heads, num_kv_heads, max_seqlen_k)
    check_out("plan_attention", "out", out, shape, torch.int32)


@torch.library.register_fake("fastinfer::merge_attention_states")
def _(outs: Tensor, lses: Tensor, *, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    op = "merge_attention_states"
    check_devices(op, outs=outs, lses=lses, sinks=sinks)
    check(op, outs.dim() in (4, 5), f"outs: expected 4 or 5 dimensions, got {tuple(outs.shape)}")
    check(op, lses.dim() == outs.dim() - 1, f"lses: expected {outs.dim() - 1} dimensions")
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


@torch.library.register_fake("fastinfer::merge_attention_states.out")
def _(outs: Tensor, lses: Tensor, *, sinks: Tensor | None = None, out: Tensor, lse: Tensor) -> None:
    op = "merge_attention_states"
    check_devices(op, outs=outs, lses=lses, sinks=sinks, out=out, lse=lse)
    check_out(op, "out", out, tuple(outs.shape[1:]), outs.dtype)
    check_out(op, "lse", lse, tuple(lses.shape[1:]), torch.float32)
