"""The attention kernel: one tile of query rows against a range of keys, for every layout.

A tile's rows are the query tokens of one sequence times the query heads that share a KV head, so
that grouped queries read K and V once: row r is token r // GROUP and head r % GROUP. The softmax is
online and in base 2. `UNIT` below is one tile of one KV head; it is either a program of its own
(dense and ragged prefill), or one of many that a persistent program takes from a plan.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2",
2023; Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastinfer.triton_kernels.launch import INTERPRETED

DENSE, RAGGED, PAGED = 0, 1, 2
"""Where keys are: [B, S, Hk, D]; [T, Hk, D] with cu_seqlens; pages behind a block table."""

FLOAT, INT8, FP8 = 0, 1, 2
"""How queries, keys and values are stored: in the dtype of the arithmetic; int8; e4m3 as raw bytes.

The arithmetic is that of q's dtype, and fp16 for e4m3 queries.
"""

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
_DENSE: tl.constexpr = tl.constexpr(DENSE)
_RAGGED: tl.constexpr = tl.constexpr(RAGGED)
_PAGED: tl.constexpr = tl.constexpr(PAGED)
_FLOAT: tl.constexpr = tl.constexpr(FLOAT)
_FP8: tl.constexpr = tl.constexpr(FP8)
_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # which has no bf16 products
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _decode(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Stored elements in the given dtype, exactly.

    e4m3 is decoded in integer arithmetic, so that GPUs without fp8 have it too: its exponent and
    mantissa in the place of fp16's give the value times 2^-8, subnormals included.
    """
    if FORMAT == _FLOAT:
        return x
    elif FORMAT == _FP8:
        bits = x.to(tl.int16)
        magnitude = bits & 0x7F
        half = ((bits & 0x80) << 8) | (magnitude << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where(magnitude == 0x7F, float("nan"), value).to(dtype)
    else:
        return x.to(tl.float32).to(dtype)


@triton.jit
def _tanh(x):
    # exp2 of a large argument is inf, and 1 - 2 / inf is 1. For small ones that would leave few
    # digits: there it is a polynomial, tanh(x) / x as a function of x^2 fitted up to 0.4.
    square = x * x
    tail = 0.13332735 + square * (-0.053845163 + square * (0.020968756 + square * -0.006054318))
    near = x + x * square * (-0.33333328 + square * tail)
    return tl.where(square < 0.4, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * _LOG2E))))


@triton.jit
def _popcount(x):
    """Bits set in the int64 elements; the halves are counted apart."""
    total = tl.zeros_like(x)
    for part in tl.static_range(2):
        v = (x >> (32 * part)) & 0xFFFFFFFF
        v = v - ((v >> 1) & 0x55555555)
        v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F
        total += ((v * 0x01010101) >> 24) & 0xFF
    return total.to(tl.int32)


