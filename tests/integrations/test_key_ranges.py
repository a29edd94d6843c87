"""Ranges of keys: what padding and packing become, and the bounds that attention gets."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastinfer.integrations.key_ranges import (
    KeyRanges,
    bounds_of_one_row,
    bounds_of_segments,
    packed_segments,
    padded_segments,
)


def bools(*rows: str) -> NDArray[np.bool_]:
    return np.array([[c == "1" for c in row] for row in rows])


def tensor(bounds: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(bounds)


def test_padding_at_either_end() -> None:
    valid = bools("0011", "1110", "1111", "0000", "0100")
    segments = padded_segments(valid, 4, 0)
    assert segments is not None and segments.tolist() == [
        [0, 2, 4, 2, 4],
        [1, 0, 3, 0, 3],
        [2, 0, 4, 0, 4],
        [3, 0, 0, 0, 0],
        [4, 1, 2, 1, 2],
    ]


def test_queries_after_keys_of_a_cache() -> None:
    segments = padded_segments(bools("00111", "11111", "11110"), 2, 3)
    assert segments is not None
    assert segments.tolist() == [[0, 2, 5, 0, 2], [1, 0, 5, 0, 2], [2, 0, 4, 0, 1]]


def test_every_row_has_its_one_query() -> None:
    segments = padded_segments(bools("0011", "1110"), 1, 3)
    assert segments is not None
    assert segments.tolist() == [[0, 2, 4, 0, 1], [1, 0, 0, 0, 1]]  # padding sees nothing


@pytest.mark.parametrize("row", ["1011", "0101", "10001"])
def test_padding_in_between_is_no_range(row: str) -> None:
    assert padded_segments(bools(row, "1" * len(row)), len(row), 0) is None


def test_packed_sequences() -> None:
    segments = packed_segments(np.array([[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]))
    assert segments.tolist() == [
        [0, 0, 2, 0, 2],
        [0, 2, 3, 2, 3],
        [0, 3, 5, 3, 5],
        [1, 0, 5, 0, 5],
    ]


def test_bounds_leave_nothing_out() -> None:
    segments = np.array([[0, 2, 4, 1, 3], [1, 0, 3, 0, 3]], dtype=np.int32)
    ranges = KeyRanges(tensor(bounds_of_segments(segments, 2, 3, 4)), 0)
    queries, keys = ranges.cumulative_lengths(10)
    # Of every three sequences: queries without keys, keys without queries, the segment.
    assert queries.tolist() == [0, 1, 1, 3, 3, 3, 6, 6, 6]
    assert keys.tolist() == [0, 0, 2, 4, 4, 10, 13, 13, 14]
    assert queries.is_contiguous() and keys.is_contiguous()
    assert queries.dtype == keys.dtype == torch.int32


@pytest.mark.parametrize("begin, end", [(0, 7), (1, 7), (0, 5)])
def test_sequences_of_one_row_need_not_fill_it(begin: int, end: int) -> None:
    cu_seqlens = torch.tensor([begin, 3, end])
    ranges = KeyRanges(bounds_of_one_row(cu_seqlens, cu_seqlens, 7), 0)
    queries, keys = ranges.cumulative_lengths(7)
    assert queries.tolist() == [0, begin, 3, end, 7]
    assert keys.tolist() == [begin, begin, 3, end, end]
    assert queries.dtype == keys.dtype == torch.int32
    got = ranges.dense(1, 7, 7, torch.device("cpu"))[0, 0]
    for q in range(7):
        for k in range(7):
            together = begin <= k <= q < end and (k < 3) == (q < 3)
            assert got[q, k] == together


def test_whole_rows_have_no_bounds() -> None:
    with pytest.raises(ValueError, match="rows are whole"):
        KeyRanges(None, 0).cumulative_lengths(10)


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
def test_dense_is_what_it_says(window: int, kind: str) -> None:
    valid, ids = bools("0011", "1110"), np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    segments = {
        "whole": None,
        "padded": padded_segments(valid, 4, 0),
        "packed": packed_segments(ids),
    }[kind]
    bounds = None if segments is None else tensor(bounds_of_segments(segments, 2, 4, 4))
    got = KeyRanges(bounds, window).dense(2, 4, 4, torch.device("cpu"))
    for b in range(2):
        for q in range(4):
            for k in range(4):
                seen = k <= q and (not window or q - k < window)
                if kind == "padded":
                    seen = seen and bool(valid[b, q] and valid[b, k])
                if kind == "packed":
                    seen = seen and bool(ids[b, q] == ids[b, k])
                assert got[b, 0, q, k] == seen


@pytest.mark.parametrize("window", [0, 1, 4096])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_says_the_same_as_its_ranges(window: int, padded: bool) -> None:
    bounds = None
    if padded:
        segments = padded_segments(bools("011", "111"), 3, 0)
        assert segments is not None
        bounds = tensor(bounds_of_segments(segments, 2, 3, 3))
    mask = KeyRanges(bounds, window).as_mask("cpu")
    back = KeyRanges.of_mask(mask)
    assert back is not None and back.window == window
    assert mask.untyped_storage().nbytes() <= 3 * 9 * 4  # whatever the window
    if bounds is None:
        assert back.bounds is None
    else:
        assert back.bounds is not None and torch.equal(back.bounds, bounds)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 3, 3, 6).bool(), torch.ones(1, 3, 3, 6), torch.ones(2, 1, 3, 6).int()]
)
def test_other_masks_are_no_ranges(mask: Tensor) -> None:
    assert KeyRanges.of_mask(mask) is None
