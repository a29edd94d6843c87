"""What every op computes, in plain PyTorch: the specification that each kernel is tested against.

A function here has its op's name and options, reads its inputs and never changes them: what an op
does in place is returned as fresh tensors. All arithmetic is done in `dtype`, float64 unless told
otherwise. Called with the inputs' own dtype, the same code is the plain eager PyTorch version of
the op, whose error against float64 is the yardstick for a kernel's (`helpers.assert_accurate`).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INT8_MAX = 127.0
FP8_MAX = 448.0


def single_threaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run it on one thread: on a busy machine waiting for a second one costs more than the sums."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **options)
        finally:
            torch.set_num_threads(threads)

    return run


# ------------------------------------------------------------------------------------- attention


def popcount(mask: Tensor) -> Tensor:
    """Number of set bits of each int64, the sign bit included."""
    bits = torch.arange(64, device=mask.device)
    return ((mask.unsqueeze(-1) >> bits) & 1).sum(-1)


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Which key each query of one sequence sees: bool [num_queries, num_keys].

    Queries are the sequence's last tokens, so query i stands at num_keys - num_queries + i. With a
    tree mask, a token's place is the depth that its mask gives it, as a query and as a key.
    """
    first = num_keys - num_queries  # key index of query 0; negative if there are more queries
    key_index = torch.arange(num_keys)
    query_position = first + torch.arange(num_queries)
    key_position = key_index
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
    if tree_mask is not None and num_queries > 0:
        tree_mask = tree_mask.cpu()
        query_position = first + popcount(tree_mask) - 1
        in_step = key_index >= first
        token = (key_index - first).clamp(0, num_queries - 1)
        key_position = torch.where(in_step, query_position[token], key_index)
        visible = ~in_step | ((tree_mask[:, None] >> token) & 1).bool()
    elif causal:
        window_right = 0
    distance = key_position[None, :] - query_position[:, None]
    if window_left >= 0:
        visible = visible & (distance >= -window_left)
    if window_right >= 0:
        visible = visible & (distance <= window_right)
    return visible


@single_threaded
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Sq, H, D], k [Sk, Hk, D], v [Sk, Hk, Dv] -> out [Sq, H, Dv], lse [H, Sq]."""
    num_queries, num_heads, head_dim = q.shape
    num_keys = k.shape[0]
    group = num_heads // k.shape[1]
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    queries = q.to(dtype).transpose(0, 1)  # [H, Sq, D]
    keys = k.to(dtype).transpose(0, 1).repeat_interleave(group, 0)  # [H, Sk, D]
    values = v.to(dtype).transpose(0, 1).repeat_interleave(group, 0)
    visible = visible_keys(
        num_queries,
        num_keys,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        tree_mask=tree_mask,
    ).to(q.device)
    if num_keys == 0:
        out = torch.zeros(num_queries, num_heads, v.shape[-1], dtype=dtype, device=q.device)
        return out, torch.full((num_heads, num_queries), -torch.inf, dtype=dtype, device=q.device)

    scores = queries @ keys.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = torch.where(visible, scores, -torch.inf)
    largest = scores.amax(-1, keepdim=True)  # [H, Sq, 1]
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.where(visible, torch.exp(scores - largest), 0.0)
    total = weights.sum(-1, keepdim=True)
    lse = torch.log(total) + largest
    denominator = total
    if sinks is not None:
        # A sink far above every score makes this infinite, and the weights 0: the right limit.
        denominator = total + torch.exp(sinks.to(dtype)[:, None, None] - largest)
    empty = ~visible.any(-1)[None, :, None]
    out = weighted_sum(weights / denominator.masked_fill(empty, 1.0), values, visible)
    out = torch.where(empty, 0.0, out)
    lse = torch.where(empty, -torch.inf, lse)
    return out.transpose(0, 1), lse.squeeze(-1)


def weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights @ values, where a NaN or infinity counts exactly for the rows that see it."""
    out = weights @ torch.where(values.isfinite(), values, 0.0)
    if values.isfinite().all():
        return out
    seen = visible.double()
    plus = seen @ values.isposinf().double() > 0
    minus = seen @ values.isneginf().double() > 0
    nan = seen @ values.isnan().double() > 0
    out = torch.where(plus, torch.inf, out)
    out = torch.where(minus, -torch.inf, out)
    return torch.where(nan | (plus & minus), torch.nan, out)


