"""The reference itself, against torch's own ops in float64, brute force and published vectors."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests import helpers, reference


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (5, 5), (3, 9)])
def test_attention_equals_torch_sdpa(sq: int, sk: int, causal: bool) -> None:
    q, k, v = double(2, sq, 6, 8), double(2, sk, 2, 8), double(2, sk, 2, 5)
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq) if causal else None
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    out, lse = reference.flash_attention(q, k, v, scale=0.3, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert lse.shape == (2, 6, sq)


def brute_attention(q, k, v, visible, scale, softcap, sink):
    """One query [D] over keys, by Python loops."""
    scores = []
    for j in range(k.shape[0]):
        s = scale * sum(float(a) * float(b) for a, b in zip(q, k[j], strict=True))
        scores.append(softcap * math.tanh(s / softcap) if softcap > 0 else s)
    seen = [j for j in range(k.shape[0]) if visible(j)]
    if not seen:
        return [0.0] * v.shape[1], -math.inf
    total = sum(math.exp(scores[j]) for j in seen)
    lse = math.log(total)
    total += 0.0 if sink is None else math.exp(sink)
    out = [
        sum(math.exp(scores[j]) * float(v[j, d]) for j in seen) / total for d in range(v.shape[1])
    ]
    return out, lse


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize(
    ("causal", "left", "right"), [(False, 2, -1), (False, 2, 1), (True, -1, 3), (True, 0, -1)]
)
@pytest.mark.parametrize(("sq", "sk"), [(4, 7), (6, 3), (2, 0)])
def test_attention_options_equal_brute_force(sq, sk, causal, left, right, with_sink, softcap):
    q, k, v = double(sq, 2, 3), double(sk, 1, 3), double(sk, 1, 4)
    sinks = double(2) if with_sink else None
    out, lse = reference.attend(
        q, k, v, scale=0.7, causal=causal, window_left=left, window_right=right,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    for i in range(sq):
        position = sk - sq + i

        def visible(j: int, position: int = position) -> bool:
            last = 0 if causal else right
            return (left < 0 or j >= position - left) and (last < 0 or j <= position + last)

        for h in range(2):
            sink = None if sinks is None else float(sinks[h])
            row, row_lse = brute_attention(q[i, h], k[:, 0], v[:, 0], visible, 0.7, softcap, sink)
            assert out[i, h].tolist() == pytest.approx(row, abs=1e-12)
            assert float(lse[h, i]) == pytest.approx(row_lse, abs=1e-12)


def test_tree_mask_of_a_chain_is_causal() -> None:
    q, k, v = double(5, 2, 4), double(9, 2, 4), double(9, 2, 4)
    chain = torch.tensor([(1 << (i + 1)) - 1 for i in range(5)])
    for window in (-1, 0, 2):
        expected = reference.attend(q, k, v, causal=True, window_left=window)
        actual = reference.attend(q, k, v, tree_mask=chain, window_left=window)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_tree_mask_siblings_share_a_position() -> None:
    # Token 0 is the root, 1 and 2 its children, 3 the child of 2; two earlier tokens.
    mask = torch.tensor([0b0001, 0b0011, 0b0101, 0b1101])
    everything = reference.visible_keys(4, 6, tree_mask=mask)
    assert everything.int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 1, 0, 1, 1],
    ]
    near = reference.visible_keys(4, 6, tree_mask=mask, window_left=1)
    assert near.int().tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_tree_mask_reaches_bit_63_and_more_queries_than_keys() -> None:
    mask = torch.zeros(64, dtype=torch.int64)
    mask[63] = -(2**63) | 1
    assert reference.popcount(mask).tolist() == [0] * 63 + [2]
    assert reference.visible_keys(64, 64, tree_mask=mask)[63].nonzero().flatten().tolist() == [
        0,
        63,
    ]
    assert reference.visible_keys(64, 62, tree_mask=mask)[63].nonzero().flatten().tolist() == [61]


def test_nan_and_infinity_reach_exactly_the_rows_that_see_them() -> None:
    q, k, v = torch.zeros(4, 1, 2), torch.zeros(4, 1, 2), torch.ones(4, 1, 1)
    v[1], v[3] = math.inf, math.nan
    out, _ = reference.attend(q, k, v, causal=True)
    assert str(out.flatten().tolist()) == "[1.0, inf, inf, nan]"
    v[2] = -math.inf
    out, _ = reference.attend(q, k, v, causal=True)
    assert str(out.flatten().tolist()) == "[1.0, inf, nan, nan]"


def test_paged_equals_ragged_over_the_same_tokens() -> None:
    lengths, counts = [0, 5, 16, 33], [0, 2, 1, 7]
    q = double(sum(counts), 4, 8)
    cu_q = helpers.cumulative(counts)
    for layout in ("HND", "NHD"):
        pages = helpers.make_pages(lengths, head_dim=8, block_size=8, layout=layout)
        blocks = pages.block_table.long()
        keys, values = (
            torch.cat([
                torch.stack([cache[blocks[b, t // 8], :, t % 8] for t in range(n)])
                for b, n in enumerate(lengths) if n
            ])
            for cache in (pages.k_cache, pages.v_cache)
        )  # fmt: skip
        expected = reference.flash_attention_varlen(
            q, keys, values, cu_q, helpers.cumulative(lengths), causal=True
        )
        actual = reference.paged_attention(
            q, pages.k_cache, pages.v_cache, pages.block_table, cu_q, pages.seq_lens
        )
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_merging_the_parts_gives_the_whole() -> None:
    q, k, v, sinks = double(4, 2, 4), double(9, 1, 4), double(9, 1, 4), double(2)
    parts = [reference.attend(q, k[a:b], v[a:b]) for a, b in ((0, 2), (2, 2), (2, 9))]
    parts[1][0].fill_(math.nan)  # the output of an empty part says nothing
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    for options in ({}, {"sinks": sinks}):
        whole = reference.attend(q, k, v, **options)
        torch.testing.assert_close(reference.merge_attention_states(outs, lses, **options), whole)
    out, lse = reference.merge_attention_states(outs[1:2], lses[1:2], sinks=sinks)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_norms_and_activations_equal_torch() -> None:
    x, w, b = double(3, 10), double(10), double(10)
    pairs = [
        (reference.rms_norm(x, w, 1e-3), F.rms_norm(x, (10,), w, 1e-3)),
        (reference.rms_norm(x, w, weight_offset=1.0), F.rms_norm(x, (10,), w + 1, 1e-6)),
        (reference.layer_norm(x, w, b), F.layer_norm(x, (10,), w, b, 1e-5)),
        (reference.layer_norm(x, w), F.layer_norm(x, (10,), w, None, 1e-5)),
        (reference.silu_and_mul(x), F.silu(x[:, :5]) * x[:, 5:]),
        (reference.gelu_and_mul(x), F.gelu(x[:, :5]) * x[:, 5:]),
        (
            reference.gelu_and_mul(x, tanh_approx=True),
            F.gelu(x[:, :5], approximate="tanh") * x[:, 5:],
        ),
    ]  # fmt: skip
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_codes_stand_where_the_layout_says(bits: int) -> None:
    """Read by Python loops; 70 x 130 takes 2 x 3 tiles."""
    codes = torch.randint(0, 2**bits, (70, 130))
    packed = reference.pack_codes(codes, bits)
    assert packed.shape == (2, 3, bits * 128) and packed.dtype == torch.int32
    assert torch.equal(reference.unpack_codes(packed, bits, 70, 130), codes)
    for n, k in [(0, 0), (69, 129), *torch.randint(0, 70, (40, 2)).tolist()]:
        row16, step, lane, h = n % 64 // 16, k % 64 // 16, n % 8 * 4 + k % 8 // 2, k % 2
        r = n // 8 % 2 + 2 * (k // 8 % 2)
        parts = {
            2: [(2 * row16 + step // 2, 2 * (r + 4 * (step % 2)) + 16 * h, 2)],
            3: [(3 * row16 + (step if step < 3 else r), (3 * r if step < 3 else 12) + 16 * h, 3)]
            if step < 3 or r < 3
            else [(3 * row16 + b, 15 + 16 * h, 1) for b in range(3)],
            4: [(4 * row16 + step, 4 * r + 16 * h, 4)],
            8: [(2 * (4 * row16 + step) + r // 2, 8 * (r % 2) + 16 * h, 8)],
        }[bits]
        code = 0
        for i, (word, first, width) in enumerate(parts):
            loads = packed[n // 64, k // 64].view(bits, 32, 4)
            value = loads[word // 4, lane, word % 4].item() % 2**32
            code |= (value >> first) % 2**width << i
        assert code == codes[n, k], (n, k)


def test_low_bit_gemm_is_a_product_with_the_dequantized_weight() -> None:
    codes, x = torch.randint(0, 16, (5, 40)), double(3, 40)
    scales, zeros, bias = double(3, 5), double(3, 5), double(5)
    perm = torch.randperm(40)
    weight = torch.empty(5, 40, dtype=torch.float64)
    for n in range(5):
        for k in range(40):
            weight[n, perm[k]] = scales[k // 16, n] * (codes[n, k] - zeros[k // 16, n])
    out = reference.low_bit_gemm(
        4, x, reference.pack_codes(codes, 4), scales, zeros, group_size=16, perm=perm, bias=bias
    )
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=1e-12, atol=1e-12)


def test_scaled_mm_is_a_product_of_what_the_codes_stand_for() -> None:
    m, n, k = 3, 130, 260
    a, b = ((torch.randn(rows, k) * 20).to(torch.float8_e4m3fn) for rows in (m, n))
    scales = {"tensor": (double(1, 1), double(1, 1)), "row": (double(m, 1), double(n, 1)),
              "block": (double(m, 3), double(2, 3))}  # fmt: skip
    for kind, (a_scale, b_scale) in scales.items():
        expected = torch.zeros(m, n, dtype=torch.float64)
        for i, j, c in itertools.product(range(m), (0, 127, 128, 129), range(k)):
            sa = {"tensor": (0, 0), "row": (i, 0), "block": (i, c // 128)}[kind]
            sb = {"tensor": (0, 0), "row": (j, 0), "block": (j // 128, c // 128)}[kind]
            product = a[i, c].double() * b[j, c].double()
            expected[i, j] += a_scale[sa] * b_scale[sb] * product
        out = reference.fp8_scaled_mm(a, b, a_scale, b_scale)
        some = [0, 127, 128, 129]
        torch.testing.assert_close(out[:, some], expected[:, some], rtol=1e-12, atol=1e-9)


def test_int8_scaled_mm_is_a_product_of_codes_less_zeros() -> None:
    a, b = (torch.randint(-128, 128, (rows, 40), dtype=torch.int8) for rows in (3, 5))
    a_scale, b_scale, bias = double(3, 1), double(5, 1), double(5)
    zero = torch.randint(-128, 128, (3, 1), dtype=torch.int32)
    out = reference.int8_scaled_mm(a, b, a_scale, b_scale, zero, bias)
    expected = F.linear(a_scale * (a.double() - zero), b_scale * b.double(), bias)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_rotation_of_pairs(interleaved: bool) -> None:
    q, positions = double(3, 2, 10), torch.tensor([0, 4, 2])
    table = reference.rotary_cos_sin(torch.tensor([1.0, 0.3, 0.01, 0.5]), 5)
    out, none = reference.rotary_embedding_(q, None, positions, table, interleaved=interleaved)
    assert none is None
    first, second = (q[..., 0:8:2], q[..., 1:8:2]) if interleaved else (q[..., :4], q[..., 4:8])
    angle = torch.complex(table[positions, :4].double(), table[positions, 4:].double())
    turned = torch.complex(first, second) * angle[:, None]
    got = (out[..., 0:8:2], out[..., 1:8:2]) if interleaved else (out[..., :4], out[..., 4:8])
    torch.testing.assert_close(got, (turned.real, turned.imag))
    assert torch.equal(out[..., 8:], q[..., 8:])


def test_quantize_rows_saturates_and_keeps_zero_rows() -> None:
    x = torch.tensor([[[0.0, 0.0]], [[127.0, -63.5]], [[1e30, 1.0]]])
    stored, scale = reference.quantize_rows(x, torch.int8, None)
    assert scale.flatten().tolist() == pytest.approx([1.0, 1.0, 1e30 / 127])
    assert stored.flatten().tolist() == [0, 0, 127, -64, 127, 0]
    stored, _ = reference.quantize_rows(x, torch.float8_e4m3fn, torch.ones(1))
    assert stored.float().flatten().tolist() == [0, 0, 128.0, -64.0, 448.0, 1.0]


def test_philox_equals_the_published_vectors() -> None:
    vectors = [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, expected in vectors:
        words = reference.philox4x32(torch.tensor(counter), torch.tensor(key))
        assert " ".join(f"{w:08x}" for w in words.tolist()) == expected


def brute_kept(x: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The definition of `sample`'s candidates, token by token."""
    kth = sorted(x, reverse=True)[top_k - 1] if 0 < top_k < len(x) else -math.inf
    survivors = [v for v in x if v >= kth]
    total = sum(math.exp(v) for v in survivors)
    keep = []
    for v in x:
        mass = sum(math.exp(u) for u in survivors if u > v) / total
        probable = math.exp(v) >= min_p * math.exp(max(x))
        keep.append(v >= kth and (top_p >= 1 or mass < top_p) and probable)
    return keep


