"""`FlashAttention` against torch's attention."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastinfer.nn import FlashAttention
from tests.helpers import assert_accurate, assert_bit_equal


def inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """q with 4 heads, k and v with 2, of [..., S, heads, 8]."""
    return torch.randn(*shape, 4, 8), torch.randn(*shape, 2, 8), torch.randn(*shape, 2, 8)


def torchs(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """torch's attention of [B, S, H, D]."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **options)
    return out.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_dense(causal: bool, scale: float | None) -> None:
    q, k, v = inputs(2, 9)
    out = FlashAttention(causal=causal, scale=scale)(q, k, v)
    options = {"is_causal": causal, "scale": scale}
    exact = torchs(q.double(), k.double(), v.double(), **options)
    assert_accurate(out, exact, torchs(q, k, v, **options))


def test_window() -> None:
    q, k, v = inputs(2, 9)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = (distance >= -1) & (distance <= 2)
    out = FlashAttention(window_left=2, window_right=1)(q, k, v)
    exact = torchs(q.double(), k.double(), v.double(), attn_mask=mask)
    assert_accurate(out, exact, torchs(q, k, v, attn_mask=mask))


def test_ragged_is_each_sequence_alone() -> None:
    q, k, v = inputs(9)
    attention = FlashAttention(causal=True, softcap=2.0, batch_invariant=True)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = attention(q, k, v, cu_seqlens_q=ends)
    for part in (slice(0, 4), slice(4, 9)):
        alone = attention(q[None, part], k[None, part], v[None, part])[0]
        assert_bit_equal(out[part], alone)
    same = attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5, max_seqlen_k=5)
    assert_bit_equal(same, out)


def test_sinks_are_in_the_state_dict_and_in_the_denominator() -> None:
    q, k, v = inputs(1, 5)
    attention = FlashAttention(num_sinks=4)
    assert_bit_equal(attention(q, k, v), FlashAttention()(q, k, v))
    attention.load_state_dict({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])})
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)).double() / 8**0.5
    sinks = attention.sinks.double().view(1, 4, 1, 1).expand(1, 4, 5, 1)
    shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    expected = torch.einsum("bhqk,bkhd->bqhd", shares, v.repeat_interleave(2, 2).double())
    assert_accurate(attention(q, k, v), expected, expected.float())
    half = attention.bfloat16()
    assert half(q.bfloat16(), k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


def test_gradients_are_refused() -> None:
    q, k, v = inputs(1, 3)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        FlashAttention()(q.requires_grad_(), k, v)


def test_keys_alone_are_no_ragged_batch() -> None:
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        FlashAttention()(*inputs(3), cu_seqlens_k=ends)


def test_copies_and_compiled_modules_compute_the_same() -> None:
    attention = FlashAttention(causal=True, num_sinks=4)
    attention.sinks.normal_()
    q, k, v = inputs(2, 6)
    expected = attention(q, k, v)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention)), compiled):
        assert_bit_equal(other(q, k, v), expected)