@single_threaded
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, tree_mask: Tensor | None = None, **options
) -> tuple[Tensor, Tensor]:
    """Dense: q [B, Sq, H, D] -> out [B, Sq, H, Dv], lse [B, H, Sq]."""
    rows = []
    for b in range(q.shape[0]):
        mask = None if tree_mask is None else tree_mask[b]
        rows.append(attend(q[b], k[b], v[b], tree_mask=mask, **options))
    if not rows:
        dtype = options.get("dtype", torch.float64)
        batch, seqlen, heads, _ = q.shape
        out = torch.empty(batch, seqlen, heads, v.shape[-1], dtype=dtype, device=q.device)
        return out, torch.empty(batch, heads, seqlen, dtype=dtype, device=q.device)
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


@single_threaded
def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    tree_mask: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Ragged: q [Tq, H, D] -> out [Tq, H, Dv], lse [H, Tq]."""
    keys = list(zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True))
    return _ragged(
        q,
        [(k[begin:end], v[begin:end]) for begin, end in keys],
        v.shape[-1],
        cu_seqlens_q,
        tree_mask,
        options,
    )


def _ragged(
    q: Tensor,
    sequences: list[tuple[Tensor, Tensor]],
    value_dim: int,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None,
    options: dict,
) -> tuple[Tensor, Tensor]:
    dtype = options.get("dtype", torch.float64)
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
    bounds = cu_seqlens_q.tolist()
    for (k, v), begin, end in zip(sequences, bounds[:-1], bounds[1:], strict=True):
        mask = None if tree_mask is None else tree_mask[begin:end]
        out[begin:end], lse[:, begin:end] = attend(q[begin:end], k, v, tree_mask=mask, **options)
    return out, lse


def read_pages(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """The first `length` tokens of one sequence: [length, Hk, D] in `dtype`, dequantized.

    Only the pages that hold them are looked at.
    """
    block_size = cache.shape[2]
    used = blocks[: -(-length // block_size)].long()
    tokens = cache[used].to(dtype).transpose(1, 2).flatten(0, 1)[:length]
    if scale is None:
        return tokens
    if scale.dim() == 1:
        return tokens * scale.to(dtype)[None, :, None]
    return tokens * scale[used].to(dtype).transpose(1, 2).flatten(0, 1)[:length, :, None]


@single_threaded
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    causal: bool = True,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Ragged queries over pages: q [T, H, D] -> out [T, H, Dv], lse [H, T]."""
    dtype = options.get("dtype", torch.float64)
    sequences = [
        (
            read_pages(k_cache, k_scale, block_table[b], length, dtype),
            read_pages(v_cache, v_scale, block_table[b], length, dtype),
        )
        for b, length in enumerate(seq_lens.tolist())
    ]
    options = {**options, "causal": causal}
    return _ragged(q, sequences, v_cache.shape[-1], cu_seqlens_q, tree_mask, options)


@single_threaded
def merge_attention_states(
    outs: Tensor,
    lses: Tensor,
    *,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """outs [S, ..., T, H, Dv], lses [S, ..., H, T] -> out [..., T, H, Dv], lse [..., H, T]."""
    lses = lses.to(dtype)
    largest = lses.amax(0)  # [..., H, T]
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - largest)  # [S, ..., H, T]
    total = weights.sum(0)
    denominator = total
    if sinks is not None:
        denominator = total + torch.exp(sinks.to(dtype)[:, None] - largest)
    per_row = weights.transpose(-1, -2).unsqueeze(-1)  # [S, ..., T, H, 1]
    summed = torch.where(per_row == 0, 0.0, outs.to(dtype) * per_row).sum(0)
    empty = (total == 0).transpose(-1, -2).unsqueeze(-1)
    divisor = denominator.transpose(-1, -2).unsqueeze(-1)
    out = torch.where(empty, 0.0, summed / divisor.masked_fill(empty, 1.0))
    return out, torch.log(total) + largest


# -------------------------------------------------------------------------------------- KV cache


def quantize_rows(x: Tensor, storage: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, Hk, D] -> (stored [T, Hk, D], scale [T, Hk]); defined in float32, so bit-exact.

    Without a scale, one is taken from each row: amax / 127 or amax / 448, and 1 for a zero row.
    """
    limit = INT8_MAX if storage == torch.int8 else FP8_MAX
    x = x.float()
    if scale is None:
        scale = x.abs().amax(-1) / limit
        scale = torch.where(scale == 0, 1.0, scale)
    else:
        scale = scale.float().expand(x.shape[:2])
    scaled = x / scale.unsqueeze(-1)
    if storage == torch.int8:
        scaled = torch.round(scaled)
    return scaled.clamp(-limit, limit).to(storage), scale


@single_threaded
def append_paged_kv_cache_(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The caches and scales as they are afterwards: (k_cache, v_cache, k_scale, v_scale)."""
    k_cache, k_scale = _append(k, k_cache, slot_mapping, k_scale)
    v_cache, v_scale = _append(v, v_cache, slot_mapping, v_scale)
    return k_cache, v_cache, k_scale, v_scale


