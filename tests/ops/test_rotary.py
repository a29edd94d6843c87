"""rotary_embedding_ and its table against the reference."""

import mpmath
import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    STRIDED,
    assert_accurate,
    assert_bit_equal,
    dtype_name,
    far_apart,
    guarded,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_style = pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])

HEAD_DIMS = [(40, 40), (64, 64), (72, 72), (80, 20), (96, 96), (128, 64), (192, 192), (256, 256),
             (2, 2), (3, 2), (7, 6), (512, 510)]  # fmt: skip


def inverse_frequencies(rotary_dim: int, base: float = 10000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def table(rotary_dim: int, num_positions: int, device: str) -> Tensor:
    return reference.rotary_cos_sin(inverse_frequencies(rotary_dim), num_positions).to(device)


def inputs(
    backend: Backend, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    q = torch.randn(tokens, heads, head_dim, device=backend.device).to(dtype)
    return q, torch.randn(tokens, kv_heads, head_dim, device=backend.device).to(dtype)


@by_dtype
@by_style
@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEAD_DIMS)
def test_head_and_rotary_sizes(
    backend: Backend, dtype: torch.dtype, interleaved: bool, head_dim: int, rotary_dim: int
) -> None:
    q, k = inputs(backend, dtype, 5, 4, 2, head_dim)
    positions = torch.tensor([3, 0, 49, 7, 7], device=backend.device)
    cos_sin = table(rotary_dim, 50, backend.device)
    args = (q, k, positions, cos_sin)
    expected = reference.rotary_embedding_(*args, interleaved=interleaved)
    baseline = reference.rotary_embedding_(*args, interleaved=interleaved, dtype=dtype)
    before = q.clone(), k.clone()
    assert backend.ops.rotary_embedding_(*args, interleaved=interleaved) is None
    for name, ours, true, plain, old in zip("qk", (q, k), expected, baseline, before, strict=True):
        assert_accurate(ours, true, plain, what=name)
        assert_bit_equal(ours[..., rotary_dim:].clone(), old[..., rotary_dim:].clone(), name)


@by_dtype
@by_style
@pytest.mark.parametrize("position", [40, 4095, 131071, 1_000_000])
def test_long_positions_are_within_one_step(
    backend: Backend, dtype: torch.dtype, interleaved: bool, position: int
) -> None:
    """R35: one unit in the last place of the output type, relative to hypot(x1, x2).

    Besides, cos and sin are each off by half a float32 step, which shows in float32 results only.
    """
    frequencies = inverse_frequencies(16, 1e6)
    cos_sin = backend.ops.rotary_cos_sin(frequencies.to(backend.device), position + 1)
    q, _ = inputs(backend, dtype, 64, 3, 1, 16)
    positions = torch.full((64,), position, device=backend.device)
    angle = (position * frequencies.double()).to(backend.device)
    first, second = (x.double() for x in reference.rotary_pairs(q, 16, interleaved))
    expected = (
        first * angle.cos() - second * angle.sin(),
        first * angle.sin() + second * angle.cos(),
    )
    allowed = torch.finfo(dtype).eps * torch.hypot(first, second)
    allowed += 2.0**-25 * (first.abs() + second.abs())
    backend.ops.rotary_embedding_(q, None, positions, cos_sin, interleaved=interleaved)
    for ours, true in zip(reference.rotary_pairs(q, 16, interleaved), expected, strict=True):
        assert ((ours.double() - true).abs() <= allowed).all()


def test_table_is_the_exact_angle_rounded_to_float32(backend: Backend) -> None:
    """Against 50-digit arithmetic; an angle in float32 would be off by 1e-3 at position 131071."""
    frequencies = inverse_frequencies(8)
    cos_sin = backend.ops.rotary_cos_sin(frequencies.to(backend.device), 131072)
    assert cos_sin.dtype == torch.float32 and cos_sin.shape == (131072, 8)
    with mpmath.workdps(50):
        for position in (0, 1, 40, 4095, 131071):
            for i, frequency in enumerate(frequencies.double().tolist()):
                angle = mpmath.mpf(position) * mpmath.mpf(frequency)
                for column, function in ((i, mpmath.cos), (4 + i, mpmath.sin)):
                    error = abs(mpmath.mpf(cos_sin[position, column].item()) - function(angle))
                    assert error <= 2.0**-25 * 1.001, (position, i, function)


def test_table_of_no_positions(backend: Backend) -> None:
    assert backend.ops.rotary_cos_sin(inverse_frequencies(8), 0).shape == (0, 8)


@by_dtype
@by_style
@pytest.mark.parametrize("layout", STRIDED)
def test_strided_equals_contiguous(
    backend: Backend, dtype: torch.dtype, interleaved: bool, layout: str
) -> None:
    q, k = inputs(backend, dtype, 6, 4, 2, 40)
    positions = torch.tensor([9, 0, 2, 2, 31, 5], device=backend.device)
    cos_sin = table(32, 32, backend.device)
    strided_q, strided_k = STRIDED[layout](q), STRIDED[layout](k)
    backend.ops.rotary_embedding_(
        strided_q, strided_k, positions, STRIDED[layout](cos_sin), interleaved=interleaved
    )
    backend.ops.rotary_embedding_(q, k, positions, cos_sin, interleaved=interleaved)
    assert_bit_equal(strided_q.clone(), q.clone(), "q")
    assert_bit_equal(strided_k.clone(), k.clone(), "k")


@by_dtype
def test_q_and_k_as_slices_of_one_projection(backend: Backend, dtype: torch.dtype) -> None:
    """R08, R32: q and k are views of one tensor; v beside them stays untouched."""
    qkv = torch.randn(5, (4 + 2 + 2) * 24, device=backend.device).to(dtype)
    before = qkv.clone()
    q, k = qkv[:, : 4 * 24].view(5, 4, 24), qkv[:, 4 * 24 : 6 * 24].view(5, 2, 24)
    positions, cos_sin = torch.arange(5, device=backend.device), table(24, 5, backend.device)
    true_q, true_k = reference.rotary_embedding_(q, k, positions, cos_sin)
    plain_q, plain_k = reference.rotary_embedding_(q, k, positions, cos_sin, dtype=dtype)
    backend.ops.rotary_embedding_(q, k, positions, cos_sin)
    assert_accurate(q, true_q, plain_q, what="q")
    assert_accurate(k, true_k, plain_k, what="k")
    assert_bit_equal(qkv[:, 6 * 24 :].clone(), before[:, 6 * 24 :].clone(), "v")


@by_style
def test_writes_only_its_views(backend: Backend, interleaved: bool) -> None:
    q, k = (guarded((5, h, 18), torch.float32, backend.device) for h in (3, 1))
    for part in (q, k):
        part.view.copy_(torch.randn(part.view.shape))
    positions, cos_sin = torch.arange(5, device=backend.device), table(16, 5, backend.device)
    backend.ops.rotary_embedding_(q.view, k.view, positions, cos_sin, interleaved=interleaved)
    q.assert_untouched_around()
    k.assert_untouched_around()


@by_style
def test_only_the_rows_of_its_positions_are_read(backend: Backend, interleaved: bool) -> None:
    q, _ = inputs(backend, torch.float32, 3, 2, 1, 16)
    positions, cos_sin = (
        torch.tensor([1, 4, 1], device=backend.device),
        table(16, 6, backend.device),
    )
    expected, _ = reference.rotary_embedding_(q, None, positions, cos_sin, interleaved=interleaved)
    cos_sin[[0, 2, 3, 5]] = torch.nan
    backend.ops.rotary_embedding_(q, None, positions, cos_sin, interleaved=interleaved)
    assert_accurate(q, expected, expected.float())


@by_style
@pytest.mark.parametrize("with_k", [False, True])
def test_zero_tokens(backend: Backend, interleaved: bool, with_k: bool) -> None:
    """R24."""
    q, k = inputs(backend, torch.float32, 0, 2, 1, 16)
    positions = torch.empty(0, dtype=torch.int64, device=backend.device)
    cos_sin = table(16, 4, backend.device)
    backend.ops.rotary_embedding_(
        q, k if with_k else None, positions, cos_sin, interleaved=interleaved
    )


@by_style
def test_position_zero_changes_nothing(backend: Backend, interleaved: bool) -> None:
    q, k = inputs(backend, torch.bfloat16, 4, 2, 1, 32)
    before = q.clone(), k.clone()
    positions = torch.zeros(4, dtype=torch.int64, device=backend.device)
    backend.ops.rotary_embedding_(
        q, k, positions, table(32, 1, backend.device), interleaved=interleaved
    )
    assert_bit_equal(q, before[0])
    assert_bit_equal(k, before[1])


@by_dtype
@by_style
def test_rows_do_not_see_each_other(
    backend: Backend, dtype: torch.dtype, interleaved: bool
) -> None:
    """R31."""
    batch = 24 if backend.interpreted else 256
    q, k = inputs(backend, dtype, batch, 3, 1, 20)
    positions = torch.randint(0, 64, (batch,), device=backend.device)
    cos_sin = table(20, 64, backend.device)
    whole_q, whole_k = q.clone(), k.clone()
    backend.ops.rotary_embedding_(whole_q, whole_k, positions, cos_sin, interleaved=interleaved)
    for begin, end in ((0, 1), (batch - 1, batch), (0, 2), (3, 7), (0, batch // 4)):
        part_q, part_k = q[begin:end].clone(), k[begin:end].clone()
        backend.ops.rotary_embedding_(
            part_q, part_k, positions[begin:end], cos_sin, interleaved=interleaved
        )
        assert_bit_equal(part_q, whole_q[begin:end], "q")
        assert_bit_equal(part_k, whole_k[begin:end], "k")


def test_token_offset_beyond_32_bits(backend: Backend) -> None:
    """R06: token index times stride passes 2^31 elements, in q and in k."""
    q, k = inputs(backend, torch.bfloat16, 3, 2, 1, 32)
    positions, cos_sin = torch.arange(3, device=backend.device), table(32, 3, backend.device)
    far_q, far_k = far_apart(q, 2**30 + 8), far_apart(k, 2**30 + 8)
    backend.ops.rotary_embedding_(far_q, far_k, positions, cos_sin)
    backend.ops.rotary_embedding_(q, k, positions, cos_sin)
    assert_bit_equal(far_q.clone(), q)
    assert_bit_equal(far_k.clone(), k)


def test_table_offset_beyond_32_bits(backend: Backend) -> None:
    """R06: position times the table's stride passes 2^31 elements."""
    q, k = inputs(backend, torch.float32, 3, 2, 1, 32)
    positions, cos_sin = torch.arange(3, device=backend.device), table(32, 3, backend.device)
    far_q, far_k = q.clone(), k.clone()
    backend.ops.rotary_embedding_(far_q, far_k, positions, far_apart(cos_sin, 2**30 + 8))
    backend.ops.rotary_embedding_(q, k, positions, cos_sin)
    assert_bit_equal(far_q, q)
    assert_bit_equal(far_k, k)


@pytest.mark.parametrize("bad", [-1, 4, 2**31, 2**40])
def test_position_outside_the_table_is_refused(backend: Backend, bad: int) -> None:
    if not backend.reads_contents:
        pytest.skip("positions are read on the device: see the next test")
    q, k = inputs(backend, torch.float32, 3, 2, 1, 16)
    before = q.clone(), k.clone()
    positions = torch.tensor([0, 3, bad])
    with pytest.raises(ValueError, match=r"rotary_embedding_.*positions"):
        backend.ops.rotary_embedding_(q, k, positions, table(16, 4, "cpu"))
    assert_bit_equal(q, before[0])
    assert_bit_equal(k, before[1])


@by_style
@pytest.mark.parametrize("bad", [-1, 4, 2**31, 2**40, -(2**63)])
def test_position_outside_the_table_shows_as_nan(
    backend: Backend, interleaved: bool, bad: int
) -> None:
    """Where positions are not checked, nothing outside the table is read."""
    if backend.reads_contents:
        pytest.skip("positions are checked: see the test before")
    q, k = inputs(backend, torch.float32, 3, 2, 1, 16)
    positions = torch.tensor([0, bad, 3], device=backend.device)
    cos_sin = table(12, 4, backend.device)
    good_q, good_k = q[[0, 2]].clone(), k[[0, 2]].clone()
    beside = q[..., 12:].clone()
    backend.ops.rotary_embedding_(q, k, positions, cos_sin, interleaved=interleaved)
    assert q[1, :, :12].isnan().all() and k[1, :, :12].isnan().all()
    assert_bit_equal(q[..., 12:].clone(), beside)
    backend.ops.rotary_embedding_(
        good_q, good_k, positions[[0, 2]], cos_sin, interleaved=interleaved
    )
    assert_bit_equal(q[[0, 2]], good_q)
    assert_bit_equal(k[[0, 2]], good_k)


@pytest.mark.parametrize("rotary_dim", [3, 18])
def test_rotary_size_odd_or_beyond_the_head_is_refused(backend: Backend, rotary_dim: int) -> None:
    q, k = inputs(backend, torch.float32, 2, 2, 1, 16)
    cos_sin = torch.zeros(4, rotary_dim, device=backend.device)
    positions = torch.zeros(2, dtype=torch.int64, device=backend.device)
    with pytest.raises(ValueError, match=r"rotary_embedding_.*cos_sin"):
        backend.ops.rotary_embedding_(q, k, positions, cos_sin)
