"""Valid arguments of every op, by name: what opcheck, compile and bad-input tests start from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastinfer.ops  # noqa: F401  (defines torch.ops.fastinfer)
from tests.helpers import cumulative, make_pages, random_tree_masks
from tests.reference import pack_codes, rotary_cos_sin

Arguments = dict[str, Any]

# The arguments that receive results: of functional ops the names in `.out`, in the order returned.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "flash_attention": ("out", "lse"),
    "flash_attention_varlen": ("out", "lse"),
    "paged_attention": ("out", "lse"),
    "plan_attention": ("out",),
    "merge_attention_states": ("out", "lse"),
    "rms_norm": ("out",),
    "layer_norm": ("out",),
    "silu_and_mul": ("out",),
    "gelu_and_mul": ("out",),
    "int2_gemm": ("out",),
    "int3_gemm": ("out",),
    "int4_gemm": ("out",),
    "int8_gemm": ("out",),
    "fp8_scaled_mm": ("out",),
    "int8_scaled_mm": ("out",),
    "quantize_fp8": ("out", "out_scale"),
    "quantize_int8": ("out", "out_scale"),
    "quantize_int8_asymmetric": ("out", "out_scale", "out_zero_point"),
    "sample": ("token_ids", "valid"),
}
# The arguments that an in-place op changes.
MUTATED: dict[str, tuple[str, ...]] = {
    "append_paged_kv_cache_": ("k_cache", "v_cache", "k_scale", "v_scale"),
    "qk_norm_rope_append_": ("q_out", "k_cache", "v_cache", "k_scale", "v_scale"),
    "fused_add_rms_norm_": ("x", "residual"),
    "fused_add_layer_norm_": ("x", "residual"),
    "rotary_embedding_": ("q", "k"),
}
OPS = [*OUTPUTS, *MUTATED]

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 16, 24
# One feature and one input past a packed tile, and past a group: one less shows in every shape.
GEMM_N, GEMM_K = 65, 65
# One past a block of scales.
MM_N, MM_K = 129, 257


def _dense(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(2, tokens, HEADS, DIM).to(dtype),
        "k": torch.randn(2, tokens + 4, KV_HEADS, DIM).to(dtype),
        "v": torch.randn(2, tokens + 4, KV_HEADS, VALUE_DIM).to(dtype),
        "causal": True,
        "window_left": 7,
        "softcap": 3.0,
        "sinks": torch.randn(HEADS),
    }


def _dense_tree(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        **_dense(tokens, dtype),
        "tree_mask": torch.stack([random_tree_masks(tokens) for _ in range(2)]),
        "batch_invariant": True,
    }


def _fp8(
    make: Callable[[int, torch.dtype], Arguments],
) -> Callable[[int, torch.dtype], Arguments]:
    """The call with e4m3 queries, keys and values, and a scale for each head of theirs."""

    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        given = make(tokens, dtype)
        given |= {name: given[name].to(torch.float8_e4m3fn) for name in "qkv"}
        heads = {"q_scale": HEADS, "k_scale": KV_HEADS, "v_scale": KV_HEADS}
        return given | {name: torch.rand(count) + 0.5 for name, count in heads.items()}

    return arguments


def _counts(tokens: int) -> list[int]:
    """Three sequences of these tokens, the middle one without any."""
    return [1, 0, tokens - 1]


def _varlen(tokens: int, dtype: torch.dtype) -> Arguments:
    counts = _counts(tokens)
    lengths = [count + 5 for count in counts]
    return {
        "q": torch.randn(tokens, HEADS, DIM).to(dtype),
        "k": torch.randn(sum(lengths), KV_HEADS, DIM).to(dtype),
        "v": torch.randn(sum(lengths), KV_HEADS, VALUE_DIM).to(dtype),
        "cu_seqlens_q": cumulative(counts),
        "cu_seqlens_k": cumulative(lengths),
        "max_seqlen_q": tokens,
        "max_seqlen_k": tokens + 5,
        "causal": True,
        "sinks": torch.randn(HEADS),
    }


def _varlen_tree(tokens: int, dtype: torch.dtype) -> Arguments:
    masks = torch.cat([random_tree_masks(count) for count in _counts(tokens)])
    return {**_varlen(tokens, dtype), "tree_mask": masks, "softcap": 2.0}


def _paged(tokens: int, dtype: torch.dtype, storage: torch.dtype | None = None) -> Arguments:
    counts = _counts(tokens)
    pages = make_pages(
        [40, 3, tokens + 9], num_kv_heads=KV_HEADS, head_dim=DIM, value_dim=VALUE_DIM,
        block_size=8, dtype=dtype, k_storage=storage, v_storage=storage, fill=0.0,
    )  # fmt: skip
    return {
        "q": torch.randn(tokens, HEADS, DIM).to(dtype),
        "k_cache": pages.k_cache,
        "v_cache": pages.v_cache,
        "block_table": pages.block_table,
        "cu_seqlens_q": cumulative(counts),
        "seq_lens": pages.seq_lens,
        "max_seqlen_q": tokens,
        "max_seqlen_k": tokens + 40,
        "sinks": torch.randn(HEADS),
        **pages.scales,
    }


def _paged_int8(tokens: int, dtype: torch.dtype) -> Arguments:
    masks = torch.cat([random_tree_masks(count) for count in _counts(tokens)])
    return {**_paged(tokens, dtype, torch.int8), "tree_mask": masks}


def _plan(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "cu_seqlens_q": cumulative(_counts(tokens)),
        "seq_lens": torch.tensor([900, 3, tokens + 9], dtype=torch.int32),
        "total_q": tokens,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "max_seqlen_q": tokens,
        "max_seqlen_k": 1000,
    }


def _merge(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "outs": torch.randn(3, tokens, HEADS, VALUE_DIM).to(dtype),
        "lses": torch.randn(3, HEADS, tokens),
        "sinks": torch.randn(HEADS),
    }


def _merge_dense(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "outs": torch.randn(3, 2, tokens, HEADS, VALUE_DIM).to(dtype),
        "lses": torch.randn(3, 2, HEADS, tokens),
    }


def _append(tokens: int, dtype: torch.dtype, storage: torch.dtype | None = None) -> Arguments:
    shape = (4, KV_HEADS, 8)
    stored = storage or dtype
    arguments = {
        "k": torch.randn(tokens, KV_HEADS, DIM).to(dtype),
        "v": torch.randn(tokens, KV_HEADS, VALUE_DIM).to(dtype),
        "k_cache": torch.zeros(*shape, DIM).to(stored),
        "v_cache": torch.zeros(*shape, VALUE_DIM).to(stored),
        "slot_mapping": torch.randperm(32)[:tokens],
    }
    if storage is not None:
        arguments |= {"k_scale": torch.zeros(shape), "v_scale": torch.zeros(shape)}
    return arguments


def _append_int8(tokens: int, dtype: torch.dtype) -> Arguments:
    return _append(tokens, dtype, torch.int8)


def _append_fp8(tokens: int, dtype: torch.dtype) -> Arguments:
    return _append(tokens, dtype, torch.float8_e4m3fn)


def _qk_norm_rope(tokens: int, dtype: torch.dtype, storage: torch.dtype | None = None) -> Arguments:
    append = _append(tokens, dtype, storage)
    columns = HEADS * DIM + KV_HEADS * (DIM + VALUE_DIM)
    return {
        "qkv": torch.randn(tokens, columns).to(dtype),
        "q_out": torch.zeros(tokens, HEADS, DIM).to(dtype),
        **{name: x for name, x in append.items() if name not in ("k", "v")},
        "positions": torch.randint(0, 20, (tokens,)),
        "cos_sin": rotary_cos_sin(torch.tensor([1.0, 0.3, 0.1, 0.01]), 20),
    }


def _qk_norm_rope_int8(tokens: int, dtype: torch.dtype) -> Arguments:
    arguments = _qk_norm_rope(tokens, dtype, torch.int8)
    arguments |= {"bias": torch.randn(arguments["qkv"].shape[1]).to(dtype), "interleaved": True}
    return arguments | {"q_weight": torch.randn(DIM).to(dtype), "k_weight": torch.randn(DIM)}


def _norm(tokens: int, dtype: torch.dtype) -> Arguments:
    return {"x": torch.randn(tokens, 40).to(dtype), "weight": torch.randn(40).to(dtype)}


def _norm_offset(tokens: int, dtype: torch.dtype) -> Arguments:
    x = torch.randn(tokens, 3, 40).to(dtype)
    return {"x": x, "weight": torch.randn(40), "eps": 1e-3, "weight_offset": 1.0}


def _layer_norm(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_norm(tokens, dtype), "bias": torch.randn(40).to(dtype)}


def _with_residual(
    make: Callable[[int, torch.dtype], Arguments],
) -> Callable[[int, torch.dtype], Arguments]:
    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        plain = make(tokens, dtype)
        return {**plain, "residual": torch.randn_like(plain["x"])}

    return arguments


def _activation(tokens: int, dtype: torch.dtype) -> Arguments:
    return {"x": torch.randn(tokens, 80).to(dtype)}


def _gelu_tanh(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_activation(tokens, dtype), "tanh_approx": True}


def _quantize(tokens: int, dtype: torch.dtype) -> Arguments:
    return {"x": torch.randn(tokens, 40).to(dtype)}


def _quantize_groups(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_quantize(tokens, dtype), "block": [1, 16]}


def _quantize_tensor(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_quantize(tokens, dtype), "block": [-1, -1]}


def _quantize_static(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_quantize(tokens, dtype), "scale": torch.rand(tokens, 1) + 0.01}


def _rotary(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        "q": torch.randn(tokens, HEADS, DIM).to(dtype),
        "k": torch.randn(tokens, KV_HEADS, DIM).to(dtype),
        "positions": torch.randint(0, 20, (tokens,)),
        "cos_sin": rotary_cos_sin(torch.tensor([1.0, 0.3, 0.1, 0.01]), 20),
        "interleaved": True,
    }


def _rotary_q(tokens: int, dtype: torch.dtype) -> Arguments:
    return {**_rotary(tokens, dtype), "k": None, "interleaved": False}


def _symmetric_gemm(bits: int) -> Callable[[int, torch.dtype], Arguments]:
    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        codes = torch.randint(0, 2**bits, (GEMM_N, GEMM_K))
        scales = torch.rand(-(-GEMM_K // 16), GEMM_N).to(dtype) + 0.5
        x = torch.randn(tokens, GEMM_K).to(dtype)
        return {"x": x, "qweight": pack_codes(codes, bits), "scales": scales, "group_size": 16}

    return arguments


def _gemm(bits: int) -> Callable[[int, torch.dtype], Arguments]:
    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        symmetric = _symmetric_gemm(bits)(tokens, dtype)
        return {
            **symmetric,
            "zeros": torch.rand_like(symmetric["scales"]) * 2**bits,
            "perm": torch.randperm(GEMM_K, dtype=torch.int32),
            "bias": torch.randn(GEMM_N),
        }

    return arguments


def _gated_gemm(bits: int) -> Callable[[int, torch.dtype], Arguments]:
    """Into fp8, with all that may be there."""

    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        n = 2 * GEMM_N
        return {
            **_gemm(bits)(tokens, dtype),
            "qweight": pack_codes(torch.randint(0, 2**bits, (n, GEMM_K)), bits),
            "scales": torch.rand(-(-GEMM_K // 16), n).to(dtype) + 0.5,
            "zeros": torch.rand(-(-GEMM_K // 16), n).to(dtype) * 2**bits,
            "bias": torch.randn(n),
            "norm_weight": torch.rand(GEMM_K).to(dtype),
            "norm_eps": 1e-5,
            "norm_weight_offset": 1.0,
            "outlier_offsets": torch.arange(n + 1, dtype=torch.int32) // 2,
            "outlier_columns": torch.randint(0, GEMM_K, (n // 2,), dtype=torch.int32),
            "outlier_values": torch.randn(n // 2),
            **_gated_to_fp8(torch.randn(tokens, GEMM_N).to(dtype)),
        }

    return arguments


def _gated_to_fp8(residual: Tensor) -> Arguments:
    return {
        "activation": "silu",
        "gated": True,
        "residual": residual,
        "out_scale": torch.full((1, 1), 0.5),
        "out_dtype": torch.float8_e4m3fn,
    }


def _scaled_mm(tokens: int, storage: torch.dtype, out: torch.dtype) -> Arguments:
    """Scales of rows; the same fraction of the codes' range whatever the storage."""
    a, b = ((torch.randn(rows, MM_K) * 20).to(storage) for rows in (tokens, MM_N))
    return {
        "a": a,
        "b": b,
        "a_scale": torch.rand(tokens, 1) + 0.5,
        "b_scale": torch.rand(MM_N, 1) + 0.5,
        "out_dtype": out,
    }


