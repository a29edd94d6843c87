"""What paged_attention refuses."""

from typing import Any

import pytest
import torch

from tests.conftest import Backend
from tests.ops.test_paged_attention import STORAGES, step


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2)])
def test_heads_that_do_not_divide_are_refused(backend: Backend, heads: int, kv_heads: int) -> None:
    """R26."""
    args, _, maxima = step(backend, [1], [5], torch.float32, heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ValueError, match=rf"paged_attention.*{heads}"):
        backend.ops.paged_attention(*args, **maxima)


@pytest.mark.parametrize("block_size", [1, 4, 12, 520])
def test_block_sizes_not_a_multiple_of_8_up_to_512_are_refused(
    backend: Backend, block_size: int
) -> None:
    args, _, maxima = step(backend, [1], [5], torch.float32, block_size=block_size)
    with pytest.raises(ValueError, match=r"paged_attention.*cache"):
        backend.ops.paged_attention(*args, **maxima)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_go_with_quantized_pages_only(backend: Backend, name: str) -> None:
    args, pool, maxima = step(backend, [1], [5], torch.float32, **STORAGES["int8"])
    scales = pool.scales
    missing = {other: scale for other, scale in scales.items() if other != name}
    with pytest.raises(ValueError, match=rf"paged_attention.*{name}"):
        backend.ops.paged_attention(*args, **maxima, **missing)
    plain, _, _ = step(backend, [1], [5], torch.float32)
    with pytest.raises(ValueError, match=rf"paged_attention.*{name}"):
        backend.ops.paged_attention(*plain, **maxima, **{name: scales[name]})


def test_float_pages_of_another_dtype_are_refused(backend: Backend) -> None:
    args, _, maxima = step(backend, [1], [5], torch.bfloat16)
    args[0] = args[0].float()
    with pytest.raises(ValueError, match=r"paged_attention.*k_cache"):
        backend.ops.paged_attention(*args, **maxima)


REFUSED: dict[str, tuple[str, Any]] = {
    "block_below_zero": ("block_table", lambda a, m: a[3][1].fill_(-1)),
    "block_past_the_pool": ("block_table", lambda a, m: a[3][1].fill_(a[1].shape[0])),
    "last_used_block": ("block_table", lambda a, m: a[3][1, 1].fill_(2**31 - 1)),
    "length_past_the_table": (
        "seq_lens", lambda a, m: (a[5][1].fill_(16 * 99), m.update(max_seqlen_k=9999))
    ),
    "length_below_zero": ("seq_lens", lambda a, m: a[5][1].fill_(-1)),
    "length_above_the_maximum": ("max_seqlen_k", lambda a, m: m.update(max_seqlen_k=39)),
    "count_above_the_maximum": ("max_seqlen_q", lambda a, m: m.update(max_seqlen_q=2)),
    "cu_seqlens_falls": ("cu_seqlens_q", lambda a, m: a[4].copy_(torch.tensor([0, 3, 2, 5]))),
    "cu_seqlens_starts_late": ("cu_seqlens_q", lambda a, m: a[4][0].fill_(1)),
    "cu_seqlens_ends_past_q": ("cu_seqlens_q", lambda a, m: a[4][-1].fill_(6)),
    "cu_seqlens_ends_before_q": ("cu_seqlens_q", lambda a, m: a[4][-1].fill_(4)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_senseless_lengths_and_blocks_are_refused(backend: Backend, case: str) -> None:
    if not backend.reads_contents:
        pytest.skip("lengths and tables are read on the device, unchecked")
    args, _, maxima = step(backend, [1, 3, 1], [40, 20, 7], torch.float32)
    name, spoil = REFUSED[case]
    spoil(args, maxima)
    with pytest.raises(ValueError, match=rf"paged_attention.*{name}"):
        backend.ops.paged_attention(*args, **maxima)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window_left": -2}, "window_left"),
        ({"window_right": -5}, "window_right"),
        ({"softcap": -1.0}, "softcap"),
    ],
)
def test_senseless_options_are_refused(
    backend: Backend, options: dict[str, Any], name: str
) -> None:
    args, _, maxima = step(backend, [1], [5], torch.float32)
    with pytest.raises(ValueError, match=rf"paged_attention.*{name}"):
        backend.ops.paged_attention(*args, **maxima, **options)


def test_tree_of_65_tokens_is_refused(backend: Backend) -> None:
    args, _, maxima = step(backend, [65], [70], torch.float32)
    mask = torch.ones(65, dtype=torch.int64, device=backend.device)
    with pytest.raises(ValueError, match=r"paged_attention.*tree_mask"):
        backend.ops.paged_attention(*args, **maxima, tree_mask=mask)