@triton.jit
def _pages(
    table_row, stride, begin, low, high, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """The pages of keys [begin, begin + BLOCK_N): one, or one for each. Entries outside [low, high)
    may be anything and are not read.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        entry = tl.maximum(begin, low) // BLOCK_SIZE
        return tl.load(
            table_row + entry.to(tl.int64) * stride, mask=(begin < high) & (low < high), other=0
        ).to(tl.int64)
    else:
        n = begin + tl.arange(0, BLOCK_N)
        entries = table_row + (n // BLOCK_SIZE).to(tl.int64) * stride
        return tl.load(entries, mask=(n >= low) & (n < high), other=0).to(tl.int64)


@triton.jit
def _keys(
    acc, m, norm, q, start, stop, low, high, step_begin,
    k_base, v_base, k_stride_outer, k_stride_token, v_stride_outer, v_stride_token,
    k_scale_base, k_scale_outer, k_scale_token, v_scale_base, v_scale_outer, v_scale_token,
    table_row, table_stride, position, tree_bits, tree_row, window_left, window_right, factor,
    softcap,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, ROW_SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    TREE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr,
    ISOLATE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the keys [start, stop) into the running softmax.

    MASKED: some may be outside [low, high) or hidden from some rows. Otherwise all are seen by all.
    ROW_SCALED: factor, that of the scores, is one for each row and may have any sign.
    ISOLATE: NaN and infinite values make NaN of the rows that see them, and of no others. STAGES of
    the pipeline; None: those of the launch.
    """
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    dtype: tl.constexpr = q.dtype
    # Of all rows alike; it enters where it costs nothing, after the maximum.
    shared_factor = 1.0 if ROW_SCALED else factor
    if LAYOUT == _PAGED:
        pages = _pages(table_row, table_stride, start, low, high, BLOCK_N, BLOCK_SIZE)
    for begin in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        begin = tl.multiple_of(begin, BLOCK_N)
        n = begin + tl.arange(0, BLOCK_N)
        present = (n >= low) & (n < high)
        if LAYOUT == _PAGED:
            inside = (n % BLOCK_SIZE).to(tl.int64)
            if BLOCK_SIZE % BLOCK_N == 0:
                inside = ((begin % BLOCK_SIZE) + tl.arange(0, BLOCK_N)).to(tl.int64)
            k_rows = pages * k_stride_outer + inside * k_stride_token
            v_rows = pages * v_stride_outer + inside * v_stride_token
            if K_SCALED:
                k_scales = pages * k_scale_outer + inside * k_scale_token
            if V_SCALED:
                v_scales = pages * v_scale_outer + inside * v_scale_token
            # A tile ahead, so that no load of keys waits for a load of its page.
            pages = _pages(table_row, table_stride, begin + BLOCK_N, low, high, BLOCK_N, BLOCK_SIZE)
        else:
            k_rows = n.to(tl.int64) * k_stride_token
            v_rows = n.to(tl.int64) * v_stride_token

        k_at = k_base + k_rows[:, None] + d[None, :]
        if MASKED:
            if HEAD_DIM == D:
                k = tl.load(k_at, mask=present[:, None], other=0)
            else:
                k = tl.load(k_at, mask=present[:, None] & (d < HEAD_DIM)[None, :], other=0)
        elif HEAD_DIM == D:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(d < HEAD_DIM)[None, :], other=0)
        k = _decode(k, K_FORMAT, dtype)
        s = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if K_SCALED:
            if MASKED:
                s *= tl.load(k_scale_base + k_scales, mask=present, other=0.0)[None, :]
            else:
                s *= tl.load(k_scale_base + k_scales)[None, :]
        if ROW_SCALED:
            s *= factor[:, None]
        if SOFTCAP:
            s = (softcap * _LOG2E) * _tanh(s * (shared_factor / softcap))

        if MASKED:
            visible = present[None, :]
            if TREE:
                # A token of this step is seen if its bit is set; it stands where its depth says.
                own = n - step_begin
                index = tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)
                bit = (tree_bits[:, None] >> index[None, :]) & 1
                visible = visible & ((own < 0)[None, :] | (bit != 0))
            key_position = n
            if TREE and (LEFT or RIGHT):
                masks = tl.load(tree_row + index, mask=present & (own >= 0), other=0)
                key_position = tl.where(own < 0, n, step_begin + _popcount(masks) - 1)
            if LEFT:
                visible = visible & (key_position[None, :] >= (position - window_left)[:, None])
            if RIGHT:
                visible = visible & (key_position[None, :] <= (position + window_right)[:, None])
            s = tl.where(visible, s, float("-inf"))

        highest = tl.maximum(m, tl.max(s, 1))
        # A row that has seen nothing keeps -inf; subtracting it from -inf would be NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        if SOFTCAP:
            p = tl.exp2(s - base[:, None])
            alpha = tl.exp2(m - base)
        else:
            p = tl.exp2(s * shared_factor - (base * shared_factor)[:, None])
            alpha = tl.exp2((m - base) * shared_factor)
        m = highest
        norm = norm * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]

        v_at = v_base + v_rows[:, None] + dv[None, :]
        if MASKED:
            seen = present
            if TREE:
                # 0 * NaN: what no row sees must not be read.
                seen = present & (tl.max(visible.to(tl.int32), 0) != 0)
            if VALUE_DIM == DV:
                v = tl.load(v_at, mask=seen[:, None], other=0)
            else:
                v = tl.load(v_at, mask=seen[:, None] & (dv < VALUE_DIM)[None, :], other=0)
        elif VALUE_DIM == DV:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(dv < VALUE_DIM)[None, :], other=0)
        if V_SCALED:
            if MASKED:
                scale = tl.load(v_scale_base + v_scales, mask=seen, other=0.0)
            else:
                scale = tl.load(v_scale_base + v_scales)
            v = (_decode(v, V_FORMAT, tl.float32) * scale[:, None]).to(dtype)
        else:
            v = _decode(v, V_FORMAT, dtype)
        if ISOLATE:
            # Not v - v: with v a product, that contracts to a multiply-add, which is its rounding.
            spoiled = (tl.abs(v.to(tl.float32)) < float("inf")) == 0
            bad = tl.max(spoiled.to(tl.int32), 1) != 0
            hit = tl.max((visible & bad[None, :]).to(tl.int32), 1) != 0
            acc = tl.where(hit[:, None], float("nan"), acc)
            v = tl.where(spoiled, 0.0, v.to(tl.float32)).to(dtype)
        acc = _dot(p.to(dtype), v, acc, PRECISION)
    return acc, m, norm