def _append(
    x: Tensor, cache: Tensor, slot_mapping: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    block_size = cache.shape[2]
    tokens = (slot_mapping >= 0).nonzero().squeeze(-1)
    slots = slot_mapping[tokens]
    block, offset = slots // block_size, slots % block_size
    rows = x[tokens]
    cache = cache.clone()
    if scale is None:
        cache[block, :, offset] = rows
        return cache, None
    per_token = scale.dim() == 3
    stored, row_scale = quantize_rows(rows, cache.dtype, None if per_token else scale)
    cache.view(torch.uint8)[block, :, offset] = stored.view(torch.uint8)
    if per_token:
        scale = scale.clone()
        scale[block, :, offset] = row_scale
    return cache, scale


@single_threaded
def qk_norm_rope_append_(
    qkv: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    bias: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(q_out, k_cache, v_cache, k_scale, v_scale) afterwards.

    q_out and pages that are not quantized are in `dtype`; what is quantized is rounded to qkv's.
    """
    heads, dim = q_out.shape[1:]
    kv_heads, value_dim = v_cache.shape[1], v_cache.shape[3]
    x = qkv.to(dtype) if bias is None else qkv.to(dtype) + bias.to(dtype)
    parts = x.split((heads * dim, kv_heads * dim, kv_heads * value_dim), dim=1)
    q, k = parts[0].unflatten(1, (heads, dim)), parts[1].unflatten(1, (kv_heads, dim))
    v = parts[2].unflatten(1, (kv_heads, value_dim))
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps, weight_offset=weight_offset, dtype=dtype)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps, weight_offset=weight_offset, dtype=dtype)
    if positions is not None and cos_sin is not None:
        q, turned = rotary_embedding_(
            q, k, positions, cos_sin, interleaved=interleaved, dtype=dtype
        )
        assert turned is not None
        k = turned
    stored = []
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is None:
            stored.append(_append(rows, cache.to(dtype), slot_mapping, None))
        else:
            stored.append(_append(rows.to(qkv.dtype), cache, slot_mapping, scale))
    return q, stored[0][0], stored[1][0], stored[0][1], stored[1][1]


# --------------------------------------------------------------- normalisation and activations


@single_threaded
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset)."""
    x = x.to(dtype)
    variance = x.square().mean(-1, keepdim=True)
    return x / torch.sqrt(variance + eps) * (weight.to(dtype) + weight_offset)


@single_threaded
def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, with the biased variance."""
    centred = x.to(dtype) - x.to(dtype).mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    out = centred / torch.sqrt(variance + eps) * (weight.to(dtype) + weight_offset)
    return out if bias is None else out + bias.to(dtype)


def add_to_residual(x: Tensor, residual: Tensor) -> Tensor:
    """The residual stream after the addition, rounded once to the residual's dtype."""
    return (residual.double() + x.double()).to(residual.dtype)


@single_threaded
def fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **options
) -> tuple[Tensor, Tensor]:
    """(x, residual) afterwards: the sum is stored first, then the stored sum is normalised."""
    residual = add_to_residual(x, residual)
    return rms_norm(residual, weight, eps, **options), residual


@single_threaded
def fused_add_layer_norm_(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options,
) -> tuple[Tensor, Tensor]:
    """(x, residual) afterwards: the sum is stored first, then the stored sum is normalised."""
    residual = add_to_residual(x, residual)
    return layer_norm(residual, weight, bias, eps, **options), residual


@single_threaded
def silu_and_mul(x: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """silu(a) * b for x = [a, b] along the last dimension."""
    a, b = x.to(dtype).chunk(2, -1)
    return a * torch.sigmoid(a) * b


@single_threaded
def gelu_and_mul(
    x: Tensor, *, tanh_approx: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    """gelu(a) * b for x = [a, b]; gelu by erf, or by its tanh approximation."""
    a, b = x.to(dtype).chunk(2, -1)
    if tanh_approx:
        # (1 + tanh(y)) / 2 is sigmoid(2 y), which keeps its digits where tanh is near -1.
        inner = math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3)
        return a * torch.sigmoid(2.0 * inner) * b
    # erfc keeps the digits that 1 + erf loses where a is far below zero.
    return 0.5 * a * torch.special.erfc(-a / math.sqrt(2.0)) * b


# ----------------------------------------------------------------------------------------- rotary


def rotary_cos_sin(inv_freq: Tensor, num_positions: int) -> Tensor:
    """float32 [P, R]: cos then sin of position * inv_freq, the angle in float64."""
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * inv_freq.double()
    return torch.cat([angle.cos(), angle.sin()], -1).float()


@single_threaded
def rotary_embedding_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """(q, k) afterwards. The first R features of each head are turned in pairs."""
    rows = cos_sin[positions].to(dtype)
    cos, sin = rows.unsqueeze(1).chunk(2, -1)  # [T, 1, R/2]

    def turn(x: Tensor) -> Tensor:
        x = x.to(dtype, copy=True)
        first, second = rotary_pairs(x, cos_sin.shape[1], interleaved)
        turned = first * cos - second * sin, first * sin + second * cos
        first.copy_(turned[0])
        second.copy_(turned[1])
        return x

    return turn(q), None if k is None else turn(k)


def rotary_pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two members of every pair: (i, i + R/2), or interleaved (2i, 2i + 1)."""
    rotated = x[..., :rotary_dim]
    if interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    return rotated[..., : rotary_dim // 2], rotated[..., rotary_dim // 2 :]


# --------------------------------------------------------------------------------------- sampling

_WORD = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 of counter [..., 4] and key [..., 2], 32-bit words held in int64.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A product of two words
    may pass 2^63, but int64 wraps and its low 64 bits, all that is used, stay right.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


def random_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """r_i for every row and token: int64 [B, vocab] in [0, 2^32)."""
    group = torch.arange(-(-vocab // 4))[None, :]
    seeds, positions = seeds.cpu()[:, None], positions.cpu()[:, None]
    counter = torch.stack(
        torch.broadcast_tensors(
            group, positions & _WORD, (positions >> 32) & _WORD, torch.zeros(1, 1, dtype=torch.long)
        ),
        -1,
    )
    key = torch.stack([seeds & _WORD, (seeds >> 32) & _WORD], -1)
    return philox4x32(counter, key).flatten(1)[:, :vocab]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """-log(-log(u)) with u = (r + 0.5) / 2^32, float64 [B, vocab]."""
    uniform = (random_words(seeds, positions, vocab).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


@dataclass(frozen=True)
class Sampled:
    """token_ids int64 [B], valid bool [B]; scores float64 [B, V]: -inf where a token is not kept,
    the perturbed logit otherwise (of a greedy row, the logit itself)."""

    token_ids: Tensor
    valid: Tensor
    scores: Tensor


def kept_tokens(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row x [V] (logits / temperature) stay candidates: bool [V]."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if x.isposinf().any():
        return x.isposinf()
    if 0 < top_k < x.numel():
        keep = x >= x.sort(descending=True).values[top_k - 1]
    in_top_k = keep
    if top_p < 1:
        probs = torch.softmax(torch.where(in_top_k, x, -torch.inf), 0)
        order = x.sort(descending=True)
        mass = probs[order.indices].cumsum(0)
        # Mass of the strictly larger: that before the first of an equal run.
        first = torch.searchsorted(-order.values, -x)
        larger = torch.where(first > 0, mass[(first - 1).clamp(min=0)], 0.0)
        keep = keep & (larger < top_p)
    if min_p > 0:
        keep = keep & (torch.exp(x - x.max()) >= min_p)
    return keep


@single_threaded
def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Sampled:
    """One token a row; see `Sampled`."""
    x = logits.double().cpu()
    batch, vocab = x.shape
    nan = x.isnan()
    valid = ~nan.any(-1) & (x > -torch.inf).any(-1)
    scores = x.masked_fill(nan, -torch.inf)
    warm = torch.zeros(batch) if temperature is None else temperature.double().cpu()
    drawn = ((warm > 0) & valid).nonzero().squeeze(-1).tolist()
    if drawn:
        assert seeds is not None and positions is not None
        noise = gumbel_noise(seeds[drawn], positions[drawn], vocab)
    for i, row in enumerate(drawn):
        scaled = x[row] / warm[row]
        keep = kept_tokens(
            scaled,
            0 if top_k is None else int(top_k[row]),
            1.0 if top_p is None else float(top_p[row]),
            0.0 if min_p is None else float(min_p[row]),
        )
        scores[row] = torch.where(keep, scaled + noise[i], -torch.inf)
    lowest = torch.arange(vocab).expand(batch, vocab)
    best = scores == scores.amax(-1, keepdim=True)
    token_ids = torch.where(best, lowest, vocab).amin(-1)
    return Sampled(token_ids.clamp(max=vocab - 1), valid, scores)