@pytest.mark.parametrize("top_k", [-1, 0, 1, 3, 8, 50])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_kept_tokens_equal_brute_force(top_k: int, top_p: float, min_p: float) -> None:
    for _ in range(20):
        x = torch.randint(-3, 4, (12,)).double() * 0.7  # with many ties
        kept = reference.kept_tokens(x, top_k, top_p, min_p)
        assert kept.tolist() == brute_kept(x.tolist(), top_k, top_p, min_p)


def test_gumbel_max_draws_the_softmax() -> None:
    logits = torch.randn(1, 9).expand(20000, 9)
    drawn = reference.sample(
        logits,
        torch.full((20000,), 0.8),
        seeds=torch.arange(20000),
        positions=torch.zeros(20000).long(),
    )
    counts = torch.bincount(drawn.token_ids, minlength=9)
    assert helpers.chi_square_p_value(counts, torch.softmax(logits[0] / 0.8, 0)) > 1e-3


def test_chi_square_p_value() -> None:
    fair = torch.full((4,), 0.25)
    # chi2 = 4 * (5^2)/25 = 4 with 3 degrees of freedom: p = 0.2615
    assert helpers.chi_square_p_value(torch.tensor([30, 20, 30, 20]), fair) == pytest.approx(
        0.2615, abs=1e-4
    )
    assert helpers.chi_square_p_value(torch.tensor([1, 0]), torch.tensor([0.0, 1.0])) == 0.0