@triton.jit
def _unit(
    sequence, kv_head, token_begin, token_count, sub_tile, key_begin, key_end, partial_row,
    q, k, v, out, lse, partial_out, partial_lse, cu_seqlens_q, cu_seqlens_k, seq_lens,
    block_table, q_scale, k_scale, v_scale, sinks, tree_mask,
    q_outer, q_token, q_head, k_outer, k_token, k_head, v_outer, v_token, v_head,
    out_outer, out_token, out_head, lse_outer, lse_head,
    k_scale_outer, k_scale_token, k_scale_head, v_scale_outer, v_scale_token, v_scale_head,
    table_outer, table_inner, tree_outer,
    seqlen_q, seqlen_k, window_left, window_right, factor, softcap, num_heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, Q_FORMAT: tl.constexpr, K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr, SCALE_SIGN: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, TREE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    ONE_TOKEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one KV head: tokens [token_begin, token_begin + token_count) of a sequence
    against keys [key_begin, key_end), or what they see of them. partial_row < 0: the result is
    final.
    """
    if LAYOUT == _DENSE:
        queries, keys = seqlen_q, seqlen_k
        q_first = sequence.to(tl.int64) * q_outer
        out_first = sequence.to(tl.int64) * out_outer
        lse_first = sequence.to(tl.int64) * lse_outer
        tree_first = sequence.to(tl.int64) * tree_outer
        k_base = k + sequence.to(tl.int64) * k_outer
        v_base = v + sequence.to(tl.int64) * v_outer
    else:
        first_token = tl.load(cu_seqlens_q + sequence)
        queries = tl.load(cu_seqlens_q + sequence + 1) - first_token
        q_first = first_token.to(tl.int64) * q_token
        out_first = first_token.to(tl.int64) * out_token
        lse_first = first_token.to(tl.int64)
        tree_first = first_token.to(tl.int64)
        if LAYOUT == _RAGGED:
            first_key = tl.load(cu_seqlens_k + sequence)
            keys = tl.load(cu_seqlens_k + sequence + 1) - first_key
            k_base = k + first_key.to(tl.int64) * k_token
            v_base = v + first_key.to(tl.int64) * v_token
        else:
            keys = tl.load(seq_lens + sequence)
            k_base = k
            v_base = v
    k_base += kv_head.to(tl.int64) * k_head
    v_base += kv_head.to(tl.int64) * v_head
    table_row = block_table
    # The scales of quantized pages; those of e4m3 tensors without pages are one for a head.
    K_SCALED: tl.constexpr = LAYOUT == _PAGED and K_FORMAT != _FLOAT
    V_SCALED: tl.constexpr = LAYOUT == _PAGED and V_FORMAT != _FLOAT
    ROW_SCALED: tl.constexpr = LAYOUT != _PAGED and (q_scale is not None or k_scale is not None)
    k_scale_base = k_scale
    v_scale_base = v_scale
    if LAYOUT == _PAGED:
        table_row += sequence.to(tl.int64) * table_outer
        if K_SCALED:
            k_scale_base += kv_head.to(tl.int64) * k_scale_head
        if V_SCALED:
            v_scale_base += kv_head.to(tl.int64) * v_scale_head

    # Rows.
    row = sub_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = token < token_count
    token = token_begin + token
    d = tl.arange(0, D)
    q_at = q + q_first + token.to(tl.int64)[:, None] * q_token
    q_at += head.to(tl.int64)[:, None] * q_head + d[None, :]
    q_tile = tl.load(q_at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0)
    q_tile = _decode(q_tile, Q_FORMAT, tl.float16)
    if SCALE_SIGN != 1:
        q_tile = (q_tile.to(tl.float32) * SCALE_SIGN).to(q_tile.dtype)

    # What the tile's rows see: [low, high), and all of them: [all_low, all_high).
    step_begin = keys - queries
    first_in_tile = token_begin + sub_tile * BLOCK_M // GROUP
    last_in_tile = token_begin + tl.minimum(
        token_count - 1, (sub_tile * BLOCK_M + BLOCK_M - 1) // GROUP
    )
    low = key_begin
    high = tl.minimum(key_end, keys)
    tree_row = tree_mask
    if TREE:
        tree_row += tree_first
        tree_bits = tl.load(tree_row + token, mask=real, other=0)
        position = step_begin + _popcount(tree_bits) - 1
        # Depths are between 0 and the tile's last token, at least -1 for an empty mask.
        first_position = step_begin - 1
        last_position = step_begin + queries - 1
        all_high = step_begin
    else:
        tree_bits = row.to(tl.int64)  # not read
        position = step_begin + token
        first_position = step_begin + first_in_tile
        last_position = step_begin + last_in_tile
        all_high = high
    all_low = low
    if LEFT:
        low = tl.maximum(low, first_position - window_left)
        all_low = tl.maximum(low, last_position - window_left)
    if RIGHT:
        high = tl.minimum(high, last_position + window_right + 1)
        all_high = tl.minimum(all_high, first_position + window_right + 1)
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    all_high = tl.minimum(all_high, high)

    scaled = factor if SOFTCAP else factor * _LOG2E
    if ROW_SCALED:
        scaled = tl.full([BLOCK_M], 1.0, tl.float32) * scaled
        if q_scale is not None:
            scaled *= tl.load(q_scale + head, mask=real, other=0.0)
        if k_scale is not None:
            scaled *= tl.load(k_scale + kv_head)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    start = low // BLOCK_N * BLOCK_N
    if not ONE_TOKEN:
        # Tiles that all rows see entirely need no masks, and most are of this kind. With one token
        # masks are nothing beside the loads, and one loop keeps the pipeline full.
        full_begin = tl.cdiv(tl.maximum(all_low, low), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, tl.cdiv(high, BLOCK_N) * BLOCK_N)
        full_end = tl.maximum(all_high // BLOCK_N * BLOCK_N, full_begin)
        if LEFT:
            acc, m, norm = _keys(
                acc, m, norm, q_tile, start, full_begin, low, high, step_begin,
                k_base, v_base, k_outer, k_token, v_outer, v_token,
                k_scale_base, k_scale_outer, k_scale_token, v_scale_base, v_scale_outer,
                v_scale_token, table_row, table_inner, position, tree_bits, tree_row, window_left,
                window_right, scaled, softcap, HEAD_DIM, VALUE_DIM, D, DV, BLOCK_N, LAYOUT,
                BLOCK_SIZE, K_FORMAT, V_FORMAT, K_SCALED, V_SCALED, ROW_SCALED,
                SOFTCAP, TREE, LEFT, RIGHT, True, False, None, PRECISION,
            )  # fmt: skip
        else:
            full_begin = tl.minimum(full_begin, start)
            full_end = tl.maximum(all_high // BLOCK_N * BLOCK_N, full_begin)
        acc, m, norm = _keys(
            acc, m, norm, q_tile, full_begin, full_end, low, high, step_begin,
            k_base, v_base, k_outer, k_token, v_outer, v_token,
            k_scale_base, k_scale_outer, k_scale_token, v_scale_base, v_scale_outer,
            v_scale_token, table_row, table_inner, position, tree_bits, tree_row, window_left,
            window_right, scaled, softcap, HEAD_DIM, VALUE_DIM, D, DV, BLOCK_N, LAYOUT,
            BLOCK_SIZE, K_FORMAT, V_FORMAT, K_SCALED, V_SCALED, ROW_SCALED,
            SOFTCAP, TREE, LEFT, RIGHT, False, False, None, PRECISION,
        )  # fmt: skip
        start = full_end
    acc, m, norm = _keys(
        acc, m, norm, q_tile, start, high, low, high, step_begin,
        k_base, v_base, k_outer, k_token, v_outer, v_token,
        k_scale_base, k_scale_outer, k_scale_token, v_scale_base, v_scale_outer,
        v_scale_token, table_row, table_inner, position, tree_bits, tree_row, window_left,
        window_right, scaled, softcap, HEAD_DIM, VALUE_DIM, D, DV, BLOCK_N, LAYOUT,
        BLOCK_SIZE, K_FORMAT, V_FORMAT, K_SCALED, V_SCALED, ROW_SCALED,
        SOFTCAP, TREE, LEFT, RIGHT, True, False, None, PRECISION,
    )  # fmt: skip
    if (LEFT or RIGHT or TREE) and not ONE_TOKEN:  # noqa: SIM102 (decided by the compiler)
        # 0 * NaN: a NaN or an infinity among the values has reached rows that do not see it. The
        # tile is computed again in a way that keeps them apart, in steps that are small so that
        # this rare case takes no registers from the others.
        if tl.max(tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 1), 0) != 0:
            acc, m, norm = _keys(
                tl.zeros([BLOCK_M, DV], tl.float32),
                tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                q_tile, low // 16 * 16, high, low, high, step_begin,
                k_base, v_base, k_outer, k_token, v_outer, v_token,
                k_scale_base, k_scale_outer, k_scale_token, v_scale_base, v_scale_outer,
                v_scale_token, table_row, table_inner, position, tree_bits, tree_row, window_left,
                window_right, scaled, softcap, HEAD_DIM, VALUE_DIM, D, DV, 16, LAYOUT,
                BLOCK_SIZE, K_FORMAT, V_FORMAT, K_SCALED, V_SCALED, ROW_SCALED,
                SOFTCAP, TREE, LEFT, RIGHT, True, True, 1, PRECISION,
            )  # fmt: skip

    # Results: m in base 2, lse natural and without the sink.
    if not SOFTCAP and not ROW_SCALED:
        m = m * scaled
    empty = norm == 0.0
    row_lse = tl.where(empty, float("-inf"), m * _LN2 + tl.log(norm))
    if LAYOUT != _PAGED and v_scale is not None:
        acc *= tl.load(v_scale + kv_head)
    dv = tl.arange(0, DV)
    store = real[:, None] & (dv < VALUE_DIM)[None, :]
    if partial_row < 0:
        total = norm
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0)
            total += tl.exp2(sink * _LOG2E - m)
        result = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
        out_at = out + out_first + token.to(tl.int64)[:, None] * out_token
        out_at += head.to(tl.int64)[:, None] * out_head + dv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=store)
        lse_at = lse + lse_first + head.to(tl.int64) * lse_head + token.to(tl.int64)
        tl.store(lse_at, row_lse, mask=real)
    else:
        result = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, norm)[:, None])
        at = (partial_row + token - token_begin).to(tl.int64) * num_heads + head
        tl.store(partial_out + at[:, None] * VALUE_DIM + dv[None, :], result, mask=store)
        tl.store(partial_lse + at, row_lse, mask=real)


# What changes from step to step: no new code for that.
_VARYING = [
    "plan", "cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table", "tree_mask", "lse_outer",
    "lse_head", "table_outer", "table_inner", "tree_outer", "seqlen_q", "seqlen_k",
    "window_left", "window_right", "tile_tokens", "num_programs",
]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def attention_kernel(
    q, k, v, out, lse, partial_out, partial_lse, plan, cu_seqlens_q, cu_seqlens_k, seq_lens,
    block_table, q_scale, k_scale, v_scale, sinks, tree_mask,
    q_outer, q_token, q_head, k_outer, k_token, k_head, v_outer, v_token, v_head,
    out_outer, out_token, out_head, lse_outer, lse_head,
    k_scale_outer, k_scale_token, k_scale_head, v_scale_outer, v_scale_token, v_scale_head,
    table_outer, table_inner, tree_outer,
    seqlen_q, seqlen_k, window_left, window_right, factor, softcap, num_heads, num_kv_heads,
    tile_tokens, num_programs,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUB_TILES: tl.constexpr,
    LAYOUT: tl.constexpr, BLOCK_SIZE: tl.constexpr, Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, SCALE_SIGN: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, ONE_TOKEN: tl.constexpr, PLANNED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All units of a call. Strides are in elements: outer is a sequence of a dense tensor or a
    block of a paged one.

    PLANNED: persistent programs take the plan's wide (WIDE) or narrow items in turn. Otherwise the
    grid is (tiles * SUB_TILES, KV heads, sequences), the last tile first: under a causal mask it is
    the longest.
    """
    if PLANNED:
        num_items = tl.load(plan + 1)
        num_wide = tl.load(plan + 14)
        if WIDE:
            first_item = 0
            count = num_wide
        else:
            first_item = num_wide
            count = num_items - num_wide
        units = count * num_kv_heads * SUB_TILES
        for unit in range(tl.program_id(0), units, num_programs):
            sub_tile = unit % SUB_TILES
            kv_head = unit // SUB_TILES % num_kv_heads
            item = plan + (2 + first_item + unit // (SUB_TILES * num_kv_heads)) * 8
            _unit(
                tl.load(item), kv_head, tl.load(item + 1), tl.load(item + 2), sub_tile,
                tl.load(item + 3), tl.load(item + 4), tl.load(item + 5),
                q, k, v, out, lse, partial_out, partial_lse, cu_seqlens_q, cu_seqlens_k,
                seq_lens, block_table, q_scale, k_scale, v_scale, sinks, tree_mask,
                q_outer, q_token, q_head, k_outer, k_token, k_head, v_outer, v_token, v_head,
                out_outer, out_token, out_head, lse_outer, lse_head,
                k_scale_outer, k_scale_token, k_scale_head, v_scale_outer, v_scale_token,
                v_scale_head, table_outer, table_inner, tree_outer,
                seqlen_q, seqlen_k, window_left, window_right, factor, softcap, num_heads,
                GROUP, HEAD_DIM, VALUE_DIM, D, DV, BLOCK_M, BLOCK_N, LAYOUT, BLOCK_SIZE,
                Q_FORMAT, K_FORMAT, V_FORMAT, SCALE_SIGN, SOFTCAP, SINKS, TREE, LEFT, RIGHT,
                ONE_TOKEN, PRECISION,
            )  # fmt: skip
    else:
        last = tl.num_programs(0) - 1 - tl.program_id(0)
        sub_tile = last % SUB_TILES
        token_begin = last // SUB_TILES * tile_tokens
        sequence = tl.program_id(2)
        if LAYOUT == _DENSE:
            queries = seqlen_q
            keys = seqlen_k
        else:
            queries = tl.load(cu_seqlens_q + sequence + 1) - tl.load(cu_seqlens_q + sequence)
            keys = tl.load(cu_seqlens_k + sequence + 1) - tl.load(cu_seqlens_k + sequence)
        if token_begin < queries:
            _unit(
                sequence, tl.program_id(1), token_begin,
                tl.minimum(tile_tokens, queries - token_begin), sub_tile, 0, keys, -1,
                q, k, v, out, lse, partial_out, partial_lse, cu_seqlens_q, cu_seqlens_k,
                seq_lens, block_table, q_scale, k_scale, v_scale, sinks, tree_mask,
                q_outer, q_token, q_head, k_outer, k_token, k_head, v_outer, v_token, v_head,
                out_outer, out_token, out_head, lse_outer, lse_head,
                k_scale_outer, k_scale_token, k_scale_head, v_scale_outer, v_scale_token,
                v_scale_head, table_outer, table_inner, tree_outer,
                seqlen_q, seqlen_k, window_left, window_right, factor, softcap, num_heads,
                GROUP, HEAD_DIM, VALUE_DIM, D, DV, BLOCK_M, BLOCK_N, LAYOUT, BLOCK_SIZE,
                Q_FORMAT, K_FORMAT, V_FORMAT, SCALE_SIGN, SOFTCAP, SINKS, TREE, LEFT, RIGHT,
                ONE_TOKEN, PRECISION,
            )  # fmt: skip