def _fp8_scaled_mm(tokens: int, dtype: torch.dtype) -> Arguments:
    arguments = _scaled_mm(tokens, torch.float8_e4m3fn, dtype)
    return arguments | {"bias": torch.randn(MM_N)}


def _fp8_block_scaled_mm(tokens: int, dtype: torch.dtype) -> Arguments:
    k_blocks = -(-MM_K // 128)
    return {
        **_fp8_scaled_mm(tokens, dtype),
        "a_scale": torch.rand(k_blocks, tokens).T + 0.5,
        "b_scale": torch.rand(-(-MM_N // 128), k_blocks) + 0.5,
    }


def _int8_scaled_mm(tokens: int, dtype: torch.dtype) -> Arguments:
    zero = torch.randint(-128, 128, (tokens, 1), dtype=torch.int32)
    return {**_symmetric_scaled_mm(tokens, dtype), "a_zero": zero, "bias": torch.randn(MM_N)}


def _symmetric_scaled_mm(tokens: int, dtype: torch.dtype) -> Arguments:
    return _scaled_mm(tokens, torch.int8, dtype)


def _gated_scaled_mm(
    make: Callable[[int, torch.dtype], Arguments],
) -> Callable[[int, torch.dtype], Arguments]:
    """An even number of features; into fp8, with all that may be there."""

    def arguments(tokens: int, dtype: torch.dtype) -> Arguments:
        given = make(tokens, dtype)
        given |= {name: given[name][1:] for name in ("b", "b_scale", "bias")}
        return given | _gated_to_fp8(torch.randn(tokens, MM_N // 2).to(dtype))

    return arguments


def _greedy(tokens: int, dtype: torch.dtype) -> Arguments:
    return {"logits": torch.randn(tokens, 50).to(dtype)}


def _sample(tokens: int, dtype: torch.dtype) -> Arguments:
    return {
        **_greedy(tokens, dtype),
        "temperature": torch.rand(tokens),
        "top_k": torch.randint(0, 50, (tokens,), dtype=torch.int32),
        "top_p": torch.rand(tokens) * 0.5 + 0.5,
        "min_p": torch.rand(tokens) * 0.1,
        "seeds": torch.arange(tokens),
        "positions": torch.arange(tokens) + 7,
    }


_MAKERS: dict[str, dict[str, Callable[[int, torch.dtype], Arguments]]] = {
    "flash_attention": {"plain": _dense, "tree": _dense_tree, "fp8": _fp8(_dense_tree)},
    "flash_attention_varlen": {"plain": _varlen, "tree": _varlen_tree, "fp8": _fp8(_varlen_tree)},
    "paged_attention": {"plain": _paged, "int8_tree": _paged_int8, "planned": _paged},
    "plan_attention": {"plain": _plan},
    "merge_attention_states": {"plain": _merge, "dense": _merge_dense},
    "append_paged_kv_cache_": {"plain": _append, "int8": _append_int8, "fp8": _append_fp8},
    "qk_norm_rope_append_": {"plain": _qk_norm_rope, "int8": _qk_norm_rope_int8},
    "rms_norm": {"plain": _norm, "offset": _norm_offset},
    "layer_norm": {"plain": _layer_norm, "no_bias": _norm_offset},
    "fused_add_rms_norm_": {"plain": _with_residual(_norm), "offset": _with_residual(_norm_offset)},
    "fused_add_layer_norm_": {"plain": _with_residual(_layer_norm)},
    "silu_and_mul": {"plain": _activation},
    "gelu_and_mul": {"plain": _activation, "tanh": _gelu_tanh},
    "quantize_fp8": {
        "plain": _quantize,
        "groups": _quantize_groups,
        "tensor": _quantize_tensor,
        "static": _quantize_static,
    },
    "quantize_int8": {"plain": _quantize, "groups": _quantize_groups, "static": _quantize_static},
    "quantize_int8_asymmetric": {"plain": _quantize},
    "rotary_embedding_": {"plain": _rotary, "q_only": _rotary_q},
    "int2_gemm": {"plain": _gemm(2), "gated": _gated_gemm(2)},
    "int3_gemm": {"plain": _gemm(3), "gated": _gated_gemm(3)},
    "int4_gemm": {
        "plain": _gemm(4),
        "symmetric": _symmetric_gemm(4),
        "gated": _gated_gemm(4),
    },
    "int8_gemm": {"plain": _gemm(8), "gated": _gated_gemm(8)},
    "fp8_scaled_mm": {
        "plain": _fp8_scaled_mm,
        "blocks": _fp8_block_scaled_mm,
        "gated": _gated_scaled_mm(_fp8_scaled_mm),
    },
    "int8_scaled_mm": {
        "plain": _int8_scaled_mm,
        "symmetric": _symmetric_scaled_mm,
        "gated": _gated_scaled_mm(_int8_scaled_mm),
    },
    "sample": {"plain": _sample, "greedy": _greedy},
}

VARIANTS = [(op, variant) for op, makers in _MAKERS.items() for variant in makers]


def make(
    op: str,
    variant: str = "plain",
    *,
    tokens: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Arguments:
    """Arguments of one valid call; the same values on every device."""
    arguments = on_device(_MAKERS[op][variant](tokens, dtype), device)
    if variant == "planned":
        arguments["plan"] = _plan_of(arguments, tokens)
    return arguments


def on_device(arguments: Arguments, device: str) -> Arguments:
    """The same call on another device."""
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def _plan_of(arguments: Arguments, tokens: int) -> Tensor:
    """Plans are opaque: one is made by the backend that reads it."""
    sizes = {"total_q": tokens, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    names = ("cu_seqlens_q", "seq_lens", "max_seqlen_q", "max_seqlen_k")
    return torch.ops.fastinfer.plan_attention(**sizes, **{n: arguments[n] for n in names})


def everything(op: str, device: str = "cpu") -> Arguments:
    """Arguments of one valid call in which every tensor argument of the op is there."""
    variants = {
        "flash_attention": "fp8",
        "flash_attention_varlen": "fp8",
        "paged_attention": "int8_tree",
        "append_paged_kv_cache_": "int8",
        "qk_norm_rope_append_": "int8",
        "quantize_fp8": "static",
        "quantize_int8": "static",
        **{f"int{bits}_gemm": "gated" for bits in (2, 3, 4, 8)},
        "fp8_scaled_mm": "gated",
        "int8_scaled_mm": "gated",
    }
    variant = variants.get(op, "plain")
    arguments = make(op, variant, device=device)
    if op == "paged_attention":
        arguments["plan"] = _plan_of(arguments, 5)
    return arguments


def receivers(op: str, arguments: Arguments) -> dict[str, Tensor]:
    """Fresh output tensors for `.out`, filled with what is not the result."""
    results = getattr(torch.ops.fastinfer, op).default(**copied(arguments))
    results = results if isinstance(results, tuple) else (results,)
    return {
        name: torch.full_like(result, 1 if result.dtype == torch.bool else -77)
        for name, result in zip(OUTPUTS[op], results, strict=True)
    }


def copied(arguments: Arguments) -> Arguments:
    """The same call on tensors of its own."""
    return {n: x.clone() if isinstance(x, Tensor) else x for n, x in arguments.items()}
