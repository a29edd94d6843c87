"""Which keys the queries of a batch see, as ranges: the masks of `attn_implementation="fastinfer"`.

A batch [B, S] of padded or packed sequences consists of segments: queries of one row that see keys
of one row, causally, the last query standing at the last key, maybe through a sliding window. All
that transformers' causal masks mean is segments, and attention over ragged sequences needs no more:
int32 [N, 5] of (row, first key, end key, first query, end query), by row and query.

`KeyRanges` go through a model's layers as one tensor of 4 dimensions, since transformers hands on
such masks as they are. It holds the bounds of ragged sequences, made once for all layers:

    int32 [1, 3, W + 1, M]: (query, key in its row, row of the key)

The third dimension has stride 0. Its size tells the window W to the host (0: none), which the
tensor's contents could not without waiting for the device. Without bounds, [1, 3, W + 1, 0], each
row is one segment of all its queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.int32]


@dataclass(frozen=True)
class KeyRanges:
    """Bounds [3, M] as above, or None; and the window, 0 for none."""

    bounds: Tensor | None
    window: int

    def as_mask(self, device: torch.device | str) -> Tensor:
        """The tensor that goes through the layers."""
        bounds = self.bounds
        if bounds is None:
            bounds = torch.empty((3, 0), dtype=torch.int32, device=device)
        return bounds[None, :, None].expand(1, 3, self.window + 1, -1)

    @staticmethod
    def of_mask(mask: Tensor) -> KeyRanges | None:
        """What `as_mask` made; None for any other tensor."""
        if mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[:2] != (1, 3):
            return None
        return KeyRanges(mask[0, :, 0] if mask.shape[3] else None, mask.shape[2] - 1)

    def cumulative_lengths(self, row_distance: int) -> tuple[Tensor, Tensor]:
        """cu_seqlens_q and cu_seqlens_k, int32 [M], of keys whose rows are so many tokens apart."""
        if self.bounds is None:
            raise ValueError("KeyRanges: bounds: expected a tensor, got None: rows are whole")
        query, key, row = self.bounds.unbind(0)
        return query, torch.add(key, row, alpha=row_distance)

    def dense(self, batch: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
        """bool [B, 1, Sq, Sk]: which keys each query sees."""
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(num_keys, device=device)
        if self.bounds is None:
            seen = self._seen(num_keys - num_queries + query, key)
            return seen.expand(batch, 1, -1, -1)
        # Of each sequence, in the row where it ends; most have no queries or no keys.
        begin, end = (x.long()[:, :, None, None] for x in (self.bounds[:, :-1], self.bounds[:, 1:]))
        row, first_key, end_key = end[2], begin[1], end[1]
        first_query, end_query = (x[0] - row * num_queries for x in (begin, end))
        inside = (key >= first_key) & (key < end_key) & (query >= first_query) & (query < end_query)
        seen = inside & self._seen(end_key - end_query + query, key)
        counts = torch.zeros(batch, num_queries, num_keys, dtype=torch.int32, device=device)
        counts.index_add_(0, row.flatten(), seen.int())
        return (counts > 0)[:, None]

    def _seen(self, position: Tensor, key: Tensor) -> Tensor:
        """Whether the query at a position sees a key of its segment."""
        causal = key <= position
        return causal & (key > position - self.window) if self.window else causal


def bounds_of_segments(segments: Array, batch: int, num_queries: int, num_keys: int) -> Array:
    """The bounds of ragged sequences in which each segment is one.

    What lies between segments is in sequences too: queries that have no keys, so that they result
    in 0, and then keys that have no queries, so that nothing reads them. On the host: a decode step
    is short beside the launches that this would be on a device.

    Args:
        segments: int32 [N, 5].
        batch, num_queries, num_keys: of the rows, each of which has so many queries and keys.

    Returns:
        int32 [3, 3N + 3] as at the head of this module.
    """
    row, first_key, end_key, first_query, end_query = segments.T
    first_query, end_query = first_query + row * num_queries, end_query + row * num_queries
    end_before, row_before = (np.concatenate(([0], x[:-1])) for x in (end_key, row))
    bounds = np.zeros((3, 3 * len(segments) + 3), dtype=np.int32)
    for line, points in enumerate(
        (
            (first_query, first_query, end_query),
            (end_before, first_key, end_key),
            (row_before, row, row),
        )
    ):
        bounds[line, 1:-2] = np.stack(points, 1).ravel()
    bounds[:, -2] = batch * num_queries, end_key[-1], row[-1]
    bounds[:, -1] = batch * num_queries, num_keys, batch - 1
    return bounds


def bounds_of_one_row(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_queries: int) -> Tensor:
    """The bounds of ragged sequences that are one row, which they need not fill: int32 [3, M + 2].

    Nothing waits for the device.
    """
    ends = cu_seqlens_q.new_tensor([0, num_queries])
    queries = torch.cat((ends[:1], cu_seqlens_q, ends[1:]))
    keys = torch.cat((cu_seqlens_k[:1], cu_seqlens_k, cu_seqlens_k[-1:]))
    return torch.stack((queries, keys, torch.zeros_like(queries))).int()


def padded_segments(
    valid: NDArray[np.bool_], num_queries: int, first_query_key: int
) -> Array | None:
    """The segments of rows with padding at their ends.

    Args:
        valid: bool [B, Sk]: which keys are tokens, of all keys up to the last query's.
        num_queries: Sq; each row's last query is its key Sk - 1.
        first_query_key: the key that is the first query: Sk - Sq.

    Returns:
        int32 [B, 5]; None if the tokens of a row are not together.
    """
    size = valid.shape[1]
    count, first = valid.sum(1), valid.argmax(1)
    end = np.where(count > 0, size - valid[:, ::-1].argmax(1), first)
    if (end - first != count).any():
        return None
    first_query = (first - first_query_key).clip(0, num_queries)
    end_query = (end - first_query_key).clip(0, num_queries)
    if num_queries == 1:
        # A query that is padding sees nothing; so all rows have one, and none is longer.
        end = np.where(end_query > first_query, end, first)
        first_query, end_query = np.zeros_like(first), np.ones_like(first)
    row = np.arange(len(valid))
    return np.stack((row, first, end, first_query, end_query), 1).astype(np.int32)


def packed_segments(ids: NDArray[np.int64]) -> Array:
    """The segments of rows of several sequences; ids [B, S] change where one begins.

    Returns:
        int32 [N, 5], queries and keys being the same tokens.
    """
    starts = np.ones(ids.shape, dtype=np.bool_)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    row, first = starts.nonzero()
    following = np.append(first[1:], 0)
    end = np.where(following == 0, ids.shape[1], following)  # a row's last segment
    return np.stack((row, first, end, first, end), 1).astype(np.int32)
